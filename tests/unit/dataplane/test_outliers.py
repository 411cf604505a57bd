"""Contributions that stand out from the others': found by their norms, and left in the average of nobody."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.outliers import FACTOR, LARGEST_AVERAGE, LARGEST_CONTRIBUTION, Outlier, above, limits
from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import bundles, kernels
from atoll.protocol.codecs.table import CODECS, DENSE, SPARSE
from atoll.protocol.errors import AverageError, InvalidMessage, NonFiniteError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chunks import paste
from tests.harness.data_plane import apply_all, filled, layout, seeded, sync_data, tensor
from tests.harness.fuzzing import fuzz

Floats = npt.NDArray[np.float32]


def outliers(norms: list[float], base_norm: float, last_norm: Callable[[], float]) -> tuple[Outlier, ...]:
    """Of contributions to a trainable chunk."""
    held_against = limits(norms, base_norm, last_norm, num_others=2, largest=LARGEST_CONTRIBUTION)
    return above(norms, held_against, LARGEST_CONTRIBUTION)


def places(norms: list[float], base: float = 0.0, last: float = 0.0) -> list[int]:
    return [place for place, _, _ in outliers(norms, base, lambda: last)]


def test_of_three_or_more_the_median_of_the_others_decides() -> None:
    assert places([1, 1, 999]) == []
    assert places([1, 1, 1001]) == [2]
    assert places([1, 1e30, 1, 1]) == [1]
    assert places([1, 1e30, 1, 1, 1e25]) == [1, 4]
    assert places([0, 0, 5, 6, 1e9]) == [4], "those that are zero do not count"
    assert outliers([1, 2, 5000], 0.0, lambda: 0.0) == ((2, 5000, 1500.0),)


def test_of_two_the_last_average_decides_or_else_the_values() -> None:
    assert places([1, 1e6], last=1) == [1]
    assert places([1, 999], last=1) == []
    assert places([1, 1e6], base=100) == [1]
    assert places([1, 9e4], base=100) == []
    assert places([1, 9e4], base=100, last=1) == [1]
    assert places([0, 0, 1e6], last=1) == [2], "the others are zero"
    assert places([0, 1e6], last=1) == [1]


def test_where_all_have_changed_nobody_stands_out() -> None:
    assert places([1e6, 1e6], last=1) == []
    assert places([1e6], last=1) == []
    assert places([0, 1e6, 1e6], last=1) == []
    assert places([0, 0, 0], last=1) == []


def test_a_chunk_that_moves_by_less_than_it_is_does_no_harm() -> None:
    """A single number may by chance have moved at one site alone."""
    assert places([1e-9, 1e-9, 1e-3], base=1.0) == []
    assert places([1e-9, 1e-9, 1.1], base=1.0) == [2]
    assert places([1e-3, 1e-9], base=1.0, last=1e-9) == []


def test_beyond_any_use_nothing_is_compared() -> None:
    huge = 2 * LARGEST_CONTRIBUTION
    assert places([huge]) == [0]
    assert places([huge, huge], base=1e300) == [0, 1]
    assert places([1.0, huge]) == [1]
    assert places([math.nan, 1.0, 1.0]) == [0]
    assert places([math.inf, math.inf, math.inf]) == [0, 1, 2]


@fuzz(300)
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-20, 1e30), st.floats()), max_size=9),
    st.floats(),
    st.floats(0, 1e20),
)
def test_no_norms_can_make_most_contributions_stand_out(norms: list[float], base: float, last: float) -> None:
    norms = [abs(n) for n in norms]
    found = outliers(norms, abs(base), lambda: last)
    assert all(not norms[place] <= limit for place, _, limit in found)
    if not any(not n <= LARGEST_CONTRIBUTION for n in norms):
        assert len(found) <= max(1, len(norms) // 2)


@fuzz(200)
@given(st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=12))
def test_the_limit_is_that_of_the_formula(norms: list[float]) -> None:
    expected = [
        (place, norm, FACTOR * statistics.median(norms[:place] + norms[place + 1 :]))
        for place, norm in enumerate(norms)
        if norm > FACTOR * statistics.median(norms[:place] + norms[place + 1 :])
    ]
    assert list(outliers(norms, 0.0, lambda: 0.0)) == [pytest.approx(o) for o in expected]


# --- as the reducer finds them


def trained(outer: OuterState, seed: int, step: float, codec: str) -> SyncData:
    """A site that is `step` away from the base in every trainable value."""
    snapshot = filled(outer.layout)
    for name in ("weight", "weight.scale"):
        values = tensor(outer.layout, snapshot, name)
        noise: Floats = np.random.default_rng(seed).standard_normal(values.size, np.float32)
        values += np.float32(step) * noise
    return sync_data(outer, snapshot, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_an_absurd_contribution_makes_no_payload_and_is_named(tmp_path: Path, codec: str) -> None:
    outer = seeded(tmp_path, layout())
    good = [trained(outer, i, 0.01, codec) for i in (1, 2)]
    for step in (1e30, 1e5) if codec != "fp16" else (1e4,):  # fp16 refuses more
        bad = trained(outer, 3, step, codec)
        with pytest.raises(AverageError, match=r"'weight', elements 0 to 969 \(20 rows of 20\) of norm") as refused:
            good[0].reduce(0, [(7, good[0].contribution(0)), (7, bad.contribution(0)), (9, good[1].contribution(0))])
        ((place, norm, limit),) = refused.value.outliers
        assert place == 1
        if codec in SPARSE:
            assert norm == kernels.norm_of(bad.contribution(0), codec, 400)
        else:
            assert norm == pytest.approx(step * 20, rel=0.3)
        assert norm > step
        assert limit < norm
    # The average of the others is what it is without the measuring.
    assert good[0].reduce(0, [(7, s.contribution(0)) for s in good])


@pytest.mark.parametrize("codec", CODECS)
def test_of_two_the_last_payload_is_what_a_contribution_is_held_against(tmp_path: Path, codec: str) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    good, other = (trained(outer, i, 1e-4, codec) for i in (1, 2))
    payloads = {c: good.reduce(c, [(1, good.contribution(c)), (1, other.contribution(c))]) for c in good.chunks}
    apply_all(outer, payloads, 1, tokens=(1, 1))

    def site(seed: int, step: float, last: Callable[[int], tuple[bytes, tuple[int, ...]] | None]) -> SyncData:
        snapshot = memoryview(bytearray(used.buffer_bytes))
        for chunk in used.chunks[: used.num_sync_chunks]:
            paste(snapshot, chunk, outer.read(chunk.index).data[: chunk.num_bytes])
        values = tensor(used, snapshot, "weight")
        values += np.float32(step) * np.random.default_rng(seed).standard_normal(values.size, np.float32)
        dtypes = {"weight": "F32", "weight.scale": "F32", "zero": "F32"}
        travels = spec_of(SyncSettings(codec=codec), 0, 0)
        return SyncData(used, travels, outer, snapshot, dtypes, last_payload=last)

    for last, is_left_out in ((lambda c: (payloads[c], (1, 1)), True), (lambda _: None, False)):
        absurd = 30.0 if codec != "topk2" else 3.0  # which carries a fifth of its norm
        sites = [site(3, 1e-4, last), site(4, absurd, last)]
        parts = [(1, s.contribution(0)) for s in sites]
        if is_left_out:
            with pytest.raises(AverageError) as refused:
                sites[0].reduce(0, parts)
            assert [place for place, _, _ in refused.value.outliers] == [1]
        else:  # a site that fetched its state does not know: 1,000 times the values are the limit
            assert sites[0].reduce(0, parts)


def test_a_buffer_is_held_against_how_the_others_change_it(tmp_path: Path) -> None:
    used = Layout(
        Manifest.canonical([TensorSpec(name="var", shape=(8,), dtype="F32", role=Role.BUFFER_MEAN)]), 8
    )  # fmt: skip
    outer = OuterState.create(tmp_path, used, (), "test")
    outer.seed(0, np.ones(8, np.float32).tobytes())

    def site(values: float) -> SyncData:
        snapshot = memoryview(bytearray(used.buffer_bytes))
        np.frombuffer(snapshot, np.float32)[:8] = values
        return SyncData(used, spec_of(SyncSettings(), 0, 0), outer, snapshot, {})

    def left_out(*values: float) -> list[int]:
        sites = [site(v) for v in values]
        try:
            sites[0].reduce(0, [(1, s.contribution(0)) for s in sites])
        except AverageError as error:
            return [place for place, _, _ in error.outliers]
        return []

    assert left_out(1.1, 1e30, 1.2) == [1]
    assert left_out(1.1, 1e30) == [1]
    assert left_out(1.0, 1e30) == [1], "the other one did not change it"
    assert left_out(1.1, 100.0, 1.2) == []
    assert left_out(-3e38, -3e38) == [], "both make it a mask"


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_that_outer_updates_would_overflow_by_is_refused(tmp_path: Path, codec: str) -> None:
    outer = seeded(tmp_path, layout())
    data = sync_data(outer, filled(outer.layout), codec)
    size = outer.layout.chunks[0].num_elements
    within = LARGEST_AVERAGE / (64 if codec != "topk2" else 4)  # the values of a transform are larger
    for value, fits in ((within, True), (1.01 * LARGEST_AVERAGE, False), (2.0**110, False)):
        if codec == "fp16":
            with pytest.raises(NonFiniteError, match="too large for fp16"):
                kernels.encode(codec, np.full(size, value, np.float32))
            continue
        part = payload = kernels.encode(codec, np.full(size, value, np.float32))
        data.check(0, part)  # a contribution may be: it is named when it is averaged
        if codec in SPARSE:
            payload = bundles.join(size, [part], over_all=False)
        if fits:
            data.check_payload(0, payload, 1)
        else:
            with pytest.raises(InvalidMessage, match="too large"):
                data.check_payload(0, payload, 1)


@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("size", [1, 511, 512, 4099])
def test_a_norm_is_the_root_of_the_sum_of_squares(codec: str, size: int) -> None:
    for scale in (1e-20, 1.0, 1e30) if codec != "fp16" else (1e-20, 1.0):
        values = np.float32(scale) * np.random.default_rng(size).standard_normal(size, np.float32)
        data, decoded = kernels.encode(codec, values), np.empty(size, np.float32)
        kernels.decode(data, codec, size, decoded)
        with np.errstate(over="ignore"):
            found = kernels.accumulate(data, codec, np.float32(0.5), np.zeros(size, np.float32))
        assert found == pytest.approx(float(np.linalg.norm(decoded.astype(np.float64))), rel=1e-6)
