"""What most scripts do, against a node in memory: it trains as it did, and takes the update of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker.tensors import find_tensors
from tests.harness.fake_group import fake_rank
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, in_memory
from tests.unit.worker.test_scripts import SETTINGS, network, seeded


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def take_sevens(node: FakeNode) -> Any:
    torch.frombuffer(node.publish, dtype=torch.float32).fill_(7.0)
    return apply(MergeMode.REPLACE, 3, version=1)


@pytest.mark.parametrize("how", ["accumulated", "autocast", "compiled", "clipped"])
def test_an_ordinary_loop_counts_its_steps_and_takes_updates(node: FakeNode, how: str) -> None:
    """Two steps of 20 tokens each, an update, and one step of what it brought: in place, so that compiled code and
    what autocast remembers see it."""
    net = network()
    forward = torch.compile(net, backend="eager") if how == "compiled" else net
    assert isinstance(forward, nn.Module)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    node.script = [*seeded(node, 2), (2, SNAPSHOT), (2, lambda: take_sevens(node)), (3, SNAPSHOT), (3, STOP)]
    outputs: list[float] = []
    with atoll.join(forward, optimizer, ramp_steps=0) as site:
        while site.running:
            loss = torch.zeros(())
            for _ in range(2 if how == "accumulated" else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                    found = forward(torch.ones(1, 8))
                part = found.float().sum()
                part.backward()
                loss = loss + part.detach()
            if how == "clipped":
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            outputs.append(found.float().sum().item())
            optimizer.step()
            optimizer.zero_grad()
            site.step(tokens=20, loss=loss)
    assert [sealed["num_steps"] for sealed in node.said("sealed")] == [0, 2, 1]
    assert [sealed["tokens"] for sealed in node.said("sealed")] == [0, 40, 20]
    of_others = 8 * (16 * 7.0 + 7.0)  # tanh of 63 is 1
    assert outputs[2] == pytest.approx(of_others, rel=0.01)
    assert outputs[1] != pytest.approx(of_others, rel=0.01)


@pytest.mark.parametrize("rank", range(4))
def test_hybrid_shards_are_the_whole_model_to_others(rank: int) -> None:
    """Two replicas of two shards each. The offloaded ones lie on the CPU anyhow, here."""
    whole = network()
    expected = find_tensors([whole], [torch.optim.SGD(whole.parameters(), lr=0.1)])
    with fake_rank(rank, 4):
        net = network()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh)
        found = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
        assert found.manifest.digest == expected.manifest.digest
        pieces = {piece.name: piece for piece in found.pieces}
        assert pieces["0.weight"].offsets == (8 * (rank % 2), 0)
        assert pieces["0.weight"].sizes == (8, 8)


def test_offloaded_shards_pass() -> None:
    with fake_rank(0, 2):
        net = network()
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
        found = find_tensors([net], [torch.optim.AdamW(net.parameters(), lr=0.1)])
        assert len(found.manifest.tensors) == 4
