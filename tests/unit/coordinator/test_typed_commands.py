"""Command lines that a person types on the coordinator's machine, and what becomes of a run by them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.coordinator import admin, commands
from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from atoll.protocol.errors import HostError, StateError
from tests.harness.audited_story import Audited
from tests.harness.coordinator_story import Story, some_settings
from tests.unit.coordinator.test_audits import back_after_restart


def typed(story: Story, folder: Path, verb: str, *words: str) -> int:
    """The exit code."""

    async def answered(line: bytes, by: str) -> e.Answer:
        asked = commands.read(line, by)
        assert isinstance(asked, e.Asked)
        (answer,) = [o for o in story.happens(replace(asked, request=1)) if isinstance(o, e.Answer)]
        return answer

    async def exit_code() -> int:
        server = admin.admin_server(folder / "run.db", answered)
        await server.start()
        try:
            return await asyncio.to_thread(main, [verb, "--store", str(folder / "run.db"), *words])
        finally:
            await server.close()

    return asyncio.run(exit_code())


def test_pause_resume_and_drain_do_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b", "c")
    assert typed(story, tmp_path, "pause", "--reason", "the cluster is moved") == 0
    assert story.view.state == "paused: a person has paused the run: the cluster is moved (atoll resume)"
    assert typed(story, tmp_path, "resume") == 0
    assert not story.is_paused()
    assert typed(story, tmp_path, "pause") == 0
    assert story.view.state == "paused: a person has paused the run: atoll pause (atoll resume)"
    assert typed(story, tmp_path, "resume") == 0
    assert typed(story, tmp_path, "drain", "c", "--reason", "new disks") == 0
    assert story.last("c", m.Drain).reason == "new disks"
    assert not story.num("a", m.Drain)
    assert capsys.readouterr().out.splitlines() == [
        "the run is paused; `atoll resume` lets it go on",
        "the run goes on",
        "the run is paused; `atoll resume` lets it go on",
        "the run goes on",
        "c is asked to leave; `atoll status` says when it has",
    ]
    assert typed(story, tmp_path, "drain", "x") == HostError.exit_code
    assert "that is here is called 'x'" in capsys.readouterr().err


def test_the_draws_in_a_log_are_held_against_the_audit_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story, log = Audited(audits=3), tmp_path / "coordinator.log"
    back_after_restart(story)
    story.next_commit()
    lines = [f"2026-01-02 03:04:05 INFO {text}\n" for _, text in story.reports]
    log.write_text("".join(lines))
    assert typed(story, tmp_path, "audit", "--draws", str(log)) == 0
    *entries, said = capsys.readouterr().out.splitlines()
    assert len(entries) == len(story.audit_log())
    assert said == "3 draws come of secrets that are in the audit log, 3 of one that is not said yet"
    log.write_text("".join(line.replace(": place ", ": place 9") for line in lines))
    assert typed(story, tmp_path, "audit", "--draws", str(log)) == StateError.exit_code
    assert f"{log}: a draw that was chosen: " in capsys.readouterr().err
    log.unlink()
    assert typed(story, tmp_path, "audit", "--draws", str(log)) == HostError.exit_code
    assert f"{log}: No such file or directory" in capsys.readouterr().err
