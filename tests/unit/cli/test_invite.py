"""Several invites at once: what is wrong with the command is said before any is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli import invite, operator
from atoll.cli.main import main, make_parser
from atoll.protocol.errors import ConfigError, HostError


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "for whom"),
        (["--site", "a", "--site", "b"], "invites for a, b: say --folder DIR"),
        (["--site", "a", "--relay", "a", "--folder", "invites"], "a.invite is there already"),
        (["--site", "a", "--viewer", "old", "--folder", "invites"], "old.invite is there already"),
        (["--site", "a", "--file", "nowhere/a.invite"], "there is no folder nowhere; make it"),
        (["--site", "a", "--host", "0"], "--host counts from 1"),
        (["--site", "a", "--hosts", "0"], "a site has at most"),
        (["--viewer", "a", "--hosts", "2"], "--hosts and --host are for one site"),
        (["--site", "a", "--site", "b", "--hosts", "2"], "--hosts and --host are for one site"),
        (["--site", "old", "--hosts", "2", "--folder", "invites"], "old.invite is there already"),
        (["--site", "a", "--hosts", "2", "--take-back"], "leave out --hosts"),
        (["--site", "a", "--take-back", "--folder", "invites"], "--take-back makes no invite"),
    ],
)
def test_nobody_is_invited_by_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "invites").mkdir()
    (tmp_path / "invites" / "old.invite").touch()
    monkeypatch.setattr(operator, "ask", lambda *_, **__: pytest.fail("somebody is invited"))
    args = make_parser().parse_args(["invite", *words])
    with pytest.raises(ConfigError, match=problem):
        invite.run(args)


def test_what_is_asked_for_a_host_and_of_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str]] = []

    def ask(_: object, command: str, *, role: str, name: str, **__: object) -> str:
        asked.append((command, role, name))
        if command == "invite":
            raise HostError("no coordinator here")
        return ""

    monkeypatch.setattr(operator, "ask", ask)
    assert main(["invite", "--site", "berlin", "--host", "1"]) == HostError.exit_code
    assert main(["invite", "--relay", "hub", "--take-back"]) == 0
    assert asked == [("invite", "host", "berlin/1"), ("take-back", "relay", "hub")]
