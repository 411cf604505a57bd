"""How a tensor is cut into blocks, each of which is a chunk; see docs/protocol.md, "Chunks". Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

EDGE = 64
"""Rows and columns of a block are multiples of it, where the tensor does not end."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of one size, in the order of their chunks: for each first row, each first column."""

    first_rows: range
    first_columns: range
    num_rows: int
    num_columns: int

    @property
    def num_blocks(self) -> int:
        return len(self.first_rows) * len(self.first_columns)


def block_groups(shape: Sequence[int], chunk_elements: int) -> Iterator[BlockGroup]:
    """The blocks of a tensor, at most four groups: those of full size, then those at its right edge, at its lower edge
    and in the corner. A tensor without elements has one empty block."""
    rows, columns = as_matrix(shape)
    if not rows * columns:
        yield BlockGroup(range(1), range(1), 0, 0)
        return
    height, width = _block_size(rows, columns, chunk_elements, is_matrix=len(shape) > 1)
    for first_rows, num_rows in _along(rows, height):
        for first_columns, num_columns in _along(columns, width):
            yield BlockGroup(first_rows, first_columns, num_rows, num_columns)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor: the last dimension counts columns, all others rows."""
    *leading, columns = shape or (1,)
    return math.prod(leading), columns


def _block_size(rows: int, columns: int, chunk_elements: int, *, is_matrix: bool) -> tuple[int, int]:
    edge = min(EDGE, math.isqrt(chunk_elements))
    height = min(edge, rows)
    if height * columns <= chunk_elements:
        return max(height, chunk_elements // columns // edge * edge), columns
    step = edge if is_matrix else min(EDGE * EDGE, chunk_elements)
    return height, chunk_elements // height // step * step


def _along(length: int, size: int) -> Iterator[tuple[range, int]]:
    """Of blocks along one dimension: where those of full size begin, and where the rest does."""
    end = length // size * size
    if end:
        yield range(0, end, size), size
    if end < length:
        yield range(end, length, size), length - end
