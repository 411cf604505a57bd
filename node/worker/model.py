"""The built-in model: a Llama-style language model (RMSNorm, RoPE, grouped-query attention, SwiGLU)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.node.parallel.blocks import attention
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings

EMBEDDING_STD = 0.02
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
    (seq, head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate = nn.Linear(settings.dim, settings.ffn_dim, bias=False)
        self.up = nn.Linear(settings.dim, settings.ffn_dim, bias=False)
        self.down = nn.Linear(settings.ffn_dim, settings.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.dim, eps=settings.norm_eps)
        self.feed_forward = FeedForward(settings)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """Logits of the next byte: (batch, seq) of integers -> (batch, seq, vocab); or one stage of it, see `keep`.

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
        self.tie()
        for name in ("cos", "sin"):
            half = settings.dim // settings.num_heads // 2
            self.register_buffer(name, torch.empty(settings.max_sequence, half), persistent=False)
        if not self.cos.is_meta:
            self.reset(seed)

    def tie(self) -> None:
        """Embedding and output are one matrix, if the settings say so. Given memory, modules get one each."""
        if self.settings.tie_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """First values, where this is the whole model."""
        self.set_angles()
        parameters = dict(self.named_parameters())
        for name, values in first_values(self.settings, seed):
            parameters[name].copy_(values)

    def set_angles(self, positions: Tensor | None = None) -> None:
        """Of the rotary embedding, computed in CPU memory; of these positions if all sequences are given so."""
        half, device = self.cos.shape[1], self.cos.device
        if positions is None:
            positions = torch.arange(self.settings.max_sequence, device="cpu")
        angles = torch.outer(
            positions.to("cpu", torch.float32),
            self.settings.rope_base ** (-torch.arange(half, dtype=torch.float32, device="cpu") / half),
        )
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def keep(self, first: int, last: int) -> None:
        """Become one stage: blocks `first` to `last` - 1, with the embedding before the first of all, and norm and head
        behind the last. The stages before it hand in (batch, seq, dim) in place of tokens."""
        num_layers = self.settings.num_layers
        for number in range(num_layers):
            if not first <= number < last:
                del self.layers[str(number)]
        if first:
            self.embedding = None
        if last < num_layers:
            self.norm = self.head = None

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.settings.max_sequence:
            raise ConfigError(f"a sequence of {seq} bytes; model.max_sequence is {self.settings.max_sequence}")
        x = tokens if self.embedding is None else self.embedding(tokens)  # (batch, seq, dim)
        cos, sin = self.cos[:seq], self.sin[:seq]
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits


def first_values(settings: ModelSettings, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Of each tensor of the whole model, one after the other: matrices normal with deviation dim ** -0.5 of their
    input, residual outputs scaled down. In CPU memory, fp32."""
    with torch.device("meta"):
        whole = Transformer(settings)
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    for name, parameter in whole.named_parameters():
        if parameter.dim() < 2:
            yield name, torch.ones(parameter.shape, device="cpu")
            continue
        std = EMBEDDING_STD if name == "embedding.weight" else parameter.shape[1] ** -0.5
        if name.endswith(("attention.wo.weight", "feed_forward.down.weight")):
            std /= math.sqrt(2 * settings.num_layers)
        yield name, torch.empty(parameter.shape, device="cpu").normal_(0.0, std, generator=generator)
