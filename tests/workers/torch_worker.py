"""A small regression with torch and atoll.join, which says what its processor is told to be.

atoll node ... -- torch_worker.py [--step-delay-s SECONDS]
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch.utils.data import TensorDataset

import atoll

BATCH_SIZE = 16
FINGERPRINT = bytes(range(32))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-delay-s", type=float, default=0.0)
    options = parser.parse_args(argv)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    capability = torch.backends.cpu.get_cpu_capability()
    sys.stdout.write(f"capability {capability}, {torch.get_num_threads()} threads\n")
    samples = torch.randn(500, 64, generator=torch.Generator().manual_seed(2))
    with atoll.join(model, optimizer, data_fingerprint=FINGERPRINT) as site:
        for (x,) in site.loader(TensorDataset(samples), BATCH_SIZE):
            time.sleep(options.step_delay_s)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            site.step(tokens=BATCH_SIZE, loss=loss)


if __name__ == "__main__":
    main(sys.argv[1:])
