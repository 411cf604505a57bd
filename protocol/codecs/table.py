"""The table of codecs: a row each, and the arithmetic of a codec in the module of its name beside this one.

Pure, without numpy: sizes are known where nothing is encoded, and a payload can be decoded where sites hold different
states of a commit. How a codec is added is said in docs/protocol.md, "Encoded chunks".
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

INT8_BLOCK = 512  # elements that share a scale: 0.8 % of int8's bytes
UNCHANGED = "unchanged"
"""Of a buffer that is what the base has, bit for bit: a header without a body."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    number: int
    """On the wire."""
    body_bytes: Callable[[int, int], int]
    """Of so many elements, of so many bytes each, before zstd. The second number counts for raw alone."""
    plain: Callable[[bytes, int], array[float]] | None = None
    """The fp32 values of a body of so many elements. None: it carries no values that could be averaged."""
    block: int = 0
    """Elements that share a scale; 0: each stands for itself."""
    planes: int = 1
    """Bytes of an element: behind zstd, those of the same significance lie side by side, and compress better."""


def floats(data: bytes) -> array[float]:
    return _little_endian(array("f", data))


def to_bytes(values: array[_Number]) -> bytes:
    return _little_endian(values).tobytes()


def _little_endian(values: array[_Number]) -> array[_Number]:
    """In place: what is written, or was read, on every host."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _plain_bf16(body: bytes, num_elements: int) -> array[float]:
    halves = _little_endian(array("H", body))
    return floats(to_bytes(array("I", [half << 16 for half in halves])))


def _plain_int8(body: bytes, num_elements: int) -> array[float]:
    """A product of fp32 numbers is exact in fp64, so that the array rounds once."""
    split = len(body) - num_elements
    scales, quants, out = floats(body[:split]), array("b", body[split:]), array("f")
    for block, scale in enumerate(scales):
        out.extend([scale * quant for quant in quants[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]])
    return out


TABLE = {
    "fp32": Codec(number=1, body_bytes=lambda n, _: 4 * n, plain=lambda body, _: floats(body), planes=4),
    "bf16": Codec(number=2, body_bytes=lambda n, _: 2 * n, plain=_plain_bf16, planes=2),
    "int8": Codec(number=3, body_bytes=lambda n, _: 4 * -(-n // INT8_BLOCK) + n, plain=_plain_int8, block=INT8_BLOCK),
    "raw": Codec(number=4, body_bytes=lambda n, itemsize: itemsize * n),
    UNCHANGED: Codec(number=5, body_bytes=lambda *_: 0),
}
"""By name."""
CODECS = tuple(name for name, codec in TABLE.items() if codec.plain is not None)
"""Those in which pseudo-gradients and their averages may travel."""
