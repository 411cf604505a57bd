"""Names, format and sizes of encoded chunks. Pure: no numpy; the arithmetic is in `kernels.py`.

An encoded chunk is a header of 16 bytes, little-endian, and a body:

    u8 format version | u8 codec | u8 flags | u8 dtype | u32 block | u64 num_elements

See docs/protocol.md, "Encoded chunks".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES, Role
from atoll.protocol.settings import CODECS

FORMAT_VERSION = 1
HEADER_BYTES = 16
INT8_BLOCK = 512  # elements that share a scale: 0.8 % of int8's bytes
FLAG_ZSTD = 1
MAX_ZSTD_LEVEL = 22
UNCHANGED = "unchanged"
"""Of a buffer that is what the base has, bit for bit: a header without a body."""

CODEC_IDS = {"fp32": 1, "bf16": 2, "int8": 3, "raw": 4, UNCHANGED: 5}
DTYPE_IDS = {
    "F32": 1, "F64": 2, "F16": 3, "BF16": 4, "I64": 5, "I32": 6, "I16": 7, "I8": 8, "U8": 9, "BOOL": 10,
    "F8_E4M3": 11, "F8_E5M2": 12, "U16": 13, "U32": 14, "U64": 15,
}  # fmt: skip

_HEADER = struct.Struct("<BBBBIQ")
_CODEC_NAMES = {number: name for name, number in CODEC_IDS.items()}
_DTYPE_NAMES = {number: name for name, number in DTYPE_IDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedHeader:
    """What a chunk says of itself. `dtype` is that of the decoded values; `block` is 0 but for int8."""

    codec: str
    zstd: bool
    dtype: str
    block: int
    num_elements: int

    def pack(self) -> bytes:
        return _HEADER.pack(
            FORMAT_VERSION,
            CODEC_IDS[self.codec],
            FLAG_ZSTD if self.zstd else 0,
            DTYPE_IDS[self.dtype],
            self.block,
            self.num_elements,
        )


def codec_of(role: Role, run_codec: str) -> str:
    """The codec of a chunk with this role, in a run whose pseudo-gradients travel as `run_codec`."""
    if run_codec not in CODECS:
        raise ConfigError(f"sync.codec = {run_codec!r}: choose one of {', '.join(CODECS)}")
    if role is Role.TRAINABLE:
        return run_codec
    return "fp32" if role is Role.BUFFER_MEAN else "raw"


def carried_codec(role: Role, run_codec: str, data: bytes | bytearray | memoryview) -> str:
    """The codec that `data` must have as a contribution or payload of a chunk with this role: a buffer may be said to
    be unchanged, a trainable tensor may not. Raises InvalidMessage if it names no codec."""
    if role is not Role.TRAINABLE and peek_codec(data) == UNCHANGED:
        return UNCHANGED
    return codec_of(role, run_codec)


def unchanged(num_elements: int, dtype: str) -> bytes:
    """The encoded chunk that says so."""
    return EncodedHeader(codec=UNCHANGED, zstd=False, dtype=dtype, block=0, num_elements=num_elements).pack()


def block_of(codec: str) -> int:
    return INT8_BLOCK if codec == "int8" else 0


def body_bytes(codec: str, num_elements: int, itemsize: int) -> int:
    """Bytes of the body before zstd. `itemsize` counts for raw alone."""
    if codec == "fp32":
        return 4 * num_elements
    if codec == "bf16":
        return 2 * num_elements
    if codec == "int8":
        return 4 * -(-num_elements // INT8_BLOCK) + num_elements
    if codec == "raw":
        return itemsize * num_elements
    if codec == UNCHANGED:
        return 0
    raise ConfigError(f"codec {codec!r} is not known; choose one of {', '.join(CODEC_IDS)}")


def encoded_bytes(codec: str, num_elements: int, itemsize: int = 4) -> int:
    """Bytes of an encoded chunk without zstd, header included."""
    return HEADER_BYTES + body_bytes(codec, num_elements, itemsize)


def max_encoded_bytes(codec: str, num_elements: int, itemsize: int = 4) -> int:
    """The most an encoded chunk can have, zstd or not: the stage is left out of a chunk that it does not shrink."""
    return encoded_bytes(codec, num_elements, itemsize)


def parse_header(
    data: bytes | bytearray | memoryview, *, codec: str, num_elements: int, dtype: str = "F32"
) -> EncodedHeader:
    """The header of an encoded chunk, which must be `codec` over `num_elements` of `dtype` and have the right size.

    Raises InvalidMessage if the chunk says anything else, is truncated or too long.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size < HEADER_BYTES:
        raise InvalidMessage(f"encoded chunk: {size} bytes, the header alone has {HEADER_BYTES}")
    version, codec_id, flags, dtype_id, block, count = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise InvalidMessage(f"encoded chunk: format version {version}, this is {FORMAT_VERSION}")
    if codec_id != CODEC_IDS[codec]:
        raise InvalidMessage(
            f"encoded chunk: codec {_CODEC_NAMES.get(codec_id, codec_id)}, the run's layout asks for {codec}"
        )
    if flags & ~FLAG_ZSTD:
        raise InvalidMessage(f"encoded chunk: unknown flags {flags:#04x}")
    if dtype_id != DTYPE_IDS[dtype]:
        raise InvalidMessage(f"encoded chunk: dtype {_DTYPE_NAMES.get(dtype_id, dtype_id)}, expected {dtype}")
    if block != block_of(codec):
        raise InvalidMessage(f"encoded chunk: block {block}, {codec} has {block_of(codec)}")
    if count != num_elements:
        raise InvalidMessage(f"encoded chunk: {count} elements, the layout has {num_elements}")
    full = encoded_bytes(codec, num_elements, DTYPE_BYTES[dtype])
    zstd = bool(flags & FLAG_ZSTD)
    if size >= full if zstd else size != full:
        raise InvalidMessage(f"encoded chunk: {size} bytes, {'fewer than ' if zstd else ''}{full} are expected")
    return EncodedHeader(codec=codec, zstd=zstd, dtype=dtype, block=block, num_elements=num_elements)


def peek_codec(data: bytes | bytearray | memoryview) -> str:
    """The codec that an encoded chunk names; all else in it is still to be checked. Raises InvalidMessage."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size < HEADER_BYTES or data[1] not in _CODEC_NAMES:
        raise InvalidMessage("encoded chunk: no header that names a known codec")
    return _CODEC_NAMES[data[1]]
