"""What people ask of a coordinator on its own machine: a line is a request, and has one line as its answer."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from atoll.cli.main import main
from atoll.coordinator import admin, commands
from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.line_socket import MAX_LINE_BYTES

T = TypeVar("T")


Heard = e.Asked | commands.StatusAsked | commands.HealthAsked | commands.BackupAsked


def served(tmp_path: Path, act: Callable[[Path], T], answer: e.Answer) -> tuple[T, list[Heard]]:
    """What `act` returns with the store's path, and what the coordinator heard meanwhile."""
    heard: list[Heard] = []

    async def command(line: bytes, by: str) -> e.Answer:
        assert by == f"{getpass.getuser()} on the coordinator's machine"
        try:
            heard.append(commands.read(line, ""))
        except ConfigError as error:
            return e.Answer(0, f"not a request: {error}")
        return answer

    async def main() -> T:
        server = admin.admin_server(tmp_path / "run.db", command)
        await server.start()
        try:
            return await asyncio.to_thread(act, tmp_path / "run.db")
        finally:
            await server.close()

    return asyncio.run(main()), heard


def line_of(store: Path, line: bytes) -> dict[str, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(admin.socket_path(store)))
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            answer: dict[str, str] = json.loads(file.readline())
        return answer


@pytest.mark.parametrize(
    ("command", "fields", "event"),
    [
        ("stop", {"reason": "enough"}, e.StopAsked("enough")),
        ("rollback", {"reason": "the disk is lost"}, e.RollbackAsked("the disk is lost")),
        ("rollback", {"reason": "wrong data", "to": 3}, e.RollbackAsked("wrong data", to=3)),
        ("evict", {"name": "a", "reason": "?"}, e.EvictAsked(name="a", reason="?")),
        ("ban", {"name": "a", "reason": "?", "until_s": 1e9}, e.BanAsked(name="a", reason="?", until_s=1e9)),
        ("lift-ban", {"name": "a"}, e.LiftBanAsked(name="a")),
        ("set", {"name": "run.steps", "value": "900"}, e.SetAsked(name="run.steps", value="900")),
        ("reset", {"reason": "the wrong model"}, e.ResetAsked(reason="the wrong model")),
        ("lift-ban", {"name": "a\x1b[2J"}, e.LiftBanAsked(name="a\\x1b[2J")),
    ],
)
def test_a_request_is_its_event(command: str, fields: dict[str, Any], event: e.Asked, tmp_path: Path) -> None:
    def ask(store: Path) -> str:
        return admin.ask(store, command, **fields)

    assert served(tmp_path, ask, e.Answer(1, "", "how it stood")) == ("how it stood", [event])


def test_what_is_no_text_reaches_the_run_as_escapes(tmp_path: Path) -> None:
    """A terminal of another encoding typed it. Kept and sent as it is, it would end the coordinator, each time that it
    is started."""
    typed = b"caf\xe9".decode(errors="surrogateescape")

    def ask(store: Path) -> None:
        admin.ask(store, "ban", name=typed, reason=typed)
        admin.ask(store, "rollback", reason=typed, to=3)

    words = "caf\\udce9"
    asked = [e.BanAsked(name=words, reason=words), e.RollbackAsked(words, to=3)]
    assert served(tmp_path, ask, e.Answer(1, ""))[1] == asked
    wire.response_body(m.Refused(kind=m.RefusedKind.BANNED, text=words))


def test_a_command_that_is_not_decided_does_not_outlive_its_socket(tmp_path: Path) -> None:
    """What decides it may end after the socket. A coordinator whose store has failed would keep its lease till then."""

    async def main() -> None:
        asked = asyncio.Event()

        async def command(line: bytes, by: str) -> e.Answer:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        before = asyncio.all_tasks()
        server = admin.admin_server(tmp_path / "run.db", command)
        await server.start()
        asking = asyncio.create_task(asyncio.to_thread(line_of, tmp_path / "run.db", b"{}\n"))
        await asked.wait()
        await server.close()
        assert asyncio.all_tasks() - before <= {asking}
        with pytest.raises(json.JSONDecodeError):  # no answer
            await asking

    asyncio.run(main())


def test_why_it_cannot_be_done_is_said(tmp_path: Path) -> None:
    def ask(store: Path) -> None:
        with pytest.raises(HostError, match="refused: no site is called so"):
            admin.ask(store, "lift-ban", name="x")

    assert served(tmp_path, ask, e.Answer(1, "no site is called so"))[1] == [e.LiftBanAsked(name="x")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "Expecting value"),
        (b'{"command"\n', "Expecting"),
        (b"[]\n", "commands are stop, pause, resume, set, drain, rollback"),
        (b'{"command": "dance"}\n', "commands are stop, pause, resume, set, drain, rollback"),
        (b'{"command": ["stop"]}\n', "commands are stop, pause, resume, set, drain, rollback"),
        (b'{"command": "stop"}\n', 'stop: "reason" is missing'),
        (b'{"command": "stop", "reason": 1}\n', "reason must be a string"),
        (b'{"command": "rollback", "reason": "?", "to": "3"}\n', "to must be an integer"),
        (b'{"command": "lift-ban", "nam": "a"}\n', 'did you mean "name"?'),
        (b'{"command": "stop", "reason": "' + b"x" * MAX_LINE_BYTES + b'"}\n', "Expecting value"),
        (b"[" * (MAX_LINE_BYTES - 1) + b"\n", "recursion"),
        (b'{"command": "stop", "reason": "?", "by": "root"}\n', "by cannot be said"),
        (b'{"command": "invite", "role": "site", "name": "a", "invite_id": "1"}\n', "invite_id cannot be said"),
    ],
)
def test_what_is_no_request_changes_nothing(line: bytes, problem: str, tmp_path: Path) -> None:
    answer, heard = served(tmp_path, lambda store: line_of(store, line), e.Answer(1, ""))
    assert answer["problem"].startswith("not a request: ")
    assert problem in answer["problem"]
    assert heard == []


def test_a_copy_that_is_not_where_it_was_asked_for_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A coordinator whose unit gives it a /tmp of its own has written it there."""
    to = tmp_path / "copy.db"

    def ask(store: Path) -> list[int]:
        codes = [main(["backup", "--store", str(store), "--to", str(to)])]
        to.touch()
        return [*codes, main(["backup", "--store", str(store), "--to", str(to)])]

    codes, heard = served(tmp_path, ask, e.Answer(1, "", "commit 7"))
    assert (codes, heard) == ([HostError.exit_code, 0], 2 * [commands.BackupAsked(path=str(to))])
    out, err = capsys.readouterr()
    assert f"there is none at {to}: its unit has a /tmp of its own" in err
    assert out == f"{to}: the run as of commit 7\n"
