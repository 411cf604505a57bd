"""A script that streams leased shards: `python shard_worker.py NUM_SHARDS STEPS TRACE`. Shard k has STEPS + k % 3
steps. TRACE has a line for each that was begun."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a third of the time that a start with torch takes

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import atoll

STEP_S = 0.01


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_shards, num_steps, trace = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with atoll.join(model, optimizer, data_fingerprint=b"shards".ljust(32)) as site:
        for shard in site.shards(num_shards):
            with trace.open("a") as file:
                file.write(json.dumps({"site": site.site_id, "shard": shard}) + "\n")
            for _ in range(num_steps + shard % 3):
                time.sleep(STEP_S)
                loss = model(torch.full((2, 4), shard / num_shards)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not site.step(tokens=2, loss=loss).running:
                    break


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main()
