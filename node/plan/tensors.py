"""The tensors of the built-in model, by its settings alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from atoll.protocol.layout import Manifest, Role, TensorSpec, TiedName
from atoll.protocol.model_settings import ModelSettings

PARTS = ("embedding", "attention", "feed-forward", "norms", "head")


def shapes_of_block(model: ModelSettings) -> dict[str, tuple[int, ...]]:
    kv_dim = model.dim // model.num_heads * model.num_kv_heads
    return {
        "attention_norm.weight": (model.dim,),
        "attention.wq.weight": (model.dim, model.dim),
        "attention.wk.weight": (kv_dim, model.dim),
        "attention.wv.weight": (kv_dim, model.dim),
        "attention.wo.weight": (model.dim, model.dim),
        "feed_forward_norm.weight": (model.dim,),
        "feed_forward.gate.weight": (model.ffn_dim, model.dim),
        "feed_forward.up.weight": (model.ffn_dim, model.dim),
        "feed_forward.down.weight": (model.dim, model.ffn_dim),
    }


def shapes(model: ModelSettings) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape), each tensor once: a head that is tied to the embedding is not among them."""
    yield "embedding.weight", (model.vocab_size, model.dim)
    for number in range(model.num_layers):
        for name, shape in shapes_of_block(model).items():
            yield f"layers.{number}.{name}", shape
    yield "norm.weight", (model.dim,)
    if not model.tie_embeddings:
        yield "head.weight", (model.vocab_size, model.dim)


def parameters_by_part(model: ModelSettings) -> dict[str, int]:
    """By `PARTS`."""
    found = dict.fromkeys(PARTS, 0)
    for name, shape in shapes(model):
        found[_part_of(name)] += math.prod(shape)
    return found


def _part_of(name: str) -> str:
    if "norm." in name:
        return "norms"
    return next((part for part in PARTS if part.replace("-", "_") + "." in name), "head")


def manifest_of(model: ModelSettings) -> Manifest:
    """As the built-in trainer's ranks say it when they join."""
    tensors = [TensorSpec(name=name, shape=shape, dtype="F32", role=Role.TRAINABLE) for name, shape in shapes(model)]
    tied = [TiedName(alias="head.weight", name="embedding.weight")] if model.tie_embeddings else []
    return Manifest.canonical(tensors, tied)
