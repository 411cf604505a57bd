"""Each codec again, slow and plain: what the kernels have to equal to the bit. Bodies alone, without the header."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from atoll.protocol.codecs import cosines

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

BUCKET = {"topk2": 64, "dct1": 128, "dct1k4": 128}
SHARE = {"topk2": 1, "dct1": 1, "dct1k4": 8}
Sent = tuple[Floats, npt.NDArray[np.bool_]]
"""What was sent, in the order of segments, and where something was."""


def in_tiles(num_elements: int, columns: int) -> npt.NDArray[np.int64]:
    """The elements of a chunk with so many columns, tile after tile."""
    places = np.arange(num_elements)
    if columns == 64:
        return places
    rows = places.reshape(-1, columns)
    tiles = [rows[r : r + 64, c : c + 64] for r in range(0, len(rows), 64) for c in range(0, columns, 64)]
    return np.concatenate([tile.ravel() for tile in tiles])


def product(first: Floats, second: Floats) -> Floats:
    """Of two matrices, summed in order."""
    out = np.zeros((first.shape[0], second.shape[1]), np.float32)
    for k in range(first.shape[1]):
        out = out + first[:, k : k + 1] * second[k]
    return out


def matrix(size: int) -> Floats:
    return np.array(cosines.table(size), np.float32).reshape(size, size)


def largest(x: Floats, room: int) -> npt.NDArray[np.int64]:
    """The places of so many of the largest, of equal ones the first, none of a zero."""
    magnitude = np.abs(x)
    order = np.argsort(-magnitude.astype(np.float64), kind="stable")[:room]
    return np.sort(order[magnitude[order] > 0])


def topk2(x: Floats, places: npt.NDArray[np.int64]) -> tuple[list[np.float32], Codes]:
    picked, number = np.abs(x[places]), len(places)
    smallest, mean = picked.min(initial=np.float32(np.inf)), total(picked) / np.float32(max(number, 1))
    threshold = smallest + np.float32(1.6) * (mean - smallest) if number else np.float32(0)
    is_above = picked > threshold
    above, num_above = total(np.where(is_above, picked, np.float32(0))), int(is_above.sum())
    low = (total(picked) - above) / np.float32(max(number - num_above, 1))
    scales = [scale_of(low), scale_of(above / np.float32(max(num_above, 1)))]
    return scales, (is_above + 2 * np.signbit(x[places])).astype(np.uint8)


def dct1(x: Floats, places: npt.NDArray[np.int64]) -> tuple[list[np.float32], Codes]:
    scale = scale_of(total(np.abs(x[places])) / np.float32(max(len(places), 1)))
    return [scale], np.signbit(x[places]).astype(np.uint8)


def encode_sparse(codec: str, values: Floats, columns: int = 64) -> bytes:
    bucket, level_of, parts = BUCKET[codec], topk2 if codec == "topk2" else dct1, []
    ordered = values[in_tiles(values.size, columns)]
    for first in range(0, values.size, 4096):
        x = ordered[first : first + 4096]
        if codec != "topk2":
            rows = np.append(x, np.zeros(-x.size % 64, np.float32)).reshape(-1, 64)
            x = product(matrix(len(rows)), product(rows, matrix(64).T)).ravel()
        num_buckets = -(-(-(-x.size // 64) * 64) // bucket)
        room = -(-num_buckets // SHARE[codec])
        places = largest(x, room)
        scales, codes = level_of(x, places)
        entries, bits = np.zeros(room, np.uint8), np.zeros(-(-(room + num_buckets) // 8) * 8, np.uint8)
        entries[: len(places)] = places % bucket + bucket * codes.astype(np.int64)
        bits[places // bucket + np.arange(len(places))] = 1
        packed = np.packbits(bits, bitorder="little").tobytes()
        parts.append((np.array(scales, np.float32).tobytes(), entries.tobytes(), packed))
    return b"".join(b"".join(part) for part in zip(*parts, strict=True))


def decode_sparse(codec: str, body: bytes, num_elements: int) -> Sent:
    bucket, num_scales = BUCKET[codec], 2 if codec == "topk2" else 1
    num_buckets, num_blocks = -(-(-(-num_elements // 64) * 64) // bucket), -(-num_elements // 4096)
    whole = 4096 // bucket
    each = whole // SHARE[codec]
    block_bytes = -(-(each + whole) // 8)
    room = num_buckets // whole * each + -(-(num_buckets % whole) // SHARE[codec])
    scales = np.frombuffer(body, np.float32, num_scales * num_blocks).reshape(num_blocks, num_scales)
    entries = np.frombuffer(body, np.uint8, room, scales.nbytes)
    buckets = np.frombuffer(body, np.uint8, offset=scales.nbytes + room)
    values = np.zeros(-(-num_elements // 64) * 64, np.float32)
    is_sent = np.zeros_like(values, np.bool_)
    for index in range(num_blocks):
        mine = entries[each * index : each * (index + 1)]
        bits = np.unpackbits(buckets[block_bytes * index : block_bytes * (index + 1)], bitorder="little")
        ones = np.flatnonzero(bits)
        places = 4096 * index + bucket * (ones - np.arange(len(ones))) + mine[: len(ones)] % bucket
        levels = np.array([*scales[index], *-scales[index]], np.float32)
        values[places], is_sent[places] = levels[mine[: len(ones)] // bucket], True
    return values, is_sent


def finished(codec: str, values: Floats, num_elements: int, columns: int = 64) -> Floats:
    """The elements of what was sent, or of its average."""
    if codec != "topk2":
        blocks = [values[first : first + 4096].reshape(-1, 64) for first in range(0, values.size, 4096)]
        back = [product(product(matrix(len(block)).T, block), matrix(64)).ravel() for block in blocks]
        values = np.concatenate([np.empty(0, np.float32), *back])
    out = np.zeros(num_elements, np.float32)
    out[in_tiles(num_elements, columns)] = values[:num_elements]
    return out


def norm_of(values: Floats) -> float:
    """The squares are added one after the other, in binary64."""
    exact = values[values != 0].astype(np.float64)
    return float(np.sqrt(np.cumsum(exact * exact)[-1])) if exact.size else 0.0


def clipped(norms: list[float], clip: float) -> list[float]:
    """What each is multiplied with, so that none is above `clip` times the median; 0: nothing is done."""
    moved = [norm for norm in norms if norm > 0]
    if not clip or len(moved) < 3:
        return [1.0] * len(norms)
    limit = clip * float(np.median(moved))
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def left_in(norms: list[float], clip: float, trim: int) -> list[int]:
    """Places of what a trimmed average is of: one after the other the highest of those above the limit goes, as long as
    a value is left beside those that are cut."""
    factors, places = clipped(norms, clip), list(range(len(norms)))
    num_cut = max(cut for cut in range(trim + 1) if 2 * cut < max(1, len(norms)))
    for _ in range(trim):
        if len(places) <= 2 * num_cut + 1:
            break
        lowest = min((factors[place] for place in places), default=1)
        if lowest < 1:
            places.remove(max(place for place in places if factors[place] == lowest))
    return places


def average_of(parts: list[Sent], tokens: list[int], *, over_all: bool, clip: float = 0.0) -> Floats:
    """Over the sites that sent a value, or over all."""
    summed = sum(tokens)
    average, weights = np.zeros_like(parts[0][0]), np.zeros_like(parts[0][0])
    factors = clipped([norm_of(values) for values, _ in parts], clip)
    for (values, is_sent), count, factor in zip(parts, tokens, factors, strict=True):
        weight, of_values = np.float32(count / summed), np.float32(count / summed * factor)
        average[is_sent] = average[is_sent] + of_values * values[is_sent]
        weights[is_sent] = weights[is_sent] + weight
    if not over_all:
        average[weights > 0] /= weights[weights > 0]
    return average
