"""Ring attention (2310.01889): each place keeps its queries, while keys and values go round from place to place.

A block of keys is on its way to the next place while this one computes with it. Results of blocks are merged by the
logarithms of their sums of weights (2205.14135, section 3.1). In the backward pass keys and values go round again, and
their gradients behind them, which are at home after as many passes as there are places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.node.parallel.blocks import block_of, wide
from atoll.node.parallel.positions import Cut, Seen


@dataclass(frozen=True, slots=True)
class Ring:
    """As one place of it sees it."""

    cut: Cut
    group: dist.ProcessGroup
    place: int
    is_causal: bool

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, heads, seq of this place, head_dim). A collective, as is its backward pass.

        q: (batch, heads, seq of this place, head_dim); k, v: the same with kv_heads, which divide heads.
        """
        out: Tensor = _RingAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def rounds(self, keys_values: Tensor) -> Iterator[tuple[Tensor, Seen | None]]:
        """Those of each place, one's own first, with what of them is seen here."""
        for turn in range(self.cut.ring):
            is_last = turn == self.cut.ring - 1
            coming = None if is_last else self.pass_on(keys_values)
            source = (self.place - turn) % self.cut.ring
            yield keys_values, self.cut.seen(self.place, source, self.is_causal)
            if coming is not None:
                keys_values = coming.wait()

    def pass_on(self, sent: Tensor) -> _Coming:
        """To the next place, while the same of the place before is on its way to this one."""
        came = torch.empty_like(sent)
        behind, ahead = (dist.get_global_rank(self.group, (self.place + step) % self.cut.ring) for step in (-1, 1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, ahead, self.group),
                dist.P2POp(dist.irecv, came, behind, self.group),
            ]
        )
        return _Coming(sent, came, works)


@dataclass(frozen=True, slots=True)
class _Coming:
    sent: Tensor
    """Has to stay until it is."""
    came: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.came


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out = torch.zeros_like(q, dtype=wide(q.dtype))  # (batch, heads, seq, head_dim)
        log_sum = torch.full(q.shape[:-1], -torch.inf, dtype=out.dtype, device=q.device)
        own = torch.stack((k, v))  # (2, batch, kv_heads, seq, head_dim)
        for keys_values, seen in ring.rounds(own):
            if seen is None:
                continue
            k, v = keys_values[:, :, :, seen.keys]
            found, its_log_sum = block_of(q[:, :, seen.queries], k, v, seen.is_diagonal).attention()
            known = log_sum[:, :, seen.queries]
            share = (its_log_sum - known).sigmoid().unsqueeze(-1)  # of all weights so far
            out[:, :, seen.queries].lerp_(found.to(out.dtype), share)
            known.copy_(torch.logaddexp(known, its_log_sum))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, log_sum)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, own, out, log_sum = ctx.saved_tensors
        ring: Ring = ctx.ring
        d_q = torch.zeros_like(q, dtype=wide(q.dtype))
        behind: _Coming | None = None
        for keys_values, seen in ring.rounds(own):
            # Those of the place where these keys are at home.
            gradients = torch.zeros_like(keys_values, dtype=d_q.dtype)
            if seen is not None:
                k, v = keys_values[:, :, :, seen.keys]
                here = block_of(q[:, :, seen.queries], k, v, seen.is_diagonal)
                d_out_here, out_here, log_sum_here = (x[:, :, seen.queries] for x in (d_out, out, log_sum))
                part, *of_heads = here.gradients(d_out_here, out_here, log_sum_here)
                d_q[:, :, seen.queries] += part
                for gradient, found in zip(gradients, of_heads, strict=True):
                    grouped = found.to(d_q.dtype).unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]
                    gradient[:, :, seen.keys] = grouped.sum(2)
            if behind is not None:
                gradients += behind.wait()
            behind = ring.pass_on(gradients)
        assert behind is not None
        d_k, d_v = behind.wait().to(q.dtype)
        return d_q.to(q.dtype), d_k, d_v, None
