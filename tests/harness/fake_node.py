"""A node in memory for one rank: answers from a script, and keeps what it is told."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from atoll.node.core.events import Answer, AnswerKind, MergeMode
from atoll.node.local_protocol import (
    NO_CHECKPOINTS,
    NO_READINGS,
    CheckpointCounts,
    CheckpointId,
    DataSet,
    Greeting,
    LocalJoin,
    LocalLayout,
    RankReadings,
    SealedReport,
)
from atoll.node.worker import join as join_module
from atoll.node.worker import joined_site
from atoll.node.worker.client import JoinedLayout, LocalClient
from atoll.node.worker.connection import Connection
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.logged import LoggedValue
from atoll.protocol.messages import DataRange
from atoll.protocol.settings import RunSettings

Question = Callable[[], Answer]


class FakeNode:
    """`script` holds one (step, answer) for each question, in order; a callable answer runs first."""

    generation = 1

    def __init__(self, *, manifest: Manifest | None = None) -> None:
        self.script: list[tuple[int, Answer | Question]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.layout: Layout | None = None
        self.snapshot = memoryview(b"")
        self.publish = memoryview(b"")
        self.moments: tuple[memoryview, ...] = ()
        self.num_readers, self.reader = 1, 0
        self.shared_pieces: tuple[int, ...] = ()
        self.checkpoint_folder = ""
        self.positions: list[int] = []
        self._checkpoint: CheckpointId | None = None
        self.data_seed = 99
        if manifest is not None:
            self._allocate(manifest)

    def _allocate(self, manifest: Manifest) -> Layout:
        self.layout = Layout(manifest)
        self.snapshot, self.publish = (_pages(self.layout.buffer_bytes) for _ in range(2))
        return self.layout

    def joined(self, num_pieces: int) -> JoinedLayout:
        assert self.layout is not None
        told = LocalLayout(
            chunk_elements=self.layout.chunk_elements,
            owned_pieces=tuple(range(num_pieces)),
            kept_pieces=tuple(range(num_pieces)),
            shared_pieces=self.shared_pieces,
            site_id=7,
            incarnation=1,
            run_seed=1,
            data_seed=self.data_seed,
            checkpoint=self._checkpoint,
            num_readers=self.num_readers,
            reader=self.reader,
        )
        return JoinedLayout(
            told=told, layout=self.layout, snapshot=self.snapshot, publish=self.publish, moments=self.moments
        )

    def connection(self, settings: RunSettings) -> Connection:
        greeting = Greeting(settings_json="", data_paths=(), checkpoint_folder=self.checkpoint_folder)
        return Connection(cast(LocalClient, self), greeting, settings, 0, 1)

    def values(self, buffer: memoryview, name: str, dtype: str = "float32") -> npt.NDArray[Any]:
        """A view of one tensor, flat."""
        assert self.layout is not None
        names = [t.name for t in self.layout.manifest.tensors]
        spec = self.layout.manifest.tensors[names.index(name)]
        offset = self.layout.tensor_offsets_bytes[names.index(name)]
        return np.frombuffer(buffer, dtype=dtype, count=spec.num_elements, offset=offset)

    def said(self, name: str) -> list[dict[str, Any]]:
        return [body for what, body in self.told if what == name]

    # --- LocalClient's side

    def join(self, offered: LocalJoin, num_moments: int = 0) -> JoinedLayout:
        self._checkpoint = max(offered.checkpoints, default=None)
        self.told.append(("join", {"fingerprint": offered.data_fingerprint, "data_rank": offered.data_rank}))
        layout = self._allocate(offered.manifest)
        self.moments = tuple(_pages(layout.moment_bytes) for _ in range(num_moments))
        return self.joined(len(offered.pieces))

    def boundary(self, step: int, seq: int) -> Answer:
        self.told.append(("boundary", {"step": step, "seq": seq}))
        expected, answer = self.script.pop(0)
        assert step == expected
        return answer() if callable(answer) else answer

    def announce_data(self, data: DataSet) -> None:
        self.told.append(("data", asdict(data)))

    def draw(self, epoch: int, first: int, num_samples: int) -> tuple[DataRange, ...]:
        """Every epoch's queue begins at position 1000 times its number, unless `positions` are said."""
        self.told.append(("draw", {"epoch": epoch, "first": first, "num_samples": num_samples}))
        if self.positions:
            return tuple(DataRange(first=p, num_samples=1) for p in self.positions[first : first + num_samples])
        return (DataRange(first=1000 * epoch + first, num_samples=num_samples),)

    def sealed(self, report: SealedReport) -> None:
        self.told.append(("sealed", asdict(report)))

    def merged(self, **body: Any) -> None:
        self.told.append(("merged", body))

    def fatal(self, kind: str, text: str) -> None:
        self.told.append(("fatal", {"kind": kind, "text": text}))

    def logged(self, values: tuple[LoggedValue, ...]) -> None:
        self.told.append(("logged", {"values": values}))

    def busy(self, what: str, limit_s: float) -> None:
        self.told.append(("busy", {"what": what, "limit_s": limit_s}))

    def progress(
        self,
        step: int,
        steps_per_s: float,
        checkpoints: CheckpointCounts = NO_CHECKPOINTS,
        readings: RankReadings = NO_READINGS,
    ) -> None:
        self.told.append(("progress", {"step": step, "checkpoints": checkpoints}))

    def goodbye(self, reason: str, run_over: bool) -> None:
        self.told.append(("goodbye", {"run_over": run_over}))

    def close(self) -> None:
        self.told.append(("close", {}))


def in_memory(monkeypatch: pytest.MonkeyPatch, settings: RunSettings) -> FakeNode:
    """The one that atoll.join finds for the rest of the test."""
    node = FakeNode()
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(settings))
    monkeypatch.setattr(joined_site, "disconnect", node.close)
    return node


def _pages(num_bytes: int) -> memoryview:
    """Memory of its own, as a node shares it: a GPU registers whole pages."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]


def apply(
    mode: MergeMode,
    next_step: int,
    *,
    run_step: int = 0,
    version: int = 0,
    fresh: bool = False,
    data_epoch: int = 0,
    site_index: int = 0,
    num_sites: int = 0,
    run_length: int = 0,
) -> Answer:
    return Answer(
        kind=AnswerKind.APPLY, mode=mode, next_step=next_step, run_step=run_step, version=version, fresh=fresh,
        data_epoch=data_epoch, site_index=site_index, num_sites=num_sites, run_length=run_length,
    )  # fmt: skip


def go_on(next_step: int) -> Answer:
    return Answer(kind=AnswerKind.CONTINUE, next_step=next_step)


SNAPSHOT = Answer(kind=AnswerKind.SNAPSHOT)
STOP = Answer(kind=AnswerKind.STOP, reason="the run is complete", run_over=True)
TOLD_TO_LEAVE = Answer(kind=AnswerKind.STOP, reason="SIGTERM")
