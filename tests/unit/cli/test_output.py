"""What a command writes where it cannot be written: a reader that has gone is no error, and anything else is one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.main import VERBS, main
from atoll.protocol.errors import ConfigError, HostError

SAYS = """
import os, sys
from atoll.cli import main
class Says:
    "An example."
    def add_arguments(self, parser): pass
    def run(self, args):
        print(os.environ["TEXT"])
        return 0
main.VERBS["stop"] = Says()
sys.argv = ["atoll", "stop"]
sys.exit(main.main())
"""


def says(output: int, text: str = "x", **environment: str) -> tuple[int, str]:
    """A command that prints: its exit code, and what it has to say of that."""
    done = subprocess.run(
        [sys.executable, "-c", SAYS],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TEXT": text, "PYTHONUNBUFFERED": ""} | environment,  # it is written as the command ends
        check=False,
    )
    return done.returncode, done.stderr


def test_output_that_nobody_reads_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert says(writing) == (0, "")
    finally:
        os.close(writing)


def test_output_that_a_full_disk_does_not_take_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        assert says(full.fileno()) == (HostError.exit_code, "atoll stop: [Errno 28] No space left on device\n")


def test_a_terminal_that_has_not_all_characters_gets_those_that_it_has(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        assert says(out.fileno(), "x\u2026", PYTHONIOENCODING="ascii") == (0, "")
    assert (tmp_path / "out").read_bytes() == b"x\\u2026\n"


class Breaks:
    """An example."""

    __name__ = "stop"

    def add_arguments(self, parser: object) -> None:
        del parser

    def run(self, args: object) -> int:
        del args
        raise BrokenPipeError(errno.EPIPE, "Broken pipe", "/a/pipe/of/somebody/else")


def test_another_pipe_that_breaks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A service that ends with 0 is not started again."""
    monkeypatch.setitem(VERBS, "stop", Breaks())
    assert main(["stop"]) == HostError.exit_code
    assert "/a/pipe/of/somebody/else" in capfd.readouterr().err


def test_an_error_in_what_stands_behind_two_dashes_names_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "x.invite", "--"]) == ConfigError.exit_code
    assert capsys.readouterr().err.startswith("atoll join: nothing stands behind")
