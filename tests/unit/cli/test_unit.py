"""The unit that `atoll join --install` writes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from atoll.cli import unit
from atoll.cli.main import make_parser, split_command

WORDS = ["join", "b.invite", "--install", "--home", "/h", "--data", "/a b", "--ranks=8", "--home=/h"]


def test_the_node_has_the_options_that_were_given() -> None:
    assert unit.options(WORDS, "b.invite") == ["--data", "/a b", "--ranks=8"]
    command = unit.node_command(Path("/h"), unit.options(WORDS, "b.invite"), ["train.py", "--lr", "1"])
    own, script = split_command(command[3:])
    args = make_parser().parse_args(own)
    assert (args.verb, args.home, args.num_ranks, [str(p) for p in args.data_paths]) == (
        "node",
        Path("/h"),
        8,
        ["/a b"],
    )
    assert script == ["train.py", "--lr", "1"]


@pytest.mark.parametrize(
    ("word", "read"),
    [("plain", "plain"), ("/a b", '"/a b"'), ("50%", "50%%"), ("$HOME", "$$HOME"), ('a"b', '"a\\"b"'), ("", '""')],
)
def test_words_are_quoted_as_systemd_reads_them(word: str, read: str) -> None:
    assert unit.quoted(word) == read


needs_systemd = pytest.mark.skipif(which("systemd-analyze") is None, reason="needs Debian's package systemd")


@needs_systemd
@pytest.mark.parametrize("is_system", [True, False])
def test_systemd_finds_no_mistake_in_it(tmp_path: Path, is_system: bool) -> None:
    path = tmp_path / "atoll-berlin.service"
    path.write_text(unit.text("berlin", ["/bin/true", "--data", "/a b", "%h $x"], is_system=is_system))
    said = subprocess.run(
        ["systemd-analyze", "verify", str(path)], check=False, capture_output=True, text=True, timeout=60
    )
    assert (said.returncode, said.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize(("is_system", "most"), [(True, 4.0), (False, 6.5)])
def test_it_leaves_little_open(tmp_path: Path, is_system: bool, most: float) -> None:
    """A unit of a user's own systemd has what needs no privilege, and is judged as one of the system."""
    path = tmp_path / "atoll-berlin.service"
    path.write_text(unit.text("berlin", ["/bin/true"], is_system=is_system))
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert found is not None, said
    assert float(found[1]) <= most, said


def test_it_leaves_open_what_the_unit_in_deploy_does_and_folders_beside() -> None:
    """Home, data, and what a script writes may lie anywhere but in the system's own folders, and be anybody's."""
    deployed = (Path(__file__).parents[3] / "deploy" / "systemd" / "atoll-node@.service").read_text()
    its_own = set(re.findall(r"^\w+=.*$", deployed.partition("# What it does not need")[2], re.MULTILINE))
    written = set(unit.text("berlin", ["/bin/true"], is_system=True).splitlines())
    of_folders = {"ProtectSystem=strict", "ProtectHome=read-only", "PrivateTmp=yes"}
    of_a_user = {"CapabilityBoundingSet=", "RemoveIPC=yes"}
    assert its_own - written == of_folders | of_a_user
    capabilities = "CapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_NET_BIND_SERVICE"  # a node at port 443 is root's
    assert written >= {"ProtectSystem=full", capabilities, "LimitMEMLOCK=infinity"}


def test_root_is_told_that_the_node_and_its_script_are_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert unit.warnings() == []
    monkeypatch.setattr("os.geteuid", lambda: 0)
    (said,) = unit.warnings()
    assert "as root" in said
    assert "atoll-node@.service" in said


def test_a_user_gets_a_unit_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    here = tmp_path / "100% here"
    here.mkdir()
    monkeypatch.chdir(here)  # where `--data texts` and `-- train.py` lie
    commands = unit.install("berlin", ["/bin/true"])
    assert commands[:2] == ["systemctl --user daemon-reload", "systemctl --user enable --now atoll-berlin.service"]
    written = (tmp_path / "systemd" / "user" / "atoll-berlin.service").read_text()
    assert f"WorkingDirectory=-{tmp_path}/100%% here\nExecStart=/bin/true\n" in written
    assert "WantedBy=default.target" in written
