"""What is in deploy/ beside the units: as far as a machine without an engine can tell, it is right."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from atoll.cli import coordinator
from atoll.cli.main import make_parser, split_command
from atoll.coordinator.main import names_of_page

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


def test_the_page_of_compose_is_where_it_says_and_prometheus_comes_by_a_name_of_it() -> None:
    (compose,) = documents("compose.yml")
    words = compose["services"]["coordinator"]["command"]
    args = make_parser().parse_args([word.replace("/etc/atoll", str(DEPLOY / "docker")) for word in words])
    names = names_of_page(coordinator.prepare(args)[1])
    (page,) = re.findall(r"^# The page: (\S+)", (DEPLOY / "compose.yml").read_text(), re.MULTILINE)
    (target,) = re.findall(r"--target (\S+)", compose["services"]["invites"]["command"][0])
    assert urlsplit(page).scheme == "https"
    assert {urlsplit(page).hostname, target.partition(":")[0]} <= set(names)
    published = [port.rpartition(":")[0] for port in compose["services"]["coordinator"]["ports"]]
    assert published == [f"127.0.0.1:{urlsplit(page).port}"]


KUBECTL = """#!/bin/sh
# In place of a cluster: what is to be done in the pod is done here; a secret is made of files that are there.
shift 2
case "$1" in
    exec) shift 3; exec "$@" ;;
    create) shift 4; for file; do test -r "${file#--from-file=}" || exit 1; done ;;
esac
"""
ATOLL = """#!/bin/sh
# In place of atoll in the pod: the folder that it writes.
while [ "$1" != --prometheus ]; do shift; done
umask 077; mkdir "$2"; for name in token node-token root.pem prometheus.yml; do echo x > "$2/$name"; done
"""


def test_what_is_typed_for_a_prometheus_in_a_cluster_works_as_typed(tmp_path: Path) -> None:
    text = (DEPLOY / "README.md").read_text().partition("servicemonitor.yaml` scrapes")[2]
    block = re.search(r"(?:^    .+\n)+", text, re.MULTILINE)
    assert block is not None
    (tmp_path / "bin").mkdir()
    for name, program in (("kubectl", KUBECTL), ("atoll", ATOLL)):
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)
    typed = block[0].replace("/tmp/p", str(tmp_path / "p"))
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", typed]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = tmp_path / "scrape"
    assert {path.name for path in made.iterdir()} == {"token", "root.pem"}
    assert made.stat().st_mode & 0o77 == 0, "a token is in it"


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
