"""The training that `utilization.py` shows beside its timed steps: the default model, and a line for each step."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import atoll
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import make_optimizer, next_byte_loss
from atoll.protocol.model_settings import ModelSettings, TrainerSettings


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    args = parser.parse_args(argv)
    trainer = TrainerSettings()
    model = Transformer(ModelSettings(), 1)
    optimizer = make_optimizer(model.parameters(), trainer)
    windows = torch.randint(0, 256, (trainer.batch_size, trainer.sequence + 1))
    tokens, step = trainer.batch_size * trainer.sequence, 0
    with args.trace.open("w", buffering=1) as trace, atoll.join(model, optimizer) as site:
        while site.running:
            began_s = time.monotonic()
            optimizer.zero_grad(set_to_none=True)
            loss = next_byte_loss(model, windows)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            at_s, step = time.monotonic(), step + 1
            trace.write(json.dumps({"event": "step", "step": step, "at_s": at_s, "train_s": at_s - began_s}) + "\n")
            site.step(tokens=tokens, loss=loss)


if __name__ == "__main__":
    main(sys.argv[1:])
