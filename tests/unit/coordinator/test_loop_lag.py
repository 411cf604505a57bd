"""The lag of an event loop is what something that is due there would have waited, at any moment."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.loop_lag import GROWTH, LEAST_S, TICK_S, LoopLag


def test_a_stall_counts_for_every_tick_that_it_kept_away() -> None:
    """A second in a hundred: one tick in 9,900 was late, and one moment in a hundred was."""
    lag = LoopLag()
    for _ in range(9900):
        lag.note(0.0)
    lag.note(1.0)
    assert lag.worst_s == 1.0
    assert 0.85 <= lag.within_s(0.999) <= 1.0
    assert lag.within_s(0.98) <= LEAST_S


@given(st.lists(st.floats(0.0, 100 * TICK_S), min_size=1, max_size=50))
def test_a_share_is_at_most_a_fifth_too_large(late: list[float]) -> None:
    lag = LoopLag()
    for value in late:
        lag.note(value)
    every = sorted(value - i * TICK_S for value in late for i in range(int(value / TICK_S) + 1))
    for share in (0.5, 0.9, 0.999):
        exact = next(value for i, value in enumerate(every, 1) if i >= share * len(every))
        assert exact <= max(lag.within_s(share) * 1.000001, LEAST_S)
        assert lag.within_s(share) <= max(GROWTH * exact, LEAST_S) * 1.000001


def test_nothing_breaks_it() -> None:
    lag = LoopLag()
    assert lag.within_s(0.999) == 0.0
    for late_s in (-1.0, 0.0, 1e9):
        lag.note(late_s)
    assert lag.worst_s == 1e9


class Noting(LoopLag):
    def __init__(self) -> None:
        super().__init__()
        self.noted = asyncio.Event()

    def note(self, late_s: float) -> None:
        super().note(late_s)
        self.noted.set()


def test_a_call_that_blocks_the_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop, lag = asyncio.get_running_loop(), Noting()
        now, stalled_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: now() + stalled_s)
        running = asyncio.create_task(lag.run())
        await lag.noted.wait()
        stalled_s = 30.0  # as if a call had taken so long
        lag.noted.clear()
        await lag.noted.wait()
        assert lag.worst_s > 29.0
        running.cancel()

    asyncio.run(scenario())
