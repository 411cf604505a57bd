"""Two ranks of a model in tensor parallelism hand in gradients as they are of the whole model.

tensor_parallel_step.py RANK ADDRESS: exits with 0 if they are.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import atoll

PLAN = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def back(of: nn.Module, x: Tensor) -> None:
    y = of(x)
    whole = y.full_tensor() if isinstance(y, DTensor) else y
    (whole**2).mean().backward()


def main(rank: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(2)
    x = torch.randn(4, 8, 6)
    alone, parallel = model(), model()
    back(alone, x)
    parallelize_module(parallel, mesh, PLAN)
    back(parallel, distribute_tensor(x, mesh, [Shard(1)]))
    gradients = {name: p.grad for name, p in parallel.named_parameters()}
    partial = [n for n, g in gradients.items() if isinstance(g, DTensor) and g.placements == (Partial(),)]
    assert partial == ["0.weight", "0.bias"], partial
    optimizer = atoll.AdamW(parallel.parameters(), lr=0.1)
    optimizer.at_commit(0)
    optimizer.step()
    for (name, expected), p in zip(alone.named_parameters(), parallel.parameters(), strict=True):
        assert expected.grad is not None
        local = distribute_tensor(expected.grad, mesh, p.placements).to_local() if isinstance(p, DTensor) else None
        found = optimizer.contribution(p)
        assert found is not None
        assert torch.allclose(found, expected.grad if local is None else local, atol=1e-6), name
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads now and then end the process as the interpreter does ("terminate called without an active
    # exception"). All that is tested is done.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
