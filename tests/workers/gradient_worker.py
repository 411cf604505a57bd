"""A small regression whose optimizer's steps are done at the nodes. It writes down each gradient that it hands in.

atoll node ... -- gradient_worker.py TRACE [--optimizer adamw|onebit|zeroone|sgd] [--fsdp2] [--learning-rate RATE]
                [--step-delay-s SECONDS] [--device cuda] [--spoiled-call N]
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a third of the time that a start with torch takes

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import atoll

BATCH_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--optimizer", choices=("adamw", "onebit", "zeroone", "sgd"), default="adamw")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--fsdp2", action="store_true", help="shard the model over a device mesh of the ranks")
    parser.add_argument("--step-delay-s", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--spoiled-call", type=int, default=0, help="of site.step, with --fsdp2: the part of the last rank"
    )
    options = parser.parse_args()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 6, generator=generator)
    target = torch.randn(6, 3, generator=generator).to(options.device)
    model.to(options.device)
    if options.fsdp2:
        fully_shard(model, mesh=init_device_mesh(options.device, (int(os.environ["WORLD_SIZE"]),)))
    if options.optimizer != "sgd":
        kind = {"adamw": atoll.AdamW, "onebit": atoll.OneBitAdam, "zeroone": atoll.ZeroOneAdam}[options.optimizer]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = kind(groups, lr=options.learning_rate, weight_decay=0.1)
    else:
        optimizer = atoll.SGD(model.parameters(), lr=options.learning_rate, momentum=0.5)
    with atoll.join(model, optimizer, data_fingerprint=bytes(32)) as site, open(options.trace, "a") as trace:
        for call, (samples,) in enumerate(site.loader(TensorDataset(x), BATCH_SIZE), start=1):
            batch, step = samples.to(options.device), site.inner_step
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate / (1 + step / 10)
            loss = torch.nn.functional.mse_loss(model(batch), torch.tanh(batch @ target))
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
            rates = [float(group[key]) for group in optimizer.param_groups for key in ("lr", "weight_decay")]
            if site.rank == 0:
                trace.write(json.dumps({"step": step, "gradients": gradients, "rates": rates}) + "\n")
                trace.flush()
            if call == options.spoiled_call and site.rank == site.world - 1:
                part = next(model.parameters()).grad
                assert isinstance(part, DTensor)
                part.to_local()[0, 0] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(options.step_delay_s)
            site.step(tokens=BATCH_SIZE, loss=loss)
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(gradient: Tensor | None) -> str:
    assert gradient is not None
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.cpu().numpy().tobytes().hex()


if __name__ == "__main__":
    main()
