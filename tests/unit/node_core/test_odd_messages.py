"""What makes no sense to a site: words of its coordinator that it does not understand, reports that come too late."""

from __future__ import annotations

from atoll.node.core import events as e
from atoll.node.core.events import AnswerKind
from atoll.node.core.state import SnapshotPhase
from atoll.protocol import messages as m
from atoll.protocol.errors import RefusedError
from tests.unit.node_core.test_site import Driver, started


def test_settings_that_this_version_does_not_understand_end_the_node_with_words() -> None:
    drive = Driver()
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json='{"run_id": "run"}'))
    ended = drive.wants(e.Exit)
    assert isinstance(ended, e.Exit)
    assert ended.code == RefusedError.exit_code
    assert "settings" in ended.text
    assert "is missing" in ended.text


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
    assert drive.core.site.snapshot.phase is SnapshotPhase.WRITING
    assert not drive.sent()
