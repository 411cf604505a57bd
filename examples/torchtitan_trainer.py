"""torchtitan's Trainer on bytes of the Python standard library: its small Llama as a site of a run.

torchrun --nproc-per-node 1 examples/torchtitan_trainer.py                                   # alone
atoll node --run RUN --name berlin --ranks 8 -- examples/torchtitan_trainer.py               # as a site

Needs torchtitan: pip install "atoll[torchtitan]". Lines with a mark make it a site. Options are torchtitan's.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from atoll.integrations.torchtitan import build  # <-


def load() -> Tensor:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


class Windows(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Of bytes, one after the other."""

    def __init__(self, text: Tensor, length: int) -> None:
        self._text, self._length = text, length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        window = self._text[index * self._length : (index + 1) * self._length + 1].long()
        return {"input": window[:-1]}, window[1:]


class BytesLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        super().__init__(Windows(load(), seq_len), dp_rank, dp_world_size, batch_size=local_batch_size)  # type: ignore[arg-type]


class BytesTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


def bytes_debugmodel() -> Trainer.Config:
    """As `--module torchtitan_trainer --config bytes_debugmodel` takes it."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.tokenizer, config.dataloader = BytesTokenizer.Config(), BytesLoader.Config()
    config.training.seq_len, config.training.disable_cuda_graphs = 256, True
    return config


def main() -> None:
    init_logger()
    config = ConfigManager().parse_args()
    fingerprint = hashlib.sha256(load().numpy().tobytes()).digest()  # <-
    trainer = build(config, data_fingerprint=fingerprint)  # <-
    try:
        trainer.train()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
