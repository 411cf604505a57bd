"""The share of a step that the ranks of a pipeline wait for each other, by its schedule. Pure.

Of `p` ranks with `v` stages each and `m` microbatches, where a backward pass takes twice a forward pass and both halves
of it the same. Transfers count nothing.
"""

from __future__ import annotations

from atoll.node.parallel.settings import SCHEDULES

MICROBATCH = {
    "gpipe": 1,  # arXiv 1811.06965
    "1f1b": 1,  # arXiv 2006.09503
    "interleaved-1f1b": 2,  # arXiv 2104.04473
    "looped-bfs": 2,  # arXiv 2211.05953
    "interleaved-zero-bubble": 6,  # arXiv 2401.10241, as zbv
    "zbv": 6,
    "dualpipev": 3,  # arXiv 2412.19437
}
"""By schedule: a rank's work for a microbatch, over the time that it waits for each rank before it."""


def bubble_share(schedule: str, num_ranks: int, num_microbatches: int) -> float:
    """Of a step: time waited over all time."""
    waits = num_ranks - 1
    return waits / (MICROBATCH[schedule] * num_microbatches + waits)


def bubbles(num_ranks: int, num_microbatches: int) -> dict[str, float]:
    """By schedule."""
    return {name: bubble_share(name, num_ranks, num_microbatches) for name in SCHEDULES}
