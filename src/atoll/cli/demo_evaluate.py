"""How good the demo's model became."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.node.worker.sample import load_model
from atoll.protocol.settings import RunSettings


def evaluate(settings: RunSettings, data_paths: Sequence[str], saved: str | None) -> dict[str, float]:
    """Held-out bits per byte by name: before, and after (with a saved model)."""
    corpus = data.load(data.source_for_run(settings.data, data_paths))
    sequence = settings.trainer.sequence
    figures = {"before": held_out_bits_per_byte(Transformer(settings.model, settings.seed), corpus, sequence)}
    if saved is not None:
        figures["after"] = held_out_bits_per_byte(load_model(saved), corpus, sequence)
    return figures
