"""What counts as progress of a peer, and what does not."""

from __future__ import annotations

from atoll.node.exchange.peers.progress import Pace, Progress

PACE = Pace(stall_s=10, slowest_bytes_per_s=100)  # 1000 bytes in each window of 20 s
MEBIBYTE = 1 << 20


def first_problem(progress: Progress, times_and_bytes: list[tuple[float, int]]) -> tuple[float, str]:
    """Asked every second, as the shell does."""
    now, problem = 0.0, ""
    for at, num_bytes in times_and_bytes:
        while now + 1 <= at and not problem:
            now += 1
            problem = progress.problem(now)
        if problem:
            break
        progress.moved(num_bytes, at)
    return now, problem


def test_silence_is_found_within_the_stall_limit() -> None:
    assert first_problem(Progress(PACE, 0, 1), [(5, 5000), (100, 0)]) == (16, "no byte for 10.0 s")


def test_a_trickle_is_found_within_two_windows() -> None:
    trickle = [(float(t), 1) for t in range(1, 100)]
    now, problem = first_problem(Progress(PACE, 0, 1), trickle)
    assert now == 20
    assert problem.startswith("only 19 bytes in 20.0 s")
    now, problem = first_problem(Progress(PACE, 0, 1), [(1.0, MEBIBYTE), *trickle[1:]])
    assert now == 40, "what came in a window before does not excuse this one"


def test_what_carries_no_bytes_is_no_progress() -> None:
    assert first_problem(Progress(PACE, 0, 1), [(float(t), 0) for t in range(1, 100)])[0] == 11


def test_a_link_at_the_slowest_rate_is_progress_for_ever() -> None:
    steady = [(float(t), 100 * 5) for t in range(5, 2000, 5)]
    assert first_problem(Progress(PACE, 0, 1), steady)[1] == ""
    shared = [(t, n // 10) for t, n in steady]
    assert first_problem(Progress(PACE, 0, 10), shared)[1] == "", "ten peers share the link"
    assert first_problem(Progress(PACE, 0, 1), shared)[1] != ""


def test_a_restart_forgets_what_was() -> None:
    progress = Progress(PACE, 0, 1)
    progress.restart(100)
    assert progress.problem(109) == ""
    assert progress.problem(111) == "no byte for 10.0 s"
