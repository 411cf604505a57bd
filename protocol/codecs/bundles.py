"""Bundles: the payload of a codec that carries some of the values. It is the contributions themselves, in the order of
site ids; every site averages them as it applies them, by the weights in the commit. Pure, and without numpy.

    header, with the number of contributions in the place of `block` | u32 bytes of each | their bytes | f64 clip

At each element `avg = (0 + c_0*v_0 + c_1*v_1 + ...) / (0 + w_0 + w_1 + ...)`, over the sites that sent it, or, with the
flag OVER_ALL, undivided: `w_i = fp32(tokens_i / sum)`. An element that nobody sent is 0. `c_i = w_i`; with
the flag CLIPPED, without which there is no `clip`, `c_i = fp32(tokens_i / sum * f_i)`, and `f_i` makes the norm of what
a site sent `clip` times the median norm, if it is above that (`clipping.py`).
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from atoll.protocol import clipping
from atoll.protocol.codecs import (
    HEADER_BYTES,
    Data,
    max_encoded_bytes,
    pack_header,
    parse_header,
    peek_codec,
    unpack_header,
)
from atoll.protocol.codecs.sparse import EDGE
from atoll.protocol.codecs.table import BUNDLE, SPARSE, TABLE
from atoll.protocol.errors import InvalidMessage

FLAG_OVER_ALL = 2
FLAG_CLIPPED = 4
_SIZE = struct.Struct("<I")
_CLIP = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Weight:
    """In fp64; what counts is each as fp32."""

    of_values: float
    of_site: float


@dataclass(frozen=True, slots=True)
class Bundle:
    codec: str
    """Of the contributions."""
    over_all: bool
    columns: int
    contributions: tuple[memoryview, ...]
    clip: float = 0.0
    """Times the median norm; 0: nothing is clipped."""

    def weighed(self, tokens: Sequence[int], norm_of: Callable[[memoryview], float]) -> list[tuple[Weight, memoryview]]:
        """Raises InvalidMessage unless they are as many as the tokens of the commit's contributors."""
        if len(tokens) != len(self.contributions) or not all(count > 0 for count in tokens):
            raise InvalidMessage(f"bundle: {len(self.contributions)} contributions for the weights {tuple(tokens)}")
        total = sum(tokens)
        shares = [count / total for count in tokens]
        kept = clipping.factors(list(map(norm_of, self.contributions)), self.clip) if self.clip else [1.0] * len(shares)
        weights = [Weight(share * factor, share) for share, factor in zip(shares, kept, strict=True)]
        return list(zip(weights, self.contributions, strict=True))


def max_bundle_bytes(codec: str, num_elements: int, num_contributions: int, *, is_clipped: bool) -> int:
    parts = num_contributions * (_SIZE.size + max_encoded_bytes(codec, num_elements))
    return HEADER_BYTES + parts + (_CLIP.size if is_clipped else 0)


def join(num_elements: int, contributions: Sequence[bytes], *, over_all: bool, clip: float = 0.0) -> bytes:
    """Of contributions that are right. `clip` 0: nothing is clipped."""
    flags = (FLAG_OVER_ALL if over_all else 0) | (FLAG_CLIPPED if clip else 0)
    header = pack_header(BUNDLE, flags, "F32", len(contributions), num_elements)
    sizes = (_SIZE.pack(len(data)) for data in contributions)
    return b"".join((header, *sizes, *contributions, _CLIP.pack(clip) if clip else b""))


def split(data: Data, num_elements: int, num_contributions: int | None = None) -> Bundle:
    """Raises InvalidMessage unless it is a bundle of chunks of so many fp32 values, all of one codec, and of so many
    contributions, if that is known. What they hold is not looked at."""
    flags, number = unpack_header(data, BUNDLE, "F32", num_elements)
    view, is_clipped = memoryview(data), bool(flags & FLAG_CLIPPED)
    if num_contributions not in (None, number):
        raise InvalidMessage(f"bundle: {number} contributions, {num_contributions} are expected")
    first, end = HEADER_BYTES + number * _SIZE.size, len(view) - (_CLIP.size if is_clipped else 0)
    if flags & ~(FLAG_OVER_ALL | FLAG_CLIPPED) or not number or first > end:
        raise InvalidMessage(f"bundle: flags {flags:#04x}, {number} contributions in {len(view)} bytes")
    ends = list(accumulate((size for (size,) in _SIZE.iter_unpack(view[HEADER_BYTES:first])), initial=first))
    if ends[-1] != end:
        raise InvalidMessage(f"bundle: contributions end at byte {ends[-1]} of {end}")
    (clip,) = _CLIP.unpack(view[end:]) if is_clipped else (0.0,)
    if is_clipped and not 1 <= clip < math.inf:
        raise InvalidMessage(f"bundle: contributions are clipped at {clip} times the median norm")
    parts = tuple(view[start:end] for start, end in pairwise(ends))
    codec = peek_codec(parts[0])
    if codec not in SPARSE:
        raise InvalidMessage(f"bundle: a contribution of codec {codec}, which is not bundled")
    widths = {parse_header(part, codec=codec, num_elements=num_elements).columns for part in parts}
    if len(widths) > 1:
        raise InvalidMessage(f"bundle: contributions of chunks that are {sorted(widths)} columns wide")
    return Bundle(codec, bool(flags & FLAG_OVER_ALL), widths.pop(), parts, clip)


def plain(data: Data, num_elements: int, tokens: Sequence[int]) -> array[float]:
    """The average: fp32, each operation rounded by itself."""
    bundle = split(data, num_elements)
    sparse = TABLE[bundle.codec].sparse
    assert sparse is not None
    none = bytes(4 * EDGE * sparse.num_segments(num_elements))
    average, weights = array("f", none), array("f", none)

    def entries(part: memoryview) -> Iterator[tuple[int, float]]:
        return sparse.entries(bytes(part[HEADER_BYTES:]), num_elements)

    def norm(part: memoryview) -> float:
        squares = 0.0
        for _, value in entries(part):  # in this order, as the kernels do; `sum` may compensate for what it rounds
            squares += value * value
        return math.sqrt(squares)

    for exact, part in bundle.weighed(tokens, norm):
        of_values, of_site = array("f", [exact.of_values, exact.of_site])
        for at, value in entries(part):
            average[at] += array("f", [of_values * value])[0]
            weights[at] += of_site
    if not bundle.over_all:
        pairs = zip(average, weights, strict=True)
        average = array("f", [value / weight if weight else 0.0 for value, weight in pairs])
    return sparse.finished(average, bundle.columns, num_elements)
