"""The outer update of one chunk without numpy, bit for bit what the sites compute: it settles disputes over a state.

Arrays of floats hold fp32, and arithmetic on what comes out of them is fp64. The product of two fp32 numbers is exact
in fp64, and a sum rounded to fp64 and then to fp32 is the sum rounded to fp32 (53 >= 2 * 24 + 2 bits), so putting one
result at a time back into an array is what fp32 arithmetic gives. tests/unit/dataplane/test_recompute.py compares.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

import zstandard

from atoll.protocol.codecs import (
    HEADER_BYTES,
    INT8_BLOCK,
    UNCHANGED,
    EncodedHeader,
    body_bytes,
    carried_codec,
    parse_header,
    peek_codec,
)
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES, FP32_ROLES, Role
from atoll.protocol.settings import CODECS, OuterSettings

_AT_ONCE = 128 * INT8_BLOCK  # elements: what is computed in between takes memory for so many
_Number = TypeVar("_Number", int, float)
_PLANES = {"fp32": 4, "bf16": 2}  # behind zstd, bytes of the same significance lie side by side


def slots_of(settings: OuterSettings) -> tuple[str, ...]:
    """What the outer optimizer keeps beside the values of a trainable chunk, in this order."""
    return ("momentum",) if settings.optimizer == "nesterov" else ()


def record_bytes(role: Role, dtype: str, num_elements: int, settings: OuterSettings) -> int:
    """Of a chunk's record: its values, and its slots if it is trained."""
    if role is Role.TRAINABLE:
        return 4 * num_elements * (1 + len(slots_of(settings)))
    return num_elements * (4 if role in FP32_ROLES else DTYPE_BYTES[dtype])


def recomputed(
    *, role: Role, dtype: str, num_elements: int, settings: OuterSettings, record: bytes, payload: bytes
) -> bytes:
    """The record after the commit whose `payload` it is, from the `record` before it. `dtype` is the tensor's own.

    Raises InvalidMessage if they are not of such a chunk.
    """
    if len(record) != record_bytes(role, dtype, num_elements, settings):
        raise InvalidMessage(f"a record of {len(record)} bytes, which is no such chunk's")
    carried = dtype if role is Role.BUFFER_LOWEST else "F32"
    codec = peek_codec(payload) if role is Role.TRAINABLE else carried_codec(role, "fp32", payload)
    if role is Role.TRAINABLE and codec not in CODECS:
        raise InvalidMessage(f"codec {codec} carries no pseudo-gradient")
    header = parse_header(payload, codec=codec, num_elements=num_elements, dtype=carried)
    if codec == UNCHANGED:
        return record
    body = _body(payload, header)
    if role is not Role.TRAINABLE:
        return body
    values, average = _floats(record[: 4 * num_elements]), _decoded(body, codec, num_elements)
    rate = array("f", [settings.learning_rate])[0]
    if settings.optimizer == "sgd":
        return _bytes(_sgd(values, average, rate))
    momentum = _floats(record[4 * num_elements :])
    return _nesterov(values, momentum, average, rate, array("f", [settings.momentum])[0])


def _sgd(values: array[float], average: array[float], rate: float) -> array[float]:
    out = array("f")
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        out.extend(_minus(values[part], _times(rate, average[part])))
    return out


def _nesterov(values: array[float], momentum: array[float], average: array[float], rate: float, mu: float) -> bytes:
    out_values, out_momentum = array("f"), array("f")
    for first in range(0, len(values), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        moved = _plus(_times(mu, momentum[part]), average[part])
        out_momentum.extend(moved)
        step = _plus(average[part], _times(mu, moved))
        out_values.extend(_minus(values[part], _times(rate, step)))
    return _bytes(out_values) + _bytes(out_momentum)


def _times(factor: float, values: Iterable[float]) -> array[float]:
    return array("f", [factor * value for value in values])


def _plus(values: array[float], more: array[float]) -> array[float]:
    return array("f", [a + b for a, b in zip(values, more, strict=True)])


def _minus(values: array[float], less: array[float]) -> array[float]:
    return array("f", [a - b for a, b in zip(values, less, strict=True)])


# --- payloads


def _body(payload: bytes, header: EncodedHeader) -> bytes:
    """After zstd and byte planes. Nothing is allocated before sizes are checked."""
    body = payload[HEADER_BYTES:]
    if not header.zstd:
        return body
    size = body_bytes(header.codec, header.num_elements, DTYPE_BYTES[header.dtype])
    try:
        if zstandard.frame_content_size(body) != size:
            raise InvalidMessage(f"encoded chunk: its zstd frame does not hold {size} bytes")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"encoded chunk: zstd: {error}") from None
    planes = _PLANES.get(header.codec, 1)
    if len(raw) != size or planes == 1:
        return raw
    joined = bytearray(size)
    for plane in range(planes):
        joined[plane::planes] = raw[plane * (size // planes) : (plane + 1) * (size // planes)]
    return bytes(joined)


def _decoded(body: bytes, codec: str, num_elements: int) -> array[float]:
    if codec == "fp32":
        return _floats(body)
    if codec == "bf16":
        halves = _little_endian(array("H", body))
        return _floats(_bytes(array("I", [half << 16 for half in halves])))
    split = len(body) - num_elements
    scales, quants, out = _floats(body[:split]), array("b", body[split:]), array("f")
    for block, scale in enumerate(scales):
        out.extend(_times(scale, quants[block * INT8_BLOCK : (block + 1) * INT8_BLOCK]))
    return out


def _floats(data: bytes) -> array[float]:
    return _little_endian(array("f", data))


def _bytes(values: array[_Number]) -> bytes:
    return _little_endian(values).tobytes()


def _little_endian(values: array[_Number]) -> array[_Number]:
    """In place: what is written, or was read, on every host."""
    if sys.byteorder == "big":
        values.byteswap()
    return values
