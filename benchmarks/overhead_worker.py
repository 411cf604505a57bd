"""The training loop that `overhead.py` runs under a node: blocks with `site.step` and without, in turn."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import atoll
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import make_optimizer, next_byte_loss
from atoll.protocol.model_settings import ModelSettings, TrainerSettings


def main(result: Path, num_pairs: int, block_steps: int) -> None:
    trainer = TrainerSettings()
    model = Transformer(ModelSettings(), 1)
    optimizer = make_optimizer(model.parameters(), trainer)
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(0, 256, (trainer.batch_size, trainer.sequence + 1), generator=generator)
    tokens = trainer.batch_size * trainer.sequence
    with atoll.join(model, optimizer) as site:

        def block(attached: bool) -> float:
            began_s = time.perf_counter()
            for _ in range(block_steps):
                optimizer.zero_grad(set_to_none=True)
                loss = next_byte_loss(model, windows)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if attached:
                    site.step(tokens=tokens, loss=loss)
            return time.perf_counter() - began_s

        block(True)
        block(False)
        pairs = []
        for i in range(num_pairs):
            first = block(i % 2 == 0)
            second = block(i % 2 == 1)
            with_atoll, without = (first, second) if i % 2 == 0 else (second, first)
            pairs.append((with_atoll, without))
        result.write_text(json.dumps(pairs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
