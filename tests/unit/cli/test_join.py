"""How an invite is given to `atoll join`, and what is never said of it."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.cli.join import read_invite
from atoll.cli.main import main
from atoll.protocol.errors import ConfigError
from atoll.protocol.trust.invites import PREFIX, to_text
from tests.unit.trust.test_enrolled import an_invite

PROMPT = b"invite (it is not shown): "
STANDARD_INPUT = Path("-")
AT_A_TERMINAL = """
import fcntl, pathlib, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from atoll.cli.join import read_invite
from atoll.protocol.errors import ConfigError
try:
    print(read_invite(pathlib.Path("-")).invite_id)
except ConfigError as error:
    print(error)
"""


def given(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """On standard input, which is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_an_invite_is_read_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, to_text(an_invite()).encode() + b"\r\n")
    assert read_invite(STANDARD_INPUT).invite_id == "i1"


def test_what_is_no_text_is_no_invite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch, b"\x7fELF\xff\xfe")
    assert main(["join", "--home", str(tmp_path / "home")]) == ConfigError.exit_code
    assert "give the line that `atoll invite` printed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "says"), [(to_text(an_invite()) + "\n", "i1"), ("\x04", "no invite was given"), ("\n", "is no invite")]
)
def test_at_a_terminal_it_is_asked_for_and_not_shown(typed: str, says: str) -> None:
    ours, its = pty.openpty()
    asks = subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL], stdin=its, stdout=subprocess.PIPE, stderr=its, start_new_session=True
    )
    os.close(its)
    shown = b""
    while PROMPT not in shown:
        shown += os.read(ours, 1024)
    os.write(ours, typed.encode())
    with suppress(OSError):  # it has ended
        while more := os.read(ours, 1024):
            shown += more
    os.close(ours)
    assert says in asks.communicate(timeout=60)[0].decode()
    assert shown.strip() == PROMPT.strip()


@pytest.mark.parametrize("how", ["whole", "a part", "in this folder", "in quotes", "without its beginning"])
def test_an_invite_that_is_a_word_of_the_command_is_not_said_again(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = to_text(an_invite())
    word = {
        "whole": text,
        "a part": text[:200],
        "in this folder": f"./{text[:200]}",
        "in quotes": f"'{text[:200]}'",
        "without its beginning": text.removeprefix(PREFIX),
    }[how]
    assert main(["join", word, "--home", str(tmp_path / "home")]) == ConfigError.exit_code
    out, err = capsys.readouterr()
    secret = text[len(PREFIX) :][:20]
    assert secret not in out + err
    assert "an invite itself is given on standard input, or in a file that is named here" in err


def test_a_file_may_be_named_as_an_invite_begins(tmp_path: Path) -> None:
    file = tmp_path / f"{PREFIX}berlin"
    file.write_text(to_text(an_invite()))
    assert read_invite(file).invite_id == "i1"
