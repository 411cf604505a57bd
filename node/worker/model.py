"""The built-in model: a Llama-style byte-level language model (RMSNorm, RoPE, grouped-query attention, SwiGLU)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings

ROPE_BASE = 10_000.0
EMBEDDING_STD = 0.02


class Attention(nn.Module):
    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = settings.num_heads, settings.num_kv_heads
        self.head_dim = settings.dim // settings.num_heads
        self.wq = nn.Linear(settings.dim, settings.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(settings.dim, settings.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(settings.dim, settings.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(settings.num_heads * self.head_dim, settings.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (batch, seq, dim)
        batch, seq, _ = x.shape
        q = self.wq(x).view(batch, seq, self.num_heads, self.head_dim).transpose(1, 2)  # (batch, heads, seq, head_dim)
        k = self.wk(x).view(batch, seq, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.num_heads // self.num_kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).reshape(batch, seq, -1))
        return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (2104.09864) of x (batch, heads, seq, head_dim); cos, sin: (seq, head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
        self.attention_norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.feed_forward = FeedForward(settings)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """Logits of the next byte: (batch, seq) of integers -> (batch, seq, vocab).

    The same seed gives the same first values on every machine of a kind. The sizes are those that
    `atoll.protocol.settings.validate` accepts.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: ModelSettings, seed: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocab_size, settings.dim)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.head = nn.Linear(settings.dim, settings.vocab_size, bias=False)
        if settings.tie_embeddings:
            self.head.weight = self.embedding.weight
        half = settings.dim // settings.num_heads // 2
        angles = torch.outer(
            torch.arange(settings.max_sequence, dtype=torch.float32),
            ROPE_BASE ** (-torch.arange(half, dtype=torch.float32) / half),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """First values: matrices normal with deviation dim ** -0.5 of their input, residual outputs scaled down."""
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = EMBEDDING_STD if name == "embedding.weight" else parameter.shape[1] ** -0.5
            if name.endswith(("attention.wo.weight", "feed_forward.down.weight")):
                std /= math.sqrt(2 * self.settings.num_layers)
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.settings.max_sequence:
            raise ConfigError(f"a sequence of {seq} bytes; model.max_sequence is {self.settings.max_sequence}")
        x = self.embedding(tokens)  # (batch, seq, dim)
        cos, sin = self.cos[:seq], self.sin[:seq]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits
