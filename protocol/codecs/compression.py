"""The stage behind a codec: zstd of a body. Without numpy, as disputes over a state need it too."""

from __future__ import annotations

import zstandard

from atoll.protocol.errors import InvalidMessage


def compressed(body: bytes | memoryview, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False).compress(body)


def decompressed(data: bytes | memoryview, size: int) -> bytes:
    """`size` bytes; InvalidMessage if it holds another number, which is seen before anything is allocated for them."""
    try:
        if zstandard.frame_content_size(data) != size:
            raise InvalidMessage(f"encoded chunk: its zstd frame does not hold {size} bytes")
        body = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"encoded chunk: zstd: {error}") from None
    if len(body) != size:
        raise InvalidMessage(f"encoded chunk: {len(body)} bytes after zstd, {size} are expected")
    return body
