"""Format and sizes of encoded chunks. Pure: no numpy; the codecs are in `table.py`, the arithmetic behind `kernels.py`.

An encoded chunk is a header of 16 bytes, little-endian, and a body:

    u8 format version | u8 codec | u8 flags | u8 dtype | u32 block | u64 num_elements

See docs/protocol.md, "Encoded chunks".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from atoll.protocol.codecs.table import TABLE, UNCHANGED
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES

FORMAT_VERSION = 1
HEADER_BYTES = 16
FLAG_ZSTD = 1

DTYPE_IDS = {
    "F32": 1, "F64": 2, "F16": 3, "BF16": 4, "I64": 5, "I32": 6, "I16": 7, "I8": 8, "U8": 9, "BOOL": 10,
    "F8_E4M3": 11, "F8_E5M2": 12, "U16": 13, "U32": 14, "U64": 15,
}  # fmt: skip

Data = bytes | bytearray | memoryview
_HEADER = struct.Struct("<BBBBIQ")
_CODEC_NAMES = {codec.number: name for name, codec in TABLE.items()}
_DTYPE_NAMES = {number: name for name, number in DTYPE_IDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedHeader:
    """What a chunk says of itself. `dtype` is that of the decoded values."""

    codec: str
    zstd: bool
    dtype: str
    num_elements: int
    columns: int = 0
    """Of a codec that carries some of the values."""

    @property
    def body_bytes(self) -> int:
        """Before zstd."""
        return TABLE[self.codec].body_bytes(self.num_elements, DTYPE_BYTES[self.dtype])

    def pack(self) -> bytes:
        block = self.columns or TABLE[self.codec].block
        return pack_header(self.codec, FLAG_ZSTD if self.zstd else 0, self.dtype, block, self.num_elements)


def pack_header(codec: str, flags: int, dtype: str, block: int, num_elements: int) -> bytes:
    return _HEADER.pack(FORMAT_VERSION, TABLE[codec].number, flags, DTYPE_IDS[dtype], block, num_elements)


def unpack_header(data: Data, codec: str, dtype: str, num_elements: int) -> tuple[int, int]:
    """Flags and block. Raises InvalidMessage if `data` has no header, or one that says anything else of the others."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size < HEADER_BYTES:
        raise InvalidMessage(f"encoded chunk: {size} bytes, the header alone has {HEADER_BYTES}")
    version, number, flags, dtype_id, block, count = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise InvalidMessage(f"encoded chunk: format version {version}, this is {FORMAT_VERSION}")
    if number != TABLE[codec].number:
        found = _CODEC_NAMES.get(number, number)
        raise InvalidMessage(f"encoded chunk: codec {found}, the run's layout asks for {codec}")
    if dtype_id != DTYPE_IDS[dtype]:
        raise InvalidMessage(f"encoded chunk: dtype {_DTYPE_NAMES.get(dtype_id, dtype_id)}, expected {dtype}")
    if count != num_elements:
        raise InvalidMessage(f"encoded chunk: {count} elements, the layout has {num_elements}")
    return flags, block


def unchanged(num_elements: int, dtype: str) -> bytes:
    """The encoded chunk that says so."""
    return EncodedHeader(codec=UNCHANGED, zstd=False, dtype=dtype, num_elements=num_elements).pack()


def max_encoded_bytes(codec: str, num_elements: int, itemsize: int = 4) -> int:
    """The most an encoded chunk can have, which is what it has without zstd: that stage is left out of a chunk that it
    does not shrink. `itemsize` counts for raw alone."""
    return HEADER_BYTES + TABLE[codec].body_bytes(num_elements, itemsize)


def parse_header(data: Data, *, codec: str, num_elements: int, dtype: str = "F32") -> EncodedHeader:
    """The header of an encoded chunk, which must be `codec` over `num_elements` of `dtype` and have the right size.

    Raises InvalidMessage if the chunk says anything else, is truncated or too long.
    """
    flags, block = unpack_header(data, codec, dtype, num_elements)
    row, size = TABLE[codec], data.nbytes if isinstance(data, memoryview) else len(data)
    if flags & ~FLAG_ZSTD or (flags and row.sparse is not None):
        raise InvalidMessage(f"encoded chunk: flags {flags:#04x}, which {codec} cannot have")
    if row.sparse is None and block != row.block:
        raise InvalidMessage(f"encoded chunk: block {block}, {codec} has {row.block}")
    if row.sparse is not None and not row.sparse.fits(block, num_elements):
        raise InvalidMessage(f"encoded chunk: {num_elements} elements in rows of {block}, which {codec} cannot have")
    full = max_encoded_bytes(codec, num_elements, DTYPE_BYTES[dtype])
    zstd = bool(flags & FLAG_ZSTD)
    if size >= full if zstd else size != full:
        raise InvalidMessage(f"encoded chunk: {size} bytes, {'fewer than ' if zstd else ''}{full} are expected")
    columns = block if row.sparse is not None else 0
    return EncodedHeader(codec=codec, zstd=zstd, dtype=dtype, num_elements=num_elements, columns=columns)


def peek_codec(data: Data) -> str:
    """The codec that an encoded chunk names; all else in it is still to be checked. Raises InvalidMessage."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size < HEADER_BYTES or data[1] not in _CODEC_NAMES:
        raise InvalidMessage("encoded chunk: no header that names a known codec")
    return _CODEC_NAMES[data[1]]
