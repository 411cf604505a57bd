"""The norm of gradients that ranks share, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from atoll.node.parallel.gradients import clip
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.settings import parse


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_alone_it_is_what_torch_does() -> None:
    parameters = [with_gradient(3.0, 4.0), with_gradient(12.0)]
    same = [with_gradient(3.0, 4.0), with_gradient(12.0)]
    assert clip(parameters, 6.5).item() == nn.utils.clip_grad_norm_(same, 6.5).item() == 13.0
    for one, other in zip(parameters, same, strict=True):
        assert torch.equal(gradient(one), gradient(other))
    assert clip([*parameters, nn.Parameter(torch.zeros(3))], 100.0).item() == pytest.approx(6.5)
    assert gradient(parameters[1]).item() == pytest.approx(6.0)


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Of eight ranks whose collectives do nothing, as the first of them sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield Mesh.of_site(torch.device("cpu"), parse("dp_shard=2,tp=2,pp=2").resolved(8))
    finally:
        dist.destroy_process_group()


def shared(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, placements, run_check=False))
    parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, placements, run_check=False)
    return parameter


def test_partial_sums_of_a_norm_are_summed_before_they_count(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sequence parallelism leaves them; here both ranks have the same."""
    parameter = shared(mesh.whole["tp"], (Replicate(),))
    parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh.whole["tp"], (Partial(),), run_check=False)
    monkeypatch.setattr(Partial, "_reduce_value", lambda placed, values, *others: 2 * values)
    assert clip([parameter], 100.0).item() == pytest.approx(10.0)
    whole = gradient(parameter)
    assert isinstance(whole, DTensor)
    assert whole.placements == (Replicate(),)
    assert whole.to_local().tolist() == [6.0, 8.0]


def test_each_element_counts_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over the ranks of each dimension that divides the tensor, here with so many that have the same values."""
    sizes: list[int] = []

    def all_reduce(values: Tensor, group: Any) -> None:
        sizes.append(group.size())
        values.mul_(group.size())

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    two, one = mesh.whole["dp_shard", "tp"], mesh.whole["tp"]
    cases: list[tuple[DeviceMesh, tuple[Placement, ...], int]] = [
        (two, (Replicate(), Replicate()), 1),
        (two, (Shard(0), Replicate()), 2),
        (two, (_StridedShard(0, split_factor=2), Shard(0)), 4),
        (one, (Shard(0),), 2),
    ]
    for where, placements, num_shares in cases:
        sizes.clear()
        parameter = shared(where, placements)
        assert clip([parameter], 1.0, mesh).item() == pytest.approx((25.0 * num_shares * 2) ** 0.5), placements
        assert sizes == [2] * (num_shares.bit_length() - 1) + [2], "and over the stages of the pipeline"
    together = [shared(where, placements) for where, placements, _ in cases]
    norm = clip([*together, with_gradient(5.0)], 1.0, mesh)
    assert norm.item() == pytest.approx((25.0 * (1 + 2 + 4 + 2 + 1) * 2) ** 0.5)
    scaled = with_gradient(5.0)
    elsewhere = clip([*together, scaled], 100.0, mesh, [together[2], scaled])
    assert elsewhere.item() == pytest.approx((25.0 * (1 + 2 + 2) * 2) ** 0.5 / norm.item())
    clip([*together, scaled], elsewhere.item() / 2, mesh, [together[2], scaled])
    assert gradient(scaled).item() == pytest.approx(2.5, rel=1e-5), "it is clipped like the others"
    local = gradient(together[2])
    assert isinstance(local, DTensor)
    assert local.to_local().tolist() == pytest.approx([1.5 / norm.item(), 2.0 / norm.item()], rel=1e-5)
