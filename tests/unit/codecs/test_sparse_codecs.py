"""Codecs that carry some of the values, and bundles of what they encode, against a slow reference, to the bit."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.codecs import (
    HEADER_BYTES,
    EncodedHeader,
    bundles,
    kernels,
    max_encoded_bytes,
    parse_header,
    peek_codec,
    table,
)
from atoll.protocol.codecs.arithmetic import NOTHING
from atoll.protocol.codecs.compression import compressed
from atoll.protocol.codecs.sparse import DCT1K4, TOPK2
from atoll.protocol.codecs.table import BUNDLE, SPARSE
from atoll.protocol.errors import InvalidMessage, NonFiniteError, SelfTestFailed
from tests.harness import reference_codecs

pytestmark = pytest.mark.timeout(600)  # a kernel that is in no cache is compiled at its first use

Floats = npt.NDArray[np.float32]
WIDTHS = {
    0: 64, 1: 64, 63: 1, 64: 64, 65: 65, 300: 100, 4096: 4096, 4097: 1, 9000: 90, 8192: 128, 12800: 128, 24576: 192
}  # fmt: skip
"""Of chunks of so many elements; those of the last three have tiles."""
sizes = st.sampled_from(list(WIDTHS))
codecs = st.sampled_from(SPARSE)
seeds = st.integers(0, 1 << 30)
exponents = st.sampled_from([-149, -140, -130, -126, -122, -30, 0, 100])


def sample(seed: int, num_elements: int, exponent: int = 0) -> Floats:
    """Many of them are equal, and some zero."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(num_elements, dtype=np.float32)
    is_coarse = generator.random(num_elements) < generator.choice([0, 0.5, 1])
    values[is_coarse] = np.round(values[is_coarse] * 2) / 2
    values[generator.random(num_elements) < generator.choice([0, 0, 0.99])] = 0
    return np.ldexp(values, exponent).astype(np.float32)


def columns_of(size: int) -> int:
    return TOPK2.columns_of(WIDTHS[size], size)


def test_tiles_are_gone_through_where_there_are_any() -> None:
    assert [columns_of(size) for size in WIDTHS] == [64] * 9 + [128, 128, 192]
    for size in WIDTHS:
        columns, order = columns_of(size), reference_codecs.in_tiles(size, columns_of(size))
        starts = [TOPK2.segment_start(segment, columns, size) for segment in range(TOPK2.num_segments(size))]
        assert starts == order[::64].tolist()


@given(codecs, sizes, seeds, exponents)
def test_kernels_give_the_bits_of_the_reference(codec: str, size: int, seed: int, exponent: int) -> None:
    columns = columns_of(size)
    values, minus, error = (sample(seed + i, size, exponent) for i in range(3))
    beta = np.float32(0.9)
    data = kernels.encode(codec, values, minus=minus, error=error, beta=beta, width=WIDTHS[size])
    header = EncodedHeader(codec=codec, zstd=False, dtype="F32", num_elements=size, columns=columns)
    assert data == header.pack() + reference_codecs.encode_sparse(codec, (values - minus) + beta * error, columns)
    assert len(data) == max_encoded_bytes(codec, size)
    assert peek_codec(data) == codec
    assert parse_header(data, codec=codec, num_elements=size) == header
    kernels.check(data, codec, size)
    sent, is_sent = reference_codecs.decode_sparse(codec, data[HEADER_BYTES:], size)
    out = np.full(size, 7, np.float32)
    kernels.decode(data, codec, size, out)
    assert (out == reference_codecs.finished(codec, sent, size, columns)).all()
    assert kernels.norm_of(data, codec, size) == reference_codecs.norm_of(sent)
    if codec != "topk2":
        acc, weights = sample(seed + 3, sent.size), sample(seed + 4, sent.size)
        weight, of_site = np.float32(1 / 3), np.float32(1 / 7)
        wanted, added = np.where(is_sent, acc + weight * sent, acc), np.where(is_sent, weights + of_site, weights)
        scatter = kernels.SPARSE_ARITHMETIC[codec].scatter
        scatter(np.frombuffer(data, np.uint8, offset=HEADER_BYTES).copy(), size, columns, weight, of_site, acc, weights)
        assert acc.tobytes() == wanted.astype(np.float32).tobytes()
        assert weights.tobytes() == added.astype(np.float32).tobytes()


def test_the_table_of_cosines_is_one() -> None:
    for size in (1, 2, 3, 40, 63, 64):
        found = reference_codecs.matrix(size)
        k, i = np.arange(size)[:, None], np.arange(size)[None]
        exact = np.sqrt(np.where(k, 2, 1) / size) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))
        assert np.allclose(found, exact, atol=1e-7)
        assert np.allclose(found.astype(np.float64) @ found.T, np.eye(size), atol=1e-6)
    assert np.count_nonzero(reference_codecs.matrix(3)) == 8, "what is zero is zero"


def test_a_wave_is_sent_as_one_value() -> None:
    wave = np.cos(np.pi * (2 * np.arange(64) + 1) * 5 / 128)
    values = np.outer(-wave, wave).astype(np.float32).ravel()
    data = kernels.encode("dct1", values, width=64)
    sent, is_sent = reference_codecs.decode_sparse("dct1", data[HEADER_BYTES:], values.size)
    assert is_sent[5 * 64 + 5]
    assert sent[5 * 64 + 5] < 0
    out = np.empty(values.size, np.float32)
    kernels.decode(data, "dct1", values.size, out)
    assert np.corrcoef(out, values)[0, 1] > 0.15, "the scale is the mean of 32 values, of which 31 are next to nothing"


def test_the_largest_of_each_tile_are_sent_and_of_equal_ones_the_first() -> None:
    values = np.zeros((128, 128), np.float32)
    values[3, 70], values[100, 5], values[127, 127] = 1.0, -2.0, 3.0
    values[:64, :64] = 0.5
    data = kernels.encode("topk2", values.ravel(), width=128)
    out = np.empty(values.size, np.float32)
    kernels.decode(data, "topk2", values.size, out)
    found = out.reshape(128, 128)
    assert (found[0, :64] == 0.5).all(), "64 of the first tile, in the order of its rows"
    assert not found[1:64, :64].any()
    assert (found[64:] == values[64:]).all()
    assert (found[:, 64:] == values[:, 64:]).all()


@given(sizes, seeds)
def test_what_was_sent_is_not_left_over_and_the_rest_is(size: int, seed: int) -> None:
    values = sample(seed, size)
    out = np.empty(size, np.float32)
    kernels.decode(kernels.encode("topk2", values), "topk2", size, out)
    left = values - out
    assert (left[out == 0] == values[out == 0]).all()
    assert np.sum(left.astype(np.float64) ** 2) <= np.sum(values.astype(np.float64) ** 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8100])
def test_values_that_are_not_finite_are_refused(bad: float, place: int) -> None:
    values, zeros = np.zeros(8192, np.float32), np.zeros(8192, np.float32)
    values[place] = bad
    for first, minus, error in ((values, NOTHING, NOTHING), (zeros, values, NOTHING), (zeros, zeros, values)):
        with pytest.raises(NonFiniteError):
            kernels.encode("topk2", first, minus=minus, error=error)
    with pytest.raises(NonFiniteError, match="too large for topk2"):
        kernels.encode("topk2", np.full(4096, 3e38, np.float32))


def test_chunks_at_odd_addresses_decode() -> None:
    data, expected = kernels.encode("topk2", sample(9, 9000)), np.empty(9000, np.float32)
    kernels.decode(data, "topk2", 9000, expected)
    for shift in (1, 2, 3):
        out = np.empty(9000, np.float32)
        kernels.decode(memoryview(bytes(shift) + data)[shift:], "topk2", 9000, out)
        assert out.tobytes() == expected.tobytes()


# --- what arrives


def damaged(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def test_the_check_refuses_entries_that_have_no_place() -> None:
    size = 130  # two segments and a rest of two elements: 8 bytes of scales, 3 entries, 1 byte of segments
    values = np.zeros(size, np.float32)
    values[[5, 70, 129]] = 1, 2, 3
    data = kernels.encode("topk2", values)
    first = HEADER_BYTES + 8
    assert (data[first : first + 3], data[first + 3]) == (bytes([5, 6, 1 + 64]), 0b10101)
    kernels.check(data, "topk2", size)
    for wrong in (
        damaged(data, first + 2, 2),  # beyond the last element
        damaged(data, first + 3, 0b1000101),  # in a segment after the last
        damaged(data, first + 3, 0b1111),  # four entries
        damaged(data, first + 3, 0b0101),  # two, and a third byte that is not zero
        damaged(damaged(data, first + 3, 0b10011), first, 6),  # the same place twice
        damaged(damaged(data, first + 3, 0b10011), first, 7),  # one after the other, the wrong way round
    ):
        with pytest.raises(InvalidMessage):
            kernels.check(wrong, "topk2", size)
    for scale in (-1.0, 2.0**-127, np.inf, np.nan):
        with pytest.raises(InvalidMessage, match="scale"):
            kernels.check(data[:HEADER_BYTES] + np.float32(scale).tobytes() + data[HEADER_BYTES + 4 :], "topk2", size)
    with pytest.raises(InvalidMessage, match="too large"):
        kernels.check(data, "topk2", size, below=1.5)
    out = np.zeros(size, np.float32)
    with pytest.raises(InvalidMessage, match="beyond its end"):
        kernels.decode(damaged(data, first + 2, 2), "topk2", size, out)


def test_where_several_buckets_share_an_entry_the_check_refuses_what_has_no_place() -> None:
    """17 segments of a transform: 9 buckets, of which the last is half of one, with room for 2 entries."""
    size = 1080
    header = EncodedHeader(codec="dct1k4", zstd=False, dtype="F32", num_elements=size, columns=64).pack()

    def body(entries: tuple[int, int], *bits: int) -> bytes:
        places = sum(1 << bit for bit in bits).to_bytes(2, "little")
        return header + np.float32(0.5).tobytes() + bytes(entries) + places

    assert max_encoded_bytes("dct1k4", size) == len(body((0, 0)))
    assert max_encoded_bytes("dct1k4", 1 << 20) == HEADER_BYTES + 256 * (4 + 4 + 5)
    data = body((5, 3 + 128), 0, 1 + 8)
    kernels.check(data, "dct1k4", size)
    sent, is_sent = reference_codecs.decode_sparse("dct1k4", data[HEADER_BYTES:], size)
    assert np.flatnonzero(is_sent).tolist() == [5, 8 * 128 + 3]
    assert sent[is_sent].tolist() == [0.5, -0.5]
    assert list(DCT1K4.entries(data[HEADER_BYTES:], size)) == [(5, 0.5), (8 * 128 + 3, -0.5)]
    for wrong in (
        body((5, 64 + 128), 0, 1 + 8),  # beyond the last value
        body((5, 3), 0, 1 + 9),  # in a bucket after the last
        body((5, 3), 0, 1 + 7, 2 + 8),  # three entries
        body((5, 3), 0),  # one, and a second byte that is not zero
        body((5, 5), 0, 1),  # the same place twice
    ):
        with pytest.raises(InvalidMessage):
            kernels.check(wrong, "dct1k4", size)


def test_the_four_largest_of_a_transform_are_sent() -> None:
    values = sample(3, 8192)
    data = kernels.encode("dct1k4", values, width=128)
    _, is_sent = reference_codecs.decode_sparse("dct1k4", data[HEADER_BYTES:], values.size)
    _, of_more = reference_codecs.decode_sparse("dct1", kernels.encode("dct1", values, width=128)[HEADER_BYTES:], 8192)
    assert (is_sent.sum(), of_more.sum()) == (8, 64)
    assert of_more[is_sent].all()


@pytest.mark.parametrize("columns", [0, 63, 65, 128, 1 << 31])
def test_a_chunk_is_only_as_wide_as_it_can_be(columns: int) -> None:
    header = EncodedHeader(codec="topk2", zstd=False, dtype="F32", num_elements=4097, columns=columns)
    with pytest.raises(InvalidMessage, match=r"rows of \d+, which topk2 cannot have"):
        parse_header(header.pack(), codec="topk2", num_elements=4097)


# --- bundles


def bundled(
    size: int, seed: int, number: int, *, over_all: bool, codec: str = "topk2", clip: float = 0.0
) -> tuple[bytes, list[bytes]]:
    """The second one stands out."""
    factors = [np.float32(9 if i == 1 else 1) for i in range(number)]
    parts = [kernels.encode(codec, f * sample(seed + i, size), width=WIDTHS[size]) for i, f in enumerate(factors)]
    return bundles.join(size, parts, over_all=over_all, clip=clip), parts


@settings(max_examples=60)
@given(codecs, sizes, seeds, st.integers(1, 5), st.booleans(), st.sampled_from([0, 1, 1.5]), st.data())
def test_a_bundle_is_averaged_as_the_reference_does(  # noqa: PLR0917
    codec: str, size: int, seed: int, number: int, over_all: bool, clip: float, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(1, 1 << 20), min_size=number, max_size=number))
    bundle, parts = bundled(size, seed, number, over_all=over_all, codec=codec, clip=clip)
    assert peek_codec(bundle) == BUNDLE
    assert len(bundle) == bundles.max_bundle_bytes(codec, size, number, is_clipped=clip > 0)
    kernels.check(bundle, BUNDLE, size)
    decoded = [reference_codecs.decode_sparse(codec, part[HEADER_BYTES:], size) for part in parts]
    average = reference_codecs.average_of(decoded, tokens, over_all=over_all, clip=clip)
    expected = reference_codecs.finished(codec, average, size, columns_of(size))
    out = np.full(size, 7, np.float32)
    kernels.decode(bundle, BUNDLE, size, out, tokens=tokens)
    assert (out == expected).all()
    if size < 9000 or codec == "topk2":  # it takes its time
        assert (np.array(bundles.plain(bundle, size, tokens), np.float32) == out).all(), "without numpy"
    found = bundles.split(bundle, size)
    assert [bytes(part) for part in found.contributions] == parts, "verbatim"


def test_an_element_counts_where_it_was_sent() -> None:
    values = np.zeros((3, 64), np.float32)
    values[0, 1], values[1, 1], values[2, 5] = 1.0, 4.0, 8.0
    parts = [kernels.encode("topk2", row) for row in values]
    for over_all, expected in ((False, (2.0, 8.0)), (True, (1.5, 2.0))):
        out = np.empty(64, np.float32)
        kernels.decode(bundles.join(64, parts, over_all=over_all), BUNDLE, 64, out, tokens=(2, 1, 1))
        assert out[[1, 5]].tolist() == list(expected)
        assert np.count_nonzero(out) == 2


@pytest.mark.parametrize("tokens", [(), (1,), (1, 1, 1), (1, 0), (2, -1)])
def test_a_bundle_has_a_contribution_for_each_weight(tokens: tuple[int, ...]) -> None:
    bundle, _ = bundled(300, 1, 2, over_all=False)
    for average in (
        lambda: kernels.decode(bundle, BUNDLE, 300, np.empty(300, np.float32), tokens=tokens),
        lambda: bundles.plain(bundle, 300, tokens),
    ):
        with pytest.raises(InvalidMessage, match="2 contributions for the weights"):
            average()


def clipped_at(bundle: bytes, clip: float) -> bytes:
    return bundle[:2] + b"\4" + bundle[3:] + struct.pack("<d", clip)


def test_a_bundle_that_is_none_is_refused() -> None:
    good, parts = bundled(300, 1, 2, over_all=False)
    dense, other = (kernels.encode(codec, sample(1, 300), zstd_level=0) for codec in ("int8", "dct1"))
    wrong = [
        good[:-1], good + b"x", good[:20], good[:15], b"",
        damaged(good, 2, 1), damaged(good, 2, 8), damaged(good, 4, 0), damaged(good, 4, 3), damaged(good, 6, 1),
        damaged(good, 8, 0), damaged(good, 3, 2), damaged(good, HEADER_BYTES, 1), damaged(good, HEADER_BYTES + 3, 255),
        damaged(good, HEADER_BYTES + 8 + 1, 3), good[:2] + b"\4" + good[3:],
        *(clipped_at(good, clip) for clip in (0.0, 0.5, -2.0, math.inf, math.nan)),
        damaged(good, len(good) - len(parts[1]) + 8, 3),
        bundles.join(300, [dense, dense], over_all=False), bundles.join(300, [parts[0], dense], over_all=False),
        bundles.join(300, [good], over_all=False), parts[0], bundles.join(300, [parts[0], other], over_all=False),
    ]  # fmt: skip
    wide, narrow = (kernels.encode("topk2", sample(1, 8192), width=width) for width in (128, 64))
    with pytest.raises(InvalidMessage, match=r"\[64, 128\] columns wide"):
        bundles.split(bundles.join(8192, [wide, narrow], over_all=False), 8192)
    for data in wrong:
        with pytest.raises(InvalidMessage):
            bundles.split(data, 300)
        with pytest.raises(InvalidMessage):
            kernels.check(data, BUNDLE, 300)


def test_a_contribution_behind_zstd_is_refused_wherever_it_arrives() -> None:
    """The coordinator decodes without that stage: it would take what the sites hold for wrong."""
    good = kernels.encode("topk2", np.zeros(4096, np.float32), zstd_level=3)
    assert good == kernels.encode("topk2", np.zeros(4096, np.float32))
    flagged = good[:2] + b"\1" + good[3:HEADER_BYTES] + compressed(good[HEADER_BYTES:], 3)
    assert len(flagged) < len(good)
    for refuse in (
        lambda: kernels.check(flagged, "topk2", 4096),
        lambda: kernels.decode(flagged, "topk2", 4096, np.empty(4096, np.float32)),
        lambda: bundles.split(bundles.join(4096, [good, flagged], over_all=False), 4096),
    ):
        with pytest.raises(InvalidMessage, match="flags 0x01, which topk2 cannot have"):
            refuse()


# --- self-test


@pytest.mark.parametrize("codec", SPARSE)
def test_the_self_test_notices_a_single_bit(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    arithmetic = kernels.SPARSE_ARITHMETIC[codec]
    assert table.TABLE[codec].sparse is not None

    def encode(terms: Any, columns: int, body: npt.NDArray[np.uint8]) -> bool:
        is_finite = arithmetic.encode(terms, columns, body)
        body[-1] ^= 1
        return is_finite

    def scatter(*given: Any) -> float:
        norm, acc = arithmetic.scatter(*given), given[5]
        acc.view(np.uint32)[700:701] ^= 1
        return norm

    def flushed(*given: Any) -> float:
        norm, acc = arithmetic.scatter(*given), given[5]
        acc[np.abs(acc) < np.finfo(np.float32).tiny] = 0.0
        return norm

    def unweighted(*given: Any) -> float:
        norm, weights = arithmetic.scatter(*given), given[6]
        weights[weights > 0] = 1
        return norm

    def lengthened(*given: Any) -> float:
        return arithmetic.scatter(*given) + 1e-3

    others = [replace(arithmetic, scatter=other) for other in (scatter, flushed, unweighted, lengthened)]
    for other in (replace(arithmetic, encode=encode), *others):
        monkeypatch.setitem(kernels.SPARSE_ARITHMETIC, codec, other)
        with pytest.raises(SelfTestFailed, match=f"codec {codec}: this host computes other bits"):
            kernels.self_test()
