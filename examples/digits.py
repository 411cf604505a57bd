"""Handwritten digits with BatchNorm, on scikit-learn's bundled data: an ordinary training loop as a site of a run.

python examples/digits.py                                                           # alone
atoll node --run RUN --name berlin -- examples/digits.py              # as a site
atoll node --run RUN --name berlin --ranks 2 -- examples/digits.py    # as a site of two processes

Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import atoll

STEPS_ALONE = 300
BATCH_SIZE = 64


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 8, 8) from 0 to 1 and labels (n,): to train on, then to test on."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    correct = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    arguments = parser.parse_args()
    images, labels, test_images, test_labels = load()
    model = build()
    is_parallel = int(os.environ.get("WORLD_SIZE", "1")) > 1  # the node says so, as torchrun would
    if is_parallel:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    fingerprint = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).digest()
    with atoll.join(model, optimizer, data_fingerprint=fingerprint) as site:
        # Every image counts once in each pass, over all sites and ranks; the run decides when it is over.
        for batch, targets in site.loader(TensorDataset(images, labels), BATCH_SIZE):
            loss = F.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = site.step(tokens=BATCH_SIZE, loss=loss)
            if site.run_length is None and step.inner_step == STEPS_ALONE:
                break
        with site.outer_parameters():
            correct = accuracy(model, test_images, test_labels)
        if site.rank == 0:
            print(f"step {site.inner_step}: {correct:.1%} of {len(test_labels)} test images are right", flush=True)
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
