"""A rank that `giving_way.py` trains: the default model by DDP over gloo, and a line when each step was done."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import make_optimizer, next_byte_loss
from atoll.protocol.model_settings import ModelSettings, TrainerSettings


def main(rendezvous: Path, rank: int, num_ranks: int, trace: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    trainer, model = TrainerSettings(), Transformer(ModelSettings(), 1)
    optimizer, shared = make_optimizer(model.parameters(), trainer), DistributedDataParallel(model)
    windows = torch.randint(0, 256, (trainer.batch_size, trainer.sequence + 1))
    with trace.open("w", buffering=1) as file:
        while True:
            optimizer.zero_grad(set_to_none=True)
            next_byte_loss(shared, windows).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            file.write(f"{time.monotonic()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
