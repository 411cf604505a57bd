"""Sizes and headers of encoded chunks: exact, and refused when anything differs from the layout."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.codecs import (
    DTYPE_IDS,
    HEADER_BYTES,
    EncodedHeader,
    max_encoded_bytes,
    parse_header,
    peek_codec,
)
from atoll.protocol.codecs.table import CODECS, TABLE
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES

HEADER = EncodedHeader(codec="int8", zstd=False, dtype="F32", num_elements=1000)
CHUNK = HEADER.pack() + bytes(max_encoded_bytes("int8", 1000) - HEADER_BYTES)


def test_every_codec_and_dtype_has_a_number_of_its_own() -> None:
    assert set(CODECS) | {"raw", "unchanged", "bundle"} == set(TABLE)
    assert set(DTYPE_IDS) == set(DTYPE_BYTES)
    assert len({codec.number for codec in TABLE.values()}) == len(TABLE)
    assert len(set(DTYPE_IDS.values())) == len(DTYPE_IDS)


def test_sizes() -> None:
    assert max_encoded_bytes("fp32", 1000) == 16 + 4000
    assert max_encoded_bytes("bf16", 1000) == 16 + 2000
    assert max_encoded_bytes("int8", 1000) == 16 + 2 * 4 + 1000
    assert max_encoded_bytes("int8", 1024) == 16 + 2 * 4 + 1024
    assert max_encoded_bytes("int8", 1025) == 16 + 3 * 4 + 1025
    assert max_encoded_bytes("raw", 7, 8) == 16 + 56


def test_a_header_is_read_as_written() -> None:
    assert parse_header(CHUNK, codec="int8", num_elements=1000) == HEADER
    assert parse_header(memoryview(CHUNK), codec="int8", num_elements=1000) == HEADER
    assert peek_codec(CHUNK) == "int8"
    assert HEADER.pack().hex() == "01030001" + "00020000" + "e803000000000000"


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0, 2, "format version 2"),
        (1, 2, "codec bf16"),
        (1, 77, "codec 77"),
        (2, 2, "flags"),
        (3, DTYPE_IDS["F64"], "dtype F64"),
        (5, 4, "block 1024"),
        (8, 0, "elements"),
    ],
)
def test_any_other_header_is_refused(offset: int, value: int, text: str) -> None:
    chunk = bytearray(CHUNK)
    chunk[offset] = value
    with pytest.raises(InvalidMessage, match=text):
        parse_header(chunk, codec="int8", num_elements=1000)


def test_truncated_and_oversized_chunks_are_refused() -> None:
    for chunk in (CHUNK[:-1], CHUNK + b"x", CHUNK[:15], b""):
        with pytest.raises(InvalidMessage, match="bytes"):
            parse_header(chunk, codec="int8", num_elements=1000)
    packed = EncodedHeader(codec="int8", zstd=True, dtype="F32", num_elements=1000).pack()
    with pytest.raises(InvalidMessage, match="fewer than"):
        parse_header(packed + CHUNK[HEADER_BYTES:], codec="int8", num_elements=1000)
    assert parse_header(packed + b"x", codec="int8", num_elements=1000).zstd


@given(st.binary(max_size=64), st.sampled_from(sorted(TABLE)), st.integers(0, 40), st.sampled_from(["F32", "I64"]))
def test_random_bytes_are_refused_or_right(data: bytes, codec: str, num_elements: int, dtype: str) -> None:
    try:
        header = parse_header(data, codec=codec, num_elements=num_elements, dtype=dtype)
    except InvalidMessage:
        return
    assert header.pack() == data[:HEADER_BYTES]
    assert header.zstd or len(data) == max_encoded_bytes(codec, num_elements, DTYPE_BYTES[dtype])


def test_names_and_sizes_need_no_numpy() -> None:
    code = "import sys, atoll.protocol.codecs as _; from atoll.coordinator import service; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert {"atoll.protocol.codecs.table", "atoll.protocol.codecs.compression"} <= loaded
    assert not loaded & {"numpy", "numba", "torch", "atoll.protocol.codecs.kernels"}
