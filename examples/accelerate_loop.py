"""A loop of one's own with accelerate, on digits: an ordinary script as a site of a run.

python examples/accelerate_loop.py                                            # alone
atoll node --run RUN --name berlin -- examples/accelerate_loop.py    # as a site

Needs accelerate and scikit-learn: pip install "atoll[hf]" scikit-learn. Lines with a mark make it a site.
"""

from __future__ import annotations

import hashlib

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import atoll  # <-

BATCH_SIZE = 32
EPOCHS_ALONE = 5


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    fingerprint = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).digest()  # <-
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)  # <- without the loader, as samples are leased
    with atoll.join(model, optimizer, data_fingerprint=fingerprint) as site:  # <-
        loader = site.loader(TensorDataset(images, labels), BATCH_SIZE, by_pass=True)  # <-
        epoch = 0
        while site.running and (site.settings is not None or epoch < EPOCHS_ALONE):  # <-
            for batch, targets in loader:
                loss = F.cross_entropy(model(batch.to(accelerator.device)), targets.to(accelerator.device))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                site.step(tokens=len(batch), loss=loss)  # <-
            epoch += 1
            print(f"epoch {epoch}, step {site.inner_step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
