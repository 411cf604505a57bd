"""A small regression with torch and atoll.join, which says what its processor is told to be.

atoll node ... -- torch_worker.py [--step-delay-s SECONDS] [--ddp | --fsdp2] [--amsgrad] [--stuck-disk FILE]
                [--crash-if-restored] [--constants] [--device cuda]
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a third of the time that a start with torch takes

import argparse
import math
import os
import stat
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import atoll
from atoll.node.worker.tensors import BufferPolicy

BATCH_SIZE = 16
FINGERPRINT = bytes(range(32))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-delay-s", type=float, default=0.0)
    parser.add_argument("--ddp", action="store_true", help="a group of gloo, found through the environment")
    parser.add_argument("--fsdp2", action="store_true", help="shard the model over a device mesh of the ranks")
    parser.add_argument("--constants", action="store_true", help="buffers that never change, as models have them")
    parser.add_argument("--amsgrad", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--crash-if-restored", action="store_true", help="before the first step")
    parser.add_argument(
        "--stuck-disk", type=Path, metavar="FILE", help="no fsync of a file comes back once this one is there"
    )
    options = parser.parse_args(argv)
    if options.stuck_disk is not None:
        stick(options.stuck_disk)
    torch.manual_seed(1)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    if options.constants:
        model.register_buffer("mask", torch.triu(torch.full((8, 8), -math.inf), 1))
        model.register_buffer("least", torch.full((8,), torch.finfo(torch.float32).min))
        model.register_buffer("one", torch.tensor(1.0))
        model.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)))
    model.to(options.device)
    if options.fsdp2:
        fully_shard(model, mesh=init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),)))
    elif options.ddp:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=options.amsgrad)
    capability = torch.backends.cpu.get_cpu_capability()
    sys.stdout.write(f"capability {capability}, {torch.get_num_threads()} threads\n")
    samples = torch.randn(500, 64, generator=torch.Generator().manual_seed(2))
    buffers: dict[str, BufferPolicy] = {"angles": "local"} if options.constants else {}
    with atoll.join(model, optimizer, buffers=buffers, data_fingerprint=FINGERPRINT) as site:
        counts = sorted({int(state["step"]) for state in optimizer.state.values()})
        sys.stdout.write(f"the optimizer has done {counts} steps\n")
        if counts and options.crash_if_restored:
            raise KeyError("a state of the optimizer that does not fit")
        tokens = BATCH_SIZE + (site.seed % 7 if options.constants else 0)  # weights that do not sum to 1 exactly
        for (batch,) in site.loader(TensorDataset(samples), BATCH_SIZE):
            x = batch.to(options.device)
            time.sleep(options.step_delay_s)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            site.step(tokens=tokens, loss=loss)


def stick(path: Path) -> None:
    fsync = os.fsync

    def fsync_or_hang(descriptor: int) -> None:
        if path.exists() and stat.S_ISREG(os.fstat(descriptor).st_mode):  # of a folder: after the write
            sys.stdout.write("the disk is stuck\n")
            threading.Event().wait()
        fsync(descriptor)

    os.fsync = fsync_or_hang  # type: ignore[assignment]


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(sys.argv[1:])
