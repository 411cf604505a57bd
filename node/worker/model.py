"""The built-in model: a Llama-style language model (RMSNorm, RoPE, grouped-query attention, SwiGLU), with a mixture of
experts in the place of each feed-forward if the settings say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.node.parallel.blocks import attention
from atoll.node.worker.experts import BUFFERS, MixtureOfExperts
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings

EMBEDDING_STD = 0.02
RESIDUAL_OUTPUTS = ("attention.wo.weight", ".down.weight", "experts.down")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values to what is mixed, causal; `atoll.node.parallel.blocks` says the shapes."""


class Attention(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.head_dim = settings.dim // settings.num_heads
        self.attend: Attend = attention
        self.wq = nn.Linear(settings.dim, settings.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(settings.dim, settings.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(settings.dim, settings.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(settings.num_heads * self.head_dim, settings.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (batch, seq, dim)
        batch, seq, _ = x.shape
        # (batch, heads, seq, head_dim); of the heads as many as this rank has
        q = self.wq(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = self.attend(q, k, v)
        mixed: Tensor = self.wo(out.transpose(1, 2).reshape(batch, seq, -1))
        return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (2104.09864) of x (batch, heads, seq, head_dim), computed in the dtype of cos and sin:
    (at least seq, head_dim / 2)."""
    cos, sin = cos[: x.shape[2]], sin[: x.shape[2]]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.feed_forward = _feed_forward(settings)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


def _feed_forward(settings: ModelSettings) -> nn.Module:
    if not settings.num_experts:
        return FeedForward(settings.dim, settings.ffn_dim)
    shared = settings.num_shared_experts * settings.ffn_dim
    return MixtureOfExperts(settings, FeedForward(settings.dim, shared) if shared else None)


class Transformer(nn.Module):
    """Logits of the next byte: (batch, seq) of integers -> (batch, seq, vocab); or one stage of it, with some of the
    blocks and None for what it lacks: (batch, seq, dim) in place of tokens, logits or both.

    The same seed gives the same first values on every machine of a kind; on the meta device there are none. The sizes
    are those that `atoll.protocol.settings.validate` accepts.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: ModelSettings, seed: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.embedding: nn.Embedding | None = nn.Embedding(settings.vocab_size, settings.dim)
        # By name, and not a list: a block has the same name in a stage that begins with it.
        self.layers = nn.ModuleDict({str(number): Block(settings) for number in range(settings.num_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.head: nn.Linear | None = nn.Linear(settings.dim, settings.vocab_size, bias=False)
        if settings.tie_embeddings:
            self.head.weight = self.embedding.weight
        for name in ("cos", "sin"):
            half = settings.dim // settings.num_heads // 2
            self.register_buffer(name, torch.empty(settings.max_sequence, half), persistent=False)
        if not self.cos.is_meta:
            self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """First values, where this is the whole model."""
        self.set_angles(self.cos.device)
        tensors = self.state_dict()
        for name, values in first_values(self.settings, seed):
            tensors[name].copy_(values)

    def set_angles(self, device: torch.device, positions: Tensor | None = None) -> None:
        """Of the rotary embedding, computed in CPU memory, to where the model computes; of these positions if all
        sequences are given so."""
        half = self.cos.shape[1]
        if positions is None:
            positions = torch.arange(self.settings.max_sequence, device="cpu")
        angles = torch.outer(
            positions.to("cpu", torch.float32),
            self.settings.rope_base ** (-torch.arange(half, dtype=torch.float32, device="cpu") / half),
        )
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.settings.max_sequence:
            raise ConfigError(f"a sequence of {seq} bytes; model.max_sequence is {self.settings.max_sequence}")
        x = tokens if self.embedding is None else self.embedding(tokens)  # (batch, seq, dim)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits


def first_values(settings: ModelSettings, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Of each tensor of the whole model, one after the other: matrices normal with deviation dim ** -0.5 of their
    input, residual outputs scaled down; a router's biases are zero. In CPU memory, fp32."""
    with torch.device("meta"):
        whole = Transformer(settings)
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    for name, parameter in whole.named_parameters():
        if parameter.dim() < 2:
            yield name, torch.ones(parameter.shape, device="cpu")
            continue
        std = EMBEDDING_STD if name == "embedding.weight" else parameter.shape[-1] ** -0.5
        if name.endswith(RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * settings.num_layers)
        yield name, torch.empty(parameter.shape, device="cpu").normal_(0.0, std, generator=generator)
    for name, buffer in whole.named_buffers():
        if fnmatchcase(name, BUFFERS):
            yield name, torch.zeros(buffer.shape, device="cpu")
