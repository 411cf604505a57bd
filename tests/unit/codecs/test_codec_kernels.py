"""Kernels against a slow reference in numpy, to the bit; decoders against anything that may arrive."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.codecs import HEADER_BYTES, INT8_BLOCK, EncodedHeader, encoded_bytes, kernels
from atoll.protocol.codecs.vectors import CODEC_VECTORS
from atoll.protocol.errors import ConfigError, InvalidMessage, NonFiniteError, SelfTestFailed
from atoll.protocol.settings import CODECS

Floats = npt.NDArray[np.float32]
SMALLEST_NORMAL = np.float32(2.0**-126)
PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"


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
    assert len(data) == encoded_bytes(codec, size)
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


@given(st.sampled_from(CODECS), sizes, seeds, st.sampled_from([1, 3, 19]))
def test_zstd_changes_the_size_and_nothing_else(codec: str, size: int, seed: int, level: int) -> None:
    values = np.round(sample(seed, size) * 4) / np.float32(4)
    plain, packed = kernels.encode(codec, values), kernels.encode(codec, values, zstd_level=level)
    assert len(packed) <= len(plain) == encoded_bytes(codec, size)
    first, second = np.empty(size, np.float32), np.empty(size, np.float32)
    kernels.decode(plain, codec, size, first)
    kernels.decode(packed, codec, size, second)
    assert first.tobytes() == second.tobytes()


def test_zstd_is_left_out_where_it_does_not_shrink() -> None:
    noise = np.random.default_rng(3).integers(0, 256, 4096, np.uint8)
    assert kernels.encode("raw", noise, zstd_level=3, dtype="U8")[2] == 0
    values = sample(5, 1 << 16)
    shrunk = kernels.encode("bf16", values, zstd_level=1)
    assert len(shrunk) * 1.3 < encoded_bytes("bf16", values.size), "byte planes make Gaussian values compressible"


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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 600, 1024])
def test_values_that_are_not_finite_are_refused(codec: str, bad: float, place: int) -> None:
    values, zeros = np.zeros(1025, np.float32), np.zeros(1025, np.float32)
    values[place] = bad
    for arguments in ({}, {"minus": zeros}):
        with pytest.raises(NonFiniteError):
            kernels.encode(codec, values, **arguments)  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError):
        kernels.encode(codec, zeros, minus=values)


def test_a_difference_that_overflows_is_refused() -> None:
    huge = np.full(8, 3e38, np.float32)
    for codec in CODECS:
        with pytest.raises(NonFiniteError):
            kernels.encode(codec, huge, minus=-huge)


def test_bf16_refuses_what_rounds_to_infinity() -> None:
    largest = np.array([0x7F7F7FFF], np.uint32).view(np.float32)
    assert kernels.encode("bf16", largest)[HEADER_BYTES:] == b"\x7f\x7f"
    with pytest.raises(NonFiniteError):
        kernels.encode("bf16", np.array([0x7F7F8000], np.uint32).view(np.float32))


def chunk_of(codec: str, *, zstd: bool, num_elements: int = 600) -> bytes:
    block = INT8_BLOCK if codec == "int8" else 0
    return EncodedHeader(codec=codec, zstd=zstd, dtype="F32", block=block, num_elements=num_elements).pack()


@given(st.sampled_from(CODECS), st.booleans(), st.binary(max_size=200))
def test_decoders_survive_random_bodies(codec: str, zstd: bool, body: bytes) -> None:
    out = np.full(600, 7, np.float32)
    with pytest.raises(InvalidMessage):
        kernels.decode(chunk_of(codec, zstd=zstd) + body, codec, 600, out)
    with pytest.raises(InvalidMessage):
        kernels.accumulate(chunk_of(codec, zstd=zstd) + body, codec, np.float32(1), out)
    assert (out == 7).all()


@given(st.sampled_from(CODECS), st.integers(0, 2**32 - 1), st.integers(0, 140), st.booleans())
def test_what_is_encoded_passes_the_check(codec: str, seed: int, exponent: int, zstd: bool) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal(600) * 2.0 ** (exponent - 140)).astype(np.float32)
    kernels.check(kernels.encode(codec, values, zstd_level=3 if zstd else 0), codec, 600)


@given(st.sampled_from(CODECS), st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_what_passes_the_check_is_finite_whatever_its_bytes(codec: str, seed: int, top: int) -> None:
    """Random bodies whose exponents are all near the same one, infinity included."""
    generator = np.random.default_rng(seed)
    size = encoded_bytes(codec, 600) - HEADER_BYTES
    body = generator.integers(0, 256, size, np.uint8)
    words = body[: size // 4 * 4].view(np.uint32)
    words[:] = (words & np.uint32(0x807FFFFF)) | np.uint32(top << 23)
    data = chunk_of(codec, zstd=False) + body.tobytes()
    out = np.zeros(600, np.float32)
    kernels.decode(data, codec, 600, out)
    try:
        kernels.check(data, codec, 600)
    except InvalidMessage:
        return
    assert np.isfinite(out).all()


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


def test_the_check_refuses_a_frame_that_does_not_unpack() -> None:
    for codec in CODECS:
        with pytest.raises(InvalidMessage, match="zstd"):
            kernels.check(chunk_of(codec, zstd=True) + b"garbage!", codec, 600)


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
    with pytest.raises(InvalidMessage, match="zstd"):
        kernels.decode(chunk_of("fp32", zstd=True) + bomb, "fp32", 600, np.empty(600, np.float32))


def test_chunks_at_odd_addresses_decode() -> None:
    values = sample(9, 700)
    for codec in CODECS:
        data = kernels.encode(codec, values)
        expected = reference_decode(codec, data, 700)
        for shift in (1, 2, 3):
            moved = memoryview(bytes(shift) + data)[shift:]
            out, acc = np.empty(700, np.float32), np.zeros(700, np.float32)
            kernels.decode(moved, codec, 700, out)
            kernels.accumulate(moved, codec, np.float32(1), acc)
            assert out.tobytes() == expected.tobytes()
            assert (acc == expected).all()


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


def test_the_self_test_passes_here_and_notices_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.self_test()
    vector = CODEC_VECTORS[0]
    for field in ("encoded", "accumulated"):
        for codec in CODECS:
            flipped = bytearray.fromhex(getattr(vector, field)[codec])
            flipped[-1] ^= 1
            values: dict[str, Any] = {k: getattr(vector, k) for k in vector.__dataclass_fields__}
            values[field] = values[field] | {codec: flipped.hex()}
            monkeypatch.setattr(kernels, "CODEC_VECTORS", (type(vector)(**values),))
            with pytest.raises(SelfTestFailed, match=codec):
                kernels.self_test()


def test_the_vectors_of_the_page_are_what_the_kernels_compute() -> None:
    blocks = re.findall(r"```json codec-vector\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == len(CODEC_VECTORS)
    for vector in map(json.loads, blocks):
        values, minus = (np.frombuffer(bytes.fromhex(vector[k]), np.float32) for k in ("values", "minus"))
        assert set(vector["encoded"]) == set(vector["accumulated"]) == set(CODECS)
        for codec in CODECS:
            data = kernels.encode(codec, values, minus=minus)
            assert data.hex() == vector["encoded"][codec]
            assert data == reference_encode(codec, values - minus)
            acc = np.frombuffer(bytes.fromhex(vector["acc"]), np.float32).copy()
            kernels.accumulate(data, codec, np.frombuffer(bytes.fromhex(vector["weight"]), np.float32)[0], acc)
            assert acc.tobytes().hex() == vector["accumulated"][codec]


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
