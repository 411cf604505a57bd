"""What is shown of a crash: the rank that failed first, its whole traceback, and of other ranks a line each."""

from __future__ import annotations

from itertools import count

import pytest

from atoll.node.daemon.rank_output import (
    HEAD_BYTES,
    NUM_LAST_LINES,
    NUM_LINES_AFTER,
    TAIL_BYTES,
    RankOutput,
    crash_lines,
)

FRAMES = ["Traceback (most recent call last):", *(f'  File "a.py", line {n}, in f' for n in range(30))]
REASON = [*FRAMES, "ValueError: the reason"]
LOST = ["Traceback (most recent call last):", '  File "b.py", line 1', "RuntimeError: Connection closed by peer"]


class Printed:
    """By ranks, in this order."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = {f"rank {n}": RankOutput() for n in range(num_ranks)}
        self._places = count()

    def __call__(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self.ranks[f"rank {rank}"].add(line, next(self._places))

    def shown(self, *ended: tuple[int, bool]) -> list[str]:
        return list(crash_lines(self.ranks, [(f"rank {rank}", is_own) for rank, is_own in ended]))


@pytest.mark.parametrize("ended", [(), ((0, False), (1, False), (2, False))])
def test_the_first_that_failed_is_shown_and_the_others_are_a_line_each(ended: tuple[tuple[int, bool], ...]) -> None:
    printed = Printed(3)
    printed(0, ["step 1"])
    printed(1, [f"[rank1]: {line}" for line in REASON])
    printed(0, LOST)
    printed(2, [*LOST[:-1], "RuntimeError: " + "x" * 1000])
    said, *lines = printed.shown(*ended)
    assert said.startswith(
        "rank 1 failed first; after it rank 0: RuntimeError: Connection closed by peer, rank 2: Runt"
    )
    assert len(said) < 400
    assert lines == [f"[rank 1] [rank1]: {line}" for line in REASON]


def test_a_rank_whose_clean_up_ends_the_others_is_first() -> None:
    """It says so before its traceback, which Python prints last."""
    printed = Printed(2)
    printed(1, ["atoll: rank 1 fails with ValueError"])
    printed(0, LOST)
    printed(1, REASON)
    assert printed.shown((0, False), (1, False))[1:] == [f"[rank 1] {line}" for line in REASON]


def test_one_that_a_signal_ended_is_first_but_for_an_abort() -> None:
    printed = Printed(2)
    printed(0, LOST)
    printed(1, [f"step {n}" for n in range(50)])
    shown = printed.shown((0, False), (1, True))
    assert shown[0] == "rank 1 failed first; after it rank 0: RuntimeError: Connection closed by peer"
    assert len(shown) == 1 + NUM_LAST_LINES
    assert printed.shown((0, False), (1, False))[0] == "rank 0 failed first"


def test_what_a_script_has_handled_is_no_crash() -> None:
    printed = Printed(2)
    printed(0, [*LOST, *(f"step {n}" for n in range(NUM_LINES_AFTER + 1))])
    printed(1, REASON)
    assert printed.shown()[0] == "rank 1 failed first"
    printed(0, LOST)
    assert printed.shown((0, False))[0].startswith("rank 0 failed first; after it rank 1: ValueError")


def test_causes_are_of_the_same_traceback_and_errors_of_the_end_do_not_replace_it() -> None:
    printed = Printed(1)
    chain = [*LOST, "", "The above exception was the direct cause of the following exception:", "", *REASON]
    end = ["Exception ignored in: <function f>", *LOST]
    printed(0, [*LOST, "went on", *chain, *end])
    assert printed.shown((0, False)) == [f"[rank 0] {line}" for line in [*chain, *end]]


def test_a_traceback_has_a_bound_and_keeps_both_ends() -> None:
    printed = Printed(1)
    printed(0, [FRAMES[0], *(f"  {n:07d} {'x' * 990}" for n in range(1000)), "ValueError: the reason"])
    shown = printed.shown()
    assert shown[0].endswith(FRAMES[0])
    assert shown[-1].endswith("ValueError: the reason")
    assert HEAD_BYTES + TAIL_BYTES - 2000 < sum(map(len, shown)) < HEAD_BYTES + TAIL_BYTES + 2000
    assert sum("lines ..." in line for line in shown) == 1


def test_without_a_sign_all_ranks_are_shown() -> None:
    printed = Printed(2)
    printed(0, ["a"])
    printed(1, ["b"])
    assert printed.shown() == ["[rank 0] a", "[rank 1] b"]
    assert Printed(2).shown() == []
