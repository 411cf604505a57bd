"""Context parallelism: ranks share each sequence of a batch, and only attention needs all of it.

Ulysses (2309.14509): before attention ranks exchange their positions of all heads for all positions of their heads, and
back after it. Ring (2310.01889): keys and values go round. With both, neighbours exchange heads, and the places of the
ring are such groups of neighbours (2405.07719).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.node.parallel.blocks import attention
from atoll.node.parallel.positions import Cut

if TYPE_CHECKING:
    from atoll.node.parallel.ring import Ring


class Context:
    """Of one rank: its positions, its attention, its part of the loss."""

    def __init__(self, mesh: DeviceMesh, ulysses: int, length: int) -> None:
        """`mesh`: one dimension, of the ranks that share a sequence of `length`; `ulysses` of them exchange heads."""
        self._cut = Cut(length, mesh.size() // ulysses, ulysses)
        self.parts = parts = mesh._unflatten(0, (self._cut.ring, ulysses), ("ring", "ulysses"))
        self._whole, self._ulysses = mesh.get_group(), parts.get_group("ulysses")
        self._rings: Sequence[Ring] = ()
        """Without and with the causal mask."""
        if self._cut.ring > 1:
            from atoll.node.parallel.ring import Ring  # and with it torch's compiler: most of a second

            group, place = parts.get_group("ring"), parts.get_local_rank("ring")
            self._rings = [Ring(self._cut, group, place, is_causal) for is_causal in (False, True)]
        positions = self._cut.positions_of(mesh.get_local_rank())
        self.num_real = self._cut.num_real(positions)
        """Of them, that are no filling, which comes last."""
        self.positions = torch.tensor([min(p, length - 1) for p in positions], device=mesh.device_type)
        """Filling repeats the last position."""

    def take(self, tokens: Tensor) -> Tensor:
        """This rank's share: (batch, length) -> (batch, positions)."""
        return tokens[:, self.positions]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
        """(batch, heads, positions of this rank, head_dim), over the whole sequence. A collective, as is its backward.

        q: (batch, heads, positions, head_dim); k, v: the same with kv_heads. Heads are a multiple of `ulysses`. Of
        fewer key heads each is sent to all ranks that need it. Results of filling mean nothing; its gradient is zero if
        the loss leaves it out.
        """
        shares = self._cut.ulysses
        if shares > 1:
            repeated = math.lcm(k.shape[1], shares) // k.shape[1]
            if repeated > 1:
                k, v = k.repeat_interleave(repeated, dim=1), v.repeat_interleave(repeated, dim=1)
            q, k, v = self._to_heads(q, k, v)
        if self._cut.ring > 1:
            out = self._rings[is_causal].attention(q, k, v)
        else:
            keys = slice(None if is_causal else self._cut.length)
            out = attention(q, k[:, :, keys], v[:, :, keys], is_causal)
        return self._to_positions(out) if shares > 1 else out

    def of_share(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """From a mean over positions, one whose mean over the ranks is the mean over the whole sequence."""
        shown, weight = max(1, self.num_real), self._cut.num_ranks * self.num_real / self._cut.length

        def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
            # Where all is filling, zero, of which there is a gradient: the backward pass is a collective.
            return loss(outputs[:, :shown], targets[:, :shown]) * weight

        return weighted

    def mean(self, x: Tensor) -> Tensor:
        """Over the ranks that share the sequence."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self._whole)
        return total / self._cut.num_ranks

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(batch, heads, positions, head_dim) each -> (batch, heads / ulysses, positions * ulysses, head_dim)."""
        shares = self._cut.ulysses
        # (to rank, batch, heads of a rank, positions, head_dim)
        parts = [_split(x, 1, shares) for x in tensors]
        whole = _Exchange.apply(torch.cat(parts, dim=2), self._ulysses)  # type: ignore[no-untyped-call]
        given = whole.split([part.shape[2] for part in parts], dim=2)
        return tuple(x.movedim(0, 2).flatten(2, 3) for x in given)

    def _to_positions(self, x: Tensor) -> Tensor:
        """The way back."""
        parts = _split(x, 2, self._cut.ulysses)
        # (from rank, batch, heads of a rank, positions, head_dim)
        given: Tensor = _Exchange.apply(parts, self._ulysses)  # type: ignore[no-untyped-call]
        return given.movedim(0, 1).flatten(1, 2)


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    """The parts of `dim` in a dimension of their own, the first."""
    return x.unflatten(dim, (parts, -1)).movedim(dim, 0)  # type: ignore[no-untyped-call,no-any-return]


class _Exchange(torch.autograd.Function):
    """Part i of each rank goes to rank i, which puts it where the sender's number says: its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    given = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(given, x.contiguous(), group=group)
    return given
