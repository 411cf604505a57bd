"""Encoded chunks: any bytes decode to the announced number of values, or are refused before memory is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.codecs import HEADER_BYTES, encoded_bytes, kernels, parse_header, peek_codec
from atoll.protocol.errors import InvalidMessage
from tests.harness.fuzzing import damaged, fuzz, peak_bytes

CODECS = ["fp32", "bf16", "int8", "raw"]
NUM_ELEMENTS = 700
FIXED_BYTES = 1 << 18  # of what is loaded or cached at a first call
VALUES = np.linspace(-3, 3, NUM_ELEMENTS, dtype=np.float32)


def encoded(codec: str, zstd_level: int) -> bytes:
    values = VALUES.view(np.uint8)[:NUM_ELEMENTS] if codec == "raw" else VALUES
    return kernels.encode(codec, values, zstd_level=zstd_level, dtype="U8" if codec == "raw" else "F32")


@pytest.mark.parametrize("codec", CODECS)
@fuzz(150)
@given(data=st.data(), zstd_level=st.sampled_from([0, 3]), num_elements=st.sampled_from([NUM_ELEMENTS, 0, 1, 701]))
def test_any_bytes_decode_or_are_refused(codec: str, zstd_level: int, num_elements: int, data: st.DataObject) -> None:
    received = data.draw(damaged(encoded(codec, zstd_level)))
    dtype = "U8" if codec == "raw" else "F32"
    marks: Any = np.full(num_elements + 8, 77, np.uint8 if codec == "raw" else np.float32)

    def judge() -> None:
        try:
            parse_header(received, codec=codec, num_elements=num_elements, dtype=dtype)
            kernels.decode(received, codec, num_elements, marks[:num_elements], dtype)
            if codec != "raw":
                kernels.accumulate(received, codec, np.float32(0.5), marks[:num_elements])
            assert peek_codec(received) == codec
        except InvalidMessage:
            pass

    with np.errstate(all="ignore"):
        assert peak_bytes(judge) <= 4 * encoded_bytes("fp32", NUM_ELEMENTS) + FIXED_BYTES
    assert (marks[num_elements:] == 77).all()  # nothing beyond the end


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_that_promises_more_than_the_chunk_has_takes_no_memory(codec: str) -> None:
    """Zeros compress a thousandfold: what counts is the size in the layout, not what the frame says."""
    import zstandard

    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    received = encoded(codec, 3)[:HEADER_BYTES] + bomb

    def judge() -> None:
        out = np.empty(NUM_ELEMENTS, np.uint8 if codec == "raw" else np.float32)
        with pytest.raises(InvalidMessage):
            kernels.decode(received, codec, NUM_ELEMENTS, out, "U8" if codec == "raw" else "F32")

    assert len(bomb) < 64 << 10
    assert peak_bytes(judge) < 1 << 20


@fuzz(150)
@given(st.binary(max_size=40))
def test_the_codec_that_a_chunk_names_is_a_known_one(data: bytes) -> None:
    try:
        assert peek_codec(data) in [*CODECS, "unchanged"]
    except InvalidMessage:
        pass
