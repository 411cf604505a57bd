"""A small model with every role, and what the tests of the data plane do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.node.dataplane import publish, saved_model
from atoll.node.dataplane.optim import OuterOptimizer, OuterUpdate
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.sync_data import SyncData
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec, TiedName
from atoll.protocol.messages import Commit, Member
from atoll.protocol.outer import OuterStep, outer_at
from atoll.protocol.outer_settings import FOR_GRADIENTS, OuterSettings
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings

RUN = "test"
DTYPES = {"weight": "BF16", "weight.scale": "F32", "zero": "F32"}


def an_optimizer(outer: OuterSettings, **sync: Any) -> OuterOptimizer:
    if outer.optimizer in FOR_GRADIENTS:
        sync = {"strategy": "gradient", "every": 1} | sync
    return OuterOptimizer(RunSettings(run_id=RUN, outer=outer, sync=SyncSettings(**sync)))


OPTIMIZER = an_optimizer(OuterSettings(learning_rate=0.7, momentum=0.9))
RATES = (3e-3, 0.1)
"""Of one parameter group, with an optimizer of gradients."""


def manifest() -> Manifest:
    return Manifest.canonical(
        [
            TensorSpec(name="weight", shape=(30, 50), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="weight.scale", shape=(), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="zero", shape=(0, 4), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="mean", shape=(33,), dtype="BF16", role=Role.BUFFER_MEAN),
            TensorSpec(name="count", shape=(3,), dtype="I64", role=Role.BUFFER_LOWEST),
            TensorSpec(name="mine", shape=(5,), dtype="F32", role=Role.BUFFER_LOCAL),
            TensorSpec(name="frozen", shape=(7, 100), dtype="BF16", role=Role.FROZEN),
        ],
        [TiedName(alias="head", name="weight")],
    )


def layout(chunk_elements: int = 400, num_fragments: int = 1) -> Layout:
    return Layout(manifest(), chunk_elements, num_fragments)


def fragment_at(layout: Layout, commit: int) -> int:
    """Of the commit with that number: of three fragments 2, 1, 0, 0, 2, 1, 0, 0 ..."""
    return (2 * commit + commit // 4) % len(layout.fragments)


def filled(layout: Layout, seed: int = 0) -> memoryview:
    """A buffer like SNAPSHOT, with ordinary values in every tensor."""
    buffer = memoryview(bytearray(layout.buffer_bytes))
    rng = np.random.default_rng(seed)
    for spec, offset in zip(layout.manifest.tensors, layout.tensor_offsets_bytes, strict=True):
        size = spec.num_elements * spec.carried_itemsize
        target = np.frombuffer(buffer, np.uint8)[offset : offset + size]
        if spec.carried_itemsize == 4:
            target[:] = rng.standard_normal(spec.num_elements, dtype=np.float32).view(np.uint8)
        else:
            target[:] = rng.integers(0, 60, size, np.uint8)
    return buffer


def tensor(layout: Layout, buffer: memoryview, name: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A writable fp32 view of a tensor in a buffer."""
    index = [t.name for t in layout.manifest.tensors].index(name)
    spec, offset = layout.manifest.tensors[index], layout.tensor_offsets_bytes[index]
    return np.frombuffer(buffer, np.float32, spec.num_elements, offset)


def seeded(folder: Path, layout: Layout, *, seed: int = 0, slots: tuple[str, ...] = ("momentum",)) -> OuterState:
    outer = OuterState.create(folder, layout, slots, RUN)
    publish.seed_from_snapshot(outer, filled(layout, seed))
    return outer


def save(  # noqa: PLR0917
    folder: Path,
    outer: OuterState,
    layout: Layout,
    slots: tuple[str, ...],
    info: Mapping[str, Any],
    num_earlier: int = 0,
) -> None:
    """The outer state in the place of what `folder` held."""
    frozen = outer.freeze()
    try:
        saved_model.write_aside(folder, frozen, layout, slots, info)
    finally:
        frozen.close()
    saved_model.put_in_place(folder, num_earlier)


def values_of(outer: OuterState, chunk: int) -> np.ndarray[Any, np.dtype[Any]]:
    """A view, valid until the next write to any chunk."""
    with outer.pinned(chunk) as record:
        return record.values


def sync_data(
    outer: OuterState, snapshot: memoryview, codec: str = "int8", fragment: int = 0, **settings: Any
) -> SyncData:
    travels = spec_of(SyncSettings(codec=codec, **settings), 0, fragment)
    return SyncData(outer.layout, travels, outer, snapshot, DTYPES, fragment=fragment)


def payloads(outer: OuterState, seeds: Sequence[int] = (1, 2), codec: str = "int8") -> dict[int, bytes]:
    """The payloads of a sync of as many sites as there are seeds, of each fragment."""
    buffers = [filled(outer.layout, seed) for seed in seeds]
    found = {}
    for fragment in range(len(outer.layout.fragments)):
        sites = [sync_data(outer, buffer, codec, fragment=fragment) for buffer in buffers]
        for chunk in sites[0].chunks:
            found[chunk] = sites[0].reduce(chunk, [(100 + i, s.contribution(chunk)) for i, s in enumerate(sites)])
    return found


def update_of(commit: int, optimizer: OuterOptimizer = OPTIMIZER, *, tokens: tuple[int, ...] = (100,)) -> OuterUpdate:
    """By the commit with that number."""
    return replace(optimizer.at(_with_rates(commit_record(commit), optimizer.settings.outer)), tokens=tokens)


def step_of(settings: OuterSettings, commit: int = 1) -> OuterStep:
    """What that commit does to a chunk."""
    return outer_at(an_optimizer(settings).settings, _with_rates(commit_record(commit), settings))


def _with_rates(record: Commit, settings: OuterSettings) -> Commit:
    return replace(record, rates=RATES) if settings.optimizer in FOR_GRADIENTS else record


def apply_all(outer: OuterState, found: dict[int, bytes], version: int, tokens: tuple[int, ...] = (100,)) -> None:
    """What of `found` is of the commit's fragment."""
    for chunk in found.keys() & set(outer.layout.fragments[fragment_at(outer.layout, version)]):
        outer.apply(chunk, found[chunk], update_of(version, tokens=tokens))


def commit_record(number: int, sync: int | None = None, attempt: int = 0, fragment: int = 0) -> Commit:
    return Commit(
        fragment=fragment,
        commit=number,
        sync=number if sync is None else sync,
        attempt=attempt,
        term=1,
        contributors=(Member(site_id=1, incarnation=1, address="a:1", tokens=100),),
        payload_digest=b"",
        run_step=20 * number,
        run_tokens=100 * number,
    )


def logged(log: PayloadLog, outer: OuterState, number: int, found: dict[int, bytes]) -> Commit:
    """Seals and commits what of `found` is of the commit's fragment."""
    record = commit_record(number, fragment=fragment_at(outer.layout, number))
    writer = log.begin(record.sync, record.term, record.attempt, record.fragment)
    for chunk in outer.layout.fragments[record.fragment]:
        writer.put(chunk, found[chunk], payload_hash(found[chunk]))
    writer.seal()
    record = replace(record, payload_digest=writer.digest(record))
    log.commit(record)
    return record
