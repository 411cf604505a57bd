"""dct1: of the cosine transform of each 4096 values, a tile of 64 rows and columns, the signs of the 32 largest, and
their mean magnitude. Also the arithmetic of dct1k4, which has 4 of them.

Source: DeMo, arXiv 2411.19870, which sends 32 values of a tile of 64 x 64; signs alone as in DisTrO.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from atoll.protocol.codecs import cosines
from atoll.protocol.codecs.arithmetic import Bytes, Floats
from atoll.protocol.codecs.blocks import SMALLEST_NORMAL, inlined, sum_of_magnitudes
from atoll.protocol.codecs.jit import f32, f32_in, f32_out, kernel, u8_in, u8_out
from atoll.protocol.codecs.picking import BLOCK, is_set, load_block, pick, segment_start
from atoll.protocol.codecs.sparse import DCT1, EDGE, Sparse
from atoll.protocol.codecs.sparse_arithmetic import SparseArithmetic, arithmetic_of

_ROOM = DCT1.block_entries
"""The most of a tile."""
_BUCKET, _BUCKETS = 128, DCT1.block_buckets
_LARGEST = np.finfo(np.float32).max
_ZERO = np.float32(0.0)
_SIGN_BIT = np.uint32(31)


@inlined
def _along_rows(block: Any, num_rows: Any, table: Any, out: Any) -> None:
    """`out = block table`, of 64 columns each."""
    for r in range(num_rows):
        row = np.zeros(EDGE, np.float32)
        for k in range(EDGE):
            value = block[r * EDGE + k]
            for i in range(EDGE):
                row[i] = row[i] + value * table[k * EDGE + i]
        for i in range(EDGE):
            out[r * EDGE + i] = row[i]


@inlined
def _along_columns(table: Any, num_rows: Any, block: Any, out: Any) -> None:
    """`out = table block`, of 64 columns."""
    for u in range(num_rows):
        row = np.zeros(EDGE, np.float32)
        for r in range(num_rows):
            factor = table[u * num_rows + r]
            for i in range(EDGE):
                row[i] = row[i] + factor * block[r * EDGE + i]
        for i in range(EDGE):
            out[u * EDGE + i] = row[i]


@kernel(f32_in, f32_in, f32_in, f32, types.int64, types.int64, f32_in, f32_in, f32_in, f32_out, u8_out, u8_out)
def _dct1_pack(  # noqa: PLR0917
    values: Any,
    minus: Any,
    error: Any,
    beta: Any,
    columns: Any,
    most: Any,
    whole: Any,
    last: Any,
    turned: Any,
    scales: Any,
    entries: Any,
    buckets: Any,
) -> Any:
    """False if a value, or one of the transform, is not finite. `most`: entries of a block; `turned`: the transposed
    table of 64."""
    block, across = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    picked, places = np.empty(_ROOM, np.float32), np.empty(_ROOM, np.uint8)
    bits, packed = picked.view(np.uint32), np.empty((_ROOM + _BUCKETS) // 8, np.uint8)
    num_segments = (values.size + EDGE - 1) // EDGE
    for index in range(scales.size):
        first = index * most
        room, num_rows = min(most, entries.size - first), min(EDGE, num_segments - index * EDGE)
        num_buckets = (num_rows * EDGE + _BUCKET - 1) // _BUCKET
        load_block((values, minus, error), beta, columns, index * EDGE, num_rows, block)
        _along_rows(block, num_rows, turned, across)
        _along_columns(whole if num_rows == EDGE else last, num_rows, across, block)
        number = pick(block, _BUCKET, num_buckets, room, picked, places, packed)
        total = sum_of_magnitudes(picked)
        if number < 0 or total > _LARGEST:
            return False
        scale = np.float32(total / np.float32(max(number, 1)))
        scales[index] = scale if scale >= SMALLEST_NORMAL else _ZERO
        for i in range(room):
            sign = np.uint8(bits[i] >> _SIGN_BIT << np.uint32(7))
            entries[first + i] = places[i] | sign if i < number else np.uint8(0)
        start = index * ((most + _BUCKETS + 7) // 8)
        for i in range((room + num_buckets + 7) // 8):
            buckets[start + i] = packed[i]
    return True


@kernel(f32_in, u8_in, u8_in, types.int64, types.int64, types.int64, f32, f32, f32_out, f32_out)
def _dct1_scatter(  # noqa: PLR0917
    scales: Any,
    entries: Any,
    buckets: Any,
    most: Any,
    num_elements: Any,
    columns: Any,
    weight: Any,
    of_site: Any,
    acc: Any,
    weights: Any,
) -> Any:
    """Values of the transform, in the order of segments. The sum of their squares, one after the other; -1 if an entry
    has no such place; those before it count."""
    squares, num_values = np.float64(0.0), (num_elements + EDGE - 1) // EDGE * EDGE
    for index in range(scales.size):
        first, before = index * most, index * _BUCKETS
        room = min(most, entries.size - first)
        num_buckets = min(_BUCKETS, (num_values + _BUCKET - 1) // _BUCKET - before)
        number = bucket = 0
        bits = buckets[index * ((most + _BUCKETS + 7) // 8) :]
        while number < room and bucket < num_buckets:
            if is_set(bits, number + bucket):
                byte = entries[first + number]
                number += 1
                at = (before + bucket) * np.int64(_BUCKET) + np.int64(byte & np.uint8(127))
                value = -scales[index] if byte & np.uint8(128) else scales[index]
                if at >= num_values:
                    return np.float64(-1.0)
                if acc.size:
                    acc[at] = acc[at] + weight * value
                squares += np.float64(value) * np.float64(value)
                if weights.size:
                    weights[at] = weights[at] + of_site
            else:
                bucket += 1
    return squares


@kernel(f32_in, types.int64, f32_in, f32_in, f32_in, f32_out)
def _dct1_inverse(values: Any, columns: Any, whole: Any, whole_turned: Any, last_turned: Any, out: Any) -> None:  # noqa: PLR0917
    """Elements of what `_dct1_scatter` makes."""
    block, down, across = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    num_segments = values.size // EDGE
    for index in range((num_segments + EDGE - 1) // EDGE):
        num_rows = min(EDGE, num_segments - index * EDGE)
        for i in range(num_rows * EDGE):
            block[i] = values[index * BLOCK + i]
        _along_columns(whole_turned if num_rows == EDGE else last_turned, num_rows, block, down)
        _along_rows(down, num_rows, whole, across)
        for row in range(num_rows):
            start = segment_start(index * EDGE + row, columns, out.size)
            for i in range(min(EDGE, out.size - start)):
                out[start + i] = across[row * EDGE + i]


@lru_cache(2 * EDGE)
def _table(size: int, *, is_turned: bool = False) -> Floats:
    found = np.array(cosines.table(size), np.float32).reshape(size, size)
    return np.ascontiguousarray(found.T if is_turned else found).reshape(-1)


def _last_rows(num_elements: int) -> int:
    return (DCT1.num_segments(num_elements) - 1) % EDGE + 1 if num_elements else EDGE


def _finish(values: Floats, columns: int, out: Floats) -> None:
    last = _last_rows(out.size)
    tables = _table(EDGE), _table(EDGE, is_turned=True), _table(last, is_turned=True)
    _dct1_inverse(values, columns, *tables, out)


def of_cosines(form: Sparse, golden: str) -> SparseArithmetic:
    most = form.block_entries

    def pack(values: Floats, minus: Floats, error: Floats, beta: np.float32, columns: int, *body: Any) -> bool:
        tables = _table(EDGE), _table(_last_rows(values.size)), _table(EDGE, is_turned=True)
        return bool(_dct1_pack(values, minus, error, beta, columns, most, *tables, *body))

    def scatter(scales: Floats, entries: Bytes, buckets: Bytes, *rest: Any) -> float:
        return float(_dct1_scatter(scales, entries, buckets, most, *rest))

    kernels = _dct1_pack, _dct1_scatter, _dct1_inverse
    return arithmetic_of(form, pack, scatter, kernels=kernels, finish=_finish, golden=golden)


ARITHMETIC = of_cosines(DCT1, "72b6573c3cc7d316c4109a85be62fe1306560facde955873f86473870509143b")
