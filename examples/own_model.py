"""A language model of one's own, whose ranks share it as the node is told: shards, matrices, stages of a pipeline.

python examples/own_model.py                                                                       # alone
atoll node --run RUN --name berlin -- examples/own_model.py                          # as a site
atoll node --run RUN --name oslo --parallel dp_shard=2,tp=2 -- examples/own_model.py   # of four ranks

It learns the source of Python's argparse, byte by byte.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import atoll

DIM, HEADS, BLOCKS, SEQUENCE, BATCH = 64, 4, 4, 64, 8
STEPS_ALONE = 200


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.queries, self.keys, self.values = (nn.Linear(DIM, DIM) for _ in range(3))
        self.mixed = nn.Linear(DIM, DIM)
        self.widen, self.narrow = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        y = self.norm(x)
        # As many heads as this rank has.
        q, k, v = (
            m(y).view(*y.shape[:2], -1, DIM // HEADS).transpose(1, 2) for m in (self.queries, self.keys, self.values)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(heads.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(F.gelu(self.widen(x)))
        return out


class Embedding(nn.Module):
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, DIM)
        nn.init.normal_(self.tokens.weight, std=DIM**-0.5)
        rates = torch.arange(SEQUENCE).outer(1e4 ** (-torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("angles", torch.cat((rates.sin(), rates.cos()), 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.tokens(tokens) + self.angles[: tokens.shape[1]]
        return out


class Model(nn.Module):
    """In a stage of a pipeline some blocks are missing, and what is before and behind them is None."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: Embedding | None = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm: nn.LayerNorm | None = nn.LayerNorm(DIM)
        self.head: nn.Linear | None = nn.Linear(DIM, 256, bias=False)
        self.head.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


PARTS: dict[str, Any] = {
    "blocks": "blocks",
    "first": ["embedding"],
    "last": ["norm", "head"],
    "columns": ["queries", "keys", "values", "widen"],
    "rows": ["mixed", "narrow"],
}


class Windows(Dataset[Tensor]):
    def __init__(self, text: bytes) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self._text) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> Tensor:
        return self._text[index * SEQUENCE : (index + 1) * SEQUENCE + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    arguments = parser.parse_args()
    text = Path(argparse.__file__).read_bytes()
    with atoll.share(Model, loss_of, **PARTS) as model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, foreach=False)
        with atoll.join(model, optimizer, data_fingerprint=hashlib.sha256(text).digest()) as site:
            batch_size = model.batch_size(BATCH)
            for batch in site.loader(Windows(text), batch_size):
                tokens = batch.to(model.device)
                loss = model(tokens[:, :-1], tokens[:, 1:])
                model.clip(1.0)
                optimizer.step()
                optimizer.zero_grad()
                step = site.step(tokens=batch_size * SEQUENCE, loss=loss)
                if step.inner_step % 20 == 0 and loss is not None:
                    print(f"step {step.inner_step}: loss {loss.item():.3f}", flush=True)
                if site.run_length is None and step.inner_step == STEPS_ALONE:
                    break


if __name__ == "__main__":
    main()
