"""DDP, FSDP2 and HSDP of two and four ranks, and of one on a GPU, under a node in a script; every value is known."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from atoll.node.core.events import (
    Answer,
    AnswerKind,
    BoundaryAsked,
    Merged,
    MergeMode,
    SnapshotSealed,
    WorkersExited,
    WorkersJoined,
    WorkersLeft,
)
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.launcher import Launcher
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.daemon.site_log import OUTPUT_LOGGER
from atoll.node.local_protocol import Greeting
from atoll.protocol.layout import Layout
from atoll.protocol.settings import RunSettings, settings_to_json
from tests.harness.chaos import descendants
from tests.harness.failures import unexpected
from tests.harness.ranks import Happened, ServedRanks
from tests.harness.sockets import listening, outside_loopback

RANKS = Path(__file__).parent.parent / "workers" / "parallel_ranks.py"
SHAPES = {"first.bias": (5,), "first.weight": (5, 3), "second.bias": (1,), "second.weight": (1, 3)}
LEARNING_RATE = 0.5
SNAPSHOT = Answer(kind=AnswerKind.SNAPSHOT)


class ScriptedNode:
    """The node's end, driven by hand: `expect` the next event, then say what comes."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.step_tokens = sum(10 * (rank + 1) for rank in range(num_ranks))
        self.events: asyncio.Queue[Happened] = asyncio.Queue()
        self.server = ServedRanks(self.events.put_nowait, unexpected)
        self.layout: Layout | None = None
        self.buffers: tuple[SharedBuffer, ...] = ()

    async def expect(self, kind: type[Happened]) -> Any:
        event = await self.events.get()
        assert type(event) is kind, event
        return event

    async def asked(self, step: int, seq: int, answer: Answer) -> None:
        event = await self.expect(BoundaryAsked)
        assert (event.step, event.seq) == (step, seq)
        self.server.answer(1, step, seq, answer)

    def tensor(self, buffer: int, name: str) -> npt.NDArray[np.float32]:
        assert self.layout is not None
        index = [t.name for t in self.layout.manifest.tensors].index(name)
        spec, offset = self.layout.manifest.tensors[index], self.layout.tensor_offsets_bytes[index]
        view = self.buffers[buffer].view
        return np.frombuffer(view, np.float32, spec.num_elements, offset).reshape(spec.shape)

    def snapshot_is(self, expected: dict[str, npt.NDArray[np.float32]]) -> None:
        for name, value in expected.items():
            np.testing.assert_array_equal(self.tensor(0, name), value, err_msg=name)

    def publish(self, values: dict[str, npt.NDArray[np.float32]]) -> None:
        for name, value in values.items():
            self.tensor(1, name)[...] = value

    def moved(self, values: dict[str, npt.NDArray[np.float32]], num_steps: int) -> dict[str, npt.NDArray[np.float32]]:
        """After that many steps of training: the gradient of a weight is the mean of the ranks' inputs."""
        weight = (self.num_ranks + 1) / 2
        step = {n: LEARNING_RATE * (1.0 if "bias" in n else weight) for n in values}
        return {n: v - np.float32(num_steps * step[n]) for n, v in values.items()}


def apply(mode: MergeMode, version: int, next_step: int, fresh: bool = False) -> Answer:
    return Answer(kind=AnswerKind.APPLY, mode=mode, version=version, next_step=next_step, fresh=fresh)


async def follow(node: ScriptedNode) -> tuple[list[float], list[float]]:
    """One life of a site. Returns the biases that the outer and the local parameters have at its end."""
    joined = await node.expect(WorkersJoined)
    assert {t.name: t.shape for t in joined.manifest.tensors} == {**SHAPES, "seen": (2,)}
    layout = Layout(joined.manifest)
    node.layout = layout
    node.buffers = tuple(SharedBuffer(layout.buffer_bytes, name) for name in ("SNAPSHOT", "PUBLISH"))
    snapshot, publish = node.buffers
    await node.server.admit(layout, snapshot, publish)
    # The seed: replaced by values that a few quarters never round.
    await node.asked(0, 0, SNAPSHOT)
    await node.expect(SnapshotSealed)
    assert any(node.tensor(0, name).any() for name in SHAPES)
    rng = np.random.default_rng(0)
    outer = {name: rng.integers(-50, 50, shape).astype(np.float32) for name, shape in SHAPES.items()}
    node.publish(outer)
    await node.asked(0, 1, apply(MergeMode.REPLACE, 0, 2, fresh=True))
    await node.expect(Merged)
    # Two steps, a snapshot, one step beyond it, a merge.
    await node.asked(2, 0, SNAPSHOT)
    sealed = await node.expect(SnapshotSealed)
    assert (sealed.tokens, sealed.num_steps, sealed.mean_loss) == (2 * node.step_tokens, 2, (node.num_ranks - 1) / 2)
    node.snapshot_is(node.moved(outer, 2))
    await node.asked(2, 1, Answer(kind=AnswerKind.CONTINUE, next_step=3))
    outer = {name: value + 100 for name, value in outer.items()}
    node.publish(outer)
    await node.asked(3, 0, apply(MergeMode.MERGE, 1, 4))
    await node.expect(Merged)
    # A commit that this site was no part of.
    node.publish({name: np.full(shape, 0.25, np.float32) for name, shape in SHAPES.items()})
    await node.asked(4, 0, apply(MergeMode.SHIFT, 2, 5))
    await node.expect(Merged)
    await node.asked(5, 0, SNAPSHOT)
    sealed = await node.expect(SnapshotSealed)
    assert (sealed.tokens, sealed.num_steps) == (3 * node.step_tokens, 3)
    node.snapshot_is({name: value + np.float32(0.25) for name, value in node.moved(outer, 3).items()})
    # The last values, and one step more, so that outer and local parameters differ.
    outer = {name: value - 7 for name, value in outer.items()}
    node.publish(outer)
    await node.asked(5, 1, apply(MergeMode.REPLACE, 3, 6))
    await node.expect(Merged)
    event = await node.expect(BoundaryAsked)
    assert (event.step, event.seq) == (6, 0)
    opened = listening(descendants(os.getpid()))
    assert node.num_ranks == 1 or len(opened) >= 2, "the store, and what the ranks opened for each other"
    assert not outside_loopback(opened)
    node.server.answer(1, 6, 0, Answer(kind=AnswerKind.STOP, reason="done"))
    await node.expect(WorkersLeft)
    biases = [np.concatenate((v["first.bias"], v["second.bias"])).tolist() for v in (outer, node.moved(outer, 1))]
    return biases[0], biases[1]


async def run(kind: str, output: pytest.LogCaptureFixture, num_ranks: int) -> None:
    node = ScriptedNode(num_ranks)
    await node.server.start()
    settings = settings_to_json(RunSettings(run_id="parallel"))
    node.server.serve(1, num_ranks, Greeting(settings_json=settings, data_paths=()))
    ended: asyncio.Future[WorkersExited] = asyncio.get_running_loop().create_future()
    command = (str(RANKS), kind)
    config = NodeConfig(coordinator="127.0.0.1:1", name="a", command=command, num_ranks=num_ranks, num_threads=1)
    launcher = Launcher(config, ended.set_result, unexpected)
    script = asyncio.create_task(follow(node))
    try:
        await launcher.start(1, node.server.path)
        await asyncio.wait((ended, script), return_when=asyncio.FIRST_COMPLETED)
        assert script.done(), f"the ranks ended early: {ended.result().text}"
        outer, local = script.result()
        ending = await ended
        assert ending.code == 0, ending.text
        for rank in range(num_ranks):
            found = re.search(rf"rank {rank} outer (\[.*?\]) local (\[.*?\])", output.text)
            assert found is not None, output.text
            assert [float(v) for v in found[1][1:-1].split(",")] == outer
            assert [float(v) for v in found[2][1:-1].split(",")] == local
    finally:
        script.cancel()
        await launcher.stop()
        await node.server.close()
        for buffer in node.buffers:
            buffer.close()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "offload"])
def test_two_ranks(kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, OUTPUT_LOGGER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asyncio.run(run(kind, caplog, num_ranks=2))


def test_hybrid_shards_of_four_ranks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two shards each."""
    caplog.set_level(logging.INFO, OUTPUT_LOGGER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asyncio.run(run("hsdp", caplog, num_ranks=4))


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_on_gpus(kind: str, num_ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU each: NCCL has no two ranks on one."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs; this host has {torch.cuda.device_count()}")
    caplog.set_level(logging.INFO, OUTPUT_LOGGER)
    asyncio.run(run(kind, caplog, num_ranks))
