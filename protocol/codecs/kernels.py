"""Encoding, decoding and averaging of chunks: fp32, each operation rounded by itself, without the interpreter lock.

Formulas and test vectors are in docs/protocol.md, "Encoded chunks".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from numba import njit

from atoll.protocol.codecs import (
    HEADER_BYTES,
    INT8_BLOCK,
    MAX_ZSTD_LEVEL,
    UNCHANGED,
    EncodedHeader,
    block_of,
    body_bytes,
    parse_header,
    scratch,
)
from atoll.protocol.codecs.jit import compile_all, f32, f32_in, f32_out, i8_in, i8_out, kernel, u16_in, u16_out
from atoll.protocol.codecs.vectors import CODEC_VECTORS
from atoll.protocol.errors import ConfigError, InvalidMessage, NonFiniteError, SelfTestFailed
from atoll.protocol.layout import DTYPE_BYTES

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Data = bytes | bytearray | memoryview

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_BF16_OVERFLOW = np.uint32(0x7F7F8000)  # from here on, rounding to bf16 gives infinity
_BF16_MAGNITUDE = np.uint16(0x7FFF)
_HALF_BELOW = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SIXTEEN = np.uint32(16)
_QUANTUM = np.float32(127.0)
_QUANTS = 128.0  # the power of two above it
_SMALLEST_NORMAL = np.float32(2.0**-126)
_SCALE_OVERFLOW = np.float32(2.0**121)  # below it, any quant of 8 bits times the scale is finite
_ZERO = np.float32(0.0)

# --- kernels. The largest magnitude is found on the bits: integers order like magnitudes, NaN above infinity, and
# LLVM vectorizes an integer maximum.


@njit(nogil=True, error_model="numpy", inline="always")
def _top_bits(values: Any, first: Any, count: Any) -> Any:
    bits = values.view(np.uint32)
    top = np.uint32(0)
    for i in range(first, first + count):
        top = max(top, np.uint32(bits[i] & _MAGNITUDE))
    return top


@njit(nogil=True, error_model="numpy", inline="always")
def _quantize(values: Any, first: Any, count: Any, quants: Any, first_out: Any) -> Any:
    """One block: writes its quants and returns its scale; -1 if a value is not finite, or may not be when decoded."""
    top = _top_bits(values, first, count)
    if top >= _INFINITE:
        return np.float32(-1.0)
    word = np.empty(1, np.uint32)
    word[0] = top
    scale = np.float32(word.view(np.float32)[0] / _QUANTUM)
    if scale >= _SCALE_OVERFLOW:
        return np.float32(-1.0)
    if scale < _SMALLEST_NORMAL:
        for i in range(count):
            quants[first_out + i] = np.int8(0)
        return _ZERO
    for i in range(count):
        quants[first_out + i] = np.int8(np.rint(values[first + i] / scale))
    return scale


@kernel(f32_in, f32_out, i8_out)
def _int8_encode(values: Any, scales: Any, quants: Any) -> Any:
    block_values = np.empty(INT8_BLOCK, np.float32)  # an array of its own: LLVM then knows that nothing overlaps
    for block in range(scales.size):
        first = block * INT8_BLOCK
        count = min(INT8_BLOCK, values.size - first)
        for i in range(count):
            block_values[i] = values[first + i]
        scale = _quantize(block_values, 0, count, quants, first)
        if scale < _ZERO:
            return False
        scales[block] = scale
    return True


@kernel(f32_in, f32_in, f32_out, i8_out)
def _int8_encode_difference(values: Any, minus: Any, scales: Any, quants: Any) -> Any:
    difference = np.empty(INT8_BLOCK, np.float32)
    for block in range(scales.size):
        first = block * INT8_BLOCK
        count = min(INT8_BLOCK, values.size - first)
        for i in range(count):
            difference[i] = values[first + i] - minus[first + i]
        scale = _quantize(difference, 0, count, quants, first)
        if scale < _ZERO:
            return False
        scales[block] = scale
    return True


@kernel(f32_in, i8_in, f32_out)
def _int8_decode(scales: Any, quants: Any, out: Any) -> None:
    for block in range(scales.size):
        scale = scales[block]
        first = block * INT8_BLOCK
        for i in range(min(INT8_BLOCK, out.size - first)):
            out[first + i] = scale * np.float32(quants[first + i])


@kernel(f32_in, i8_in, f32, f32_out)
def _int8_accumulate(scales: Any, quants: Any, weight: Any, acc: Any) -> None:
    for block in range(scales.size):
        scale = scales[block]
        first = block * INT8_BLOCK
        for i in range(min(INT8_BLOCK, acc.size - first)):
            acc[first + i] = acc[first + i] + weight * (scale * np.float32(quants[first + i]))


@kernel(f32_in, u16_out)
def _bf16_encode(values: Any, out: Any) -> Any:
    """Round to nearest, ties to even. False if a value is not finite or rounds to infinity."""
    bits = values.view(np.uint32)
    for i in range(out.size):
        word = bits[i]
        out[i] = np.uint16(np.uint32(word + _HALF_BELOW + ((word >> _SIXTEEN) & _ONE)) >> _SIXTEEN)
    return _top_bits(values, 0, values.size) < _BF16_OVERFLOW


@kernel(u16_in, f32_out)
def _bf16_decode(halves: Any, out: Any) -> None:
    bits = out.view(np.uint32)
    for i in range(out.size):
        bits[i] = np.uint32(halves[i]) << _SIXTEEN


@kernel(f32_in, f32, f32_out)
def _fp32_accumulate(values: Any, weight: Any, acc: Any) -> None:
    for i in range(acc.size):
        acc[i] = acc[i] + weight * values[i]


@kernel(f32_in, f32_in, f32_out)
def _difference(values: Any, minus: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = values[i] - minus[i]


@kernel(f32_in)
def _finite(values: Any) -> Any:
    return _top_bits(values, 0, values.size) < _INFINITE


@kernel(f32_in)
def _largest(values: Any) -> Any:
    """The bits of the largest magnitude."""
    return _top_bits(values, 0, values.size)


@kernel(f32_in, i8_in)
def _int8_square_sum(scales: Any, quants: Any) -> Any:
    total = np.float64(0.0)
    for block in range(scales.size):
        first = block * INT8_BLOCK
        squares = np.int32(0)
        for i in range(first, min(first + INT8_BLOCK, quants.size)):
            squares += np.int32(quants[i]) * np.int32(quants[i])
        total += np.float64(scales[block]) * np.float64(scales[block]) * np.float64(squares)
    return total


@kernel(f32_in)
def _square_sum(values: Any) -> Any:
    a = b = c = d = np.float64(0.0)  # in binary64, where no fp32 overflows; four chains of additions beside each other
    whole = values.size - values.size % 4
    for i in range(0, whole, 4):
        a += np.float64(values[i]) * np.float64(values[i])
        b += np.float64(values[i + 1]) * np.float64(values[i + 1])
        c += np.float64(values[i + 2]) * np.float64(values[i + 2])
        d += np.float64(values[i + 3]) * np.float64(values[i + 3])
    for i in range(whole, values.size):
        a += np.float64(values[i]) * np.float64(values[i])
    return a + b + c + d


_KERNELS = (
    _int8_encode, _int8_encode_difference, _int8_decode, _int8_accumulate, _bf16_encode, _bf16_decode,
    _fp32_accumulate, _difference, _finite, _largest, _int8_square_sum, _square_sum,
)  # fmt: skip


def warm_up() -> None:
    """Compiles every kernel, or loads it from the cache. Safe from any thread."""
    compile_all(_KERNELS)


# --- encoding


def encode(
    codec: str,
    values: npt.NDArray[Any],
    *,
    minus: Floats | None = None,
    zstd_level: int = 0,
    dtype: str = "F32",
) -> bytes:
    """`values`, or `values - minus`, as an encoded chunk.

    `values` and `minus` are 1-D fp32 and contiguous; for codec raw `values` are the uint8 bytes of elements of `dtype`.
    Raises NonFiniteError (without the tensor's name, which the caller knows) if a value is not finite, or would be
    infinite in bf16.
    """
    if codec == "raw":
        body = np.ascontiguousarray(values).view(np.uint8)
        return _packed(codec, body.size // DTYPE_BYTES[dtype], dtype, body, zstd_level)
    size = body_bytes(codec, values.size, 4)
    out = scratch.array("encoded", HEADER_BYTES + size)
    body = out[HEADER_BYTES:]
    if codec == "int8":
        num_scales = (size - values.size) // 4
        scales, quants = body[: 4 * num_scales].view(np.float32), body[4 * num_scales :].view(np.int8)
        if minus is None:
            finite = _int8_encode(values, scales, quants)
        else:
            finite = _int8_encode_difference(values, minus, scales, quants)
    elif codec == "bf16":
        if minus is not None:
            values = _subtracted(values, minus)
        finite = _bf16_encode(values, body.view(np.uint16))
    else:
        target = body.view(np.float32)
        if minus is None:
            target[:] = values
        else:
            _difference(values, minus, target)
        finite = _finite(target)
    if not finite:
        raise NonFiniteError(f"a value is not finite, or too large for {codec}")
    if zstd_level == 0:
        out[:HEADER_BYTES] = np.frombuffer(_header(codec, values.size, "F32", False), np.uint8)
        return out.tobytes()
    return _packed(codec, values.size, "F32", body, zstd_level)


def _subtracted(values: Floats, minus: Floats) -> Floats:
    out = scratch.floats("difference", values.size)
    _difference(values, minus, out)
    return out


def _header(codec: str, num_elements: int, dtype: str, zstd: bool) -> bytes:
    return EncodedHeader(codec=codec, zstd=zstd, dtype=dtype, block=block_of(codec), num_elements=num_elements).pack()


def _packed(codec: str, num_elements: int, dtype: str, body: Bytes, zstd_level: int) -> bytes:
    if zstd_level:
        if not -MAX_ZSTD_LEVEL <= zstd_level <= MAX_ZSTD_LEVEL:
            raise ConfigError(f"sync.zstd_level = {zstd_level}: choose 0 (off) or 1 to {MAX_ZSTD_LEVEL}")
        compressor = zstandard.ZstdCompressor(level=zstd_level, write_content_size=True, write_checksum=False)
        small = compressor.compress(_split(codec, body).data)
        if len(small) < body.size:
            return _header(codec, num_elements, dtype, True) + small
    return _header(codec, num_elements, dtype, False) + body.tobytes()


_PLANES = {"fp32": 4, "bf16": 2}  # bytes of the same significance compress better side by side


def _split(codec: str, body: Bytes) -> Bytes:
    planes = _PLANES.get(codec, 1)
    if planes == 1:
        return body
    out = scratch.array("planes", body.size).reshape(planes, -1)
    for plane in range(planes):
        out[plane] = body[plane::planes]
    return out.reshape(-1)


def _joined(codec: str, body: Bytes) -> Bytes:
    planes = _PLANES.get(codec, 1)
    if planes == 1:
        return body
    out = scratch.array("joined", body.size)
    for plane, part in enumerate(body.reshape(planes, -1)):
        out[plane::planes] = part
    return out


# --- decoding


def _body(data: Data, header: EncodedHeader) -> Bytes:
    """The body after zstd and byte planes, aligned to 4 bytes. Nothing is allocated before sizes are checked."""
    body: Bytes = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
    if header.zstd:
        size = body_bytes(header.codec, header.num_elements, DTYPE_BYTES[header.dtype])
        try:
            if zstandard.frame_content_size(body.data) != size:
                raise InvalidMessage(f"encoded chunk: its zstd frame does not hold {size} bytes")
            raw = zstandard.ZstdDecompressor().decompress(body.data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise InvalidMessage(f"encoded chunk: zstd: {error}") from None
        if len(raw) != size:
            raise InvalidMessage(f"encoded chunk: {len(raw)} bytes after zstd, {size} are expected")
        body = _joined(header.codec, np.frombuffer(raw, np.uint8))
    elif body.ctypes.data % 4:
        body = body.copy()
    return body


def _scales_and_quants(body: Bytes, num_elements: int) -> tuple[Floats, npt.NDArray[np.int8]]:
    split = body.size - num_elements
    return body[:split].view(np.float32), body[split:].view(np.int8)


def check(data: Data, codec: str, num_elements: int, dtype: str = "F32", *, below: float = math.inf) -> None:
    """Raises InvalidMessage unless `data` is such an encoded chunk and all that it decodes to is finite, and smaller
    than the power of two `below`; codec raw carries no numbers."""
    header = parse_header(data, codec=codec, num_elements=num_elements, dtype=dtype)
    if codec == UNCHANGED:
        return
    body = _body(data, header)
    if codec == "int8":
        scales, _ = _scales_and_quants(body, num_elements)
        largest_scale = min(_SCALE_OVERFLOW, np.float32(below / _QUANTS))
        if not np.all((scales == _ZERO) | ((scales >= _SMALLEST_NORMAL) & (scales < largest_scale))):
            raise InvalidMessage("encoded chunk: a scale that is not finite, negative, too small or too large")
        return
    least = np.array(below, np.float32).view(np.uint32)
    if codec == "bf16":
        is_large = num_elements and np.max(body.view(np.uint16) & _BF16_MAGNITUDE) >= least >> _SIXTEEN
    else:
        is_large = codec == "fp32" and _largest(body.view(np.float32)) >= least
    if is_large:
        raise InvalidMessage(f"encoded chunk: a value that is {'too large' if below < math.inf else 'not finite'}")


def decode(data: Data, codec: str, num_elements: int, out: npt.NDArray[Any], dtype: str = "F32") -> None:
    """Writes the values of an encoded chunk into `out`: fp32, or for codec raw the uint8 bytes.

    Raises InvalidMessage if `data` is not such a chunk.
    """
    header = parse_header(data, codec=codec, num_elements=num_elements, dtype=dtype)
    body = _body(data, header)
    if codec == "int8":
        _int8_decode(*_scales_and_quants(body, num_elements), out)
    elif codec == "bf16":
        _bf16_decode(body.view(np.uint16), out)
    elif codec == "fp32":
        out[:] = body.view(np.float32)
    else:
        out[:] = body


def accumulate(data: Data, codec: str, weight: np.float32, acc: Floats) -> float:
    """`acc = acc + weight * value` with `value = scale * quant` for int8; each operation rounded to fp32 by itself.

    Returns the norm of the values, the root of the sum of their squares: a measure, not the same bits everywhere.
    Raises InvalidMessage if `data` is not an encoded chunk of `acc.size` fp32 values; `acc` is then unchanged.
    """
    header = parse_header(data, codec=codec, num_elements=acc.size)
    body = _body(data, header)
    weight = np.float32(weight)
    if codec == "int8":
        scales, quants = _scales_and_quants(body, acc.size)
        _int8_accumulate(scales, quants, weight, acc)
        return math.sqrt(_int8_square_sum(scales, quants))
    if codec == "bf16":
        values = scratch.floats("decoded", acc.size)
        _bf16_decode(body.view(np.uint16), values)
    elif codec == "fp32":
        values = body.view(np.float32)
    else:
        raise ConfigError(f"codec {codec} carries bytes, which cannot be averaged")
    add(values, weight, acc)
    return norm(values)


def add(values: Floats, weight: np.float32, acc: Floats) -> None:
    """`acc = acc + weight * value`, as `accumulate` does it of values that have travelled."""
    _fp32_accumulate(values, np.float32(weight), acc)


def norm(values: Floats, minus: Floats | None = None) -> float:
    """Of `values`, or of `values - minus`: the root of the sum of squares."""
    if minus is not None:
        values = _subtracted(values, minus)
    return math.sqrt(_square_sum(values))


def is_finite(values: Floats) -> bool:
    return bool(_finite(values))


# --- self-test


def self_test() -> None:
    """Raises SelfTestFailed if this host computes other bits than the golden vectors, subnormal numbers included."""
    for vector in CODEC_VECTORS:
        values, minus = _tiled(vector.values), _tiled(vector.minus)
        weight = np.frombuffer(bytes.fromhex(vector.weight), np.float32)[0]
        for codec, encoded in vector.encoded.items():
            where = f"codec {codec}, vector {vector.name!r}"
            _same(encode(codec, values[:_VECTOR], minus=minus[:_VECTOR]), bytes.fromhex(encoded), f"{where}: encoding")
            body = bytes.fromhex(encoded)[HEADER_BYTES:]
            split = 4 if codec == "int8" else 0  # all blocks of the repeated vector have its one scale
            body = body[:split] * -(-values.size // INT8_BLOCK) + body[split:] * _TILES
            expected = _header(codec, values.size, "F32", False) + body
            data = encode(codec, values, minus=minus)
            _same(data, expected, f"{where}: encoding")
            difference = np.empty(values.size, np.float32)
            _difference(values, minus, difference)
            _same(encode(codec, difference), expected, f"{where}: encoding of values")
            acc = _tiled(vector.acc)
            accumulate(data, codec, weight, acc)
            _same(acc.tobytes(), bytes.fromhex(vector.accumulated[codec]) * _TILES, f"{where}: averaging")
            plain, packed = np.empty(values.size, np.float32), np.empty(values.size, np.float32)
            decode(data, codec, values.size, plain)
            decode(encode(codec, difference, zstd_level=1), codec, values.size, packed)
            _same(packed.tobytes(), plain.tobytes(), f"{where}: zstd")


_VECTOR = 16  # elements of a golden vector
_TILES = 65  # repetitions, so that whole blocks and a rest go through the vector units


def _tiled(data: str) -> Floats:
    return np.tile(np.frombuffer(bytes.fromhex(data), np.float32), _TILES)


def _same(found: bytes, expected: bytes, what: str) -> None:
    if found != expected:
        raise SelfTestFailed(
            f"{what}: this host computes other bits than the protocol asks for; it cannot take part in a run. "
            "Look for a library that turns subnormal numbers off (flush to zero), or another numba or LLVM"
        )
