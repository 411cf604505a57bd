"""A small regression with torch and atoll.join, which writes down its parameters around every `site.step`.

atoll node ... -- recording_worker.py FILE [--step-delay-s SECONDS] [--layers NUM]
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a third of the time that a start with torch takes

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import atoll

TOKENS = 8


def values_of(model: torch.nn.Module) -> list[float]:
    found: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--step-delay-s", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=1, help="each a tensor of its own")
    options = parser.parse_args(argv)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(options.layers - 1)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1, bias=False))
    num_steps = torch.tensor(0)
    model.register_buffer("num_steps", num_steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002 if layers else 0.05)
    target = torch.arange(8.0)
    with atoll.join(model, optimizer) as site, options.file.open("w", encoding="utf-8", buffering=1) as file:
        samples = torch.Generator().manual_seed(site.site_id)
        while site.running:
            time.sleep(options.step_delay_s)
            x = torch.randn(TOKENS, 8, generator=samples)
            loss = (model(x).squeeze(1) - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
            before = values_of(model)
            step = site.step(tokens=TOKENS, loss=loss)
            line = {"loss": float(loss), "before": before, "after": values_of(model)}
            line["num_steps"] = int(num_steps)
            if step.synced and site.has_outer_parameters:
                with site.outer_parameters():
                    line["outer"] = values_of(model)
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(sys.argv[1:])
