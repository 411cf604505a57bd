"""What the coordinator computes of a chunk to settle a dispute has the bits that the sites have, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.outer_update import updated
from atoll.protocol.codecs import EncodedHeader, bundles, kernels, unchanged
from atoll.protocol.codecs.compression import compressed
from atoll.protocol.codecs.table import DENSE, E3M0, INT2, INT4, INT8, SIGN1, TABLE
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import DTYPE_BYTES, Chunk, Layout, Manifest, Role, TensorSpec
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.recompute import recomputed, record_bytes
from tests.harness.data_plane import an_optimizer, step_of, update_of
from tests.harness.fuzzing import damaged, fuzz

SIZES = [1, 511, 513, 1300]
TOKENS = (7, 3000, 100)
RAW_DTYPES = ["I64", "F16", "BF16", "BOOL", "F64"]
SPECIAL = [
    0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x3F800000, 0x33800000, 0x4B000001, 0x2F800000, 0x5F000000,
    0x7FC00000, 0x7FC00001, 0x7F800001,
]  # fmt: skip
RATES = st.one_of(st.sampled_from([1.0, 0.7, 0.1, 999.0, 1e-38, 1e-42]), st.floats(1e-6, 2.0))
MOMENTA = st.one_of(st.sampled_from([0.0, 0.3, 0.9, 1 - 1e-9, 1e-42]), st.floats(0.0, 0.999))


def specs() -> list[TensorSpec]:
    found = [TensorSpec(name=f"w{n}", shape=(n,), dtype="F32", role=Role.TRAINABLE) for n in SIZES]
    found += [TensorSpec(name=f"m{n}", shape=(n,), dtype="BF16", role=Role.BUFFER_MEAN) for n in SIZES[:2]]
    return found + [TensorSpec(name=f"b{d}", shape=(9,), dtype=d, role=Role.BUFFER_LOWEST) for d in RAW_DTYPES]


@pytest.fixture(scope="module", params=["nesterov", "sgd", "adamw"])
def outer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OuterState:
    slots = an_optimizer(OuterSettings(optimizer=request.param)).slots
    return OuterState.create(tmp_path_factory.mktemp("outer"), Layout(Manifest.canonical(specs())), slots, "run")


def some_floats(generator: np.random.Generator, num: int, *, are_finite: bool) -> np.ndarray:
    """Any bits, many of them of numbers that are special."""
    bits = generator.integers(0, 1 << 32, num, dtype=np.uint32)
    is_special = generator.random(num) < 0.4
    signs = generator.integers(0, 2, num, dtype=np.uint32) << np.uint32(31)
    bits[is_special] = generator.choice(np.array(SPECIAL, np.uint32), num)[is_special] | signs[is_special]
    if are_finite:
        bits[bits & 0x7F800000 == 0x7F800000] &= 0xFF7FFFFF
    return bits.view(np.float32)


FORMS = {"int8": INT8, "int4": INT4, "e3m0": E3M0, "int2": INT2, "sign1": SIGN1}


def body_of(generator: np.random.Generator, codec: str, num: int) -> bytes:
    """Sites refuse payloads with values that are not finite where they arrive."""
    if codec == "fp32":
        return some_floats(generator, num, are_finite=True).tobytes()
    if codec == "bf16":
        return (some_floats(generator, num, are_finite=True).view(np.uint32) >> 16).astype("<u2").tobytes()
    if codec == "fp16":
        return (generator.integers(0, 1 << 16, num) & 0xFBFF).astype("<u2").tobytes()
    body_bytes = TABLE[codec].body_bytes(num, 4)
    scales = some_floats(generator, FORMS[codec].scales_bytes(body_bytes) // 4, are_finite=True)
    return scales.tobytes() + generator.bytes(body_bytes - scales.nbytes)


@st.composite
def outer_settings(draw: st.DrawFn) -> dict[str, float]:
    return {"learning_rate": draw(RATES), "momentum": draw(MOMENTA)}


def payload_of(outer: OuterState, chunk: Chunk, generator: np.random.Generator, data: st.DataObject) -> bytes:
    num, dtype = chunk.num_elements, "F32"
    if chunk.role is Role.TRAINABLE and data.draw(st.integers(0, 3)) == 0:
        number = data.draw(st.integers(1, 3))
        values = [some_floats(generator, num, are_finite=True) / np.float32(64) for _ in range(number)]
        widths = [data.draw(st.sampled_from([1, num])) for _ in range(number)]
        parts = [kernels.encode("topk2", v, width=w) for v, w in zip(values, widths, strict=True)]
        return bundles.join(num, parts, over_all=data.draw(st.booleans()))
    if chunk.role is Role.TRAINABLE:
        codec = data.draw(st.sampled_from(DENSE))
        body = body_of(generator, codec, num)
    else:
        codec = "raw" if chunk.role is Role.BUFFER_LOWEST else "fp32"
        dtype = outer.layout.manifest.tensors[chunk.tensor].dtype if codec == "raw" else dtype
        body = generator.bytes(TABLE[codec].body_bytes(num, DTYPE_BYTES[dtype]))
        if data.draw(st.booleans()):
            return unchanged(num, dtype)
    header = EncodedHeader(codec=codec, zstd=False, dtype=dtype, num_elements=num)
    small = compressed(kernels._split(np.frombuffer(body, np.uint8), TABLE[codec].planes).data, 3)
    if len(small) < len(body) and data.draw(st.booleans()):
        return replace(header, zstd=True).pack() + small
    return header.pack() + body


@fuzz(200)
@given(seed=st.integers(0, 1 << 32), values=outer_settings(), data=st.data())
def test_every_chunk_comes_out_with_the_bits_of_the_sites(
    outer: OuterState, seed: int, values: dict[str, float], data: st.DataObject
) -> None:
    generator = np.random.default_rng(seed)
    name = {0: "sgd", 1: "nesterov", 2: "adamw"}[len(outer.slots)]
    settings = OuterSettings(optimizer=name, **values)
    optimizer = an_optimizer(settings)
    chunk = outer.layout.chunks[data.draw(st.integers(0, len(outer.layout.chunks) - 1))]
    dtype = outer.layout.manifest.tensors[chunk.tensor].dtype
    size = record_bytes(chunk.role, dtype, chunk.num_elements, settings)
    record = generator.bytes(size)
    if chunk.role is Role.TRAINABLE:
        rows = some_floats(generator, size // 4, are_finite=name == "adamw").reshape(1 + len(outer.slots), -1)
        if name == "adamw":
            np.abs(rows[2], out=rows[2])  # a sum of squares
        record = rows.tobytes()

    def at_a_site(payload: bytes) -> bytes:
        with np.errstate(all="ignore"):
            return updated(outer.layout, chunk.index, record, payload, update_of(1, optimizer, tokens=TOKENS[:number]))

    def at_the_coordinator(payload: bytes) -> bytes:
        return recomputed(
            role=chunk.role,
            dtype=dtype,
            num_elements=chunk.num_elements,
            step=step_of(settings),
            record=record,
            payload=payload,
            tokens=TOKENS[:number],
        )

    payload = payload_of(outer, chunk, generator, data)
    number = len(bundles.split(payload, chunk.num_elements).contributions) if payload[1] == 12 else 1
    assert at_the_coordinator(payload) == at_a_site(payload)
    received = data.draw(damaged(payload))
    assert is_refused(at_the_coordinator, received) == is_refused(at_a_site, received)


def is_refused(compute: Callable[[bytes], bytes], payload: bytes) -> bool:
    try:
        compute(payload)
    except InvalidMessage:
        return True
    return False
