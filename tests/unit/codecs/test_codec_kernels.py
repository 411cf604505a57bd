"""Kernels against a slow reference in numpy, to the bit; decoders against anything that may arrive."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.codecs import HEADER_BYTES, EncodedHeader, kernels, max_encoded_bytes, unchanged
from atoll.protocol.codecs.compression import compressed
from atoll.protocol.codecs.table import DENSE, INT8, TABLE
from atoll.protocol.errors import ConfigError, InvalidMessage, NonFiniteError
from tests.harness import reference_codecs

pytestmark = pytest.mark.timeout(600)  # a kernel that is in no cache is compiled at its first use

Floats = npt.NDArray[np.float32]
SMALLEST_NORMAL = np.float32(2.0**-126)


def reference_encode(codec: str, values: Floats) -> bytes:
    header = EncodedHeader(codec=codec, zstd=False, dtype="F32", num_elements=values.size).pack()
    return header + reference_codecs.encode(codec, values)


def reference_decode(codec: str, data: bytes, num_elements: int) -> Floats:
    return reference_codecs.decode(codec, data[HEADER_BYTES:], num_elements)


def exponent_for(codec: str, exponent: int) -> int:
    """fp16 refuses what the others take."""
    return min(exponent, 8) if codec == "fp16" else exponent


def sample(seed: int, num_elements: int, exponent: int = 0) -> Floats:
    values = np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)
    return np.ldexp(values, exponent).astype(np.float32)


sizes = st.sampled_from([0, 1, 2, 3, 31, 255, 257, 511, 512, 513, 1024, 1026, 1700, 2051])
seeds = st.integers(0, 1 << 30)
exponents = st.sampled_from([-149, -140, -130, -126, -122, -30, 0, 100])


@given(st.sampled_from(DENSE), sizes, seeds, exponents)
def test_kernels_give_the_bits_of_the_reference(codec: str, size: int, seed: int, exponent: int) -> None:
    exponent = exponent_for(codec, exponent)
    values, minus = sample(seed, size, exponent), sample(seed + 1, size, exponent)
    data = kernels.encode(codec, values, minus=minus, zstd_level=0)
    assert data == reference_encode(codec, values - minus)
    assert kernels.encode(codec, values, zstd_level=0) == reference_encode(codec, values)
    expected = reference_decode(codec, data, size)
    out = np.empty(size, np.float32)
    kernels.decode(data, codec, size, out)
    assert out.tobytes() == expected.tobytes()
    weight, acc = np.float32(1 / 3), sample(seed + 2, size, exponent)
    wanted = acc + weight * expected
    kernels.accumulate(data, codec, weight, acc)
    assert acc.tobytes() == wanted.astype(np.float32).tobytes()


@given(sizes, seeds, exponents)
def test_int8_is_within_half_a_step_of_each_block(size: int, seed: int, exponent: int) -> None:
    values = sample(seed, size, exponent)
    out = np.empty(size, np.float32)
    kernels.decode(kernels.encode("int8", values), "int8", size, out)
    for first in range(0, size, INT8.block):
        block, got = values[first : first + INT8.block], out[first : first + INT8.block]
        step = float(np.max(np.abs(block))) / 127
        bound = 0.5001 * step if step >= SMALLEST_NORMAL else 127 * float(SMALLEST_NORMAL)
        assert np.max(np.abs(block.astype(np.float64) - got)) <= bound


def test_a_block_whose_scale_would_be_subnormal_is_zero() -> None:
    values = np.full(INT8.block, 126 * SMALLEST_NORMAL, np.float32)
    assert kernels.encode("int8", values)[HEADER_BYTES:] == bytes(4 + INT8.block)
    values[3] = 127 * SMALLEST_NORMAL
    assert kernels.encode("int8", values)[HEADER_BYTES : HEADER_BYTES + 4] == SMALLEST_NORMAL.tobytes()


def test_zstd_is_left_out_where_it_does_not_shrink() -> None:
    noise = np.random.default_rng(3).integers(0, 256, 4096, np.uint8)
    assert kernels.encode("raw", noise, zstd_level=3, dtype="U8")[2] == 0
    values = sample(5, 1 << 16)
    shrunk = kernels.encode("bf16", values, zstd_level=1)
    assert len(shrunk) * 1.3 < max_encoded_bytes("bf16", values.size), "byte planes make Gaussian values compressible"


@pytest.mark.parametrize(("dtype", "itemsize"), [("I64", 8), ("BF16", 2), ("BOOL", 1), ("F64", 8)])
def test_raw_bytes_come_back(dtype: str, itemsize: int) -> None:
    source = np.random.default_rng(1).integers(0, 4, 33 * itemsize, np.uint8)
    for level in (0, 3):
        data = kernels.encode("raw", source, zstd_level=level, dtype=dtype)
        out = np.empty(source.size, np.uint8)
        kernels.decode(data, "raw", 33, out, dtype)
        assert out.tobytes() == source.tobytes()
        with pytest.raises(InvalidMessage, match="dtype"):
            kernels.decode(data, "raw", 33, out, "F8_E5M2")


def test_bf16_refuses_what_rounds_to_infinity() -> None:
    largest = np.array([0x7F7F7FFF], np.uint32).view(np.float32)
    assert kernels.encode("bf16", largest)[HEADER_BYTES:] == b"\x7f\x7f"
    with pytest.raises(NonFiniteError):
        kernels.encode("bf16", np.array([0x7F7F8000], np.uint32).view(np.float32))


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_check_refuses_values_that_are_not_finite(codec: str, bad: float) -> None:
    good = kernels.encode(codec, np.ones(600, np.float32), zstd_level=0)
    value = np.array([bad], np.float32).tobytes()
    body = {"bf16": value[2:], "fp16": np.array([bad], np.float16).tobytes()}.get(codec, value)
    with pytest.raises(InvalidMessage):
        kernels.check(good[:HEADER_BYTES] + body + good[HEADER_BYTES + len(body) :], codec, 600)


LARGEST_SCALES = {"int8": 2.0**121, "int4": 2.0**125, "e3m0": np.inf, "int2": np.inf, "sign1": np.inf}
"""From these on, an element could say more than is finite."""


@pytest.mark.parametrize("codec", LARGEST_SCALES)
def test_the_check_refuses_scales_that_no_encoder_makes(codec: str) -> None:
    good = kernels.encode(codec, np.ones(600, np.float32), zstd_level=0)
    limit = np.float32(LARGEST_SCALES[codec])
    for scale in (-1.0, 2.0**-127, limit, np.nan):
        with pytest.raises(InvalidMessage, match="scale"):
            kernels.check(good[:HEADER_BYTES] + np.float32(scale).tobytes() + good[HEADER_BYTES + 4 :], codec, 600)
    for scale in (0.0, 2.0**-126, np.nextafter(limit, np.float32(0))):
        kernels.check(good[:HEADER_BYTES] + np.float32(scale).tobytes() + good[HEADER_BYTES + 4 :], codec, 600)


@pytest.mark.parametrize(("codec", "largest", "refused"), [("int8", 3.37e38, 3.4e38), ("int4", 2.97e38, 2.98e38)])
def test_what_would_not_be_finite_when_decoded_is_refused(codec: str, largest: float, refused: float) -> None:
    out = np.zeros(8, np.float32)
    data = kernels.encode(codec, np.full(8, largest, np.float32))
    kernels.check(data, codec, 8)
    kernels.decode(data, codec, 8, out)
    assert np.isfinite(out).all()
    with pytest.raises(NonFiniteError):
        kernels.encode(codec, np.full(8, refused, np.float32))


def test_fp16_refuses_what_rounds_to_infinity() -> None:
    largest = np.nextafter(np.float32(65520), np.float32(0))
    assert kernels.encode("fp16", np.array([largest, -largest]))[HEADER_BYTES:] == b"\xff\x7b\xff\xfb"
    for value in (65520, -65520, 1e30):
        with pytest.raises(NonFiniteError, match="too large for fp16"):
            kernels.encode("fp16", np.array([value], np.float32))


def test_fp16_has_the_bits_of_all_halves_and_of_what_is_between_them() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[halves & 0x7C00 != 0x7C00]
    exact = halves.view(np.float16).astype(np.float32)
    data, out = kernels.encode("fp16", exact), np.empty_like(exact)
    assert data[HEADER_BYTES:] == halves.tobytes()
    kernels.decode(data, "fp16", out.size, out)
    assert out.tobytes() == exact.tobytes()
    kept = exact[np.abs(exact) < 65504]
    between = (kept + np.nextafter(kept.astype(np.float16), np.float16(np.inf)).astype(np.float32)) / np.float32(2)
    for values in (between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(np.inf))):
        assert kernels.encode("fp16", values)[HEADER_BYTES:] == values.astype(np.float16).tobytes()


def test_e3m0_takes_the_larger_of_two_levels_that_are_as_near() -> None:
    levels = [0.0, *(2.0**e for e in range(-6, 1))]
    ties = np.array([(a + b) / 2 for a, b in pairwise(levels)] + [1.0], np.float32)
    below, out = np.nextafter(ties, np.float32(0)), np.empty(8, np.float32)
    for values, expected in ((ties, [*levels[1:], 1.0]), (-ties, [-x for x in (*levels[1:], 1.0)])):
        kernels.decode(kernels.encode("e3m0", values), "e3m0", 8, out)
        assert out.tolist() == expected
    below[7] = 1.0
    kernels.decode(kernels.encode("e3m0", below), "e3m0", 8, out)
    assert out.tolist() == [*levels[:7], 1.0]


def test_a_sparse_block_does_not_grow_by_sign1() -> None:
    """With the root mean square as the scale, what is left over of it is more than there was."""
    generator = np.random.default_rng(0)
    values = np.where(generator.random(4096) < 0.01, generator.standard_normal(4096), 0).astype(np.float32)
    out = np.empty_like(values)
    kernels.decode(kernels.encode("sign1", values), "sign1", values.size, out)
    assert np.sum((values - out) ** 2) < np.sum(values**2)


@given(st.binary(min_size=1, max_size=8), st.integers(0, 10_000))
def test_a_damaged_zstd_frame_is_refused_or_has_the_right_size(damage: bytes, place: int) -> None:
    data = bytearray(kernels.encode("int8", np.zeros(600, np.float32), zstd_level=3))
    assert data[2] == 1
    place = HEADER_BYTES + place % (len(data) - HEADER_BYTES)
    data[place : place + len(damage)] = damage
    out = np.empty(600, np.float32)
    try:
        kernels.decode(data, "int8", 600, out)
    except InvalidMessage:
        pass


@pytest.mark.parametrize("content_size", [True, False])
def test_a_zstd_bomb_is_refused_before_it_is_unpacked(content_size: bool) -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=content_size).compress(bytes(1 << 24))
    header = EncodedHeader(codec="fp32", zstd=True, dtype="F32", num_elements=600)
    with pytest.raises(InvalidMessage, match="zstd"):
        kernels.decode(header.pack() + bomb, "fp32", 600, np.empty(600, np.float32))


def test_bytes_cannot_be_averaged() -> None:
    data = kernels.encode("raw", np.zeros(16, np.uint8), dtype="F32")
    with pytest.raises(ConfigError, match="averaged"):
        kernels.accumulate(data, "raw", np.float32(1), np.zeros(4, np.float32))


def test_threads_do_not_share_their_arrays() -> None:
    chunks = [sample(seed, 5000) for seed in range(8)]
    expected = [reference_encode("int8", chunk) for chunk in chunks]
    wrong: list[int] = []

    def work(first: int) -> None:
        for i in range(first, first + 200):
            if kernels.encode("int8", chunks[i % 8]) != expected[i % 8]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kernels_work_where_no_cache_folder_can_be_written() -> None:
    code = (
        "import logging; logging.basicConfig()\n"
        "from atoll.protocol.codecs import jit, kernels\n"
        "import numpy as np\n"
        "assert not jit.CACHED\n"
        "print(len(kernels.encode('int8', np.ones(5, np.float32))))\n"
    )
    environment = {
        **os.environ,
        "NUMBA_CACHE_LOCATOR_CLASSES": "ZipCacheLocator",
    }  # none of it fits: as on a read-only host
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "25\n"
    assert result.stderr.count("are not cached") == 1


@pytest.mark.parametrize("codec", DENSE)
def test_a_payload_without_zstd_is_the_same_whatever_made_it_small(codec: str) -> None:
    values = np.random.default_rng(1).integers(-3, 4, 4096).astype(np.float32)
    plain = kernels.encode(codec, values, zstd_level=0)
    if not TABLE[codec].zstd_level:
        small = kernels.encode(codec, values, zstd_level=1)
        assert kernels.without_zstd(small, codec, 4096) is small, "it has to be as it is encoded"
        return
    found = [kernels.encode(codec, values, zstd_level=level) for level in (1, 9)]
    assert {kernels.without_zstd(data, codec, 4096) for data in (plain, *found)} == {plain}
    body = plain[HEADER_BYTES:]
    bomb = found[0][:HEADER_BYTES] + compressed(bytes(1 << 20), 1)
    for wrong in (b"", found[0][:-1], found[0] + b"0", bomb, found[0][:8] + bytes(8) + body, unchanged(4096, "F32")):
        assert kernels.without_zstd(wrong, codec, 4096) is wrong
