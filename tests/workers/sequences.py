"""One rank of several that share sequences: attention and its gradients, held against those of one process.

sequences.py RANK WORLD ADDRESS: prints a line of JSON for each way to share; exits with 1 if it could not go on.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atoll.node.parallel.context import Context
from atoll.node.parallel.positions import Cut

BATCH, HEADS, HEAD_DIM = 2, 4, 8
LENGTHS = (16, 13, 3)
"""The last leaves ranks with nothing but filling."""
KV_HEADS = (4, 2, 1)
ROUNDED = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    ulysses: int
    length: int
    kv_heads: int
    is_causal: bool
    dtype: str


def ways(world: int) -> Iterator[Way]:
    for ulysses in (n for n in range(1, world + 1) if world % n == 0):
        for length, is_causal in product(LENGTHS, (True, False)):
            for kv_heads in KV_HEADS:
                yield Way(ulysses=ulysses, length=length, kv_heads=kv_heads, is_causal=is_causal, dtype="float64")
            for dtype in ROUNDED:
                yield Way(ulysses=ulysses, length=length, kv_heads=2, is_causal=is_causal, dtype=dtype)


def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """In full, as it is written down."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / HEAD_DIM**0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out


def with_gradients(out: Tensor, d_out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def difference(way: Way, mesh: DeviceMesh, context: Context) -> float:
    """The largest of this rank, in the result and the gradients of q, k and v."""
    torch.manual_seed(1)
    shapes = [(BATCH, heads, way.length, HEAD_DIM) for heads in (HEADS, way.kv_heads, way.kv_heads, HEADS)]
    dtype = getattr(torch, way.dtype)
    *inputs, d_out = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    q, k, v = (x.double().requires_grad_() for x in inputs)
    expected = with_gradients(plain(q, k, v, way.is_causal), d_out.double(), q, k, v)
    positions = context.positions
    q, k, v = (x[:, :, positions].detach().requires_grad_() for x in inputs)
    cut = Cut(way.length, mesh.size() // way.ulysses, way.ulysses)
    num_real = cut.num_real(cut.positions_of(mesh.get_local_rank()))
    is_filling = torch.arange(len(positions)).view(-1, 1) >= num_real
    d_here = d_out[:, :, positions].masked_fill(is_filling, 0.0)
    found = with_gradients(context.attend(q, k, v, way.is_causal), d_here, q, k, v)
    worst = 0.0
    for one, of_whole in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert one.isfinite().all()
        real = of_whole[:, :, positions] - one.double()
        worst = max(worst, real.masked_fill(is_filling, 0.0).abs().max().item())
    for gradient in found[1:]:
        assert not gradient.masked_select(is_filling).any(), "filling has no part in the loss"
    return worst


def main(rank: int, world: int, address: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    contexts: dict[tuple[int, int], Context] = {}
    for way in ways(world):
        context = contexts.get((way.ulysses, way.length)) or Context(mesh, way.ulysses, way.length)
        contexts[way.ulysses, way.length] = context
        worst = torch.tensor(difference(way, mesh, context), dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if rank == 0:
            sys.stdout.write(json.dumps({**asdict(way), "difference": worst.item()}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads now and then never let the interpreter end


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
