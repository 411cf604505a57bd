"""Attention of queries to keys and values: to all of them, and to one block of several, with what merges blocks.

Shapes: queries (batch, heads, queries, head_dim), keys and values (batch, kv_heads, keys, head_dim). Query head h uses
key head h // (heads / kv_heads), as in grouped-query attention (2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """(batch, heads, queries, head_dim), by torch's kernel for this device."""
    return F.scaled_dot_product_attention(q, for_each_head(k, q), for_each_head(v, q), is_causal=is_causal)


def for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, repeated for the query heads that use them."""
    groups = q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which blocks are merged and gradients summed."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and one block of keys and values, which have as many heads; in matrix products, computed in fp32 or
    wider. The scores (batch, heads, queries, keys) of the block are in memory, twice in the backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_diagonal: bool
    """Query i sees the keys up to i."""

    def attention(self) -> tuple[Tensor, Tensor]:
        """Within the block, and the logarithm of each query's sum of weights: (batch, heads, queries)."""
        with torch.autocast(self.q.device.type, enabled=False):
            scores = self._scores()
            log_sum = scores.logsumexp(-1)
            return (scores - log_sum.unsqueeze(-1)).exp() @ self.v.to(scores.dtype), log_sum

    def gradients(self, d_out: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of those of q, k and v, where `out` and `log_sum` are over all blocks.

        Right for a part because a weight is exp(score - log_sum) whatever block it is in (FlashAttention-2, 2307.08691,
        section 3.1).
        """
        with torch.autocast(self.q.device.type, enabled=False):
            weights = (self._scores() - log_sum.unsqueeze(-1)).exp()
            d_out, q, k, v, out = (x.to(weights.dtype) for x in (d_out, self.q, self.k, self.v, out))
            of_scores = d_out @ v.mT - (d_out * out).sum(-1, keepdim=True)
            d_scores = weights * of_scores * q.shape[-1] ** -0.5
            return d_scores @ k, d_scores.mT @ q, weights.mT @ d_out

    def _scores(self) -> Tensor:
        q, k = self.q.to(wide(self.q.dtype)), self.k.to(wide(self.k.dtype))
        scores: Tensor = q @ k.mT * float(q.shape[-1]) ** -0.5
        if self.is_diagonal:
            behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(behind, -torch.inf)
        return scores


class BlockOnCpu(Block):
    """By torch's kernel, which keeps no scores."""

    __slots__ = ()

    def attention(self) -> tuple[Tensor, Tensor]:
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.q, self.k, self.v, 0.0, self.is_diagonal
        )
        return out, log_sum

    def gradients(self, d_out: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, self.q, self.k, self.v, out, log_sum, 0.0, self.is_diagonal
        )
        return d_q, d_k, d_v


def block_of(q: Tensor, k: Tensor, v: Tensor, is_diagonal: bool) -> Block:
    """On its device. k and v may have fewer heads than q."""
    made = BlockOnCpu if q.is_cpu else Block
    return made(q, for_each_head(k, q), for_each_head(v, q), is_diagonal)
