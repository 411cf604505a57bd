"""README's table of exit codes is what the program does."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from atoll.cli import main as command_line
from atoll.cli import status
from atoll.protocol import errors
from atoll.protocol.exit_codes import ENDED_AT_ONCE

ROOT = Path(__file__).parents[3]
CLEAN = 0
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AtollError)]


def rows() -> dict[int, str]:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| exit code | means |")[1].split("\n\n")[0]
    return {int(code): means for code, means in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)}


def test_the_readme_has_a_row_for_each_code_and_for_no_other() -> None:
    assert rows().keys() == {CLEAN, ENDED_AT_ONCE, *(kind.exit_code for kind in KINDS)}


def test_the_page_of_errors_says_of_each_code_what_to_do() -> None:
    _, *sections = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split("\n## ")
    said = dict(section.split("\n", 1) for section in sections)
    assert [int(code) for code in said] == sorted(rows())
    assert all(len(text.split()) > 20 for text in said.values())


def code_of(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a verb that raises it."""

    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(status, "run", fail)
    return command_line.main(["status", "--coordinator", "127.0.0.1:1"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_ends_a_verb_with_the_code_of_its_kind(
    kind: type[errors.AtollError], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_of(kind("what, where, what to do"), monkeypatch)
    assert code == kind.exit_code
    assert code in rows()
    assert code != CLEAN


def test_what_the_machine_says_and_ctrl_c_have_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(OSError(errno.ENOSPC, "no space"), monkeypatch) == 3
    assert code_of(KeyboardInterrupt(), monkeypatch) == 130


def test_a_coordinator_that_does_not_answer_is_nobody_who_answers() -> None:
    assert command_line.main(["status", "--coordinator", "127.0.0.1:1"]) == errors.PeerError.exit_code
