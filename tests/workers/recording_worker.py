"""A small regression with torch and atoll.join, which writes down its parameters around every `site.step`.

atoll node ... -- recording_worker.py FILE [--step-delay-s SECONDS]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import atoll

TOKENS = 8


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--step-delay-s", type=float, default=0.0)
    options = parser.parse_args(argv)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1, bias=False)
    num_steps = torch.tensor(0)
    model.register_buffer("num_steps", num_steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
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
            before = model.weight.detach().flatten().tolist()
            step = site.step(tokens=TOKENS, loss=loss)
            line = {"loss": float(loss), "before": before, "after": model.weight.detach().flatten().tolist()}
            line["num_steps"] = int(num_steps)
            if step.synced:
                with site.outer_parameters():
                    line["outer"] = model.weight.detach().flatten().tolist()
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
