"""The service units start commands that there are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from shutil import which

import pytest

from atoll.cli.main import make_parser, split_command
from atoll.protocol import errors

UNITS = sorted((Path(__file__).parents[3] / "deploy" / "systemd").glob("*.service"))
EXIT_CODES = {cls.exit_code for cls in vars(errors).values() if isinstance(cls, type) and hasattr(cls, "exit_code")}


def values(unit: Path, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit.read_text(), re.MULTILINE)


def test_there_is_a_unit_for_each_service() -> None:
    assert [u.name for u in UNITS] == ["atoll-coordinator.service", "atoll-node@.service", "atoll-relay.service"]


@pytest.mark.parametrize(
    ("unit", "options"),
    [
        (UNITS[0], ""),
        (UNITS[2], "--quota-gb 500"),
        *((UNITS[1], o) for o in ("", "--data /srv/texts", "--ranks 8 -- /srv/train.py --lr 1")),
    ],
    ids=str,
)
def test_the_command_of_a_unit_is_understood(unit: Path, options: str) -> None:
    (line,) = values(unit, "ExecStart")
    line = line.replace("%i", "berlin").replace("$OPTIONS", options)
    program, *words = shlex.split(line)
    assert program == "/opt/atoll/bin/atoll"
    own, command = split_command(words)
    args = make_parser().parse_args(own)
    assert args.verb in unit.name
    assert command == (["/srv/train.py", "--lr", "1"] if "--" in options.split() else [])


@pytest.mark.parametrize(("name", "most"), [("atoll-coordinator", 2.5), ("atoll-node@", 4.0), ("atoll-relay", 2.5)])
@pytest.mark.skipif(which("systemd-analyze") is None, reason="needs Debian's package systemd")
def test_units_leave_little_open(name: str, most: float) -> None:
    unit = next(unit for unit in UNITS if unit.stem == name)
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert found is not None, said
    assert float(found[1]) <= most, said


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name)
@pytest.mark.skipif(which("systemd-analyze") is None, reason="needs Debian's package systemd")
def test_systemd_finds_no_mistake_in_a_unit(unit: Path, tmp_path: Path) -> None:
    """With a program that there is, as systemd looks for it. A key that it does not know is a warning alone."""
    checked = tmp_path / unit.name
    checked.write_text(unit.read_text().replace("/opt/atoll/bin/atoll ", "/bin/true "))
    command = ["systemd-analyze", "verify", "--man=no", str(checked)]
    said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stderr) == (0, "")


def test_devices_of_a_node_stay_open_for_gpus() -> None:
    """Each of these closes them: a DeviceAllow= is said or implied."""
    for key in ("PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute"):
        assert not values(UNITS[1], key), key


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.name)
def test_codes_that_prevent_a_restart_are_atolls(unit: Path) -> None:
    (codes,) = values(unit, "RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} <= EXIT_CODES


def test_the_coordinators_unit_lets_it_write_the_copies_of_its_store() -> None:
    """Where the page says, and it is the coordinator that writes them."""
    text = (UNITS[0].parents[1] / "README.md").read_text()
    (to,) = re.findall(r"^ +atoll backup .*--to (\S+)$", text, re.MULTILINE)
    (folder,) = re.findall(r"^ +install -d -o atoll -m 700 (\S+)$", text, re.MULTILINE)
    assert (values(UNITS[0], "ReadWritePaths"), str(Path(to).parent)) == ([f"-{folder}"], folder)


@pytest.mark.skipif(which("nft") is None or os.geteuid() != 0, reason="needs root and Debian's package nftables")
def test_rules_before_a_nodes_port_are_understood() -> None:
    """They are only checked, not put in place."""
    rules = UNITS[0].parents[1] / "nftables" / "atoll-node.nft"
    subprocess.run(["nft", "--check", "--file", str(rules)], check=True, capture_output=True, timeout=60)
