"""Run as a process: how good the demo's model became. A request (JSON) on stdin, figures (JSON) on stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.node.worker import baselines, data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.node.worker.sample import load_model
from atoll.protocol.errors import AtollError
from atoll.protocol.settings import RunSettings, settings_from_json

PROGRESS_EVERY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    settings: RunSettings
    data_paths: tuple[str, ...]
    saved: Path | None
    num_sites: int
    compare: bool


def evaluate(request: Request) -> dict[str, float]:
    """Held-out bits per byte by name: before, after (with a saved model), alone and data_parallel (to compare)."""
    corpus = data.load(data.list_for_run(request.settings.data, request.data_paths))
    sequence = request.settings.trainer.sequence
    first = Transformer(request.settings.model, request.settings.seed)
    figures = {"before": held_out_bits_per_byte(first, corpus, sequence)}
    if request.saved is not None:
        figures["after"] = held_out_bits_per_byte(load_model(request.saved), corpus, sequence)
    if request.compare:
        alone = baselines.train_alone(request.settings, corpus, _progress)
        figures["alone"] = alone.bits_per_byte_after
        together = baselines.train_data_parallel(request.settings, corpus, request.num_sites, _progress)
        figures["data_parallel"] = together.bits_per_byte_after
    return figures


def _progress(name: str, steps: int) -> None:
    if steps % PROGRESS_EVERY == 0:
        print(f"{name}: step {steps}", file=sys.stderr, flush=True)


def main() -> int:
    table: dict[str, Any] = json.load(sys.stdin)
    request = Request(
        settings=settings_from_json(table["settings"]),
        data_paths=tuple(table["data_paths"]),
        saved=Path(table["saved"]) if table["saved"] else None,
        num_sites=table["num_sites"],
        compare=table["compare"],
    )
    torch.set_num_threads(table["num_threads"])
    try:
        json.dump(evaluate(request), sys.stdout)
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
