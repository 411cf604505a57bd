"""What makes no sense to a site: words of its coordinator that it does not understand, reports that come too late."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind
from atoll.protocol import messages as m
from atoll.protocol.errors import RefusedError
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_site import SETTINGS, Driver, at_boundary, commit, opened, plan, started


def test_settings_that_this_version_does_not_understand_end_the_node_with_words() -> None:
    drive = Driver()
    drive(e.SessionOpened())
    table = json.loads(settings_to_json(SETTINGS)) | {"needs": ["codec int8", "overlap mix"]}
    drive.receive(m.Welcome(settings_json=json.dumps(table)))
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert ended.code == RefusedError.exit_code
    assert "the run needs what this version cannot do: overlap mix" in ended.text


def test_a_coordinator_that_is_upgraded_in_mid_run_does_not_end_a_site() -> None:
    drive = started()
    newer, older = json.loads(settings_to_json(SETTINGS)), json.loads(settings_to_json(SETTINGS))
    newer["sync"]["overlap"] = 0
    del older["sync"]["up"], older["needs"]
    said = []
    for table in (newer, newer, older):
        drive(e.SessionLost("upgraded"))
        drive(e.SessionOpened())
        drive.receive(m.Welcome(settings_json=json.dumps(table), site_id=1))
        assert not any(isinstance(o, out.Exit) for o in drive.out)
        assert drive.is_welcomed()
        said += [o.text for o in drive.out if isinstance(o, out.Report)]
    assert said == ["the coordinator is newer; this node does not know, and does not need: sync.overlap"]


def test_a_site_is_not_in_a_run_whose_settings_change() -> None:
    drive = started()
    drive(e.SessionLost("restarted"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(replace(SETTINGS, steps=41)), site_id=1))
    ended = drive.wants(out.Exit)
    assert isinstance(ended, out.Exit)
    assert "settings changed" in ended.text


OF_NO_FRAGMENT: dict[str, m.CoordinatorMessage] = {
    "Open": replace(opened(1, 0), fragment=1),
    "Plan": replace(plan(1), fragment=1),
    "Commit": replace(commit(1, 1), fragment=1),
    "Commit, with the next Open": replace(commit(1, 1), next=replace(opened(2, 1), fragment=1)),
    "Abandoned": m.Abandoned(sync=1, reason="x", next=replace(opened(2, 0), fragment=1)),
    "Sources": m.Sources(commits=(replace(commit(1, 1), fragment=1),)),
}


@pytest.mark.parametrize("name", OF_NO_FRAGMENT)
def test_a_fragment_that_the_run_does_not_have_ends_the_site_with_the_reason(name: str) -> None:
    drive = started()
    at_boundary(drive)
    drive(e.Received(1, OF_NO_FRAGMENT[name]))
    text = f"{name.partition(',')[0]} of fragment 1: this run has 1, from 0 on"
    assert m.Leave(reason=text, fatal=True) in drive.sent()
    assert drive.wants(out.Exit) == out.Exit(RefusedError.exit_code, text)
    assert not [o for o in drive.out if isinstance(o, out.BeginExchange | out.ApplyCommit | out.FetchState)]


def test_34_a_report_of_dead_workers_does_not_seal_the_snapshot_of_new_ones() -> None:
    drive = started()
    drive.ask(10)
    drive(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed"))
    drive.joined()
    drive.ask(0)
    drive(e.Published(e.Values(0)))
    drive.merged(0)
    drive.ask(10)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    late = e.SnapshotSealed(generation=1, step=10, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0)
    drive(late)
    assert drive.snapshot_phase() == "writing"
    assert not drive.sent()
