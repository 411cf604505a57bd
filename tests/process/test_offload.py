"""A rank whose shards are in the host's memory while it computes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import Passes, parameters_of
from atoll.node.parallel.settings import DIMENSIONS, ParallelSettings
from atoll.node.worker.device import BACKENDS_OF_OFFLOAD
from atoll.node.worker.recipe import make_optimizer
from atoll.node.worker.shared_model import shared_model
from atoll.node.worker.tensors import find_tensors
from atoll.node.worker.trainer import train_step
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from tests.harness.sockets import free_address

SETTINGS = RunSettings(
    run_id="offload",
    data="mine",
    model=ModelSettings(dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=128, max_sequence=32),
    trainer=TrainerSettings(batch_size=4, sequence=32),
)
STEPS = 5
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Of one rank that has the one shard: NCCL has no two ranks on one GPU."""
    address = free_address()
    dist.init_process_group(BACKENDS_OF_OFFLOAD, init_method=f"tcp://{address}", rank=0, world_size=1)
    try:
        whole = init_device_mesh("cuda", (1,) * len(DIMENSIONS), mesh_dim_names=DIMENSIONS)
        yield Mesh(whole, ParallelSettings(), whole["dp_shard"], None, None)
    finally:
        dist.destroy_process_group()


def trained(passes: Passes, device: str, mesh: Mesh | None) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = make_optimizer(parameters_of(passes), SETTINGS.trainer)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(STEPS):
        windows = torch.randint(0, 256, (4, 33), generator=generator, dtype=torch.uint8)
        loss = train_step(passes, optimizer, windows.to(device), SETTINGS.trainer.grad_clip, mesh)
        assert loss is not None
        losses.append(loss.item())
    found = find_tensors(passes.parts, [optimizer])
    return losses, {held.spec.name: held.local().cpu().clone() for held in found.held}


def test_it_trains_as_one_on_a_cpu(mesh: Mesh) -> None:
    """Parameters, gradients and moments stay in pinned memory; atoll finds them there."""
    settings = ParallelSettings(dp_shard=2, offload=1)  # the option, of a site with a shard for another rank
    device = torch.device("cuda", 0)
    passes = shared_model(SETTINGS, settings, replace(mesh, settings=settings), device)
    alone = shared_model(SETTINGS, ParallelSettings(), None, torch.device("cpu"))
    losses, values = trained(passes, "cuda", mesh)
    for parameter in parameters_of(passes):
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().is_cpu
        assert parameter.to_local().is_pinned()
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.to_local().is_cpu
    assert {buffer.device.type for part in passes.parts for buffer in part.buffers()} == {"cuda"}
    expected_losses, expected = trained(alone, "cpu", None)
    assert losses == pytest.approx(expected_losses, abs=1e-3)
    assert values.keys() == expected.keys()
    assert max((values[name] - expected[name]).abs().max().item() for name in values) < 5e-3
