"""What a reducer takes of a contributor, no other site refuses in its payload: else the reducer has the blame."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import HEADER_BYTES, kernels
from atoll.protocol.codecs.table import CODECS, SPARSE, TABLE
from atoll.protocol.errors import AverageError, InvalidMessage, NonFiniteError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import filled, seeded

TOKENS = (100, 7, 3000, 20)
LAST = len(TOKENS) - 1
STRATEGIES: dict[str, dict[str, Any]] = {"diloco": {}, "gradient": {"strategy": "gradient", "every": 1}}
LIMITS = {"diloco": 2.0**96, "gradient": 2.0**60}
FUZZED = 120
"""Bodies of each codec and strategy."""


def of_tiles(folder: Path, **sync: Any) -> tuple[Layout, list[SyncData]]:
    """Four sites, and a matrix of two tiles a row in three chunks: 64, 64 and 2 rows."""
    spec = TensorSpec(name="weight", shape=(130, 128), dtype="F32", role=Role.TRAINABLE)
    used = Layout(Manifest.canonical([spec]), 1 << 13)
    outer, travels = seeded(folder, used), spec_of(SyncSettings(**sync), 0, 0)
    return used, [SyncData(used, travels, outer, filled(used, i), {"weight": "F32"}) for i in (1, 2, 3, 4)]


def with_scale(data: bytes, codec: str, num_elements: int, scale: float) -> bytes:
    """The last scale of the first block is that one, and no value of the chunk has it."""
    form = TABLE[codec].sparse
    assert form is not None
    scales, entries, _ = form.parts_bytes(num_elements)
    if form.scales == 1:
        data = kernels.encode(codec, np.zeros(num_elements, np.float32), width=128)  # no entries
    body = np.frombuffer(data, np.uint8, offset=HEADER_BYTES).copy()
    body[:scales].view(np.float32)[form.scales - 1] = scale
    if form.scales > 1:
        body[scales : scales + entries] &= 0xFF ^ form.bucket  # all have the first level
    return data[:HEADER_BYTES] + body.tobytes()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", SPARSE)
def test_a_scale_that_no_value_has_names_its_site(tmp_path: Path, codec: str, strategy: str) -> None:
    used, sites = of_tiles(tmp_path, codec=codec, **STRATEGIES[strategy])
    limit = LIMITS[strategy]
    for chunk in range(len(used.chunks)):
        size = used.chunks[chunk].num_elements
        parts = [site.contribution(chunk) for site in sites]
        for scale, is_taken in ((limit, False), (2.0**127, False), (limit / 2, True)):
            parts[LAST] = with_scale(parts[LAST], codec, size, scale)
            sites[0].check(chunk, parts[LAST])
            if is_taken:
                payload = sites[0].reduce(chunk, list(zip(TOKENS, parts, strict=True)))
                sites[1].check_payload(chunk, payload, len(TOKENS))
                continue
            with pytest.raises(AverageError, match="weight") as found:
                sites[0].reduce(chunk, list(zip(TOKENS, parts, strict=True)))
            assert [place for place, _, _ in found.value.outliers] == [LAST]


@pytest.mark.parametrize("codec", SPARSE)
def test_a_chunk_of_other_columns_than_the_layouts_is_refused_as_it_arrives_and_in_a_payload(
    tmp_path: Path, codec: str
) -> None:
    used, sites = of_tiles(tmp_path, codec=codec)
    for chunk in range(len(used.chunks)):
        values = np.ones(used.chunks[chunk].num_elements, np.float32)
        good, wrong = (kernels.encode(codec, values, width=width) for width in (128, 64))
        sites[0].check(chunk, good)
        with pytest.raises(InvalidMessage, match="64 columns, the layout's chunk has 128"):
            sites[0].check(chunk, wrong)
        payload = sites[0].reduce(chunk, [(count, wrong) for count in TOKENS])
        with pytest.raises(InvalidMessage, match="64 columns, the layout's chunk has 128"):
            sites[1].check_payload(chunk, payload, len(TOKENS))


def damaged(data: bytes, codec: str, num_elements: int, draw: random.Random) -> bytes:
    """Some of its bytes are other ones, or its scales, or its columns."""
    out = bytearray(data)
    match draw.randrange(5):
        case 0:
            for _ in range(draw.randint(1, 8)):
                out[draw.randrange(HEADER_BYTES, len(out))] = draw.choice((0, 1, 63, 64, 127, 128, 254, 255))
        case 1:
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(HEADER_BYTES, len(out) - 3) & ~3
                out[at : at + 4] = np.float32(2.0 ** draw.randint(-126, 127)).tobytes()
        case 2:
            out[4:8] = draw.choice((0, 32, 64, 128, 256, 64 * 128, num_elements)).to_bytes(4, "little")
        case 3:
            values = np.zeros(num_elements, np.float32)
            values[draw.randrange(num_elements)] = 2.0 ** draw.randint(-140, 126)
            try:
                return kernels.encode(codec, values, width=draw.choice((0, 64, 128)))
            except NonFiniteError:
                return data
        case _:
            out = bytearray(out[: draw.randint(0, len(out))])
    return bytes(out)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", CODECS)
def test_what_a_reducer_takes_of_each_no_site_refuses_in_its_payload(tmp_path: Path, codec: str, strategy: str) -> None:
    used, sites = of_tiles(tmp_path, codec=codec, **STRATEGIES[strategy])
    draw, num_taken, num_named, num_refused = random.Random(f"{codec} {strategy}"), 0, 0, 0
    good = [[site.contribution(chunk) for site in sites] for chunk in range(len(used.chunks))]
    for _ in range(FUZZED):
        chunk = draw.randrange(len(used.chunks))
        parts, size = list(good[chunk]), used.chunks[chunk].num_elements
        bad = draw.sample(range(len(TOKENS)), draw.choice((1, 1, 2, 4)))
        for place in bad:
            parts[place] = damaged(parts[place], codec, size, draw)
        try:
            for part in parts:
                sites[0].check(chunk, part)
        except InvalidMessage:
            num_refused += 1
            continue
        payload, named = reduced(sites[0], chunk, parts)
        if payload is None:
            num_named += 1
            assert named == bad if len(bad) == 1 else named
        else:
            num_taken += 1
            sites[1].check_payload(chunk, payload, len(TOKENS))
    assert min(num_taken, num_refused) > 0
    assert num_named > 0 or codec == "fp16", "which has no numbers that are as large"


def reduced(site: SyncData, chunk: int, parts: list[bytes]) -> tuple[bytes | None, list[int]]:
    """Or whose contributions stand out, by their places."""
    try:
        return site.reduce(chunk, list(zip(TOKENS, parts, strict=True))), []
    except AverageError as error:
        return None, [place for place, _, _ in error.outliers]
