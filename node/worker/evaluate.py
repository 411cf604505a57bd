"""How good a model is: held-out bits per byte."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from atoll.node.worker.data import Corpus
from atoll.node.worker.recipe import next_byte_loss
from atoll.protocol.errors import ConfigError

EVALUATION_WINDOWS = 256
EVALUATION_BATCH = 32


@torch.no_grad()
def held_out_bits_per_byte(
    model: nn.Module, corpus: Corpus, sequence: int, num_windows: int = EVALUATION_WINDOWS
) -> float:
    """Mean over `num_windows` windows of `sequence` predicted bytes or tokens, evenly spaced over the held-out text.
    Of tokens, all count, ends of documents too, and are shared by the bytes that they stand for."""
    text = corpus.held_out
    last = len(text) - (sequence + 1)
    if last < 0:
        raise ConfigError(f"{len(text)} held-out bytes or tokens are fewer than a sequence of {sequence + 1}; add data")
    offsets = np.unique(np.linspace(0, last, num_windows, dtype=np.int64))
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    nats = 0.0
    for first in range(0, len(offsets), EVALUATION_BATCH):
        windows = [text.window(int(at), sequence + 1) for at in offsets[first : first + EVALUATION_BATCH]]
        nats += next_byte_loss(model, torch.from_numpy(np.stack(windows)).to(device)).item() * len(windows)
    model.train(was_training)
    return nats / (len(offsets) * math.log(2) * corpus.bytes_a_token)
