"""What the codec loses of an average counts only while that average is the last commit of its chunk."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.spill import Spill, Spilled
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.errors import HostError
from tests.simulation.loop import InlineExecutor

FIRST, AGAIN, SECOND, OTHER = AttemptKey(1, 1, 1), AttemptKey(1, 1, 2), AttemptKey(2, 1, 1), AttemptKey(3, 1, 1)


def log_with(*in_force: AttemptKey) -> PayloadLog:
    class Log:
        def attempts_in_force(self) -> set[AttemptKey]:
            return set(in_force)

    return cast(PayloadLog, Log())


def values(number: float) -> Floats:
    return np.full(5, number, np.float32)


POOL = InlineExecutor()


def test_the_error_of_the_attempt_that_is_asked_for_is_given() -> None:
    errors = AverageErrors(POOL)
    errors.keep(FIRST, 7, values(1))
    errors.keep(SECOND, 7, values(2))
    assert errors.of(7, FIRST).tobytes() == values(1).tobytes()
    assert errors.of(7, SECOND).tobytes() == values(2).tobytes()
    for chunk, attempt in ((8, FIRST), (7, AGAIN), (7, None)):
        assert not errors.of(chunk, attempt).size


def test_a_later_attempt_at_a_sync_takes_the_place_of_the_one_before() -> None:
    """However many attempts fail, there is one error of a chunk for the sync."""
    errors = AverageErrors(POOL)
    for attempt in (FIRST, AGAIN):
        for chunk in (7, 8):
            errors.keep(attempt, chunk, values(attempt.attempt))
    errors.keep(AttemptKey(1, 2, 1), 7, values(3))  # a later term
    assert [errors.of(chunk, FIRST).size for chunk in (7, 8)] == [0, 0]
    assert [errors.of(chunk, AGAIN).size for chunk in (7, 8)] == [0, 5]
    assert errors.num_bytes == 40


def test_what_an_earlier_attempt_says_late_stays_beside_the_later_one() -> None:
    """A thread was still at it when the attempt was given up."""
    errors = AverageErrors(POOL)
    errors.keep(AGAIN, 7, values(2))
    errors.keep(FIRST, 7, values(1))
    assert errors.of(7, AGAIN).tobytes() == values(2).tobytes()


def test_an_attempt_that_became_no_commit_is_forgotten_with_its_sync_and_one_under_way_stays() -> None:
    errors = AverageErrors(POOL)
    for attempt in (AttemptKey(1, 1, 0), SECOND):
        errors.keep(attempt, 7, values(1))
    errors.keep(AGAIN, 8, values(1))
    errors.forget_void(log_with(AGAIN), in_flight={2})
    assert not errors.of(7, AttemptKey(1, 1, 0)).size
    assert errors.of(8, AGAIN).size
    assert errors.of(7, SECOND).size, "its sync is not over"
    assert (errors.num_dropped, errors.num_bytes) == (0, 40)


def test_what_a_thread_keeps_of_a_sync_that_is_over_goes_with_the_next_one() -> None:
    errors = AverageErrors(POOL)
    errors.forget_void(log_with(), in_flight=())
    errors.keep(FIRST, 7, values(1))  # it was at it when the sync was abandoned
    errors.keep(SECOND, 7, values(2))
    errors.forget_void(log_with(SECOND), in_flight=())
    assert not errors.of(7, FIRST).size
    assert errors.num_bytes == 20


def test_a_commit_that_is_made_meanwhile_keeps_its_error() -> None:
    """The log is asked after it was seen which syncs are over: what was over by then is in it."""
    errors, in_flight = AverageErrors(POOL), {2}
    errors.keep(SECOND, 7, values(1))

    class Log:
        def attempts_in_force(self) -> set[AttemptKey]:
            in_flight.discard(2)  # it is committed, and its sync is over, right after this was looked up
            return set()

    errors.forget_void(cast(PayloadLog, Log()), in_flight)
    assert errors.of(7, SECOND).size


def test_an_error_that_no_later_commit_follows_is_dropped_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    errors = AverageErrors(POOL)
    for chunk in (7, 8):
        errors.keep(FIRST, chunk, values(1))
    errors.forget_void(log_with(FIRST), in_flight=())
    errors.keep(SECOND, 7, values(2))  # chunk 8 is another site's now
    with caplog.at_level(logging.INFO, "atoll.node"):
        errors.forget_void(log_with(SECOND), in_flight=())
    assert not errors.of(8, FIRST).size
    assert errors.of(7, SECOND).size
    assert errors.num_dropped == 1
    assert "the errors of 1 chunks are dropped; their last average was made by another site, or is void" in caplog.text
    errors.forget_void(log_with(OTHER), in_flight=())
    assert errors.num_dropped == 2


def test_what_does_not_fit_into_memory_is_on_the_disk_until_it_is_void(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill", memory_limit_bytes=30)
    errors = AverageErrors(POOL, spill)
    for chunk in range(3):
        errors.keep(FIRST, chunk, values(chunk))
    errors.keep(FIRST, 2, values(9))  # an attempt that is begun again keeps one of each
    assert (spill.memory_bytes, spill.disk_bytes) == (20, 40)
    for chunk, number in ((0, 0), (1, 1), (2, 9)):
        assert errors.of(chunk, FIRST).tobytes() == values(number).tobytes()
    errors.forget_void(log_with(), in_flight=())
    assert (spill.memory_bytes, spill.disk_bytes) == (0, 0)
    assert not list(spill.folder.iterdir())


def test_without_room_on_the_disk_an_error_is_lost_and_the_sync_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_full(item: Encoded) -> Encoded | Spilled:
        raise HostError("the disk is full; make room")

    spill = Spill(tmp_path / "spill")
    monkeypatch.setattr(spill, "keep", is_full)
    errors = AverageErrors(POOL, spill)
    for chunk in (7, 8, 9):
        errors.keep(FIRST, chunk, values(1))
        assert not errors.of(chunk, FIRST).size
    assert "there is no room for the error of chunk 7: the disk is full; make room" in caplog.text
    assert len(caplog.records) == 1, "not for each chunk: the log may be on that disk"


def test_an_error_that_the_disk_does_not_give_back_is_lost_and_the_sync_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = AverageErrors(POOL, Spill(tmp_path / "spill"))
    errors.keep(FIRST, 7, values(1))
    (path,) = (tmp_path / "spill").iterdir()
    path.write_bytes(bytes(20))
    assert not errors.of(7, FIRST).size
    assert "the error of chunk 7 is dropped" in caplog.text


def test_a_pool_that_is_closed_is_no_failure() -> None:
    pool = ThreadPoolExecutor(1)
    errors = AverageErrors(pool)
    errors.keep(FIRST, 7, values(1))
    pool.shutdown()
    errors.forget_void(log_with(), in_flight=())


@pytest.mark.parametrize(("keeps_errors", "limits"), [(True, (500, 500)), (False, (1000, 0))])
def test_errors_have_half_of_the_memory_where_they_are_kept(
    keeps_errors: bool, limits: tuple[int, int], tmp_path: Path
) -> None:
    spills = Spill(tmp_path / "contributions"), Spill(tmp_path / "errors")
    hub = Hub(run_id="run", incarnation=1, dialer=Dialer(), pool=POOL, spill=spills[0], error_spill=spills[1])
    hub.allow(5000, 1000, keeps_errors=keeps_errors)
    assert tuple(spill.memory_limit_bytes for spill in spills) == limits
    assert hub.retained_bytes == 0
    hub.average_errors.keep(FIRST, 7, values(1))
    assert hub.retained_bytes == 20
