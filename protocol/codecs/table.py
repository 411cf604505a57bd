"""The table of codecs: a row each, and the arithmetic of a codec in the module of its name beside this one.

Pure, without numpy: sizes are known where nothing is encoded, and a payload can be decoded where sites hold different
states of a commit. How a codec is added is said in docs/protocol.md, "Encoded chunks".
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from atoll.protocol.codecs.sparse import DCT1, DCT1K4, TOPK2, Sparse

UNCHANGED = "unchanged"
"""Of a buffer that is what the base has, bit for bit: a header without a body."""
BUNDLE = "bundle"
"""The contributions themselves, in the place of their average (`bundles.py`)."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Packed:
    """Bodies of blocks of elements of some bits each: the scales of all blocks, fp32, then their elements.

    A block of `n` elements has `stride = ceil(n * bits / 8)` bytes. Element `i` is in byte `i mod stride`, from bit
    `bits * (i div stride)` on, so that neighbours are packed by the same instruction. What is beyond `n` is zero.
    """

    block: int
    """Elements; a multiple of 64."""
    bits: int
    """Of an element: 1, 2, 4 or 8."""
    scales: int = 1
    """Of a block."""

    def body_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return 4 * self.scales * -(-num_elements // self.block) + -(-num_elements * self.bits // 8)

    def scales_bytes(self, body_bytes: int) -> int:
        """Of a body of so many bytes."""
        return 4 * self.scales * -(-body_bytes // (4 * self.scales + self.block * self.bits // 8))

    def plain(self, body: bytes, num_elements: int, levels: Callable[[array[float]], list[float]]) -> array[float]:
        """`levels` of a block's scales: the value of each code. Products with fp32 numbers are exact in fp64."""
        split, out = self.scales_bytes(len(body)), array("f")
        scales, start, num_codes = floats(body[:split]), split, 1 << self.bits
        planes = [bytes(byte >> shift & num_codes - 1 for byte in range(256)) for shift in range(0, 8, self.bits)]
        for block in range(-(-num_elements // self.block)):
            count = min(self.block, num_elements - block * self.block)
            packed = body[start : start + -(-count * self.bits // 8)]
            start += len(packed)
            values = levels(scales[block * self.scales : (block + 1) * self.scales])
            codes = b"".join(packed.translate(plane) for plane in planes)[:count]
            out.extend([values[code] for code in codes])
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    number: int
    """On the wire."""
    body_bytes: Callable[[int, int], int]
    """Of so many elements, of so many bytes each, before zstd. The second number counts for raw alone."""
    plain: Callable[[bytes, int], array[float]] | None = None
    """The fp32 values of a body of so many elements. None: it carries no values that could be averaged."""
    sparse: Sparse | None = None
    """Of one that carries some of the values. What it encodes travels in bundles, and the header says how wide a chunk
    is in the place of `block`."""
    block: int = 0
    """Elements that share a scale; 0: each stands for itself."""
    planes: int = 1
    """Bytes of an element: behind zstd, those of the same significance lie side by side, and compress better."""
    zstd_level: int = 0
    """Of the stage behind it; 0: none. Level 1 where it makes real pseudo-gradients smaller by a tenth or more
    (docs/codecs.md)."""


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


def _plain_fp16(body: bytes, num_elements: int) -> array[float]:
    return array("f", struct.unpack(f"<{num_elements}e", body))


INT8 = Packed(block=512, bits=8)
INT4 = Packed(block=256, bits=4)
E3M0 = Packed(block=256, bits=4)
INT2 = Packed(block=1024, bits=2, scales=2)
SIGN1 = Packed(block=1024, bits=1)


def _plain_int8(body: bytes, num_elements: int) -> array[float]:
    quants = array("b", range(128)) + array("b", range(-128, 0))
    return INT8.plain(body, num_elements, lambda scales: [scales[0] * quant for quant in quants])


def _plain_int4(body: bytes, num_elements: int) -> array[float]:
    return INT4.plain(body, num_elements, lambda scales: [scales[0] * (code - 8) for code in range(16)])


def _plain_e3m0(body: bytes, num_elements: int) -> array[float]:
    powers = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
    return E3M0.plain(body, num_elements, lambda s: [s[0] * power for power in (*powers, *(-p for p in powers))])


def _plain_int2(body: bytes, num_elements: int) -> array[float]:
    return INT2.plain(body, num_elements, lambda scales: [scales[0], scales[1], -scales[0], -scales[1]])


def _plain_sign1(body: bytes, num_elements: int) -> array[float]:
    return SIGN1.plain(body, num_elements, lambda scales: [scales[0], -scales[0]])


def _packed(number: int, form: Packed, plain: Callable[[bytes, int], array[float]], zstd_level: int = 0) -> Codec:
    return Codec(number=number, body_bytes=form.body_bytes, plain=plain, block=form.block, zstd_level=zstd_level)


TABLE = {
    "fp32": Codec(number=1, body_bytes=lambda n, _: 4 * n, plain=lambda body, _: floats(body), planes=4, zstd_level=1),
    "bf16": Codec(number=2, body_bytes=lambda n, _: 2 * n, plain=_plain_bf16, planes=2, zstd_level=1),
    "int8": _packed(3, INT8, _plain_int8),
    "raw": Codec(number=4, body_bytes=lambda n, itemsize: itemsize * n),
    UNCHANGED: Codec(number=5, body_bytes=lambda *_: 0),
    "fp16": Codec(number=6, body_bytes=lambda n, _: 2 * n, plain=_plain_fp16, planes=2),
    "int4": _packed(7, INT4, _plain_int4, zstd_level=1),
    "e3m0": _packed(8, E3M0, _plain_e3m0, zstd_level=1),
    "int2": _packed(9, INT2, _plain_int2),
    "sign1": _packed(10, SIGN1, _plain_sign1),
    "topk2": Codec(number=11, body_bytes=TOPK2.body_bytes, sparse=TOPK2),
    "dct1": Codec(number=13, body_bytes=DCT1.body_bytes, sparse=DCT1),
    "dct1k4": Codec(number=14, body_bytes=DCT1K4.body_bytes, sparse=DCT1K4),
    BUNDLE: Codec(number=12, body_bytes=lambda *_: 0),
}
"""By name."""
DENSE = tuple(name for name, codec in TABLE.items() if codec.plain is not None)
"""Those in which pseudo-gradients and their averages may travel."""
SPARSE = tuple(name for name, codec in TABLE.items() if codec.sparse is not None)
"""Those in which pseudo-gradients may travel, and are bundled."""
CODECS = (*DENSE, *SPARSE)
