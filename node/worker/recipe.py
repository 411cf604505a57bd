"""The built-in trainer's recipe, the same in a run and in what it is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.node.worker.data import Corpus
from atoll.node.worker.sampling import window_offsets
from atoll.protocol.settings import TrainerSettings


def make_optimizer(model: torch.nn.Module, trainer: TrainerSettings) -> torch.optim.AdamW:
    """AdamW of the built-in trainer; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": trainer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=trainer.learning_rate, betas=(trainer.beta1, trainer.beta2))


def draw(corpus: Corpus, trainer: TrainerSettings, seed: int, index: int) -> Tensor:
    """Batch `index` of the stream `seed`: (batch, sequence + 1) uint8, on the CPU."""
    length = trainer.sequence + 1
    offsets = window_offsets(seed, index, trainer.batch_size, len(corpus.training) - length + 1)
    return torch.from_numpy(corpus.training.windows(offsets, length))


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of predicting windows[:, 1:] from windows[:, :-1]; windows: (batch, seq + 1) uint8."""
    tokens = windows.long()
    logits = model(tokens[:, :-1])  # (batch, seq, vocab)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def learning_rate(trainer: TrainerSettings, step: int, total_steps: int) -> float:
    """Linear warm-up, then cosine decay to a tenth at `total_steps`. `step` counts from 0."""
    if step < trainer.warmup_steps:
        return trainer.learning_rate * (step + 1) / trainer.warmup_steps
    done = min(1.0, (step - trainer.warmup_steps) / max(1, total_steps - trainer.warmup_steps))
    return trainer.learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * done)))
