"""Frozen parameters that every site has by itself: compared by hash, and not carried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker import own_frozen
from atoll.node.worker.own_frozen import MARK
from atoll.node.worker.tensors import ModelTensors, find_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Layout
from atoll.protocol.settings import RunSettings
from tests.harness.fake_group import fake_rank
from tests.harness.fake_node import SNAPSHOT, STOP, apply, in_memory


class LoRA(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base = nn.Linear(64, 64, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)


def trained(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def found(net: nn.Module) -> ModelTensors:
    return find_tensors([net], [trained(net)], has_own_frozen=True)


def names(tensors: ModelTensors) -> set[str]:
    return {spec.name for spec in tensors.manifest.tensors}


def test_the_base_takes_no_room_and_is_in_the_manifest_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = found(LoRA())
    assert Layout(tensors.manifest).buffer_bytes < 64 * 64 * 4, "less than the base"
    (mark,) = names(tensors) - {"down.weight", "up.weight"}
    assert mark.startswith(f"{MARK}.")
    monkeypatch.setattr(own_frozen, "PIECE_BYTES", 1000)
    assert names(found(LoRA())) == names(tensors), "however it is cut"


@pytest.mark.parametrize("what", ["value", "dtype", "name"])
def test_another_base_is_another_model(what: str) -> None:
    other = LoRA(torch.bfloat16 if what == "dtype" else torch.float32)
    if what == "value":
        other.base.bias.data[63] += 1.0
    elif what == "name":
        other.other, other.base = other.base, None  # type: ignore[assignment]
    assert found(other).manifest.digest != found(LoRA()).manifest.digest


def test_a_base_that_the_script_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=9))
    node.script = [(0, apply(MergeMode.REPLACE, 1, fresh=True)), (1, SNAPSHOT), (1, apply(MergeMode.REPLACE, 2))]
    node.script += [(2, SNAPSHOT), (2, STOP)]
    net = LoRA()
    site = atoll.join(net, trained(net), frozen="own")
    before = net.base.weight.clone()
    with torch.no_grad():
        net.base.weight.mul_(1.0)
    site.step(tokens=1)
    assert torch.equal(net.base.weight, before), "nothing of it came from the run"
    with torch.no_grad():
        net.base.weight.add_(1.0)
    with pytest.raises(ConfigError, match=r"'base.weight' is frozen .* has changed it"):
        site.step(tokens=1)


def test_an_optimizer_may_hold_the_base_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AdamW(model.parameters()): it steps what has a gradient, and checkpoints are of that."""
    settings = RunSettings(run_id="r", steps=9, checkpoint_every=2)
    node = in_memory(monkeypatch, settings)
    node.checkpoint_folder = str(tmp_path)

    def trained_for(num_steps: int) -> torch.optim.Optimizer:
        node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True)), (9, STOP)]
        net = LoRA()
        base, trained = [*net.base.parameters()], [*net.down.parameters(), *net.up.parameters()]
        optimizer = torch.optim.AdamW([{"params": base}, {"params": trained}])
        with atoll.join(net, optimizer, frozen="own", ramp_steps=0) as site:
            for _ in range(num_steps):
                net.up(net.down(net.base(torch.ones(1, 64)))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                site.step(tokens=1)
        return optimizer

    before, after = (trained_for(num_steps) for num_steps in (2, 0))
    found, again = ([state for state in each.state.values() if state] for each in (before, after))
    assert [float(state["step"]) for state in again] == [2.0, 2.0]
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(found, again, strict=True))


def test_what_cannot_be_ones_own() -> None:
    with pytest.raises(ConfigError, match="no parameter is frozen"):
        found(nn.Linear(2, 2))
    net = LoRA()
    with pytest.raises(ConfigError, match='choose "run" or "own"'):
        atoll.join(net, trained(net), frozen="mine")  # type: ignore[arg-type]


def test_a_base_that_is_spread_over_ranks_is_refused_by_name() -> None:
    with fake_rank(0, 2):
        net = LoRA()
        spread = distribute_tensor(
            net.base.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        net.base.weight = nn.Parameter(spread, requires_grad=False)
        with pytest.raises(ConfigError, match=r"'base.weight' is frozen and spread over ranks, .* leave it out"):
            found(net)
