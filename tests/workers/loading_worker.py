"""A script with torch whose DataLoader has processes of its own: `python loading_worker.py NUM_SAMPLES BATCH_SIZE`."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a third of the time that a start with torch takes

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import atoll


class Numbers(Dataset[Tensor]):
    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / self._num_samples)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_samples, batch_size = int(sys.argv[1]), int(sys.argv[2])
    with atoll.join(model, optimizer, data_fingerprint=b"numbers".ljust(32)) as site:
        for batch in site.loader(Numbers(num_samples), batch_size, num_workers=2):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            site.step(tokens=len(batch), loss=loss)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main()
