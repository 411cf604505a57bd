"""One rank of several layouts, one after the other: the memory of a step of the built-in trainer, as the allocator of
torch counts it.

memory_of_ranks.py RANK WORLD ADDRESS LAYOUT ...: prints a line of JSON for each layout; exits with 1 if it could not go
on.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load

import json
import os
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import Passes, parameters_of
from atoll.node.parallel.settings import parse
from atoll.node.worker.recipe import make_optimizer
from atoll.node.worker.shared_model import shared_model
from atoll.node.worker.trainer import train_step
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings

SETTINGS = RunSettings(
    run_id="memory",
    data="mine",
    model=ModelSettings(
        dim=256, num_layers=4, num_heads=8, num_kv_heads=2, ffn_dim=704, vocab_size=512, max_sequence=256
    ),
    trainer=TrainerSettings(batch_size=8, sequence=256),
)
CPU = torch.device("cpu")


STEPS = 9
"""Counted, after one that is not."""


def most_bytes(passes: Passes, mesh: Mesh) -> float:
    """That a step of this rank has at once, beside what there was before it. What a thread of gloo gives back is not
    always seen, and counts then until the step ends: a step is never seen with too little, so the least of some counts.
    """
    trainer = SETTINGS.trainer
    optimizer = make_optimizer(parameters_of(passes), trainer)
    windows = torch.randint(0, 256, (trainer.batch_size // mesh.settings.num_data_ranks, trainer.sequence + 1))
    train_step(passes, optimizer, windows, trainer.grad_clip, mesh)
    found = []
    gc.collect()  # the layout before, which would be given back in the midst of a step
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            train_step(passes, optimizer, windows, trainer.grad_clip, mesh)
        changes = sorted(allocations(seen.profiler.kineto_results.experimental_event_tree()))
        found.append(max(accumulate(num_bytes for _, num_bytes in changes)))
    return min(found)


def allocations(events: list[Any]) -> Iterator[tuple[int, int]]:
    """(time, bytes) of each; less than 0 where memory is given back."""
    for event in events:
        kind, found = event.typed
        if kind == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, found.alloc_size
        yield from allocations(event.children)


def main(rank: int, world: int, address: str, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
    for layout in layouts:
        settings = parse(layout).resolved(world)
        mesh = Mesh.of_site(CPU, settings)
        most = torch.tensor(most_bytes(shared_model(SETTINGS, settings, mesh, CPU), mesh))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if rank == 0:
            sys.stdout.write(json.dumps({"layout": layout, "most_bytes": most.item()}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads now and then never let the interpreter end


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
