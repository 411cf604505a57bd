"""Each codec again, slow and plain: what the kernels have to equal to the bit. Bodies alone, without the header."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

TINY = np.float32(2.0**-126)
BITS = {"int8": 8, "int4": 4, "e3m0": 4, "int2": 2, "sign1": 1}
BLOCK = {"int8": 512, "int4": 256, "e3m0": 256, "int2": 1024, "sign1": 1024}


def total(values: Floats) -> np.float32:
    """In 16 lanes, which are then folded."""
    lanes = np.zeros(16, np.float32)
    for row in np.append(values, np.zeros(-values.size % 16, np.float32)).reshape(-1, 16):
        lanes = lanes + row
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half:]
    return np.float32(lanes[0])


def scale_of(value: np.float32) -> np.float32:
    return value if value >= TINY else np.float32(0)


def int8(x: Floats) -> tuple[list[np.float32], Codes]:
    scale = scale_of(np.max(np.abs(x)) / np.float32(127))
    return [scale], np.rint(x / scale if scale else 0 * x).astype(np.int8).view(np.uint8)


def int4(x: Floats) -> tuple[list[np.float32], Codes]:
    scale = scale_of(np.max(np.abs(x)) / np.float32(7))
    return [scale], (np.rint(x / scale if scale else 0 * x) + 8).astype(np.uint8)


def e3m0(x: Floats) -> tuple[list[np.float32], Codes]:
    """By distance to each level; of two that are as near, the larger one."""
    scale = scale_of(np.max(np.abs(x)))
    if not scale:
        return [scale], np.zeros(x.size, np.uint8)
    levels = np.array([0.0, *(2.0**e for e in range(-6, 1))])
    distances = np.abs(np.abs(x / scale).astype(np.float64)[:, None] - levels[None, ::-1])
    return [scale], (7 - np.argmin(distances, axis=1) + 8 * np.signbit(x)).astype(np.uint8)


def int2(x: Floats) -> tuple[list[np.float32], Codes]:
    magnitude, count = np.abs(x), np.float32(x.size)
    threshold = np.float32(1.25) * (total(magnitude) / count)
    is_above = magnitude > threshold
    above, num_above = total(np.where(is_above, magnitude, np.float32(0))), np.float32(is_above.sum())
    low = (total(magnitude) - above) / (count - num_above)
    high = above / max(num_above, np.float32(1))
    return [scale_of(low), scale_of(high)], (is_above + 2 * np.signbit(x)).astype(np.uint8)


def sign1(x: Floats) -> tuple[list[np.float32], Codes]:
    scale = scale_of(total(np.abs(x)) / np.float32(x.size))
    return [scale], (np.signbit(x) & (scale > 0)).astype(np.uint8)


ENCODERS: dict[str, Callable[[Floats], tuple[list[np.float32], Codes]]] = {
    "int8": int8, "int4": int4, "e3m0": e3m0, "int2": int2, "sign1": sign1
}  # fmt: skip
LEVELS: dict[str, Callable[[Floats], list[np.float32]]] = {
    "int8": lambda s: [s[0] * np.float32(code - 256 if code > 127 else code) for code in range(256)],
    "int4": lambda s: [s[0] * np.float32(code - 8) for code in range(16)],
    "e3m0": lambda s: [s[0] * np.float32(sign * p) for sign in (1, -1) for p in (0.0, *(2.0**e for e in range(-6, 1)))],
    "int2": lambda s: [s[0], s[1], -s[0], -s[1]],
    "sign1": lambda s: [s[0], -s[0]],
}


def encode(codec: str, values: Floats) -> bytes:
    if codec == "fp32":
        return values.tobytes()
    if codec == "fp16":
        return values.astype(np.float16).tobytes()
    if codec == "bf16":
        wide = values.view(np.uint32).astype(np.uint64)
        return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2").tobytes()
    all_scales, packed, bits = b"", b"", BITS[codec]
    for first in range(0, values.size, BLOCK[codec]):
        scales, codes = ENCODERS[codec](values[first : first + BLOCK[codec]])
        padding = np.full(-codes.size % (8 // bits), 8 if codec == "int4" else 0, np.uint8)  # the code of 0
        planes = np.append(codes, padding).reshape(8 // bits, -1).astype(np.uint16)
        packed += sum(plane << bits * k for k, plane in enumerate(planes)).astype(np.uint8).tobytes()  # type: ignore[union-attr]
        all_scales += np.array(scales, np.float32).tobytes()
    return all_scales + packed


def decode(codec: str, body: bytes, num_elements: int) -> Floats:
    if codec == "fp32":
        return np.frombuffer(body, np.float32)
    if codec == "fp16":
        return np.frombuffer(body, np.float16).astype(np.float32)
    if codec == "bf16":
        return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)
    bits, block = BITS[codec], BLOCK[codec]
    num_blocks = -(-num_elements // block)
    num_scales = 2 if codec == "int2" else 1
    scales = np.frombuffer(body, np.float32, num_blocks * num_scales).reshape(num_blocks, num_scales)
    packed, out = np.frombuffer(body, np.uint8, offset=scales.nbytes), np.empty(0, np.float32)
    for index in range(num_blocks):
        count = min(block, num_elements - index * block)
        taken = packed[index * block * bits // 8 :][: -(-count * bits // 8)]
        codes = np.concatenate([taken >> bits * k & ((1 << bits) - 1) for k in range(8 // bits)])[:count]
        out = np.append(out, np.array(LEVELS[codec](scales[index]), np.float32)[codes])
    return out


# --- codecs that carry some of the values


def in_tiles(num_elements: int, columns: int) -> npt.NDArray[np.int64]:
    """The elements of a chunk with so many columns, tile after tile."""
    places = np.arange(num_elements)
    if columns == 64:
        return places
    rows = places.reshape(-1, columns)
    tiles = [rows[r : r + 64, c : c + 64] for r in range(0, len(rows), 64) for c in range(0, columns, 64)]
    return np.concatenate([tile.ravel() for tile in tiles])


def topk2(x: Floats) -> tuple[bytes, bytes, bytes]:
    """Scales, entries and segments of a block."""
    room, magnitude = -(-x.size // 64), np.abs(x)
    order = np.argsort(-magnitude.astype(np.float64), kind="stable")[:room]
    places = np.sort(order[magnitude[order] > 0])
    picked, number = magnitude[places], len(places)
    smallest, mean = picked.min(initial=np.float32(np.inf)), total(picked) / np.float32(max(number, 1))
    threshold = smallest + np.float32(1.6) * (mean - smallest) if number else np.float32(0)
    is_above = picked > threshold
    above, num_above = total(np.where(is_above, picked, np.float32(0))), int(is_above.sum())
    low = (total(picked) - above) / np.float32(max(number - num_above, 1))
    scales = np.array([scale_of(low), scale_of(above / np.float32(max(num_above, 1)))], np.float32)
    entries = np.zeros(room, np.uint8)
    entries[:number] = places % 64 + 64 * is_above + 128 * np.signbit(x[places])
    bits = np.zeros(-(-room // 4) * 8, np.uint8)
    bits[places // 64 + np.arange(number)] = 1
    return scales.tobytes(), entries.tobytes(), np.packbits(bits, bitorder="little").tobytes()


def encode_sparse(values: Floats, columns: int = 64) -> bytes:
    ordered = values[in_tiles(values.size, columns)]
    blocks = [topk2(ordered[first : first + 4096]) for first in range(0, values.size, 4096)]
    return b"".join(b"".join(part) for part in zip(*blocks, strict=True))


def decode_sparse(body: bytes, num_elements: int, columns: int = 64) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The values, and where there are any."""
    num_blocks, room = -(-num_elements // 4096), -(-num_elements // 64)
    scales = np.frombuffer(body, np.float32, 2 * num_blocks).reshape(num_blocks, 2)
    entries = np.frombuffer(body, np.uint8, room, scales.nbytes)
    segments = np.frombuffer(body, np.uint8, offset=scales.nbytes + room)
    ordered, is_sent = np.zeros(num_elements, np.float32), np.zeros(num_elements, np.bool_)
    for index in range(num_blocks):
        mine = entries[64 * index : 64 * index + 64]
        bits = np.unpackbits(segments[16 * index : 16 * index + 16], bitorder="little")
        ones = np.flatnonzero(bits)
        places = 4096 * index + 64 * (ones - np.arange(len(ones))) + mine[: len(ones)] % 64
        levels = np.array([*scales[index], *-scales[index]], np.float32)
        ordered[places], is_sent[places] = levels[mine[: len(ones)] // 64], True
    values, sent = np.zeros_like(ordered), np.zeros_like(is_sent)
    order = in_tiles(num_elements, columns)
    values[order], sent[order] = ordered, is_sent
    return values, sent


def average_of(parts: list[tuple[Floats, npt.NDArray[np.bool_]]], tokens: list[int], *, over_all: bool) -> Floats:
    """Over the sites that sent an element, or over all."""
    size, summed = parts[0][0].size, sum(tokens)
    average, weights = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for (values, is_sent), count in zip(parts, tokens, strict=True):
        weight = np.float32(count / summed)
        average[is_sent] = average[is_sent] + weight * values[is_sent]
        weights[is_sent] = weights[is_sent] + weight
    if not over_all:
        average[weights > 0] /= weights[weights > 0]
    return average
