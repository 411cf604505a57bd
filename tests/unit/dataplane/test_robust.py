"""Averages that contributions which stand out cannot break: clipped and trimmed, and what is said of them."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane import averages
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.dataplane.trimming import trimmed_mean
from atoll.protocol import clipping
from atoll.protocol.codecs import arithmetic, bundles, kernels
from atoll.protocol.codecs.table import DENSE
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import DTYPES, filled, layout, seeded, tensor
from tests.harness.reference_codecs import clipped, left_in

Floats = npt.NDArray[np.float32]
PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
TOKENS = (100, 7, 3000, 20)
norms = st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), max_size=9)


def sites_of(
    folder: Path, codec: str = "fp32", hostile: float = 1.0, **robust: Any
) -> tuple[Layout, list[SyncData], list[memoryview]]:
    """Four sites, and their snapshots: what the last one trained is multiplied."""
    used = layout()
    outer = seeded(folder, used)
    first, snapshots = filled(used), [filled(used, i) for i in (1, 2, 3, 4)]
    for spec in used.manifest.tensors:
        if spec.role is Role.TRAINABLE and all(spec.shape):
            start, last = tensor(used, first, spec.name), tensor(used, snapshots[-1], spec.name)
            last[:] = start + np.float32(hostile) * (last - start)
    travels = spec_of(SyncSettings(codec=codec, **robust), 0, 0)
    return used, [SyncData(used, travels, outer, s, DTYPES) for s in snapshots], snapshots


def trainable(used: Layout) -> list[int]:
    return [c.index for c in used.chunks if c.role is Role.TRAINABLE and c.num_elements]


def decoded(data: bytes, codec: str, size: int) -> Floats:
    out = np.empty(size, np.float32)
    kernels.decode(data, codec, size, out, tokens=TOKENS)
    return out


# --- factors


@given(norms, st.sampled_from([1.0, 1.5, 3.0]))
def test_no_contribution_is_above_so_many_times_the_median(found: list[float], clip: float) -> None:
    factors = clipping.factors(found, clip)
    assert factors == clipped(found, clip)
    moved = [norm for norm in found if norm]
    if len(moved) < 3:
        assert factors == [1.0] * len(found)
        return
    limit = clip * float(np.median(moved))
    for norm, factor in zip(found, factors, strict=True):
        assert factor == 1 or norm > limit
        assert norm * factor <= limit * (1 + 1e-12)


# --- clip


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("robust", ["warn", "clip"])
def test_where_nothing_stands_out_the_bits_are_those_without_a_defence(tmp_path: Path, codec: str, robust: str) -> None:
    found = []
    for mode in ("off", robust):
        used, sites, _ = sites_of(tmp_path / mode, codec, robust=mode, clip=50.0)
        parts = [[(t, s.contribution(c)) for t, s in zip(TOKENS, sites, strict=True)] for c in trainable(used)]
        found.append([sites[0].reduce(c, p) for c, p in zip(trainable(used), parts, strict=True)])
        said = sites[0].averaged()
        assert (said is None) == (mode == "off")
        assert said is None or not any(said.num_high)
    assert found[0] == found[1]


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("is_read", [False, True])
def test_what_stands_out_is_clipped(tmp_path: Path, codec: str, is_read: bool) -> None:
    used, sites, _ = sites_of(tmp_path, codec, hostile=-10.0, robust="clip", clip=1.5)
    high = 0
    for chunk in trainable(used):
        size = used.chunks[chunk].num_elements
        parts = [site.contribution(chunk) for site in sites]
        given_ = [(t, (lambda p=p: p) if is_read else p) for t, p in zip(TOKENS, parts, strict=True)]
        measured = [kernels.accumulate(p, codec, np.float32(1), np.zeros(size, np.float32)) for p in parts]
        average = np.zeros(size, np.float32)
        for count, part, factor in zip(TOKENS, parts, clipped(measured, 1.5), strict=True):
            average = average + np.float32(count / sum(TOKENS) * factor) * decoded(part, codec, size)
        high += clipped(measured, 1.5)[-1] < 1
        assert sites[0].reduce(chunk, given_) == kernels.encode(codec, average)
    said = sites[0].averaged()
    assert said is not None
    assert high > 0
    assert said.num_chunks == len(trainable(used))
    assert said.num_high[-1] == high


def test_no_buffer_is_clipped(tmp_path: Path) -> None:
    for mode in ("off", "clip", "trim"):
        used, sites, snapshots = sites_of(tmp_path / mode, robust=mode, clip=1.0)
        (mean,) = [c.index for c in used.chunks if c.role is Role.BUFFER_MEAN and c.num_elements]
        tensor(used, snapshots[-1], "mean")[:] *= 100
        payload = sites[0].reduce(mean, [(t, s.contribution(mean)) for t, s in zip(TOKENS, sites, strict=True)])
        values = [tensor(used, s, "mean").reshape(-1) for s in snapshots]
        average = np.zeros_like(values[0])
        for count, value in zip(TOKENS, values, strict=True):
            average = average + np.float32(count / sum(TOKENS)) * value
        assert payload == kernels.encode("fp32", average)
        assert sites[0].averaged() is None


# --- trim


def reference_trimmed(values: Floats, weights: Sequence[float], cut: int) -> Floats:
    out = np.empty(values.shape[1], np.float32)
    for i, column in enumerate(values.T):
        order = sorted(range(len(column)), key=lambda k: (column[k], k))
        total = weight = np.float32(0)
        for k in sorted(order[cut : len(order) - cut]):
            total = np.float32(total + np.float32(weights[k]) * column[k])
            weight = np.float32(weight + np.float32(weights[k]))
        out[i] = total / weight
    return out


@given(st.integers(1, 9), st.integers(0, 5), st.integers(1, 40), st.integers(0, 1 << 30))
def test_the_highest_and_lowest_of_each_element_are_cut(number: int, trim: int, size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = np.round(generator.standard_normal((number, size)) * 2).astype(np.float32)  # many are equal, some -0.0
    weights = (generator.random(number) + 0.1).tolist()
    out = np.empty(size, np.float32)
    trimmed_mean(values, weights, trim, out)
    cut = min(trim, (number - 1) // 2)
    assert out.tobytes() == reference_trimmed(values, weights, cut).tobytes()


def test_the_vector_of_the_page_is_trimmed_so() -> None:
    (block,) = re.findall(r"```json trim-vector\n(.*?)```", PAGE.read_text(), re.S)
    vector = json.loads(block)
    values = np.stack([np.frombuffer(bytes.fromhex(row), np.float32) for row in vector["values"]])
    weights = [count / sum(vector["tokens"]) for count in vector["tokens"]]
    found_norms = [arithmetic.norm(row) for row in values]
    for clip, by_trim in vector["averages"].items():
        for trim, average in by_trim.items():
            out = np.empty(values.shape[1], np.float32)
            places = clipping.counted(clipping.factors(found_norms, float(clip)), int(trim))
            trimmed_mean(values[places], [weights[place] for place in places], int(trim), out)
            assert out.tobytes().hex() == average, (clip, trim)


@given(norms, st.sampled_from([1.0, 1.5, 3.0]), st.integers(1, 4))
def test_the_highest_norms_above_the_limit_are_not_in_a_trimmed_average(
    found: list[float], clip: float, trim: int
) -> None:
    places = clipping.counted(clipping.factors(found, clip), trim)
    assert places == left_in(found, clip, trim)
    assert len(places) >= max(len(found) - trim, len(found) / 2)


@pytest.mark.parametrize("codec", ["fp32", "int8", "sign1"])
@pytest.mark.parametrize(("hostile", "is_first"), [(1.0, False), (-10.0, False), (-10.0, True)])
def test_an_average_is_trimmed_and_encoded_once(tmp_path: Path, codec: str, hostile: float, is_first: bool) -> None:
    used, sites, _ = sites_of(tmp_path, codec, hostile=hostile, robust="trim", trim=1)
    num_left_out = 0
    for chunk in trainable(used):
        size = used.chunks[chunk].num_elements
        parts = [site.contribution(chunk) for site in (sites[::-1] if is_first else sites)]
        measured = [kernels.accumulate(p, codec, np.float32(1), np.zeros(size, np.float32)) for p in parts]
        places = left_in(measured, 3.0, 1)
        num_left_out += len(parts) - len(places)
        values = np.stack([decoded(parts[place], codec, size) for place in places])
        average = reference_trimmed(values, [TOKENS[place] / sum(TOKENS) for place in places], 1)
        payload = sites[0].reduce(chunk, list(zip(TOKENS, parts, strict=True)))
        assert payload == kernels.encode(codec, average)
    assert bool(num_left_out) == (hostile != 1)


def test_two_hostile_of_eight_do_not_pull_a_trimmed_average(tmp_path: Path) -> None:
    """Cut element by element alone, it is the mean of the honest values that are nearest to theirs."""
    size = 1 << 12
    generator = np.random.default_rng(5)
    values = (1 + 3 * generator.standard_normal((8, size))).astype(np.float32)
    values[-2:] *= -10
    parts = [(1, kernels.encode("fp32", row)) for row in values]
    way = spec_of(SyncSettings(codec="fp32", robust="trim", trim=2), 0, 0).trainable
    average = decoded(averages.recomputed(way, size, parts), "fp32", size)
    assert abs(float(average.mean()) - 1) < 0.1
    alone = np.empty(size, np.float32)
    trimmed_mean(values, [1 / 8] * 8, 2, alone)
    assert float(alone.mean()) < 0.7


@pytest.mark.parametrize(("honest", "num_hostile"), [((1.0, 4.0), 1), ((1.0, 4.0, 5.0), 2), ((1.0, 1.0, 4.0, 5.0), 3)])
def test_fewer_than_half_whose_norms_are_not_high_decide_no_trimmed_average(
    honest: tuple[float, ...], num_hostile: int
) -> None:
    """Though the norms of some honest sites are: who made fewer steps has a lower one."""
    size, tokens = 64, [1] * len(honest) + [1000] * num_hostile
    rows = [np.full(size, value, np.float32) for value in (*honest, *[-1.0] * num_hostile)]
    parts = [(count, kernels.encode("fp32", row)) for count, row in zip(tokens, rows, strict=True)]
    way = spec_of(SyncSettings(codec="fp32", robust="trim", trim=num_hostile), 0, 0).trainable
    assert decoded(averages.recomputed(way, size, parts), "fp32", size).min() >= min(honest)


# --- bundles


def of_tiles(folder: Path, **sync: Any) -> tuple[Layout, list[SyncData]]:
    used = Layout(
        Manifest.canonical([TensorSpec(name="weight", shape=(130, 128), dtype="F32", role=Role.TRAINABLE)]), 1 << 14
    )
    outer, travels = seeded(folder, used), spec_of(SyncSettings(codec="topk2", **sync), 0, 0)
    return used, [SyncData(used, travels, outer, filled(used, i), {"weight": "F32"}) for i in (1, 2, 3, 4)]


def test_a_bundle_says_at_what_it_is_clipped_and_another_one_is_refused(tmp_path: Path) -> None:
    used, sites = of_tiles(tmp_path / "clip", robust="clip", clip=1.5)
    _, others = of_tiles(tmp_path / "warn", robust="warn", clip=1.5)
    for chunk in trainable(used):
        size = used.chunks[chunk].num_elements
        parts = [site.contribution(chunk) for site in sites]
        payload, plain = (some[0].reduce(chunk, list(zip(TOKENS, parts, strict=True))) for some in (sites, others))
        assert (bundles.split(payload, size).clip, bundles.split(plain, size).clip) == (1.5, 0.0)
        sites[1].check_payload(chunk, payload, 4)
        others[1].check_payload(chunk, plain, 4)
        for some, wrong in ((sites, plain), (others, payload)):
            with pytest.raises(InvalidMessage, match="clipped at"):
                some[1].check_payload(chunk, wrong, 4)


# --- what is said


@pytest.mark.parametrize("codec", ["fp32", "int4", "topk2"])
def test_norms_cosines_and_what_the_codec_loses_are_said(tmp_path: Path, codec: str) -> None:
    used, sites = of_tiles(tmp_path, robust="warn", clip=1.5)
    travels = spec_of(SyncSettings(codec=codec, robust="warn", clip=1.5), 0, 0)
    for site in sites:
        site.travels = travels
    assert sites[0].averaged() is None
    squares, cosines, shares = np.zeros(4), [], []
    for chunk in trainable(used):
        size = used.chunks[chunk].num_elements
        parts = [site.contribution(chunk) for site in sites]
        payload = sites[0].reduce(chunk, list(zip(TOKENS, parts, strict=True)))
        values = [decoded(part, codec, size).astype(np.float64) for part in parts]
        average = decoded(payload, travels.trainable.down, size).astype(np.float64)
        lengths = [float(np.linalg.norm(v)) for v in values]
        squares += np.square(lengths)
        cosines.append(
            [float(v @ average) / n / float(np.linalg.norm(average)) for v, n in zip(values, lengths, strict=True)]
        )
        shares.append(float(np.linalg.norm(average)) / float(np.mean(lengths)))
    said = sites[0].averaged()
    assert said is not None
    assert said.num_chunks == len(trainable(used)) > 1
    assert np.allclose(said.norms, np.sqrt(squares), rtol=1e-5)
    assert np.allclose(said.cosines, cosines[0], rtol=1e-4), "of the first chunk that was averaged"
    assert math.isclose(said.average_share, shares[0], rel_tol=1e-4)
    assert said.last_cosine == (), "there is no average before it"
    least, most = {"fp32": (0.0, 0.0), "int4": (0.01, 0.2), "topk2": (0.5, 1.0)}[codec]
    (codec_error,) = said.codec_error
    assert least <= codec_error <= most


def test_every_eighth_commit_is_looked_at_closer(tmp_path: Path) -> None:
    found = []
    for base_commit in range(17):
        used, sites = of_tiles(tmp_path / str(base_commit), robust="warn", clip=1.5)
        sites[0].base_commit = base_commit
        (chunk, _) = trainable(used)
        sites[0].reduce(chunk, list(zip(TOKENS, [site.contribution(chunk) for site in sites], strict=True)))
        said = sites[0].averaged()
        assert said is not None
        assert bool(said.cosines) == bool(said.codec_error)
        found += [base_commit] if said.cosines else []
    assert found == [0, 8, 16]


def test_a_last_average_that_cannot_be_read_leaves_the_payload_as_it_is(tmp_path: Path) -> None:
    used, sites = of_tiles(tmp_path, robust="warn", clip=1.5)
    chunk, another = trainable(used)
    parts = {c: list(zip(TOKENS, [site.contribution(c) for site in sites], strict=True)) for c in (chunk, another)}
    payload = sites[0].reduce(chunk, parts[chunk])
    sites[1].last_payload = lambda _: (b"no payload", TOKENS)
    assert sites[1].reduce(chunk, parts[chunk]) == payload
    said = sites[1].averaged()
    assert said is not None
    assert (said.num_chunks, said.cosines) == (1, ())
    sites[2].last_payload = lambda _: (payload, TOKENS)
    sites[2].reduce(chunk, parts[chunk])
    again = sites[2].averaged()
    assert again is not None
    assert math.isclose(again.last_cosine[0], 1.0, rel_tol=1e-6)


def test_what_is_kept_of_norms_does_not_grow_with_the_chunks(tmp_path: Path) -> None:
    used, sites = of_tiles(tmp_path, robust="warn", clip=1.5)
    (chunk, *_) = trainable(used)
    parts = list(zip(TOKENS, [site.contribution(chunk) for site in sites], strict=True))

    def peak(times: int) -> int:
        for _ in range(times):
            sites[0].reduce(chunk, parts)
        return tracemalloc.get_traced_memory()[0]

    peak(2)
    tracemalloc.start()
    first = peak(10)
    assert peak(200) - first < 1 << 16
    tracemalloc.stop()
