"""Inner products of the contributions to a chunk: binary64, each operation rounded by itself, in a fixed order."""

from __future__ import annotations

from atoll.node.dataplane.averages import Contributions, read
from atoll.protocol.codecs import arithmetic, kernels, scratch
from atoll.protocol.spec import Way

BLOCK_ELEMENTS = 1 << 14
"""Of each contribution: all of them together stay in the cache while each is multiplied with all others."""


def products_of(way: Way, num_elements: int, contributions: Contributions) -> tuple[float, ...]:
    """Of the first with itself; of the second with the first, with itself; and so on. Raises InvalidMessage."""
    values = scratch.floats("contributions", len(contributions) * num_elements).reshape(len(contributions), -1)
    for row, (_, of) in zip(values, contributions, strict=True):
        kernels.decode(read(of), way.up, num_elements, row)
    found = [0.0] * (len(contributions) * (len(contributions) + 1) // 2)
    for first in range(0, num_elements, BLOCK_ELEMENTS):
        block = [row[first : first + BLOCK_ELEMENTS] for row in values]
        pairs = ((one, other) for place, one in enumerate(block) for other in block[: place + 1])
        found = [total + arithmetic.dot(one, other) for total, (one, other) in zip(found, pairs, strict=True)]
    return tuple(found)
