"""No rank gathers a model: beside its tensors it has room for less than two of the largest at any time."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from atoll.node.core.events import MergeMode
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import parameters_of
from atoll.node.parallel.settings import parse
from atoll.node.worker import copies
from atoll.node.worker.pieces import SharedTensors
from atoll.node.worker.shared_model import shared_model
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.fake_group import fake_rank
from tests.harness.fake_node import FakeNode
from tests.harness.live_memory import Live

CPU = torch.device("cpu")
NUM_TENSORS = 8
MODEL = ModelSettings(dim=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=256, vocab_size=512)
EXPERTS = replace(MODEL, ffn_dim=64, num_experts=8, num_shared_experts=1)


def settings_of(layout: str) -> RunSettings:
    """Of a model with experts, where ranks share experts."""
    model = EXPERTS if parse(layout).ep > 1 else MODEL
    return RunSettings(run_id="run", model=model, trainer=TrainerSettings(batch_size=8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MergeMode)
def test_a_sync(mode: MergeMode, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 2048)  # as small beside a tensor as 64 MiB beside a large one
    net = nn.ParameterList([nn.Parameter(torch.randn(64, 64, dtype=dtype)) for _ in range(NUM_TENSORS)])
    tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    node = FakeNode(manifest=tensors.manifest)
    shared = SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings(alpha=0.5))
    with Live() as live:
        for held, *views in shared._slices:
            for tensor in (held.local(), *views):
                live.count(tensor)
        before = live.now
        shared.write_snapshot(0, with_frozen=True)
        shared.apply(0, mode, fresh=False)
        shared.write_snapshot(0, with_frozen=False)
    assert live.most < before + 2 * net[0].nbytes


@pytest.mark.parametrize(
    "layout", ["dp_shard=4", "tp=4", "dp_shard=2,tp=2", "dp_shard=2,pp=2", "dp_shard=4,ep=2", "dp_shard=2,ep=2,tp=2"]
)
def test_first_values(layout: str) -> None:
    settings = settings_of(layout)
    for rank in range(4):
        with fake_rank(rank, 4), contextlib.ExitStack() as measured:
            parallel = parse(layout).resolved(4)
            mesh = Mesh.of_site(CPU, parallel)
            live = measured.enter_context(Live())
            passes = shared_model(settings, parallel, mesh, CPU)
            held = {id(p): local(p).untyped_storage().nbytes() for part in passes.parts for p in part.parameters()}
            assert sum(held.values()) <= live.now
            assert live.most < live.now + 2 * 4 * 512 * 64
            whole = 4 * sum(p.numel() for part in passes.parts for p in part.parameters())
            assert live.now < whole, "the rank has a part of it"


@pytest.mark.parametrize(
    "layout",
    [
        *("dp_shard=4", "tp=4", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2", "cp=2,pp=2"),
        *("dp_shard=4,ep=2", "dp_shard=2,ep=2,tp=2", "cp=2,ep=2,pp=2"),
    ],
)
def test_ranks_that_share_a_model_gather_nothing_for_a_sync(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No collective at all, and less than two of the rank's own largest tensors, from what a forward pass has left."""
    monkeypatch.setattr(copies, "PIECE_BYTES", 2048)
    settings = settings_of(layout)
    for rank in (0, 3):
        with fake_rank(rank, 4):
            parallel = parse(layout).resolved(4)
            passes = shared_model(settings, parallel, Mesh.of_site(CPU, parallel), CPU)
            parameters = parameters_of(passes)
            tensors = find_tensors(passes.parts, [torch.optim.SGD(parameters, lr=0.1)])
            node = FakeNode(manifest=tensors.manifest)
            shared = SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings(alpha=0.5))
            for part in passes.parts:
                if isinstance(part, FSDPModule):
                    part.unshard()
            with Live() as live, CommDebugMode() as collectives:  # type: ignore[no-untyped-call]
                for held, *views in shared._slices:
                    for tensor in (held.local(), *views):
                        live.count(tensor)
                before = live.now
                tensors.reshard()
                shared.write_snapshot(0, with_frozen=True)
                for mode in MergeMode:
                    shared.apply(0, mode, fresh=False)
                shared.write_snapshot(0, with_frozen=False)
            assert collectives.get_total_counts() == 0
            assert live.most < before + 2 * max(local(p).nbytes for p in parameters)


def local(parameter: Tensor) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter)
