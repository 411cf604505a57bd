"""What `atoll rollback --to` says while it waits for an answer."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from atoll.cli import operator, rollback
from atoll.cli.main import main
from atoll.protocol.errors import HostError

ARGS = Namespace(to=7, reason="", skip_samples=False)
WAITS = "asked for; if commit 7 is in reach, the run waits until a site has its state\n"


def test_a_refusal_stands_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise HostError("the newest commit is 3")

    monkeypatch.setattr(operator, "ask", refuse)
    with pytest.raises(HostError, match="the newest commit is 3"):
        rollback.run(ARGS)
    assert capsys.readouterr() == ("", "")


def test_samples_are_skipped_when_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[bool] = []
    monkeypatch.setattr(operator, "ask", lambda *_, skip_samples, **__: skipped.append(skip_samples))
    assert main(["rollback", "--to", "7", "--skip-samples"]) == main(["rollback", "--to", "7"]) == 0
    assert skipped == [True, False]


def test_who_waits_is_told_for_what(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def answer(*_: Any, **__: Any) -> str:
        nonlocal said
        while WAITS not in said:
            said += capsys.readouterr().err
        return ""

    monkeypatch.setattr(rollback, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(operator, "ask", answer)
    assert rollback.run(ARGS) == 0
    assert said == WAITS
    assert capsys.readouterr().out == "the run goes on from commit 7; what followed is void\n"
