"""The settings of the built-in model and its trainer. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.protocol.bounds import within
from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The built-in Llama-style language model, of bytes or tokens, dense or with experts. Ignored by sites that run a
    script of their own."""

    dim: int = within(1, 1 << 16, 128)
    """Width of the residual stream."""
    num_layers: int = within(1, 1024, 4)
    num_heads: int = within(1, 1024, 4)
    num_kv_heads: int = within(1, 1024, 2)
    """Heads of keys and values (grouped-query attention)."""
    ffn_dim: int = within(1, 1 << 20, 448)
    """Width of the SwiGLU feed-forward; where there are experts, of each of them."""
    vocab_size: int = within(256, 1 << 20, 256)
    """256 for text as bytes; for packed tokens at least what `atoll tokenize` says."""
    max_sequence: int = within(1, 1 << 24, 128)
    """Longest sequence, in tokens: bytes, where text is not tokenized."""
    tie_embeddings: bool = False
    """The output layer shares its weights with the embedding."""
    rope_base: float = within(1, 1e12, 10_000.0, open_low=True)
    """Base of the rotary embedding's wavelengths."""
    norm_eps: float = within(0, 1, 1e-5, open_low=True)
    """Added to mean squares by RMSNorm."""
    num_experts: int = within(0, 1 << 12, 0)
    """Feed-forwards of a block, of which a router chooses some for each token; 0: one, for all tokens."""
    experts_per_token: int = within(1, 1 << 12, 2)
    """Of num_experts, how many a token goes through."""
    num_shared_experts: int = within(0, 64, 0)
    """Of experts beside these that all tokens go through, computed as one of so many times the width."""
    router_bias_rate: float = within(0, 1, 1e-3)
    """After each step the bias of an expert that got too many tokens falls by this, and that of others rises; 0: loads
    are not balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The built-in trainer: AdamW, warm-up, cosine decay to a tenth over the run's length."""

    batch_size: int = within(1, 1 << 20, 8)
    """Sequences a step and site."""
    sequence: int = within(1, 1 << 24, 128)
    """Tokens a sequence: bytes, where text is not tokenized."""
    learning_rate: float = within(0, 100, 3e-3, open_low=True)
    warmup_steps: int = within(0, 1 << 40, 20)
    weight_decay: float = within(0, 100, 0.1)
    beta1: float = within(0, 1, 0.9, open_high=True)
    beta2: float = within(0, 1, 0.95, open_high=True)
    grad_clip: float = within(0, 1 << 20, 1.0, open_low=True)
    ramp_steps: int = within(0, 1 << 40, 20)
    """After joining, and where the run has made more steps than this without a site or beyond the checkpoint that its
    optimizer comes back from, the learning rate rises over this many; 0 turns it off."""
    evaluate_every: int = within(0, 1 << 40, 0)
    """Commits from one evaluation of the outer parameters on held-out text to the next, by one site, and once more at
    the end: the curve held_out_loss. 0: none. For run.best_by = "held_out_loss" run.save_every is a multiple of it."""


def _llama(
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_dim: int,
    *,
    vocab_size: int = 128_256,
    max_sequence: int = 8192,
    tie_embeddings: bool = False,
) -> ModelSettings:
    return ModelSettings(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        max_sequence=max_sequence,
        tie_embeddings=tie_embeddings,
    )


MODELS = {
    "nano": ModelSettings(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=96),  # for trying things out
    "tiny": ModelSettings(),  # about 0.9 million parameters
    "small": ModelSettings(dim=384, num_layers=6, num_heads=6, num_kv_heads=2, ffn_dim=1024, max_sequence=256),
    "tiny-moe": ModelSettings(ffn_dim=128, num_experts=8, num_shared_experts=1),  # 2.0 million, 0.8 of them for a token
    "llama-125m": _llama(768, 12, 12, 12, 2048, vocab_size=32_000, max_sequence=2048),
    "llama-350m": _llama(1024, 24, 16, 16, 2816, vocab_size=32_000, max_sequence=2048),
    "llama3-1b": _llama(2048, 16, 32, 8, 8192, tie_embeddings=True),
    "llama3-3b": _llama(3072, 28, 24, 8, 8192, tie_embeddings=True),
    "llama3-8b": _llama(4096, 32, 32, 8, 14_336),
    "llama3-70b": _llama(8192, 80, 64, 8, 28_672),
    "olmoe-1b-7b": replace(
        _llama(2048, 16, 16, 16, 1024, vocab_size=50_304, max_sequence=4096), num_experts=64, experts_per_token=8
    ),
    "deepseek-moe-16b": replace(
        _llama(2048, 28, 16, 16, 1408, vocab_size=102_400, max_sequence=4096),
        num_experts=64,
        experts_per_token=6,
        num_shared_experts=2,
    ),
    "mixtral-8x7b": replace(_llama(4096, 32, 32, 8, 14_336, vocab_size=32_000, max_sequence=32_768), num_experts=8),
}
"""Named sizes of the built-in model. Those called llama have the shapes of that family (the Llama 3 ones of arXiv
2407.21783 and their releases; 125m and 350m the widths and depths of arXiv 2005.14165). Those with experts have the
shapes of arXiv 2409.02060, 2401.06066 (whose first block alone is dense) and 2401.04088, with this model's router."""
ON_ONE_MACHINE = ("nano", "tiny", "small", "tiny-moe")
"""Of these, those that several sites on one machine without a GPU can train."""


def check_model(model: ModelSettings, trainer: TrainerSettings) -> None:
    """Of the built-in model and its trainer. Raises ConfigError."""
    if model.dim % model.num_heads or (model.dim // model.num_heads) % 2:
        raise ConfigError(
            f"model.dim = {model.dim} and model.num_heads = {model.num_heads}: "
            "each head needs the same, even width; make dim a multiple of 2 * num_heads"
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(f"model.num_kv_heads = {model.num_kv_heads} must divide model.num_heads = {model.num_heads}")
    if model.num_experts and model.experts_per_token > model.num_experts:
        raise ConfigError(
            f"model.experts_per_token = {model.experts_per_token} of model.num_experts = {model.num_experts}: choose "
            "at most as many"
        )
    if model.num_shared_experts and not model.num_experts:
        raise ConfigError(
            f"model.num_shared_experts = {model.num_shared_experts} with model.num_experts = 0: they are beside others "
            "that a router chooses; say num_experts, or make ffn_dim larger"
        )
    if trainer.sequence > model.max_sequence:
        raise ConfigError(
            f"trainer.sequence = {trainer.sequence} is longer than model.max_sequence = {model.max_sequence}"
        )
