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

from atoll.cli import coordinator, scrape
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


def mounts(service: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Source, target, and whether nothing can be written there."""
    for volume in service.get("volumes", ()):
        if isinstance(volume, str):
            source, target, *more = volume.split(":")
            yield source, target, more == ["ro"]
        else:
            yield volume.get("source", ""), volume["target"], volume.get("read_only", False)


def services() -> dict[str, dict[str, Any]]:
    (compose,) = documents("compose.yml")
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def test_compose_is_what_compose_reads_and_its_commands_are_understood() -> None:
    passes(str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "compose.yml")
    assert is_understood(services()["coordinator"]["command"]) == "coordinator"
    for part in services().values():
        for source, _, _ in mounts(part):
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
    verbs = []
    for name in ("invite-berlin", "invite-paris", "scrape"):
        (script,) = services()[name]["command"]
        (line,) = (line for line in script.splitlines() if line.strip().startswith("atoll "))
        verbs.append(is_understood(shlex.split(line)[1:]))
    assert verbs == ["invite", "invite", "token"]


def test_nothing_is_mounted_where_an_engine_cannot_make_the_place() -> None:
    """Within what it has mounted read-only before: such a container does not start (moby/moby#39587)."""
    for name, service in services().items():
        frozen = [target for _, target, is_read_only in mounts(service) if is_read_only]
        assert not [
            (name, target) for _, target, _ in mounts(service) if any(target.startswith(f"{one}/") for one in frozen)
        ]


@pytest.mark.parametrize("site", ["berlin", "paris"])
def test_a_site_of_compose_has_what_is_its_own_and_nothing_else(site: str) -> None:
    """What makes invites, and the token of a Prometheus, is the coordinator's; its own training script reads nothing of
    them."""
    found, made = services()[site], services()[f"invite-{site}"]
    volumes = {source: target for source, target, _ in mounts(found) if not source.startswith("./")}
    assert volumes == {site: "/var/lib/atoll", f"{site}-invite": "/shared"}
    assert {source for source, _, _ in mounts(made)} == {"store", f"{site}-invite"}
    assert made["environment"] == {"SITE": site}
    assert found["depends_on"] == {f"invite-{site}": {"condition": "service_completed_successfully"}}
    others = [source for name, other in services().items() if name not in (site, f"invite-{site}")
              for source, _, _ in mounts(other)]  # fmt: skip
    assert not set(volumes) & set(others)


STUB = """#!/bin/sh
# In place of atoll: the file or the folder that it writes.
echo "$@" >> "$LOG"
while [ $# -gt 0 ]; do
    case "$1" in
        --file) echo an invite > "$2" ;;
        --enrol-only) mkdir -p "$3/trust" && touch "$3/trust/identity.pem" ;;
        --prometheus) mkdir "$2" && echo a configuration > "$2/prometheus.yml" ;;
    esac
    shift
done
"""


def asked_for(folder: Path, *command: str, **environment: str) -> list[str]:
    """What that command, which is run twice, as after a container's second start, has asked the stub for."""
    program = folder / "bin" / "atoll"
    program.parent.mkdir()
    program.write_text(STUB)
    program.chmod(0o755)
    told = {"PATH": f"{program.parent}:{os.environ['PATH']}", "LOG": str(folder / "log"), **environment}
    for _ in range(2):
        done = subprocess.run(command, check=False, env=told, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    return (folder / "log").read_text().splitlines()


def asked_by(name: str, folder: Path, **environment: str) -> list[str]:
    """What that service of compose asks atoll for, with its volumes in the folder."""
    service, where = services()[name], {"$$": "$"}
    for source, target, _ in mounts(service):
        where[target] = str((DEPLOY if source.startswith("./") else folder) / source)
        if not source.startswith("./"):
            (folder / source).mkdir()
    (script,) = service["command"]
    text = re.sub("|".join(map(re.escape, where)), lambda found: where[found[0]], script)
    return asked_for(folder, *service["entrypoint"], text, **environment)


@pytest.mark.parametrize("site", ["berlin", "paris"])
def test_an_invite_of_compose_is_made_once_where_its_site_looks_for_it(site: str, tmp_path: Path) -> None:
    (asked,) = asked_by(f"invite-{site}", tmp_path, SITE=site)
    assert f"--site {site} " in asked
    expected = Path(services()[site]["environment"]["INVITE"])
    assert (tmp_path / f"{site}-invite" / expected.relative_to("/shared")).is_file()


def test_the_prometheus_of_compose_has_its_token_once_and_rules_beside_its_configuration(tmp_path: Path) -> None:
    assert len(asked_by("scrape", tmp_path)) == 1
    prometheus = services()["prometheus"]
    (configuration,) = (Path(word.partition("=")[2]) for word in prometheus["command"] if "--config.file" in word)
    (at,) = (Path(target) for source, target, _ in mounts(prometheus) if source == "scrape")
    folder = (tmp_path / "scrape" / configuration.relative_to(at)).parent
    assert sorted(path.name for path in folder.iterdir()) == ["atoll.rules.yml", "prometheus.yml"]
    assert (folder / "atoll.rules.yml").read_text() == (DEPLOY / "prometheus" / "atoll.rules.yml").read_text()
    pattern = yaml.safe_load(scrape.configuration("page", "metrics", "run.example:7701"))["rule_files"]
    assert pattern == ["*.rules.yml"], "which are looked for in the folder of the configuration"


def test_the_page_of_compose_is_where_it_says_and_prometheus_comes_by_a_name_of_it() -> None:
    words = services()["coordinator"]["command"]
    args = make_parser().parse_args([word.replace("/etc/atoll", str(DEPLOY / "docker")) for word in words])
    names = names_of_page(coordinator.prepare(args)[1])
    (page,) = re.findall(r"^# The page: (\S+)", (DEPLOY / "compose.yml").read_text(), re.MULTILINE)
    (target,) = re.findall(r"--target (\S+)", services()["scrape"]["command"][0])
    assert urlsplit(page).scheme == "https"
    assert {urlsplit(page).hostname, target.partition(":")[0]} <= set(names)
    published = [port.rpartition(":")[0] for port in services()["coordinator"]["ports"]]
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
    (secret,) = re.findall(r"create secret generic (\S+) ", block[0])
    keys = re.findall(r"--from-file=scrape/(\S+)", block[0])
    assert {(secret, key) for key in keys} == {(one["name"], one["key"]) for one in shown_by_the_operator()}


def shown_by_the_operator() -> list[dict[str, str]]:
    """Places in Secrets of what its Prometheus shows to the coordinator, and of the root by which it knows it."""
    (monitor,) = documents("kubernetes", "servicemonitor.yaml")
    (endpoint,) = monitor["spec"]["endpoints"]
    return [endpoint["authorization"]["credentials"], endpoint["tlsConfig"]["ca"]["secret"]]


def test_the_operator_of_prometheus_scrapes_the_page_of_the_coordinator_over_tls() -> None:
    (monitor,) = documents("kubernetes", "servicemonitor.yaml")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], [one["key"] for one in shown_by_the_operator()]) == ("https", ["token", "root.pem"])
    service, pods, *_ = documents("kubernetes", "coordinator.yaml")
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    names = [word.partition("=")[2] for word in container["args"] if word.startswith("--http-name=")]
    assert names == [endpoint["tlsConfig"]["serverName"]]
    (kustomization,) = documents("kubernetes", "kustomization.yaml")
    assert monitor["metadata"]["namespace"] == kustomization["namespace"]
    assert monitor["spec"]["selector"]["matchLabels"] in [one["pairs"] for one in kustomization["labels"]]


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


def test_the_container_of_a_site_joins_once_and_starts_its_node_each_time(tmp_path: Path) -> None:
    home, invite = str(tmp_path / "home"), str(tmp_path / "invite")
    script = str(DEPLOY / "docker" / "site.sh")
    asked = asked_for(tmp_path, "sh", script, "--ranks", "2 3", INVITE=invite, HOME_DIR=home)
    node = f"node --home {home} --ranks 2 3"
    assert asked == [f"join --enrol-only --home {home} {invite}", node, node]
    assert [is_understood(line.split()) for line in asked[:1]] == ["join"]


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
