"""The share of a step that the ranks of a pipeline wait for each other, by its schedule. Pure.

Of `p` ranks with `v` stages each and `m` microbatches, where a backward pass takes twice a forward pass and both halves
of it the same. Transfers count nothing.
"""

from __future__ import annotations

from atoll.node.parallel.settings import ONE_STAGE_SCHEDULES, SCHEDULES

SOURCES = {
    "gpipe": "arXiv 1811.06965",
    "1f1b": "arXiv 2006.09503",
    "interleaved-1f1b": "arXiv 2104.04473",
    "looped-bfs": "arXiv 2211.05953",
    "interleaved-zero-bubble": "arXiv 2401.10241",
    "zbv": "arXiv 2401.10241",
    "dualpipev": "arXiv 2412.19437",
}


def bubble_share(schedule: str, num_ranks: int, num_microbatches: int) -> float:
    """Of a step: time waited over all time."""
    waits = num_ranks - 1
    if schedule in ONE_STAGE_SCHEDULES:
        return waits / (num_microbatches + waits)
    if schedule in ("interleaved-1f1b", "looped-bfs"):
        return waits / (2 * num_microbatches + waits)
    if schedule == "interleaved-zero-bubble":  # the half of the backward pass that can wait fills two thirds
        return waits / (6 * num_microbatches + waits)
    if schedule == "dualpipev":
        return waits / (3 * num_microbatches + waits)
    return 0.0  # zbv


def bubbles(num_ranks: int, num_microbatches: int) -> dict[str, float]:
    """By schedule."""
    return {name: bubble_share(name, num_ranks, num_microbatches) for name in SCHEDULES}
