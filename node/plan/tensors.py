"""The tensors of the built-in model, by its settings alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from atoll.protocol.layout import Manifest, Role, TensorSpec, TiedName
from atoll.protocol.model_settings import ModelSettings

PARTS = ("embedding", "attention", "feed-forward", "norms", "head")

ROUTER = "feed_forward.router.weight"
"""Whole on each rank of tensor parallelism."""


def shapes_of_block(model: ModelSettings) -> dict[str, tuple[int, ...]]:
    kv_dim = model.dim // model.num_heads * model.num_kv_heads
    return {
        "attention_norm.weight": (model.dim,),
        "attention.wq.weight": (model.dim, model.dim),
        "attention.wk.weight": (kv_dim, model.dim),
        "attention.wv.weight": (kv_dim, model.dim),
        "attention.wo.weight": (model.dim, model.dim),
        "feed_forward_norm.weight": (model.dim,),
        **_feed_forward(model),
    }


def _feed_forward(model: ModelSettings) -> dict[str, tuple[int, ...]]:
    if not model.num_experts:
        return _swiglu("feed_forward", model.dim, model.ffn_dim)
    wide, narrow = (model.num_experts, model.ffn_dim, model.dim), (model.num_experts, model.dim, model.ffn_dim)
    shared = model.num_shared_experts * model.ffn_dim
    return {
        ROUTER: (model.num_experts, model.dim),
        "feed_forward.experts.gate": wide,
        "feed_forward.experts.up": wide,
        "feed_forward.experts.down": narrow,
        **(_swiglu("feed_forward.shared", model.dim, shared) if shared else {}),
    }


def _swiglu(name: str, dim: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.gate.weight": (width, dim), f"{name}.up.weight": (width, dim), f"{name}.down.weight": (dim, width)}


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


def active_parameters(model: ModelSettings) -> int:
    """Of those, what a token goes through."""
    idle = 3 * model.dim * model.ffn_dim * (model.num_experts - model.experts_per_token) if model.num_experts else 0
    return sum(parameters_by_part(model).values()) - model.num_layers * idle


def _part_of(name: str) -> str:
    if "norm." in name:
        return "norms"
    return next((part for part in PARTS if part.replace("-", "_") + "." in name), "head")


def manifest_of(model: ModelSettings) -> Manifest:
    """As the built-in trainer's ranks say it when they join."""
    tensors = [TensorSpec(name=name, shape=shape, dtype="F32", role=Role.TRAINABLE) for name, shape in shapes(model)]
    if model.num_experts:
        names = (f"layers.{number}.feed_forward.router.bias" for number in range(model.num_layers))
        tensors += [
            TensorSpec(name=name, shape=(model.num_experts,), dtype="F32", role=Role.BUFFER_MEAN) for name in names
        ]
    tied = [TiedName(alias="head.weight", name="embedding.weight")] if model.tie_embeddings else []
    return Manifest.canonical(tensors, tied)
