"""Invites are made: what is wrong with the command is said before, and a file of one is for its owner alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from atoll.cli import invite, operator
from atoll.cli.main import main, make_parser
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.trust.invites import to_text
from tests.unit.trust.test_enrolled import an_invite


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


@pytest.mark.parametrize("where", [["--file", "a.invite"], ["--folder", "."]])
def test_the_file_of_an_invite_is_for_its_owner_alone(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever reads it comes into the run."""
    monkeypatch.chdir(tmp_path)
    text = to_text(an_invite())
    monkeypatch.setattr(operator, "ask", lambda *_, **__: text)
    assert main(["invite", "--site", "a", *where]) == 0
    file = tmp_path / "a.invite"
    assert file.read_text() == f"{text}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    out, err = capsys.readouterr()
    assert text not in out + err


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
