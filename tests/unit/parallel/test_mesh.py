"""Where a rank stands in the mesh of its site: data rank, shards, and its part of a sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from atoll.node.parallel.context import Context
from atoll.node.parallel.experts import sharded_dimension
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.settings import parse
from tests.harness.fake_group import fake_rank

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "shape", "data_ranks"),
    [
        ("dp_shard=2,tp=2", (2,), [0, 0, 1, 1]),
        ("dp_replicate=2,tp=2", (2, 1), [0, 0, 1, 1]),
        ("dp_shard=2,cp=2", (4,), [0, 0, 1, 1]),
        ("cp=2,tp=2", (2,), [0, 0, 0, 0]),
        ("dp_replicate=2,cp=2", (2, 2), [0, 0, 1, 1]),
        ("tp=4", None, [0, 0, 0, 0]),
    ],
)
def test_ranks_of_one_sequence_draw_one_batch_and_share_parameters(
    text: str, shape: tuple[int, ...] | None, data_ranks: list[int]
) -> None:
    for rank, data_rank in enumerate(data_ranks):
        with fake_rank(rank, 4):
            mesh = Mesh.of_site(CPU, parse(text).resolved(4))
            assert mesh.data_rank == data_rank
            assert (None if mesh.of_fsdp is None else tuple(mesh.of_fsdp.shape)) == shape


@pytest.mark.parametrize(("cp", "ulysses", "length"), [(2, 1, 8), (4, 2, 13), (4, 1, 3)])
def test_losses_of_ranks_have_the_mean_of_the_whole_sequence(cp: int, ulysses: int, length: int) -> None:
    values = torch.arange(2.0 * length).view(2, length) ** 2

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).mean()

    total = 0.0
    for rank in range(cp):
        with fake_rank(rank, cp):
            mesh = Mesh.of_site(CPU, parse(f"cp={cp}").resolved(cp)).of("cp")
            assert mesh is not None
            context = Context(mesh, ulysses, length)
            share = context.take(values)
            found = context.of_share(loss)(share.requires_grad_(), torch.ones_like(share))
            found.backward()  # type: ignore[no-untyped-call]
            assert share.shape[1] == len(context.positions)
            total += found.item()
    assert total / cp == pytest.approx((values - 1).mean().item())


@pytest.mark.parametrize(
    ("text", "ep", "of_experts"),  # of the first rank: those that share its experts, and those that have the same
    [
        ("dp_shard=4,ep=2", [0, 1], [[0, 2]]),
        ("dp_shard=4,ep=4", [0, 1, 2, 3], [[0]]),
        ("dp_shard=2,cp=2,ep=4", [0, 1, 2, 3], [[0]]),
        ("dp_replicate=2,dp_shard=2,ep=2", [0, 1], [[0], [2]]),
        ("dp_shard=2,tp=2,ep=2", [0, 2], [[0]]),
    ],
)
def test_neighbours_share_experts_and_the_others_have_the_same(
    text: str, ep: list[int], of_experts: list[list[int]]
) -> None:
    with fake_rank(0, 4):
        mesh = Mesh.of_site(CPU, parse(text).resolved(4))
        assert mesh.ep is not None
        assert mesh.of_experts is not None
        assert mesh.ep.mesh.tolist() == ep
        assert mesh.of_experts.mesh.view(-1, mesh.of_experts.size(-1)).tolist() == of_experts


@pytest.mark.parametrize(
    ("shape", "num_shards", "dimension"),
    [((8, 6, 4), 8, None), ((2, 6, 4), 3, Shard(1)), ((2, 6, 4), 4, None), ((2, 6), 3, None), ((3, 6, 4), 2, None)],
)
def test_of_few_experts_each_rank_has_a_part(shape: tuple[int, ...], num_shards: int, dimension: Shard | None) -> None:
    assert sharded_dimension(nn.Parameter(torch.empty(shape)), num_shards) == dimension
