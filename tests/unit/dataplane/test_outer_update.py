"""Outer optimizers, the worker's cast and PUBLISH: formulas with every operation rounded by itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane import kernels, publish
from atoll.node.dataplane.bases import cast_base
from atoll.node.threads import pool_of
from atoll.protocol.errors import ConfigError, SelfTestFailed
from atoll.protocol.layout import Role
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings, validate
from tests.harness.chunks import cut_out, paste
from tests.harness.data_plane import (
    DTYPES,
    an_optimizer,
    apply_all,
    filled,
    layout,
    payloads,
    seeded,
    tensor,
    update_of,
    values_of,
)

Floats = npt.NDArray[np.float32]
PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
sizes = st.sampled_from([0, 1, 15, 16, 17, 1000])
seeds = st.integers(0, 1 << 30)
exponents = st.sampled_from([-149, -127, -60, 0, 60])


def sample(seed: int, size: int, exponent: int) -> Floats:
    values = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    return np.ldexp(values, exponent).astype(np.float32)


@given(sizes, seeds, exponents, st.sampled_from([0.7, 1.0, 0.3]), st.sampled_from([0.0, 0.5, 0.9]))
def test_nesterov_rounds_every_operation(size: int, seed: int, exponent: int, rate: float, momentum: float) -> None:
    optimizer = an_optimizer(OuterSettings(optimizer="nesterov", learning_rate=rate, momentum=momentum))
    assert optimizer.slots == ("momentum",)
    x, m, d = (sample(seed + i, size, exponent) for i in range(3))
    lr, mu = np.float32(rate), np.float32(momentum)
    new_m = mu * m + d
    new_x = x - lr * (d + mu * new_m)
    out_x, out_m = np.empty_like(x), np.empty_like(m)
    update_of(1, optimizer).apply(x, [m], d, out_x, [out_m])
    assert out_m.tobytes() == new_m.tobytes()
    assert out_x.tobytes() == new_x.tobytes()
    update_of(1, optimizer).apply(x, [m], d, x, [m])  # in place
    assert (x.tobytes(), m.tobytes()) == (new_x.tobytes(), new_m.tobytes())


@given(sizes, seeds, exponents, st.sampled_from([0.7, 1.0, 0.3]))
def test_sgd_rounds_every_operation(size: int, seed: int, exponent: int, rate: float) -> None:
    optimizer = an_optimizer(OuterSettings(optimizer="sgd", learning_rate=rate))
    assert optimizer.slots == ()
    x, d = sample(seed, size, exponent), sample(seed + 1, size, exponent)
    expected = x - np.float32(rate) * d
    out = np.empty_like(x)
    update_of(1, optimizer).apply(x, [], d, out, [])
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (OuterSettings(optimizer="adam"), 'outer.optimizer = "adam"'),
        (OuterSettings(learning_rate=0.0), "outer.learning_rate"),
        (OuterSettings(learning_rate=float("nan")), "outer.learning_rate"),
        (OuterSettings(momentum=1.0), "outer.momentum"),
        (OuterSettings(momentum=-0.1), "outer.momentum"),
    ],
)
def test_settings_out_of_range_are_refused(settings: OuterSettings, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        validate(RunSettings(run_id="r", steps=1, data="local", outer=settings))


def vectors_of_the_page() -> list[dict[str, str]]:
    return [json.loads(block) for block in re.findall(r"```json outer-vector\n(.*?)```", PAGE.read_text(), re.S)]


@pytest.mark.parametrize("name", ["sgd", "nesterov"])
@pytest.mark.parametrize("output", [-1, -2])
def test_the_self_test_passes_here_and_notices_other_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, output: int
) -> None:
    kernels.self_test()
    compute = getattr(kernels, name)

    def other_bits(*arrays: Any) -> None:
        compute(*arrays)
        arrays[output if name == "nesterov" else -1].view(np.uint32)[40] ^= 1

    monkeypatch.setattr(kernels, name, other_bits)
    with pytest.raises(SelfTestFailed, match="of ordinary numbers: this host computes other bits"):
        kernels.self_test()


def test_the_self_test_notices_numbers_that_are_flushed_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = kernels.sgd

    def flushed(*arguments: Any) -> None:
        compute(*arguments)
        values = arguments[-1]
        values[np.abs(values) < np.finfo(np.float32).tiny] = 0.0

    monkeypatch.setattr(kernels, "sgd", flushed)
    with pytest.raises(SelfTestFailed, match="of subnormal numbers"):
        kernels.self_test()


def test_the_self_test_notices_fused_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(x: Floats, d: Floats, learning_rate: np.float32, out: Floats) -> None:
        out[:] = (x.astype(np.float64) - np.float64(learning_rate) * d).astype(np.float32)

    monkeypatch.setattr(kernels, "sgd", fused)
    with pytest.raises(SelfTestFailed, match="of ordinary numbers"):
        kernels.self_test()


def test_the_vectors_would_notice_fused_or_double_arithmetic() -> None:
    differ = 0
    for vector in vectors_of_the_page():
        x, m, d, mu, lr, expected = (
            np.frombuffer(bytes.fromhex(vector[k]), np.float32)
            for k in ("x", "nesterov_m", "d", "momentum", "learning_rate", "nesterov_x")
        )
        double = x.astype(np.float64) - lr.astype(np.float64) * (d + mu.astype(np.float64) * m)
        differ += int((double.astype(np.float32) != expected).sum())
    assert differ > 3


def test_the_vectors_of_the_page_are_what_the_optimizers_compute() -> None:
    found = vectors_of_the_page()
    assert [vector["name"] for vector in found] == ["ordinary", "subnormal"]
    for vector in found:
        x, m, d = (np.frombuffer(bytes.fromhex(vector[k]), np.float32) for k in ("x", "m", "d"))
        lr, mu = (float(np.frombuffer(bytes.fromhex(vector[k]), np.float32)[0]) for k in ("learning_rate", "momentum"))
        out_x, out_m = np.empty_like(x), np.empty_like(m)
        update_of(1, an_optimizer(OuterSettings(optimizer="sgd", learning_rate=lr))).apply(x, [], d, out_x, [])
        assert out_x.tobytes().hex() == vector["sgd_x"]
        settings = OuterSettings(optimizer="nesterov", learning_rate=lr, momentum=mu)
        update_of(1, an_optimizer(settings)).apply(x, [m], d, out_x, [out_m])
        assert out_x.tobytes().hex() == vector["nesterov_x"]
        assert out_m.tobytes().hex() == vector["nesterov_m"]
        adamw, out_v, variance = OuterSettings(optimizer="adamw", momentum=mu), np.empty_like(m), np.abs(m)
        update_of(1, an_optimizer(adamw)).apply(x, [m, variance], d, out_x, [out_m, out_v])
        for name, out in (("adamw_m", out_m), ("adamw_v", out_v), ("adamw_x", out_x)):
            assert out.tobytes().hex() == vector[name]
        one_bit = an_optimizer(adamw, strategy="momentum", warmup_commits=1)
        update_of(2, one_bit).apply(x, [m, variance], d, out_x, [out_m, out_v])
        assert (out_x.tobytes().hex(), out_m.tobytes()) == (vector["onebit_x"], d.tobytes())
        update_of(1, an_optimizer(OuterSettings(optimizer="signsgd"))).apply(x, [], d, out_x, [])
        assert out_x.tobytes().hex() == vector["signsgd_x"]


@given(sizes, seeds, exponents)
def test_bases_round_to_nearest_even(size: int, seed: int, exponent: int) -> None:
    values = sample(seed, size, exponent)
    out = np.empty_like(values)
    cast_base(values, "F32", out)
    assert out.tobytes() == values.tobytes()
    cast_base(values, "BF16", out)
    low, high = values.view(np.uint32) & 0xFFFF0000, (values.view(np.uint32) & 0xFFFF0000) + 0x10000
    below, above = low.view(np.float32).astype(np.float64), high.view(np.float32).astype(np.float64)
    exact = values.astype(np.float64)
    nearer = np.where(np.abs(exact - below) < np.abs(above - exact), below, above)
    tie = np.abs(exact - below) == np.abs(above - exact)
    even = np.where((low >> 16) & 1 == 0, below, above)
    assert out.tobytes() == np.where(tie, even, nearer).astype(np.float32).tobytes()
    cast_base(values, "F16", out)
    with np.errstate(over="ignore"):
        assert out.tobytes() == values.astype(np.float16).astype(np.float32).tobytes()


def test_ties_and_limits_of_bf16() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x7F7F8000, 0x00008000, 0x00018000, 0x80000000], np.uint32)
    out = np.empty(bits.size, np.float32)
    cast_base(bits.view(np.float32), "BF16", out)
    assert [hex(n) for n in out.view(np.uint32)] == [
        "0x3f800000", "0x3f820000", "0x7f800000", "0x0", "0x20000", "0x80000000",
    ]  # fmt: skip


@pytest.mark.parametrize("num_threads", [1, 3])
def test_replace_writes_the_outer_values(tmp_path: Path, num_threads: int) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    apply_all(outer, payloads(outer), 1)
    buffer = memoryview(bytearray(used.buffer_bytes))
    with pool_of(num_threads) as pool:
        publish.publish_replace(outer, buffer, range(len(used.chunks)), pool)
    for chunk in used.chunks:
        assert cut_out(buffer, chunk) == outer.read(chunk.index).data[: chunk.num_bytes]
    before = bytes(buffer)
    for chunk in (c for c in used.chunks if c.role is Role.FROZEN):
        paste(buffer, chunk, bytes(chunk.num_bytes))
    publish.publish_replace(outer, buffer, outer.layout.sync_chunks, None)
    assert bytes(buffer) != before
    publish.publish_replace(outer, buffer, range(len(used.chunks)), None)
    assert bytes(buffer) == before


@pytest.mark.parametrize("num_threads", [1, 3])
def test_replace_writes_moments_behind_the_values(tmp_path: Path, num_threads: int) -> None:
    used = layout()
    adamw = an_optimizer(OuterSettings(optimizer="adamw", momentum=0.9))
    outer = seeded(tmp_path, used, slots=adamw.slots)
    for chunk in used.chunks:
        if chunk.role is Role.TRAINABLE:
            record = np.random.default_rng(chunk.index).standard_normal(3 * chunk.num_elements, np.float32)
            outer.put(chunk.index, 0, record.tobytes())
    size, of_moment = used.buffer_bytes, used.moment_bytes
    assert of_moment < size, "there is more than is trained"
    buffer = memoryview(bytearray(size + 2 * of_moment))
    with pool_of(num_threads) as pool:
        publish.publish_replace(outer, buffer, range(len(used.chunks)), pool, 2)
    for chunk in used.chunks:
        data, num_bytes = outer.read(chunk.index).data, chunk.num_bytes
        assert cut_out(buffer, chunk) == data[:num_bytes]
        if chunk.role is Role.TRAINABLE:
            momentum, variance = buffer[size : size + of_moment], buffer[size + of_moment :]
            assert cut_out(momentum, used.in_moment(chunk)) == data[num_bytes : 2 * num_bytes]
            assert cut_out(variance, used.in_moment(chunk)) == data[2 * num_bytes :]
    alone = memoryview(bytearray(size))
    publish.publish_replace(outer, alone, range(len(used.chunks)), None)
    assert alone == buffer[:size]


def test_shift_moves_local_and_base_by_the_same_amount(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used)
    buffer = memoryview(bytearray(used.buffer_bytes))
    publish.publish_replace(outer, buffer, range(len(used.chunks)), None)
    old = {name: tensor(used, buffer, name).copy() for name in ("weight", "weight.scale", "mean")}
    apply_all(outer, payloads(outer), 1)
    fresh = memoryview(bytearray(used.buffer_bytes))
    publish.publish_replace(outer, fresh, range(len(used.chunks)), None)
    with pool_of(2) as pool:
        publish.publish_shift(outer, buffer, range(len(used.chunks)), DTYPES, pool)
    for name, dtype in (("weight", "BF16"), ("weight.scale", "F32")):
        base_old, base_new = np.empty_like(old[name]), np.empty_like(old[name])
        cast_base(old[name], dtype, base_old)
        cast_base(tensor(used, fresh, name).copy(), dtype, base_new)
        assert tensor(used, buffer, name).tobytes() == (base_new - base_old).tobytes()
        assert np.abs(tensor(used, buffer, name)).max() > 0
    assert tensor(used, buffer, "mean").tobytes() == old["mean"].tobytes(), "buffers are not shifted"


def test_first_values_come_from_snapshot(tmp_path: Path) -> None:
    used = layout()
    outer = seeded(tmp_path, used, seed=4)
    expected = filled(used, 4)
    assert values_of(outer, 0).tobytes() == cut_out(expected, used.chunks[0])
