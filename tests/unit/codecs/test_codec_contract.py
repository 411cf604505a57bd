"""What holds of every codec in the table, whichever it is."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import codecs
from atoll.protocol.codecs import (
    FLAG_ZSTD,
    HEADER_BYTES,
    EncodedHeader,
    kernels,
    max_encoded_bytes,
    parse_header,
    peek_codec,
)
from atoll.protocol.codecs.arithmetic import NOTHING, Terms
from atoll.protocol.codecs.table import BUNDLE, CODECS, DENSE, TABLE, UNCHANGED
from atoll.protocol.errors import InvalidMessage, NonFiniteError, SelfTestFailed
from atoll.protocol.spec import most_bundled

pytestmark = pytest.mark.timeout(600)  # a kernel that is in no cache is compiled at its first use

Floats = npt.NDArray[np.float32]
PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"

sizes = st.sampled_from([0, 1, 2, 3, 31, 255, 257, 511, 512, 513, 1024, 1026, 1700, 2051])
seeds = st.integers(0, 1 << 30)
exponents = st.sampled_from([-149, -140, -130, -126, -122, -30, 0, 100])


def exponent_for(codec: str, exponent: int) -> int:
    """fp16 refuses what the others take."""
    return min(exponent, 8) if codec == "fp16" else exponent


def sample(seed: int, num_elements: int, exponent: int = 0) -> Floats:
    values = np.random.default_rng(seed).standard_normal(num_elements, dtype=np.float32)
    return np.ldexp(values, exponent).astype(np.float32)


def chunk_of(codec: str, *, zstd: bool) -> bytes:
    return EncodedHeader(codec=codec, zstd=zstd, dtype="F32", num_elements=600).pack()


def test_a_codec_is_a_row_a_module_and_a_line_of_the_page() -> None:
    folder, page = Path(codecs.__file__).parent, PAGE.read_text()
    assert [name for name in TABLE if not (folder / f"{name}.py").exists()] == [UNCHANGED, BUNDLE], "of no one's own"
    for name, codec in TABLE.items():
        assert re.search(rf"\| codec: (.*, )?{codec.number} {name}\b", page)
        assert f"\n| {name} | " in page
        if name not in (UNCHANGED, BUNDLE):
            arithmetic = kernels.ARITHMETIC.get(name) or kernels.SPARSE_ARITHMETIC[name]
            assert bool(arithmetic.golden) == (name != "raw")


def test_the_page_for_people_has_each_codec_with_its_bits_and_for_how_many_sites_it_is() -> None:
    page = (PAGE.parent / "codecs.md").read_text()
    table = page.partition("\nBelow 8 bits")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.]+)(?: up)? \| [\d.e-]+ \| [^|]+ \|$", table, re.M)
    assert sorted(name for name, _ in rows) == sorted(CODECS)
    for name, bits in rows:
        found = 8 * (max_encoded_bytes(name, 1 << 24) - HEADER_BYTES) / (1 << 24)
        assert abs(float(bits) - found) <= 0.02 * found, f"{name} has {found} bits"
    assert f"above {most_bundled('topk2')} sites take `int4`" in " ".join(page.split())


@given(st.sampled_from(DENSE), sizes, seeds, exponents)
def test_a_chunk_is_what_its_row_says_wherever_it_is_decoded(codec: str, size: int, seed: int, exponent: int) -> None:
    exponent = exponent_for(codec, exponent)
    values, minus = sample(seed, size, exponent), sample(seed + 1, size, exponent)
    encode = partial(kernels.encode, codec, zstd_level=0)
    data = encode(values, minus=minus)
    assert data == encode(values - minus)
    error, beta = sample(seed + 3, size, exponent), np.float32(0.9)
    assert encode(values, minus=minus, error=error) == encode((values - minus) + error)
    scaled = beta * error
    assert encode(values, error=error, beta=beta) == encode(values + scaled)
    assert encode(values, minus=minus, error=error, beta=beta) == encode((values - minus) + scaled)
    assert len(data) == max_encoded_bytes(codec, size)
    assert peek_codec(data) == codec
    assert parse_header(data, codec=codec, num_elements=size).pack() == data[:HEADER_BYTES]
    out = np.empty(size, np.float32)
    kernels.decode(data, codec, size, out)
    plain = TABLE[codec].plain
    assert plain is not None
    assert plain(data[HEADER_BYTES:], size).tobytes() == out.tobytes(), "without numpy"
    weight, acc = np.float32(1 / 3), sample(seed + 2, size, exponent)
    wanted = acc + weight * out
    norm = kernels.accumulate(data, codec, weight, acc)
    assert acc.tobytes() == wanted.astype(np.float32).tobytes()
    assert math.isclose(norm, float(np.sqrt(np.sum(out.astype(np.float64) ** 2))), rel_tol=1e-6)


def test_a_codec_that_zstd_makes_smaller_has_it() -> None:
    values = sample(1, 1 << 16)
    for codec in DENSE:
        data = kernels.encode(codec, values)
        assert bool(data[2] & FLAG_ZSTD) == bool(TABLE[codec].zstd_level)
        assert len(data) < max_encoded_bytes(codec, values.size) or not TABLE[codec].zstd_level


@given(st.sampled_from(DENSE), sizes, seeds, st.sampled_from([1, 3, 19]))
def test_zstd_changes_the_size_and_nothing_else(codec: str, size: int, seed: int, level: int) -> None:
    values = np.round(sample(seed, size) * 4) / np.float32(4)
    plain, packed = (kernels.encode(codec, values, zstd_level=n) for n in (0, level))
    assert len(packed) <= len(plain) == max_encoded_bytes(codec, size)
    first, second = np.empty(size, np.float32), np.empty(size, np.float32)
    kernels.decode(plain, codec, size, first)
    kernels.decode(packed, codec, size, second)
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 600, 1024])
def test_values_that_are_not_finite_are_refused(codec: str, bad: float, place: int) -> None:
    values, zeros = np.zeros(1025, np.float32), np.zeros(1025, np.float32)
    values[place] = bad
    none = NOTHING
    for first, minus, error in (
        *((values, m, e) for m in (none, zeros) for e in (none, zeros)),
        (zeros, values, none), (zeros, none, values), (zeros, zeros, values),
    ):  # fmt: skip
        with pytest.raises(NonFiniteError):
            kernels.encode(codec, first, minus=minus, error=error)


def test_a_difference_that_overflows_is_refused() -> None:
    huge = np.full(8, 3e38, np.float32)
    for codec in DENSE:
        with pytest.raises(NonFiniteError):
            kernels.encode(codec, huge, minus=-huge)


@given(st.sampled_from(DENSE), st.booleans(), st.binary(max_size=200))
def test_decoders_survive_random_bodies(codec: str, zstd: bool, body: bytes) -> None:
    out = np.full(600, 7, np.float32)
    with pytest.raises(InvalidMessage):
        kernels.decode(chunk_of(codec, zstd=zstd) + body, codec, 600, out)
    with pytest.raises(InvalidMessage):
        kernels.accumulate(chunk_of(codec, zstd=zstd) + body, codec, np.float32(1), out)
    assert (out == 7).all()


@given(st.sampled_from(DENSE), st.integers(0, 2**32 - 1), st.integers(0, 140), st.booleans())
def test_what_is_encoded_passes_the_check(codec: str, seed: int, exponent: int, zstd: bool) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal(600) * 2.0 ** (exponent - 140)).astype(np.float32)
    kernels.check(kernels.encode(codec, values, zstd_level=3 if zstd else 0), codec, 600)


@given(st.sampled_from(DENSE), st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_what_passes_the_check_is_finite_whatever_its_bytes(codec: str, seed: int, top: int) -> None:
    """Random bodies whose exponents are all near the same one, infinity included."""
    generator = np.random.default_rng(seed)
    size = max_encoded_bytes(codec, 600) - HEADER_BYTES
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


def test_the_check_refuses_a_frame_that_does_not_unpack() -> None:
    for codec in DENSE:
        with pytest.raises(InvalidMessage, match="zstd"):
            kernels.check(chunk_of(codec, zstd=True) + b"garbage!", codec, 600)


def test_chunks_at_odd_addresses_decode() -> None:
    values = sample(9, 700)
    for codec in DENSE:
        data, expected = kernels.encode(codec, values), np.empty(700, np.float32)
        kernels.decode(data, codec, 700, expected)
        for shift in (1, 2, 3):
            moved = memoryview(bytes(shift) + data)[shift:]
            out, acc = np.empty(700, np.float32), np.zeros(700, np.float32)
            kernels.decode(moved, codec, 700, out)
            kernels.accumulate(moved, codec, np.float32(1), acc)
            assert out.tobytes() == expected.tobytes()
            assert (acc == expected).all()


def tried_with(monkeypatch: pytest.MonkeyPatch, codec: str, **changes: Any) -> None:
    """The self-test on a host whose arithmetic differs in this."""
    monkeypatch.setitem(kernels.ARITHMETIC, codec, replace(kernels.ARITHMETIC[codec], **changes))
    kernels.self_test()


@pytest.mark.parametrize("codec", DENSE)
def test_the_self_test_passes_here_and_notices_a_single_bit(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    kernels.self_test()
    arithmetic = kernels.ARITHMETIC[codec]

    def encode(terms: Terms, body: npt.NDArray[np.uint8]) -> bool:
        is_finite = arithmetic.encode(terms, body)
        body[-1] ^= 1
        return is_finite

    def decode(body: npt.NDArray[np.uint8], out: Floats) -> None:
        arithmetic.decode(body, out)
        out.view(np.uint32)[700] ^= 1

    def accumulate(body: npt.NDArray[np.uint8], weight: np.float32, acc: Floats) -> float:
        norm = arithmetic.accumulate(body, weight, acc)
        acc.view(np.uint32)[700] ^= 1
        return norm

    for changes in ({"encode": encode}, {"decode": decode}, {"accumulate": accumulate}):
        with pytest.raises(SelfTestFailed, match=f"codec {codec}: this host computes other bits"):
            tried_with(monkeypatch, codec, **changes)


@pytest.mark.parametrize("codec", DENSE)
def test_the_self_test_notices_other_arithmetic(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    arithmetic = kernels.ARITHMETIC[codec]

    def flushed(body: npt.NDArray[np.uint8], weight: np.float32, acc: Floats) -> float:
        norm = arithmetic.accumulate(body, weight, acc)
        acc[np.abs(acc) < np.finfo(np.float32).tiny] = 0.0
        return norm

    def fused(body: npt.NDArray[np.uint8], weight: np.float32, acc: Floats) -> float:
        values = np.empty_like(acc)
        arithmetic.decode(body, values)
        acc[:] = (acc.astype(np.float64) + np.float64(weight) * values).astype(np.float32)
        return 0.0

    for accumulate in (flushed, fused):
        with pytest.raises(SelfTestFailed, match=codec):
            tried_with(monkeypatch, codec, accumulate=accumulate)


def test_the_self_test_notices_halves_that_are_not_rounded_to_even(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(terms: Terms, body: npt.NDArray[np.uint8]) -> bool:
        values = terms.values - terms.minus if terms.minus.size else terms.values
        body.view(np.uint16)[:] = (values.view(np.uint32) + np.uint32(0x8000)) >> 16
        return True

    with pytest.raises(SelfTestFailed, match="bf16"):
        tried_with(monkeypatch, "bf16", encode=away)


def test_the_vectors_of_the_page_are_what_the_codecs_compute() -> None:
    blocks = re.findall(r"```json codec-vector\n(.*?)```", PAGE.read_text(), re.S)
    vectors = [json.loads(block) for block in blocks]
    assert [vector["name"] for vector in vectors] == ["ordinary", "subnormal", "below"]
    for vector in vectors:
        values, minus, weight = (
            np.frombuffer(bytes.fromhex(vector[k]), np.float32) for k in ("values", "minus", "weight")
        )
        for codec in DENSE:
            data = kernels.encode(codec, values, minus=minus, zstd_level=0)
            acc = np.frombuffer(bytearray.fromhex(vector["acc"]), np.float32)
            kernels.accumulate(data, codec, weight[0], acc)
            assert data.hex() == vector["encoded"][codec]
            assert acc.tobytes().hex() == vector["accumulated"][codec]
        assert vector["encoded"].keys() == vector["accumulated"].keys() == set(DENSE)
