"""A site that `gradient.py` trains: linear layers whose compute is small beside their bytes, and a line for each step
done.

gradient_rank.py TRACE --width WIDTH --layers LAYERS --steps STEPS [--optimizer NAME] [--ddp RANK WORLD ADDRESS]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import atoll

BATCH_SIZE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ddp", nargs=3, metavar=("RANK", "WORLD", "ADDRESS"), help="torch's own, without atoll")
    parser.add_argument("--optimizer", default="AdamW", help="of atoll")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    width = options.width
    layers = [module for _ in range(options.layers) for module in (nn.Linear(width, width, bias=False), nn.Tanh())]
    model: nn.Module = nn.Sequential(*layers)
    batch = torch.randn(BATCH_SIZE, width)
    with options.trace.open("w", buffering=1) as trace:
        if options.ddp:
            rank, world, address = options.ddp
            dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=int(world))
            model = DistributedDataParallel(model)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            for _ in range(options.steps):
                step(model, optimizer, batch)
                trace.write(f"{time.monotonic()}\n")
            trace.flush()
            os._exit(0)  # a thread of gloo's that is still there as Python ends aborts the process
        optimizer = getattr(atoll, options.optimizer)(model.parameters(), lr=1e-4)
        with atoll.join(model, optimizer) as site:
            while site.running:
                loss = step(model, optimizer, batch)
                site.step(tokens=BATCH_SIZE, loss=loss)
                trace.write(f"{time.monotonic()}\n")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss: torch.Tensor = (model(batch) - batch.roll(1)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


if __name__ == "__main__":
    main()
