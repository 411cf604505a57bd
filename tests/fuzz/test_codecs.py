"""Encoded chunks: any bytes decode to the announced number of values, or are refused before memory is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.codecs import HEADER_BYTES, kernels, max_encoded_bytes, parse_header, peek_codec
from atoll.protocol.codecs.table import TABLE
from atoll.protocol.errors import InvalidMessage
from tests.harness.fuzzing import damaged, fuzz, peak_bytes

pytestmark = pytest.mark.timeout(600)  # kernels are compiled before it, where no cache has them

CODECS = list(kernels.ARITHMETIC)
HAS_VALUES = {codec: TABLE[codec].plain is not None for codec in CODECS}
DTYPES = {codec: "F32" if has_values else "U8" for codec, has_values in HAS_VALUES.items()}
NUM_ELEMENTS = 700
FIXED_BYTES = 1 << 18  # of what is loaded or cached at a first call
VALUES = np.linspace(-3, 3, NUM_ELEMENTS, dtype=np.float32)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiling takes memory of its own, where no cache has the kernels yet."""
    kernels.warm_up()


def encoded(codec: str, zstd_level: int) -> bytes:
    values = VALUES if HAS_VALUES[codec] else VALUES.view(np.uint8)[:NUM_ELEMENTS]
    return kernels.encode(codec, values, zstd_level=zstd_level, dtype=DTYPES[codec])


def room(codec: str, num_elements: int) -> Any:
    return np.full(num_elements, 77, np.float32 if HAS_VALUES[codec] else np.uint8)


@pytest.mark.parametrize("codec", CODECS)
@fuzz(150)
@given(data=st.data(), zstd_level=st.sampled_from([0, 3]), num_elements=st.sampled_from([NUM_ELEMENTS, 0, 1, 701]))
def test_any_bytes_decode_or_are_refused(codec: str, zstd_level: int, num_elements: int, data: st.DataObject) -> None:
    received = data.draw(damaged(encoded(codec, zstd_level)))
    dtype, marks = DTYPES[codec], room(codec, num_elements + 8)

    def judge() -> None:
        try:
            parse_header(received, codec=codec, num_elements=num_elements, dtype=dtype)
            kernels.decode(received, codec, num_elements, marks[:num_elements], dtype)
            assert peek_codec(received) == codec
            kernels.check(received, codec, num_elements, dtype)
            assert np.isfinite(marks[:num_elements]).all()
            if HAS_VALUES[codec]:
                kernels.accumulate(received, codec, np.float32(0.5), marks[:num_elements])
        except InvalidMessage:
            pass

    with np.errstate(all="ignore"):
        assert peak_bytes(judge) <= 4 * max_encoded_bytes("fp32", NUM_ELEMENTS) + FIXED_BYTES
    assert (marks[num_elements:] == 77).all()  # nothing beyond the end


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_that_promises_more_than_the_chunk_has_takes_no_memory(codec: str) -> None:
    """Zeros compress a thousandfold: what counts is the size in the layout, not what the frame says."""
    import zstandard

    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    received = encoded(codec, 3)[:HEADER_BYTES] + bomb

    def judge() -> None:
        out = room(codec, NUM_ELEMENTS)
        with pytest.raises(InvalidMessage):
            kernels.decode(received, codec, NUM_ELEMENTS, out, DTYPES[codec])

    assert len(bomb) < 64 << 10
    assert peak_bytes(judge) < 1 << 20


@fuzz(150)
@given(st.binary(max_size=40))
def test_the_codec_that_a_chunk_names_is_a_known_one(data: bytes) -> None:
    try:
        assert peek_codec(data) in TABLE
    except InvalidMessage:
        pass
