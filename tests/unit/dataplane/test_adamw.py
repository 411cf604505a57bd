"""Gradients as they travel, and what the nodes make of their average: AdamW with the rates of the commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.outliers import LARGEST_AVERAGE_GRADIENT, LARGEST_GRADIENT
from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.codecs import kernels
from atoll.protocol.errors import AverageError, InvalidMessage
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import Commit
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.spec import Contribution, spec_of
from tests.harness.chunks import elements_of
from tests.harness.data_plane import DTYPES, RUN, an_optimizer, commit_record, filled, seeded, sync_data, tensor
from tests.harness.data_plane import layout as a_layout

Floats = npt.NDArray[np.float32]
ADAMW = an_optimizer(OuterSettings(optimizer="adamw", momentum=0.9, beta2=0.75, epsilon=1e-3))
RATES = (0.5, 0.25, 0.125, 0.0)
STEPS = 20
"""Of the run, in each commit."""


def a_commit(number: int) -> Commit:
    return replace(commit_record(number), rates=RATES)


def test_a_contribution_is_the_gradient_that_the_snapshot_holds(tmp_path: Path) -> None:
    outer = seeded(tmp_path, a_layout())
    snapshot = filled(outer.layout, 3)
    data = sync_data(outer, snapshot, "fp32", strategy="gradient", every=1)
    chunk = next(c for c in outer.layout.chunks if outer.layout.name_of(c.index) == "weight")
    found = np.empty(chunk.num_elements, np.float32)
    kernels.decode(data.contribution(chunk.index), "fp32", chunk.num_elements, found)
    assert np.array_equal(found, tensor(outer.layout, snapshot, "weight")[elements_of(chunk)])


def test_what_a_codec_loses_of_a_gradient_is_left_over(tmp_path: Path) -> None:
    outer = seeded(tmp_path, a_layout())
    snapshot = filled(outer.layout, 3)
    data = sync_data(outer, snapshot, "sign1", strategy="gradient", every=1)
    chunk = next(c for c in outer.layout.chunks if outer.layout.name_of(c.index) == "weight")
    left, sent = np.empty((2, chunk.num_elements), np.float32)
    norm = data.left_over(chunk.index, left)
    kernels.decode(data.contribution(chunk.index), "sign1", chunk.num_elements, sent)
    gradient = tensor(outer.layout, snapshot, "weight")[elements_of(chunk)]
    assert np.array_equal(left, gradient - sent)
    assert norm == pytest.approx(np.linalg.norm(gradient))


def test_a_gradient_whose_square_would_not_fit_is_refused(tmp_path: Path) -> None:
    outer = seeded(tmp_path, a_layout())
    snapshot = filled(outer.layout, 3)
    values = tensor(outer.layout, snapshot, "weight.scale")
    chunk = next(c.index for c in outer.layout.chunks if outer.layout.name_of(c.index) == "weight.scale")
    data = sync_data(outer, snapshot, "fp32", strategy="gradient", every=1)
    for share, fits in ((0.5, True), (2.0, False)):
        values[:] = share * LARGEST_GRADIENT
        contributions = [(1, data.contribution(chunk))] * 2
        if fits:
            data.reduce(chunk, contributions)
        else:
            with pytest.raises(AverageError, match=r"weight\.scale"):
                data.reduce(chunk, contributions)
    payload = kernels.encode("fp32", np.full(1, 2 * LARGEST_AVERAGE_GRADIENT, np.float32))
    with pytest.raises(InvalidMessage):
        data.check_payload(chunk, payload, 2)
    data.check_payload(chunk, kernels.encode("fp32", np.full(1, 0.5 * LARGEST_AVERAGE_GRADIENT, np.float32)), 2)


def test_each_parameter_group_moves_by_its_own_rates(tmp_path: Path) -> None:
    specs = [
        TensorSpec(name=name, shape=(700,), dtype="F32", role=Role.TRAINABLE, group=group)
        for group, name in enumerate("ab")
    ]
    layout = Layout(Manifest.canonical(specs), 512)
    outer = OuterState.create(tmp_path, layout, ADAMW.slots, RUN)
    generator = np.random.default_rng(0)
    for chunk in layout.chunks:
        outer.seed(chunk.index, generator.standard_normal(chunk.num_elements, np.float32).tobytes())
    expected = {c.index: np.frombuffer(outer.read(c.index).data, np.float32).reshape(3, -1) for c in layout.chunks}
    for number in (1, 2):
        t = STEPS * number
        c1, c2 = np.float32(1 - 0.9**t), np.float32(1 - 0.75**t)
        for chunk in layout.chunks:
            gradient = generator.standard_normal(chunk.num_elements, np.float32)
            outer.apply(chunk.index, kernels.encode("fp32", gradient), ADAMW.at(a_commit(number)))
            group = layout.manifest.tensors[chunk.tensor].group
            rate, decay = np.float32(RATES[2 * group]), np.float32(RATES[2 * group + 1])
            x, m, v = expected[chunk.index]
            m = np.float32(0.9) * m + np.float32(1 - 0.9) * gradient
            v = np.float32(0.75) * v + np.float32(0.25) * (gradient * gradient)
            x = x - rate * ((m / c1) / (np.sqrt(v / c2) + np.float32(1e-3)) + decay * x)
            expected[chunk.index] = np.stack([x, m, v])
    for chunk in layout.chunks:
        assert outer.read(chunk.index).data == expected[chunk.index].tobytes()


ONE_BIT = an_optimizer(
    ADAMW.settings.outer, strategy="momentum", every=1, warmup_commits=2, codec="sign1", error_feedback=1.0
)


def test_after_the_warm_up_a_contribution_is_the_momentum_that_the_gradient_moves(tmp_path: Path) -> None:
    outer = seeded(tmp_path, a_layout(), slots=ADAMW.slots)
    chunk = next(c for c in outer.layout.chunks if outer.layout.name_of(c.index) == "weight")
    record = np.random.default_rng(5).standard_normal(3 * chunk.num_elements, np.float32)
    outer.put(chunk.index, 2, record.tobytes())
    snapshot = filled(outer.layout, 3)
    gradient = tensor(outer.layout, snapshot, "weight")[elements_of(chunk)]
    settings = replace(ONE_BIT.settings.sync, codec="fp32", error_feedback=0.0, warmup_codec="bf16")
    sent = {}
    for base, codec in ((1, "bf16"), (2, "fp32")):
        travels = spec_of(settings, base, 0)
        data = SyncData(outer.layout, travels, outer, snapshot, DTYPES, base_commit=base, beta1=0.9)
        assert (travels.trainable.up, travels.trainable.down) == (codec, codec)
        sent[base] = np.empty(chunk.num_elements, np.float32)
        kernels.decode(data.contribution(chunk.index), codec, chunk.num_elements, sent[base])
    momentum = record[chunk.num_elements : 2 * chunk.num_elements]
    assert np.array_equal(sent[2], np.float32(0.9) * momentum + np.float32(1 - 0.9) * gradient)
    assert np.allclose(sent[1], gradient, rtol=1 / 128)


def test_momenta_of_local_steps_travel_as_they_are(tmp_path: Path) -> None:
    outer = seeded(tmp_path, a_layout(), slots=ADAMW.slots)
    chunk = next(c for c in outer.layout.chunks if outer.layout.name_of(c.index) == "weight")
    snapshot = filled(outer.layout, 3)
    settings = replace(ONE_BIT.settings.sync, codec="fp32", error_feedback=0.0, local_doubling=1)
    travels = spec_of(settings, 3, 0)
    assert travels.trainable.contribution is Contribution.LOCAL_MOMENTUM
    data = SyncData(outer.layout, travels, outer, snapshot, DTYPES, base_commit=3, beta1=0.9)
    sent = np.empty(chunk.num_elements, np.float32)
    kernels.decode(data.contribution(chunk.index), "fp32", chunk.num_elements, sent)
    assert np.array_equal(sent, tensor(outer.layout, snapshot, "weight")[elements_of(chunk)])


def test_after_the_warm_up_the_variance_stays_and_no_element_leaps() -> None:
    generator = np.random.default_rng(0)
    x, m, v, average = generator.standard_normal((4, 300), np.float32)
    v = np.square(v) * np.float32(1e-3)
    v[:5] = 0  # never trained
    for number in (2, 3, 9):
        out_x, out_m, out_v = np.empty_like(x), np.empty_like(x), np.empty_like(x)
        ONE_BIT.at(a_commit(number)).apply(x, [m, v], average, out_x, [out_m, out_v])
        is_frozen, steps = number > 2, STEPS * number - max(0, number - 2)
        assert np.array_equal(out_v, v) is is_frozen
        assert np.array_equal(out_m, average) is is_frozen
        if is_frozen:
            c1, c2 = np.float32(1 - 0.9 ** (STEPS * number)), np.float32(1 - 0.75**steps)
            step = (average / c1) / (np.sqrt(v / c2) + np.float32(1e-3))
            assert np.abs(step).max() > 100, "else nothing is held back"
            step = step.clip(-1, 1)
            assert np.array_equal(out_x, x - np.float32(0.5) * (step + np.float32(0.25) * x))


@pytest.mark.parametrize("last", ["bf16", "sign1"])
def test_the_last_average_is_known_whatever_codec_it_came_in(tmp_path: Path, last: str) -> None:
    outer = seeded(tmp_path, a_layout(), slots=ADAMW.slots)
    snapshot = filled(outer.layout, 3)
    chunk = next(c for c in outer.layout.chunks if outer.layout.name_of(c.index) == "weight")
    payload = kernels.encode(last, np.full(chunk.num_elements, 1e-9, np.float32))
    travels = spec_of(ONE_BIT.settings.sync, 2, 0)
    data = SyncData(outer.layout, travels, outer, snapshot, DTYPES, base_commit=2, beta1=0.9)
    asked: list[int] = []
    data.last_payload = lambda index: asked.append(index) or (payload, (1,))  # type: ignore[func-returns-value]
    data.reduce(chunk.index, [(1, data.contribution(chunk.index))] * 2)
    assert chunk.index in asked


def test_the_variance_is_corrected_by_the_steps_of_the_warm_up() -> None:
    """One that is nearly all of the last steps' would be another one, once it stays, at each step."""
    slow = an_optimizer(replace(ADAMW.settings.outer, beta2=0.999), strategy="momentum", every=1, warmup_commits=2)
    records = [replace(commit_record(number), rates=RATES, run_step=number) for number in (2, 3, 50)]
    bias = [slow.at(record).of_group(0).bias[1] for record in records]
    assert bias == [pytest.approx(1 - 0.999**2)] * 3


def test_the_variance_moves_in_commits_of_gradients_alone() -> None:
    phases = an_optimizer(
        replace(ADAMW.settings.outer, beta2=0.999), strategy="momentum", every=1, warmup_commits=6, gradient_doubling=1,
        local_doubling=1,
    )  # fmt: skip
    steps = {1: 1, 2: 2, 3: 3, 4: 4, 6: 6, 7: 7, 8: 9, 9: 13}
    for before in (0, 1000):  # of the run that this one was resumed from
        found = {}
        for commit, run_step in steps.items():
            record = replace(commit_record(commit), rates=RATES, run_step=before + run_step)
            step = phases.at(record).of_group(0)
            found[commit] = step.is_frozen
            num = before + {1: 1, 2: 2, 3: 2}.get(commit, 3)
            assert step.bias[1] == pytest.approx(1 - 0.999**num), commit
            assert step.bias[0] == pytest.approx(1 - 0.9 ** (before + run_step)), commit
        assert [commit for commit, is_frozen in found.items() if not is_frozen] == [1, 2, 4]
    cut_short = replace(commit_record(9), rates=RATES, run_step=10)
    assert phases.at(cut_short).of_group(0).bias[1] == pytest.approx(1 - 0.999**3), "and no less"


def test_rates_of_a_group_that_the_commit_does_not_have_are_refused() -> None:
    update = ADAMW.at(replace(commit_record(1), rates=RATES[:2]))
    with pytest.raises(InvalidMessage, match="no rates of parameter group 1"):
        update.of_group(1)
