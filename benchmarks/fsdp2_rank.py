"""One rank of what `fsdp2.py` measures."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import atoll
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import parameters_of
from atoll.node.parallel.settings import ParallelSettings
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import learning_rate, make_optimizer
from atoll.node.worker.shared_model import shared_model
from atoll.node.worker.trainer import train_step
from atoll.protocol.settings import RunSettings

SETTINGS = RunSettings(run_id="bench", steps=1 << 20, data="local")
TRAINER = SETTINGS.trainer
CPU = torch.device("cpu")
NUM_SAMPLES = 4096


def by_hand() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Transformer(SETTINGS.model, SETTINGS.seed)
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    betas = TRAINER.beta1, TRAINER.beta2
    return model, torch.optim.AdamW(model.parameters(), lr=TRAINER.learning_rate, betas=betas)


def main(result: Path, num_pairs: int, block_steps: int) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    parallel = ParallelSettings(dp_shard=world)
    mesh = Mesh.of_site(CPU, parallel)
    passes = shared_model(SETTINGS, parallel, mesh, CPU)
    optimizer = make_optimizer(parameters_of(passes), TRAINER)
    batch_size = TRAINER.batch_size // world
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(0, 256, (NUM_SAMPLES, TRAINER.sequence + 1), generator=generator, dtype=torch.uint8)
    model, other = by_hand()
    same = windows[:batch_size]
    with atoll.join(passes.parts, optimizer, data_rank=mesh.data_rank) as site:
        batches = iter(site.loader(TensorDataset(windows), batch_size))

        def built_in() -> None:
            for (batch,) in islice(batches, block_steps):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(TRAINER, site.inner_step, SETTINGS.steps)
                loss = train_step(passes, optimizer, batch, TRAINER.grad_clip, mesh)
                site.step(tokens=batch_size * TRAINER.sequence, loss=loss)

        def hand() -> None:
            for _ in range(block_steps):
                other.zero_grad(set_to_none=True)
                tokens = same.long()
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), TRAINER.grad_clip)
                other.step()

        ways = [built_in, hand]
        for way in ways:
            way()
        pairs = []
        for pair in range(num_pairs):
            took_s = {}
            for way in ways if pair % 2 == 0 else reversed(ways):
                dist.barrier()
                began_s = time.perf_counter()
                way()
                took_s[way] = time.perf_counter() - began_s
            pairs.append((took_s[built_in], took_s[hand]))
        if site.rank == 0:
            result.write_text(json.dumps(pairs))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then never let the interpreter end


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
