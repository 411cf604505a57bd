"""Run as a process: how good the demo's model became. A request (JSON) on stdin, figures (JSON) on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.node.worker.sample import load_model
from atoll.protocol.errors import AtollError
from atoll.protocol.settings import RunSettings, settings_from_json


def evaluate(settings: RunSettings, data_paths: Sequence[str], saved: str | None) -> dict[str, float]:
    """Held-out bits per byte by name: before, and after (with a saved model)."""
    corpus = data.load(data.list_for_run(settings.data, data_paths))
    sequence = settings.trainer.sequence
    figures = {"before": held_out_bits_per_byte(Transformer(settings.model, settings.seed), corpus, sequence)}
    if saved is not None:
        figures["after"] = held_out_bits_per_byte(load_model(saved), corpus, sequence)
    return figures


def main() -> int:
    request = json.load(sys.stdin)
    torch.set_num_threads(request.pop("num_threads"))
    try:
        json.dump(evaluate(settings_from_json(request.pop("settings")), **request), sys.stdout)
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
