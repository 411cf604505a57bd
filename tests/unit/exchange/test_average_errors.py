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
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.spill import Spill
from atoll.protocol.codecs.arithmetic import Floats
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
    errors.keep(AGAIN, 7, values(2))
    assert errors.of(7, AGAIN).tobytes() == values(2).tobytes()
    assert errors.of(7, FIRST).tobytes() == values(1).tobytes()
    for chunk, attempt in ((8, FIRST), (7, SECOND), (7, None)):
        assert not errors.of(chunk, attempt).size


def test_an_attempt_that_became_no_commit_is_forgotten_with_its_sync_and_one_under_way_stays() -> None:
    errors = AverageErrors(POOL)
    for attempt in (FIRST, AGAIN, SECOND):
        errors.keep(attempt, 7, values(1))
    errors.forget_void(log_with(AGAIN), over=1)
    assert not errors.of(7, FIRST).size
    assert errors.of(7, AGAIN).size
    assert errors.of(7, SECOND).size, "its sync is not over"
    assert errors.num_dropped == 0


def test_an_error_whose_chunk_others_average_is_dropped_counted_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = AverageErrors(POOL)
    for chunk in (7, 8):
        errors.keep(FIRST, chunk, values(1))
    errors.forget_void(log_with(FIRST), over=1)
    errors.keep(SECOND, 7, values(2))  # chunk 8 is another site's now
    with caplog.at_level(logging.INFO, "atoll.node"):
        errors.forget_void(log_with(SECOND), over=2)
    assert not errors.of(8, FIRST).size
    assert errors.of(7, SECOND).size
    assert errors.num_dropped == 1
    assert "of 1 chunks it is dropped" in caplog.text
    errors.forget_void(log_with(OTHER), over=3)
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
    errors.forget_void(log_with(), over=1)
    assert (spill.memory_bytes, spill.disk_bytes) == (0, 0)
    assert not list(spill.folder.iterdir())


def test_a_pool_that_is_closed_is_no_failure() -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    AverageErrors(pool).forget_void(log_with(), over=1)
