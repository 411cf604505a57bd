"""Kernels against a slow reference in numpy, to the bit; decoders against anything that may arrive."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.codecs import HEADER_BYTES, EncodedHeader, kernels, max_encoded_bytes
from atoll.protocol.codecs.table import CODECS, INT8_BLOCK
from atoll.protocol.errors import ConfigError, InvalidMessage, NonFiniteError

Floats = npt.NDArray[np.float32]
SMALLEST_NORMAL = np.float32(2.0**-126)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    kernels.warm_up()


def reference_encode(codec: str, values: Floats) -> bytes:
    ids = {"fp32": 1, "bf16": 2, "int8": 3}
    header = struct.pack("<BBBBIQ", 1, ids[codec], 0, 1, 512 if codec == "int8" else 0, values.size)
    if codec == "fp32":
        return header + values.tobytes()
    if codec == "bf16":
        wide = values.view(np.uint32).astype(np.uint64)
        return header + ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2").tobytes()
    scales, quants = b"", b""
    for first in range(0, values.size, 512):
        block = values[first : first + 512]
        scale = np.float32(np.max(np.abs(block)) / np.float32(127))
        if scale < SMALLEST_NORMAL:
            scale, rounded = np.float32(0), np.zeros(block.size, np.int8)
        else:
            rounded = np.rint(block / scale).astype(np.int8)
        scales += scale.tobytes()
        quants += rounded.tobytes()
    return header + scales + quants


def reference_decode(codec: str, data: bytes, num_elements: int) -> Floats:
    body = data[HEADER_BYTES:]
    if codec == "fp32":
        return np.frombuffer(body, np.float32)
    if codec == "bf16":
        return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)
    num_blocks = -(-num_elements // 512)
    scales = np.frombuffer(body[: 4 * num_blocks], np.float32)
    quants = np.frombuffer(body[4 * num_blocks :], np.int8).astype(np.float32)
    return np.repeat(scales, 512)[:num_elements] * quants


def sample(seed: int, num_elements: int, exponent: int = 0) -> Floats:
    values = np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)
    return np.ldexp(values, exponent).astype(np.float32)


sizes = st.sampled_from([0, 1, 2, 31, 511, 512, 513, 1024, 1700])
seeds = st.integers(0, 1 << 30)
exponents = st.sampled_from([-149, -140, -130, -126, -122, -30, 0, 100])


@given(st.sampled_from(CODECS), sizes, seeds, exponents)
def test_kernels_give_the_bits_of_the_reference(codec: str, size: int, seed: int, exponent: int) -> None:
    values, minus = sample(seed, size, exponent), sample(seed + 1, size, exponent)
    data = kernels.encode(codec, values, minus=minus)
    assert data == reference_encode(codec, values - minus)
    assert kernels.encode(codec, values) == reference_encode(codec, values)
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
    for first in range(0, size, INT8_BLOCK):
        block, got = values[first : first + INT8_BLOCK], out[first : first + INT8_BLOCK]
        step = float(np.max(np.abs(block))) / 127
        bound = 0.5001 * step if step >= SMALLEST_NORMAL else 127 * float(SMALLEST_NORMAL)
        assert np.max(np.abs(block.astype(np.float64) - got)) <= bound


def test_a_block_whose_scale_would_be_subnormal_is_zero() -> None:
    values = np.full(INT8_BLOCK, 126 * SMALLEST_NORMAL, np.float32)
    assert kernels.encode("int8", values)[HEADER_BYTES:] == bytes(4 + INT8_BLOCK)
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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_check_refuses_values_that_are_not_finite(codec: str, bad: float) -> None:
    good = kernels.encode(codec, np.ones(600, np.float32))
    value = np.array([bad], np.float32).tobytes()
    body = value[2:] if codec == "bf16" else value
    with pytest.raises(InvalidMessage):
        kernels.check(good[:HEADER_BYTES] + body + good[HEADER_BYTES + len(body) :], codec, 600)


@pytest.mark.parametrize("scale", [-1.0, 2.0**-127, 2.0**121, 3.4e38])
def test_the_check_refuses_scales_that_no_encoder_makes(scale: float) -> None:
    good = kernels.encode("int8", np.ones(600, np.float32))
    with pytest.raises(InvalidMessage, match="scale"):
        kernels.check(good[:HEADER_BYTES] + np.float32(scale).tobytes() + good[HEADER_BYTES + 4 :], "int8", 600)


def test_int8_refuses_what_would_not_be_finite_when_decoded() -> None:
    out = np.zeros(8, np.float32)
    largest = np.full(8, 3.37e38, np.float32)
    kernels.decode(kernels.encode("int8", largest), "int8", 8, out)
    assert np.isfinite(out).all()
    with pytest.raises(NonFiniteError):
        kernels.encode("int8", np.full(8, 3.4e38, np.float32))


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


def test_bytes_cannot_be_averaged_and_levels_are_bounded() -> None:
    data = kernels.encode("raw", np.zeros(16, np.uint8), dtype="F32")
    with pytest.raises(ConfigError, match="averaged"):
        kernels.accumulate(data, "raw", np.float32(1), np.zeros(4, np.float32))
    with pytest.raises(ConfigError, match="zstd_level"):
        kernels.encode("int8", np.zeros(4, np.float32), zstd_level=99)


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
