"""Copies between local tensors and the shared buffers, exact to the bit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.node.core.events import MergeMode
from atoll.node.dataplane.bases import cast_base
from atoll.node.local_protocol import PieceHash, piece_hash
from atoll.node.worker import copies
from atoll.node.worker.pieces import SharedTensors
from atoll.node.worker.tensors import ModelTensors, find_tensors
from atoll.protocol.errors import ConfigError, StateError
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.devices import DEVICES
from tests.harness.fake_node import FakeNode

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Net(nn.Module):
    mean: Tensor
    count: Tensor
    own: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))  # 0-dim
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("own", torch.ones(2))


def share(net: nn.Module) -> tuple[ModelTensors, FakeNode, SharedTensors]:
    tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)], {"own": "local"})
    node = FakeNode(manifest=tensors.manifest)
    return tensors, node, SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings())


def addresses(net: nn.Module) -> list[int]:
    return [t.data_ptr() for t in net.state_dict().values()]


def fill(node: FakeNode, name: str, values: Tensor) -> None:
    node.values(node.publish, name)[:] = values.detach().float().cpu().flatten().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_snapshot_and_replace(dtype: torch.dtype, device: str) -> None:
    net = Net().to(device, dtype)
    _, node, shared = share(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    places = addresses(net)
    shared.write_snapshot(0, with_frozen=True)
    expected = before["weight"].float().cpu().flatten().numpy()
    np.testing.assert_array_equal(node.values(node.snapshot, "weight"), expected)
    assert node.values(node.snapshot, "scale").tolist() == [2.0]
    assert node.values(node.snapshot, "count", "int64").tolist() == [5]
    assert node.values(node.snapshot, "own").tolist() == [0.0, 0.0] or dtype is not torch.float32  # local: not written
    node.publish[:] = node.snapshot
    with torch.no_grad():
        for value in net.state_dict().values():
            value.add_(1)
    moved = net.own.clone()
    shared.apply(0, MergeMode.REPLACE, fresh=True)
    for name, value in net.state_dict().items():
        assert torch.equal(value, moved if name == "own" else before[name]), name
    assert addresses(net) == places  # in place: compiled code and captured graphs stay valid


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_tensors_travel_only_with_the_first_values(device: str) -> None:
    net = Net().to(device)
    _, node, shared = share(net)
    shared.write_snapshot(0, with_frozen=False)
    assert not node.values(node.snapshot, "frozen").any()
    before = net.frozen.clone()
    shared.apply(0, MergeMode.REPLACE, fresh=False)
    assert torch.equal(net.frozen, before)
    shared.apply(0, MergeMode.REPLACE, fresh=True)
    assert not net.frozen.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_keeps_what_was_trained_since_the_snapshot(dtype: torch.dtype, device: str) -> None:
    net = Net().to(device, dtype)
    _, node, shared = share(net)
    shared.write_snapshot(0, with_frozen=False)
    outer = torch.randn(5, 3)
    fill(node, "weight", outer)
    fill(node, "mean", torch.tensor([1.0, 2.0, 3.0]))
    node.values(node.publish, "count", "int64")[:] = 8
    snapshot = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.add_(0.25)
    expected = (outer.to(device) + (net.weight.detach().float() - snapshot.float())).to(dtype)
    shared.apply(0, MergeMode.MERGE, fresh=False)
    assert torch.equal(net.weight.detach(), expected)
    assert net.mean.tolist() == [1.0, 2.0, 3.0]
    assert net.count.item() == 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [0.5, 0.25])
def test_mix_weighs_the_local_copy_with_alpha(dtype: torch.dtype, device: str, alpha: float) -> None:
    """In fp32, then cast; what was trained since the snapshot counts with it, and averaged buffers are replaced."""
    net = Net().to(device, dtype)
    tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)], {"own": "local"})
    node = FakeNode(manifest=tensors.manifest)
    shared = SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings(alpha=alpha))
    shared.write_snapshot(0, with_frozen=False)
    outer = torch.randn(5, 3)
    fill(node, "weight", outer)
    fill(node, "mean", torch.tensor([1.0, 2.0, 3.0]))
    with torch.no_grad():
        net.weight.add_(0.25)
    local = net.weight.detach().cpu().double()
    places = addresses(net)
    shared.apply(0, MergeMode.MIX, fresh=False)
    expected = alpha * local + (1 - alpha) * outer.double()
    precision = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(net.weight.detach().cpu().double(), expected, rtol=precision, atol=precision)
    assert net.mean.tolist() == [1.0, 2.0, 3.0]
    assert addresses(net) == places


def test_the_vectors_of_the_page() -> None:
    (block,) = re.findall(r"```json merge-vector\n(.*?)```", PAGE.read_text(), re.S)
    for vector in json.loads(block):
        net = nn.Linear(3, 1, bias=False)
        tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
        node = FakeNode(manifest=tensors.manifest)
        shared = SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings(alpha=vector.get("alpha", 0.0)))
        for name in ("snapshot", "local"):
            with torch.no_grad():
                net.weight.copy_(torch.tensor([vector[name]]))
            if name == "snapshot":
                shared.write_snapshot(0, with_frozen=False)
        fill(node, "weight", torch.tensor(vector["outer"]))
        shared.apply(0, {"keep": MergeMode.MERGE, "mix": MergeMode.MIX}[vector["mode"]], fresh=False)
        torch.testing.assert_close(net.weight.detach(), torch.tensor([vector["taken"]]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [MergeMode.MERGE, MergeMode.MIX])
def test_a_buffer_keeps_what_training_made_of_it_since_the_snapshot(
    dtype: torch.dtype, device: str, mode: MergeMode
) -> None:
    """What it was at the snapshot is in the commit. Where each commit is taken a whole window late, a buffer that took
    the commit's values would be handed in again as it was, for ever."""
    net = Net().to(device, dtype)
    _, node, shared = share(net)
    shared.write_snapshot(0, with_frozen=False)
    fill(node, "mean", torch.tensor([1.0, 2.0, 3.0]))
    node.values(node.publish, "count", "int64")[:] = 4
    with torch.no_grad():
        net.mean[1] += 0.25
        net.count += 3
    trained = net.mean.tolist()
    shared.apply(0, mode, fresh=False)
    assert (net.mean.tolist(), net.count.item()) == (trained, 8)
    shared.write_snapshot(0, with_frozen=False)
    shared.apply(0, mode, fresh=False)
    assert (net.mean.tolist(), net.count.item()) == ([1.0, 2.0, 3.0], 4), "nothing was trained since"


@pytest.mark.parametrize(("mode", "taken"), [(MergeMode.MERGE, [1.0, 2.25, 3.0]), (MergeMode.MIX, [0.5, 1.125, 1.5])])
def test_what_training_added_to_a_summed_buffer_is_kept_on_top_of_the_mean(mode: MergeMode, taken: list[float]) -> None:
    net = Net()
    net.mean.zero_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tensors = find_tensors([net], [optimizer], {"own": "local", "me*": "summed"})
    node = FakeNode(manifest=tensors.manifest)
    shared = SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings(alpha=0.5))
    shared.write_snapshot(0, with_frozen=False)
    fill(node, "mean", torch.tensor([1.0, 2.0, 3.0]))
    net.mean[1] += 0.25
    shared.apply(0, mode, fresh=False)
    assert net.mean.tolist() == taken
    shared.apply(0, MergeMode.SHIFT, fresh=False)
    assert net.mean.tolist() == taken
    shared.apply(0, MergeMode.REPLACE, fresh=False)
    assert net.mean.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shift_moves_trainable_tensors_only(dtype: torch.dtype, device: str) -> None:
    net = Net().to(device, dtype)
    _, node, shared = share(net)
    difference = torch.randn(5, 3, device=device)
    fill(node, "weight", difference)
    fill(node, "mean", torch.ones(3))
    weight, mean = net.weight.detach().clone(), net.mean.clone()
    shared.apply(0, MergeMode.SHIFT, fresh=False)
    assert torch.equal(net.weight.detach(), (weight.float() + difference).to(dtype))
    assert torch.equal(net.mean, mean)
    assert net.count.item() == 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_an_idle_site_has_no_pseudo_gradient(dtype: torch.dtype, name: str, device: str) -> None:
    """The base that the node computes is what the worker received, cast included; merging nothing adds nothing."""
    net = nn.Linear(64, 64, bias=False).to(device, dtype)
    _, node, shared = share_linear(net)
    outer = np.random.default_rng(0).standard_normal(64 * 64).astype(np.float32)
    outer[:64] *= np.float32(1e-7)  # subnormal in fp16
    outer[64:128] *= np.float32(1e-39)  # and in all of them
    node.values(node.publish, "weight")[:] = outer
    base = np.empty_like(outer)
    cast_base(outer, name, base)
    shared.apply(0, MergeMode.REPLACE, fresh=True)
    shared.write_snapshot(0, with_frozen=False)
    np.testing.assert_array_equal(base - node.values(node.snapshot, "weight"), 0)
    shared.apply(0, MergeMode.MERGE, fresh=False)
    shared.write_snapshot(0, with_frozen=False)
    np.testing.assert_array_equal(base - node.values(node.snapshot, "weight"), 0)


def share_linear(net: nn.Module) -> tuple[ModelTensors, FakeNode, SharedTensors]:
    tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    node = FakeNode(manifest=tensors.manifest)
    return tensors, node, SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings())


@pytest.mark.parametrize("device", DEVICES)
def test_only_pieces_that_it_keeps_are_written_and_shared_ones_hashed(device: str) -> None:
    net = Net().to(device, torch.bfloat16)
    tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    node = FakeNode(manifest=tensors.manifest)
    weight = [p.name for p in tensors.pieces].index("weight")
    node.shared_pieces = (weight,)
    joined = node.joined(weight)  # keeps those before it
    shared = SharedTensors(tensors, joined, SyncSettings())
    shared.write_snapshot(0, with_frozen=False)
    assert not node.values(node.snapshot, "weight").any()
    assert node.values(node.snapshot, "scale").any()
    expected = PieceHash(piece=weight, hash=piece_hash(net.weight.detach().float().cpu().numpy().tobytes()))
    assert shared.hashes() == (expected,)


def test_a_replaced_buffer_is_followed() -> None:
    net = Net()
    _, node, shared = share(net)
    net.mean = torch.full((3,), 4.0)
    shared.write_snapshot(0, with_frozen=False)
    assert node.values(node.snapshot, "mean").tolist() == [4.0] * 3


@pytest.mark.parametrize("how", ["deleted", "none"])
def test_a_buffer_that_was_removed_is_named(how: str) -> None:
    net = Net()
    _, _, shared = share(net)
    if how == "deleted":
        del net.mean
    else:
        net._buffers["mean"] = None
    with pytest.raises(ConfigError, match="'mean' was removed"):
        shared.write_snapshot(0, with_frozen=False)


@pytest.mark.parametrize("device", DEVICES)
def test_swap_in_and_back(device: str) -> None:
    net = Net().to(device, torch.bfloat16)
    _, node, shared = share(net)
    fill(node, "weight", torch.ones(5, 3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    saved = shared.swap_in()
    assert net.weight.tolist() == [[1.0] * 3] * 5
    assert torch.equal(net.frozen, before["frozen"])
    shared.swap_back(saved)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    shared.apply(0, MergeMode.REPLACE, fresh=False)
    taken = net.weight.clone()
    saved = shared.swap_in()
    assert set(saved) == {None}, "what has been taken is there: nothing of it is kept beside it"
    with torch.no_grad():
        net.weight.add_(1)  # a script prunes, makes noise, or brings statistics up to date
    shared.swap_back(saved)
    assert torch.equal(net.weight, taken)


class Moving:
    """PUBLISH whose values the node moves so many times while they are read; until then what is there is no value."""

    def __init__(self, node: FakeNode, times: int, whole: Tensor) -> None:
        self._node, self._left, self._whole = node, times, whole

    def refresh(self) -> None:
        fill(self._node, "weight", self._whole if self._left <= 0 else torch.full((5, 3), torch.nan))

    def give_away(self, times: int) -> None:
        """From now on what a rank has mapped is of another chunk, until it has looked so often."""
        self._left = times
        fill(self._node, "weight", torch.full((5, 3), 7.0))

    @property
    def is_current(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize("times", [0, 1, 3])
def test_outer_values_that_are_moved_while_they_are_read_are_read_again(times: int) -> None:
    """Of several ranks one looks at them while its node goes on."""
    net = Net()
    tensors, node, _ = share(net)
    moving: Any = Moving(node, times, torch.ones(5, 3))
    joined = replace(node.joined(len(tensors.pieces)), in_place=moving)
    shared = SharedTensors(tensors, joined, SyncSettings())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    saved = shared.swap_in()
    assert net.weight.tolist() == [[1.0] * 3] * 5
    shared.swap_back(saved)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_cannot_be_swapped_in_leaves_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU has no memory for it: a script may skip the evaluation, and trains on."""
    net = Net()
    _, node, shared = share(net)
    for name in ("weight", "scale"):
        fill(node, name, torch.ones_like(net.get_parameter(name)))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    real, taken = copies.to_local, list[Tensor]()

    def until_the_second(shared: Tensor, local: Tensor) -> None:
        if taken:
            raise torch.OutOfMemoryError("no memory")
        real(shared, local)
        taken.append(local.clone())

    monkeypatch.setattr(copies, "to_local", until_the_second)
    with pytest.raises(torch.OutOfMemoryError):
        shared.swap_in()
    assert taken, "one was swapped in"
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("times", [0, 1, 3])
def test_values_whose_place_the_node_gave_away_while_a_rank_evaluated_do_not_come_back(times: int) -> None:
    """Others commit without a site that evaluates for long: its node applies that, and another chunk has the place."""
    net = Net()
    tensors, node, _ = share(net)
    moving: Any = Moving(node, 0, torch.ones(5, 3))
    shared = SharedTensors(tensors, replace(node.joined(len(tensors.pieces)), in_place=moving), SyncSettings())
    moving.refresh()
    shared.apply(0, MergeMode.REPLACE, fresh=False)
    saved = shared.swap_in()
    assert set(saved) == {None}, "what has been taken is there"
    moving.give_away(times)
    shared.swap_back(saved)
    assert net.weight.tolist() == [[1.0] * 3] * 5


def test_outer_values_that_are_moved_while_they_are_taken_end_the_rank() -> None:
    """The node keeps them until all ranks have them; a merge cannot be done again."""
    net = Net()
    tensors, node, _ = share(net)
    moving: Any = Moving(node, 1, torch.ones(5, 3))
    shared = SharedTensors(tensors, replace(node.joined(len(tensors.pieces)), in_place=moving), SyncSettings())
    with pytest.raises(StateError, match="were replaced while this rank took them"):
        shared.apply(0, MergeMode.MERGE, fresh=False)
