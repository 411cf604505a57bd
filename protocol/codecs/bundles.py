"""Bundles: the payload of a codec that carries some of the values. It is the contributions themselves, in the order of
site ids; every site averages them as it applies them, by the weights in the commit. Pure, and without numpy.

    header, with the number of contributions in the place of `block` | u32 bytes of each | their bytes

At each element `avg = (0 + w_0*v_0 + w_1*v_1 + ...) / (0 + w_0 + w_1 + ...)`, over the sites that sent it, or, with the
flag OVER_ALL, undivided: `w_i = fp32(tokens_i / sum)`. An element that nobody sent is 0.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Bundle:
    codec: str
    """Of the contributions."""
    over_all: bool
    columns: int
    contributions: tuple[memoryview, ...]

    def weighed(self, tokens: Sequence[int]) -> list[tuple[float, memoryview]]:
        """Each with its weight, in fp64; what counts is that as fp32. Raises InvalidMessage unless they are as many as
        the tokens of the commit's contributors."""
        if len(tokens) != len(self.contributions) or not all(count > 0 for count in tokens):
            raise InvalidMessage(f"bundle: {len(self.contributions)} contributions for the weights {tuple(tokens)}")
        total = sum(tokens)
        return [(count / total, part) for count, part in zip(tokens, self.contributions, strict=True)]


def max_bundle_bytes(codec: str, num_elements: int, num_contributions: int) -> int:
    return HEADER_BYTES + num_contributions * (_SIZE.size + max_encoded_bytes(codec, num_elements))


def join(num_elements: int, contributions: Sequence[bytes], *, over_all: bool) -> bytes:
    """Of contributions that are right."""
    header = pack_header(BUNDLE, FLAG_OVER_ALL if over_all else 0, "F32", len(contributions), num_elements)
    return b"".join((header, *(_SIZE.pack(len(data)) for data in contributions), *contributions))


def split(data: Data, num_elements: int, num_contributions: int | None = None) -> Bundle:
    """Raises InvalidMessage unless it is a bundle of chunks of so many fp32 values, all of one codec, and of so many
    contributions, if that is known. What they hold is not looked at."""
    flags, number = unpack_header(data, BUNDLE, "F32", num_elements)
    view = memoryview(data)
    if num_contributions not in (None, number):
        raise InvalidMessage(f"bundle: {number} contributions, {num_contributions} are expected")
    first = HEADER_BYTES + number * _SIZE.size
    if flags & ~FLAG_OVER_ALL or not number or first > len(view):
        raise InvalidMessage(f"bundle: flags {flags:#04x}, {number} contributions in {len(view)} bytes")
    ends = list(accumulate((size for (size,) in _SIZE.iter_unpack(view[HEADER_BYTES:first])), initial=first))
    if ends[-1] != len(view):
        raise InvalidMessage(f"bundle: contributions end at byte {ends[-1]} of {len(view)}")
    parts = tuple(view[start:end] for start, end in pairwise(ends))
    codec = peek_codec(parts[0])
    if codec not in SPARSE:
        raise InvalidMessage(f"bundle: a contribution of codec {codec}, which is not bundled")
    widths = {parse_header(part, codec=codec, num_elements=num_elements).columns for part in parts}
    if len(widths) > 1:
        raise InvalidMessage(f"bundle: contributions of chunks that are {sorted(widths)} columns wide")
    return Bundle(codec, bool(flags & FLAG_OVER_ALL), widths.pop(), parts)


def plain(data: Data, num_elements: int, tokens: Sequence[int]) -> array[float]:
    """The average: fp32, each operation rounded by itself."""
    bundle = split(data, num_elements)
    sparse = TABLE[bundle.codec].sparse
    assert sparse is not None
    none = bytes(4 * EDGE * sparse.num_segments(num_elements))
    average, weights = array("f", none), array("f", none)
    for exact, part in bundle.weighed(tokens):
        weight = array("f", [exact])[0]
        for at, value in sparse.entries(bytes(part[HEADER_BYTES:]), num_elements):
            average[at] += array("f", [weight * value])[0]
            weights[at] += weight
    if not bundle.over_all:
        pairs = zip(average, weights, strict=True)
        average = array("f", [value / weight if weight else 0.0 for value, weight in pairs])
    return sparse.finished(average, bundle.columns, num_elements)
