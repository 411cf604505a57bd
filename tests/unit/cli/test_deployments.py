"""What is in deploy/ beside the units: as far as a machine without an engine can tell, it is right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from atoll.cli.main import make_parser, split_command

DEPLOY = Path(__file__).parents[3] / "deploy"
BIN = Path(sys.executable).parent
MANIFESTS = ("namespace", "coordinator", "site", "network")


def passes(*command: str) -> None:
    done = subprocess.run(command, check=False, cwd=DEPLOY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def documents(*path: str) -> Iterator[Any]:
    yield from yaml.safe_load_all(DEPLOY.joinpath(*path).read_text())


def is_understood(words: list[str]) -> str:
    """The verb of a command line of atoll that there is."""
    own, _ = split_command(words)
    verb: str = make_parser().parse_args(own).verb
    return verb


def test_images_are_built_without_what_git_ignores() -> None:
    """An environment of gigabytes, and everything that runs have left."""
    ignored = [line.strip("/") for line in (DEPLOY.parent / ".gitignore").read_text().split()]
    left_out = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert {name.removeprefix("**/") for name in left_out} >= {".git", *ignored}


@pytest.mark.parametrize("name", ["coordinator", "node"])
def test_images_are_built_as_they_should_be(name: str) -> None:
    passes(str(BIN / "hadolint"), f"docker/{name}.Dockerfile")
    text = (DEPLOY / "docker" / f"{name}.Dockerfile").read_text()
    lines = {line.split(" ", 1)[0]: line for line in text.splitlines() if line.startswith(("CMD", "ENTRYPOINT"))}
    words = [word.strip('", []') for word in lines["CMD"].removeprefix("CMD ").split(",")]
    assert is_understood(words) == name
    assert "USER 10001" in text
    assert ("[node]" in text) == (name == "node"), "a coordinator needs no torch"


def test_compose_is_what_compose_reads_and_its_commands_are_understood() -> None:
    passes(str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "compose.yml")
    (compose,) = documents("compose.yml")
    assert is_understood(compose["services"]["coordinator"]["command"]) == "coordinator"
    for part in compose["services"].values():
        for volume in part.get("volumes", ()):
            source = volume.split(":")[0] if isinstance(volume, str) else ""
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
    (script,) = compose["services"]["invites"]["command"]
    for line in script.replace("$$", "$").splitlines():
        if line.strip().startswith("atoll "):
            words = [word.replace("$site", "a") for word in shlex.split(line)[1:]]
            assert is_understood(words) in ("invite", "token")


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_what_kubernetes_takes(name: str) -> None:
    passes(str(BIN / "kubernetes-validate"), "--strict", f"kubernetes/{name}.yaml")


@pytest.mark.skipif(which("kubectl") is None, reason="needs kubectl")
def test_manifests_are_built_together() -> None:
    passes("kubectl", "kustomize", "kubernetes")


def test_commands_of_pods_and_probes_are_understood() -> None:
    verbs = []
    for name in MANIFESTS:
        for found in documents("kubernetes", f"{name}.yaml"):
            if found["kind"] != "StatefulSet":
                continue
            for container in found["spec"]["template"]["spec"]["containers"]:
                verbs.append(is_understood(container["args"]))
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    program, *words = container[probe]["exec"]["command"]
                    assert program == "atoll"
                    verbs.append(is_understood(words))
                start = container["startupProbe"]
                assert start["periodSeconds"] * start["failureThreshold"] >= 1800, "a node reads all of its state"
    assert verbs == ["coordinator", "health", "health", "health", "node", "health", "health", "health"]


def test_all_that_is_in_the_folder_of_manifests_is_built_or_said_not_to_be() -> None:
    (kustomization,) = documents("kubernetes", "kustomization.yaml")
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert files - set(kustomization["resources"]) == {"servicemonitor.yaml"}
    assert sorted(kustomization["resources"]) == sorted(f"{name}.yaml" for name in MANIFESTS)


@pytest.mark.parametrize(("shell", "path"), [("bash", "slurm/site.sbatch"), ("sh", "docker/site.sh")])
def test_scripts_have_no_mistake_in_their_syntax(shell: str, path: str) -> None:
    passes(shell, "-n", path)


def test_the_task_for_clouds_is_one_and_its_commands_are_understood() -> None:
    (task,) = documents("skypilot", "site.yaml")
    assert {"name", "envs", "resources", "file_mounts", "setup", "run"} <= set(task)
    run = task["run"].replace("${SKYPILOT_NUM_GPUS_PER_NODE}", "8")
    about = (DEPLOY / "skypilot" / "site.yaml").read_text()
    offered = ["", *re.findall(r'--env OPTIONS="([^"]+)"', about)]
    assert len(offered) == 3
    for options in offered:
        words = shlex.split(run.replace("${OPTIONS}", options))
        assert words[:2] == ["exec", "~/atoll/bin/atoll"]
        assert is_understood(words[2:]) == "node"
