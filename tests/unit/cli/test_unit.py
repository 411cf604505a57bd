"""The unit that `atoll join --install` writes."""

from __future__ import annotations

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


@pytest.mark.skipif(which("systemd-analyze") is None, reason="needs Debian's package systemd")
def test_systemd_finds_no_mistake_in_it(tmp_path: Path) -> None:
    path = tmp_path / "atoll-berlin.service"
    path.write_text(unit.text("berlin", ["/bin/true", "--data", "/a b", "%h $x"], is_system=True))
    said = subprocess.run(
        ["systemd-analyze", "verify", str(path)], check=False, capture_output=True, text=True, timeout=60
    )
    assert (said.returncode, said.stderr) == (0, "")


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
