"""A small network by Lightning's Trainer, on digits: an ordinary script as a site of a run.

python examples/lightning_trainer.py                                            # alone
atoll node --run RUN --name berlin -- examples/lightning_trainer.py    # as a site

Needs lightning and scikit-learn: pip install "atoll[lightning]" scikit-learn. Lines with a mark make it a site.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from atoll.integrations.lightning import SiteCallback  # <-


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="alone; a run has a length of its own")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    fingerprint = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).digest()  # <-
    site = SiteCallback(data_fingerprint=fingerprint)  # <-
    trainer = Trainer(
        max_epochs=arguments.epochs, accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[site],  # <-
        use_distributed_sampler=False,  # <-
    )  # fmt: skip
    trainer.fit(Classifier(), site.loader(TensorDataset(images, labels), batch_size=32))  # <-
    print(f"{trainer.global_step} steps of this process", flush=True)


if __name__ == "__main__":
    main()
