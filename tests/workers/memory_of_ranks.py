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
from bisect import bisect_left
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import parameters_of
from atoll.node.parallel.settings import ParallelSettings, parse
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
STEP = "a step"


STEPS = 5
"""The first is not counted: in it the optimizer's state comes."""


def most_bytes(settings: ParallelSettings, mesh: Mesh) -> int:
    """That a step of this rank has at once, weights and moments among them. Threads that wait for a collective hold its
    tensors for as long as they do, so the least of some steps counts."""
    trainer = SETTINGS.trainer
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        passes = shared_model(SETTINGS, settings, mesh, CPU)
        optimizer = make_optimizer(parameters_of(passes), trainer)
        windows = torch.randint(0, 256, (trainer.batch_size // settings.num_data_ranks, trainer.sequence + 1))
        for _ in range(STEPS):
            with record_function(STEP):
                train_step(passes, optimizer, windows, trainer.grad_clip, mesh)
                optimizer.zero_grad(set_to_none=True)
    tree = seen.profiler.kineto_results.experimental_event_tree()
    changes, steps = list[tuple[int, int]](), list[tuple[int, int]]()
    read(tree, changes, steps)
    times, totals = zip(*accumulate(sorted(changes), lambda had, new: (new[0], had[1] + new[1])), strict=True)
    counted = [slice(bisect_left(times, start), bisect_left(times, end)) for start, end in sorted(steps)[1:]]
    assert len(counted) == STEPS - 1
    return min(max(totals[step]) for step in counted)


def read(events: list[Any], changes: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
    """(time, bytes) of each that is taken, less than 0 where it is given back; start and end of each step."""
    for event in events:
        kind, found = event.typed
        if kind == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, found.alloc_size))
        elif event.name == STEP:
            steps.append((event.start_time_ns, event.end_time_ns))
        read(event.children, changes, steps)


def main(rank: int, world: int, address: str, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
    for layout in layouts:
        settings = parse(layout).resolved(world)
        mesh = Mesh.of_site(CPU, settings)
        most = torch.tensor(most_bytes(settings, mesh))
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
