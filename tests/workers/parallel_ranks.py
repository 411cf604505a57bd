"""One rank of a DDP or FSDP2 site whose every step is known: each takes 0.75 from every weight and 0.5 from every bias.

Each rank: parallel_ranks.py ddp|fsdp2|hsdp|offload [STEP]

From STEP on rank 1 changes a bias of its own copy by hand.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a third of the time that a start with torch takes

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import atoll


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)  # 5 rows over 2 ranks: shards of 3 and 2
        self.second = nn.Linear(3, 1)  # rank 1 holds nothing of it under FSDP2
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.first(x), self.second(x)), dim=1)


def main(kind: str, drift_from: float) -> None:
    use_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_gpu else torch.device("cpu")
    torch.manual_seed(rank)  # the first values must come from one rank
    bare = Net().to(device)
    net: nn.Module = bare
    if kind != "ddp":
        num = dist.get_world_size()
        shape, names = ((2, num // 2), ("replicate", "shard")) if kind == "hsdp" else ((num,), ("shard",))
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        policy = CPUOffloadPolicy(pin_memory=use_gpu) if kind == "offload" else OffloadPolicy()
        fully_shard(bare.first, mesh=mesh, offload_policy=policy)
        fully_shard(bare, mesh=mesh, offload_policy=policy)
    else:
        net = DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x = torch.full((1, 3), float(rank + 1), device=device)  # mean over ranks: 1.5
    with atoll.join(net, optimizer) as site:
        while site.running:
            optimizer.zero_grad()
            loss = net(x).sum()
            loss.backward()
            optimizer.step()
            if rank == 1 and site.inner_step + 1 >= drift_from:
                with torch.no_grad():
                    bare.first.bias[2] += 1
            with torch.no_grad():
                net(x)  # without backward FSDP2 leaves gathered copies in the root module: writes must not be lost
            site.step(tokens=10 * (rank + 1), loss=torch.tensor(float(rank), device=device))
        with site.outer_parameters():
            outer = net(torch.zeros(1, 3, device=device)).flatten().tolist()  # the biases
        with torch.no_grad():
            local = net(torch.zeros(1, 3, device=device)).flatten().tolist()
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} outer {outer} local {local}\n")
    sys.stdout.flush()
    # On a busy machine gloo's threads now and then never let the interpreter end (torch 2.13; their stacks are native
    # code only). All that is tested is done.
    os._exit(0)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else math.inf)
