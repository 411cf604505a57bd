"""What one of three ranks of a real process group tells the others, and what it hears.

ranks_together.py RANK ADDRESS: exits with 0 if all is as it was sent.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from atoll.node.worker.ranks_together import ranks_together

WORLD = 3


def main(rank: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=WORLD)
    cpu = torch.device("cpu")
    assert ranks_together(range(WORLD), WORLD, cpu, is_wanted=True) is None, "one host has all files"
    here = range(rank, rank + 1)
    assert ranks_together(here, WORLD, cpu, is_wanted=rank != 1) is None, "one of them would not come"
    elsewhere = range((rank + 1) % WORLD, (rank + 1) % WORLD + 1)
    assert ranks_together(elsewhere, WORLD, cpu, is_wanted=True) is None, "the group numbers ranks otherwise"
    together = ranks_together(here, WORLD, cpu, is_wanted=True)
    assert together is not None
    said = {"rank": rank, "text": "ä" * (10**rank)}
    assert together.told(said) == [{"rank": each, "text": "ä" * (10**each)} for each in range(WORLD)]
    assert together.all_say(yes=True)
    assert not together.all_say(yes=rank != 1)
    data = (torch.arange(70_000) % 251).to(torch.uint8)
    if rank == 2:
        together.send(data, [0, 1])
        together.send(data[:1], [1])
    else:
        assert torch.equal(together.receive(data.numel(), 2), data)
        if rank == 1:
            assert torch.equal(together.receive(1, 2), data[:1])
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then end the process, or never let it end, as the interpreter does


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
