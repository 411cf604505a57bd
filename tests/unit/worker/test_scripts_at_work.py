"""What most scripts do, against a node in memory: it trains as it did, and takes the update of others."""

from __future__ import annotations

from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.local_protocol import data_seed
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.layout import Layout
from tests.harness.data_plane import save, values_of
from tests.harness.data_plane import seeded as outer_seeded
from tests.harness.fake_group import fake_rank
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, in_memory
from tests.unit.worker.test_scripts import SETTINGS, network, seeded


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def take_sevens(node: FakeNode) -> Any:
    torch.frombuffer(node.publish, dtype=torch.float32).fill_(7.0)
    return apply(MergeMode.REPLACE, 3, version=1)


INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.timeout(600),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch.jit, which inductor imports
        pytest.mark.skipif(which("g++") is None, reason="torch.compile needs a C++ compiler: g++"),
    ],
)


@pytest.mark.parametrize("how", ["accumulated", "autocast", "compiled", INDUCTOR, "checkpointed", "clipped"])
def test_an_ordinary_loop_counts_its_steps_and_takes_updates(
    node: FakeNode, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 20 tokens each, an update, and one step of what it brought: in place, so that compiled code and
    what autocast remembers see it."""
    net = network()
    forward: Any = net
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # inductor sets it, and leaves it
    if how in ("compiled", "inductor"):
        forward = torch.compile(net, backend="eager" if how == "compiled" else "inductor")
    elif how == "checkpointed":
        forward = checkpoint_wrapper(net)
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


def test_each_of_several_optimizers_does_its_steps_and_takes_updates(node: FakeNode) -> None:
    """Muon for the matrices, and AdamW for the rest."""
    net = network()
    kinds = {dim: [p for p in net.parameters() if p.dim() == dim] for dim in (1, 2)}
    optimizers = [torch.optim.Muon(kinds[2], lr=0.125), torch.optim.AdamW(kinds[1], lr=0.125)]
    first = [p.detach().clone() for p in net.parameters()]
    node.script = [*seeded(node, 2), (2, SNAPSHOT), (2, lambda: take_sevens(node)), (3, SNAPSHOT), (3, STOP)]
    with atoll.join(net, optimizers, ramp_steps=0) as site:
        while site.running:
            net(torch.ones(1, 8)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if site.inner_step == 1:
                assert all(bool((p != was).any()) for p, was in zip(net.parameters(), first, strict=True))
            if site.step(tokens=20).synced:
                assert {value for p in net.parameters() for value in p.flatten().tolist()} == {7.0}
    assert [sealed["tokens"] for sealed in node.said("sealed")] == [0, 40, 20]
    for name, parameter in net.named_parameters():
        sent = node.values(node.snapshot, name)
        assert sent.tolist() == parameter.flatten().tolist()
        assert (sent != 7.0).any(), "each has done a step from there"


def test_a_loop_that_draws_its_batches_itself_draws_those_of_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nanoGPT's `get_batch` does. The script has seeded torch for its first values, alike at all sites. Ranks of a
    site draw batches of their own, but for those that see the same ones."""
    text = torch.arange(10_000)

    def places_drawn(site_id: int, reader: int = 0) -> list[list[int]]:
        node = in_memory(monkeypatch, SETTINGS)
        node.data_seed = data_seed(1, site_id, 1, 1)
        node.num_readers, node.reader = 2, reader
        node.script = [*seeded(node, 3), (3, SNAPSHOT), (3, STOP)]
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
        found = []
        with atoll.join(net, optimizer, ramp_steps=0) as site:
            torch.manual_seed(site.seed)
            while site.running:
                batch = text[torch.randint(len(text) - 8, (4,))]
                found.append(batch.tolist())
                loss = net(torch.ones(1, 8)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                site.step(tokens=32, loss=loss)
        return found

    one = places_drawn(1)
    for other in (places_drawn(2), places_drawn(1, reader=1)):
        assert len(one) == len(other) == 3
        assert all(mine != others for mine, others in zip(one, other, strict=True))
    assert places_drawn(1) == one


def test_a_saved_model_is_read_by_its_script_with_a_tied_weight(tmp_path: Path) -> None:
    table, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    table.weight = head.weight
    net = nn.Sequential(table, head)
    layout = Layout(find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.125)]).manifest)
    outer = outer_seeded(tmp_path / "outer", layout)
    save(tmp_path / "model", outer, layout, ("momentum",), {"run_step": 1, "run_tokens": 1, "settings": {}})
    load_model(net, tmp_path / "model" / "model.safetensors")
    assert table.weight is head.weight
    assert head.weight.detach().flatten().tolist() == values_of(outer, 0)[: head.weight.numel()].tolist()


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
