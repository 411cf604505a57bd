"""What the coordinator computes of one chunk is what the sites compute, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.outer_update import updated
from atoll.protocol.codecs import kernels, unchanged
from atoll.protocol.codecs.table import DENSE
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.recompute import recomputed, record_bytes
from tests.harness.data_plane import an_optimizer, step_of, update_of

NESTEROV = OuterSettings(learning_rate=0.7, momentum=0.9)
SGD = OuterSettings(optimizer="sgd", learning_rate=0.3)
ADAMW = OuterSettings(optimizer="adamw", momentum=0.9)
SIGN = OuterSettings(optimizer="signsgd")
ONE_BIT = an_optimizer(ADAMW, strategy="momentum", every=1, warmup_commits=1).settings
NUM_ELEMENTS = 70_001  # more than are computed at once, and no multiple of a block


def floats(seed: int, num: int = NUM_ELEMENTS) -> np.ndarray:
    """Of every size that training knows and does not know: subnormal numbers, both zeros, large ones."""
    generator = np.random.default_rng(seed)
    found = generator.standard_normal(num) * 10.0 ** generator.integers(-44, 3, num)
    found[:2] = 0.0, -0.0
    return found.astype(np.float32)


@pytest.mark.parametrize("zstd_level", [0, 3])
@pytest.mark.parametrize("codec", DENSE)
@pytest.mark.parametrize("settings", [NESTEROV, SGD, ADAMW, SIGN], ids=lambda s: s.optimizer)
def test_a_trained_chunk_comes_out_as_at_the_sites(
    tmp_path: object, settings: OuterSettings, codec: str, zstd_level: int
) -> None:
    optimizer = an_optimizer(settings)
    rows = [floats(i) for i in range(1 + len(optimizer.slots))]
    if settings.optimizer == "adamw":
        rows[2] = np.abs(rows[2])
    payload = kernels.encode(codec, floats(7), zstd_level=zstd_level)
    average = np.empty(NUM_ELEMENTS, np.float32)
    kernels.decode(payload, codec, NUM_ELEMENTS, average)
    out = np.empty((len(rows), NUM_ELEMENTS), np.float32)
    update_of(1, optimizer).apply(rows[0], rows[1:], average, out[0], list(out[1:]))
    found = recomputed(
        role=Role.TRAINABLE,
        dtype="F32",
        num_elements=NUM_ELEMENTS,
        step=step_of(settings),
        record=b"".join(row.tobytes() for row in rows),
        payload=payload,
    )
    is_same = found == out.tobytes()  # by itself: pytest takes minutes to say where so many bytes differ
    assert is_same


@pytest.mark.parametrize("commit", [1, 2])
def test_a_step_of_1_bit_adam_comes_out_as_at_the_sites(commit: int) -> None:
    rows, average = [floats(i, 999) for i in range(3)], floats(7, 999)
    rows[2] = np.abs(rows[2])
    update, out = update_of(commit, OuterOptimizer(ONE_BIT)), np.empty((3, 999), np.float32)
    update.apply(rows[0], rows[1:], average, out[0], list(out[1:]))
    found = recomputed(
        role=Role.TRAINABLE,
        dtype="F32",
        num_elements=999,
        step=update.of_group(0),
        record=b"".join(row.tobytes() for row in rows),
        payload=kernels.encode("fp32", average),
    )
    assert found == out.tobytes()


def specs() -> list[TensorSpec]:
    return [
        TensorSpec(name="counts", shape=(9,), dtype="I64", role=Role.BUFFER_LOWEST),
        TensorSpec(name="mean", shape=(9,), dtype="BF16", role=Role.BUFFER_MEAN),
        TensorSpec(name="w", shape=(9,), dtype="F32", role=Role.TRAINABLE),
    ]


@pytest.mark.parametrize("is_unchanged", [False, True])
def test_every_role_comes_out_as_in_the_outer_state(tmp_path, is_unchanged: bool) -> None:  # type: ignore[no-untyped-def]
    layout = Layout(Manifest.canonical(specs()))
    optimizer = an_optimizer(NESTEROV)
    outer = OuterState.create(tmp_path, layout, optimizer.slots, "run")
    for chunk in layout.chunks:
        spec = layout.manifest.tensors[chunk.tensor]
        is_raw = chunk.role is Role.BUFFER_LOWEST
        dtype = spec.dtype if is_raw else "F32"
        record = np.random.default_rng(chunk.index).bytes(record_bytes(chunk.role, spec.dtype, 9, NESTEROV))
        if not is_raw:
            record = floats(chunk.index, len(record) // 4).tobytes()
        payload = unchanged(9, dtype)
        if not is_unchanged or chunk.role is Role.TRAINABLE:
            values = np.arange(72, dtype=np.uint8) if is_raw else floats(3, 9)
            payload = kernels.encode("raw" if is_raw else "fp32", values, dtype=dtype)
        outer.put(chunk.index, 0, record)
        expected = updated(outer.layout, chunk.index, record, payload, update_of(1, optimizer))
        found = recomputed(
            role=chunk.role,
            dtype=spec.dtype,
            num_elements=9,
            step=step_of(NESTEROV),
            record=record,
            payload=payload,
        )
        assert found == expected


def test_what_is_of_another_chunk_is_refused() -> None:
    payload = kernels.encode("fp32", floats(1, 9))
    for record, data in (
        (bytes(9 * 8), payload[:-1]),
        (bytes(9 * 8 - 4), payload),
        (bytes(9 * 8), unchanged(9, "F32")),
    ):
        with pytest.raises(InvalidMessage):
            recomputed(
                role=Role.TRAINABLE,
                dtype="F32",
                num_elements=9,
                step=step_of(NESTEROV),
                record=record,
                payload=data,
            )
