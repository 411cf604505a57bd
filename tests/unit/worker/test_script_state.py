"""`state=` of atoll.join: what a script keeps beside its optimizers goes on after a crash, and nothing is unpickled."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import atoll
from atoll.integrations.training import follow
from atoll.node.core.events import Answer, MergeMode
from atoll.node.worker import join as join_module
from atoll.node.worker import joined_site
from atoll.node.worker.checkpoint import LocalCheckpoints
from atoll.node.worker.optimizer_state import OptimizerState
from atoll.node.worker.script_state import ScriptState
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.errors import ConfigError
from tests.harness.copying_optimizers import Beside, InState
from tests.harness.fake_group import fake_rank
from tests.harness.fake_node import SNAPSHOT, FakeNode, apply
from tests.unit.worker.test_scripts import SETTINGS, network, seeded, train


class Keeps:
    """Anything with the two methods."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


VALUES = {
    "numbers": [1, 2.5, float("inf"), True, None, "text"],
    "nested": {"a": (1, (2,)), 7: [], "milestones": Counter({3: 2}), "in order": OrderedDict(b=1, a=2)},
    "bits": torch.tensor([1.5, float("nan"), -0.0]).to(torch.bfloat16),
    "rng": torch.arange(7, dtype=torch.uint8),
}


class Trained:
    def __init__(self, folder: Path, kept: dict[str, Any], *, rank: int = 0, world: int = 1, kind: Any = None) -> None:
        self.net = network()
        self.optimizer = (kind or torch.optim.SGD)(self.net.parameters(), lr=0.1)
        tensors = find_tensors([self.net], [self.optimizer])
        self.copy_keys: list[set[str]] = [set()]
        self.checkpoints = LocalCheckpoints(
            folder,
            OptimizerState(tensors, [self.optimizer], self.copy_keys),
            "run",
            rank,
            world,
            script=ScriptState(kept, [self.optimizer]) if kept else None,
        )

    def write(self) -> None:
        self.checkpoints.go_on(None, 1, 1)
        self.checkpoints.write(5, 5)
        self.checkpoints.finish()

    def go_on(self) -> None:
        self.checkpoints.go_on(max(self.checkpoints.usable), 1, 2)


def test_tensors_and_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    """Also where the optimizer keeps nothing."""
    Trained(tmp_path, {"mine": Keeps(VALUES)}).write()
    again = Keeps({})
    Trained(tmp_path, {"mine": again}).go_on()
    for one, other in ((VALUES["bits"], again.state["bits"]), (VALUES["rng"], again.state["rng"])):
        assert isinstance(one, torch.Tensor)
        assert one.dtype == other.dtype
        assert one.view(torch.uint8).tolist() == other.view(torch.uint8).tolist()
    plain = {key: value for key, value in VALUES.items() if not isinstance(value, torch.Tensor)}
    assert {key: again.state[key] for key in plain} == plain
    assert [type(value) for value in again.state["nested"].values()] == [tuple, list, Counter, OrderedDict]


def test_tensors_whose_keys_read_alike_are_kept_apart(tmp_path: Path) -> None:
    """Names of parameters have dots in them, and so does the path to what is nested."""
    alike: dict[Any, Any] = {
        "a.b": torch.zeros(2),
        "a": {"b": torch.ones(2)},
        1: torch.full((2,), 2.0),
        "1": torch.full((2,), 3.0),
    }
    Trained(tmp_path, {"mine": Keeps(alike)}).write()
    again = Keeps({})
    Trained(tmp_path, {"mine": again}).go_on()
    found: dict[Any, Any] = again.state
    assert [found["a.b"][0], found["a"]["b"][0], found[1][0], found["1"][0]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), r'"mine\.deep\.0" is object'),
        ({object(): 1}, r'"mine\.deep\.0" is dict'),
        (torch.zeros(2, dtype=torch.complex64), r"complex64, which cannot be kept"),
        (torch.zeros(2).to_sparse(), "make it dense"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name_at_join(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScriptState({"mine": Keeps({"deep": [value]})}, [])


def test_what_is_no_keeper_is_refused() -> None:
    net, optimizer = nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    with pytest.raises(ConfigError, match=r'state\["s"\] is int, which has no state_dict'):
        ScriptState({"s": 3}, [])
    with pytest.raises(ConfigError, match=r'state\["o"\] is an optimizer given to atoll\.join'):
        ScriptState({"net": net, "o": optimizer}, [optimizer])


def test_what_a_checkpoint_lacks_begins_again_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trained(tmp_path, {"old": Keeps({"n": 1})}).write()
    old, new = Keeps({}), Keeps({"n": 5})
    Trained(tmp_path, {"old": old, "new": new}).go_on()
    assert (old.state, new.state) == ({"n": 1}, {"n": 5})
    assert 'state["new"] begins again: the checkpoint does not have it' in capsys.readouterr().err


def sharded(fill: float, rank: int, world: int) -> DTensor:
    mesh = init_device_mesh("cpu", (world,))
    return distribute_tensor(
        torch.full((4, 2), fill) + torch.arange(4).view(4, 1), mesh, [Shard(0)], src_data_rank=None
    )


def test_shards_go_to_the_ranks_that_had_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And where the site has another number of ranks, what is sharded begins again; the rest does not."""
    for rank in range(2):
        with fake_rank(rank, 2):
            kept = {"ema": Keeps({"w": sharded(3.0, rank, 2)}), "count": Keeps({"n": 9})}
            Trained(tmp_path, kept, rank=rank, world=2).write()
    for rank in range(2):
        with fake_rank(rank, 2):
            ema, count = Keeps({"w": sharded(0.0, rank, 2)}), Keeps({})
            Trained(tmp_path, {"ema": ema, "count": count}, rank=rank, world=2).go_on()
            got = ema.state["w"]
            assert isinstance(got, DTensor)
            assert got.to_local().tolist() == [[3.0 + 2 * rank] * 2, [4.0 + 2 * rank] * 2]
    ema, count = Keeps({"w": torch.zeros(4, 2)}), Keeps({})
    Trained(tmp_path, {"ema": ema, "count": count}).go_on()
    assert ema.state["w"].unique().tolist() == [0.0]
    assert count.state == {"n": 9}
    assert "state[\"ema\"] begins again: 'state/0/ema.w' was sharded" in capsys.readouterr().err


def test_a_scheduler_and_an_ema_go_on_after_a_crash(node: FakeNode, tmp_path: Path) -> None:
    """The same rates and averages as those of a script that never crashed."""
    node.checkpoint_folder = str(tmp_path)
    settings = replace(SETTINGS, checkpoint_every=4)

    class Script:
        def __init__(self) -> None:
            self.net = network()
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.SequentialLR(
                self.optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=3),
                    torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.5),
                ],
                milestones=[3],
            )
            self.ema = AveragedModel(
                self.net,
                multi_avg_fn=get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]
            )

        def go_on(self, first: int, last: int, site: atoll.Site | None = None) -> None:
            for number in range(first, last):
                train(self.net, self.optimizer, number)
                self.scheduler.step()
                self.ema.update_parameters(self.net)
                if site is not None:
                    site.step(tokens=1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(join_module, "connect", lambda: node.connection(settings))
        patched.setattr(joined_site, "disconnect", node.close)
        whole, first, second = Script(), Script(), Script()
        whole.go_on(0, 8)
        node.script = seeded(node, 100)
        with atoll.join(
            first.net, first.optimizer, ramp_steps=0, state={"scheduler": first.scheduler, "ema": first.ema}
        ) as site:
            first.go_on(0, 4, site)
        trained = copy.deepcopy(first.net.state_dict())
        node.script = seeded(node, 100)
        with atoll.join(
            second.net, second.optimizer, ramp_steps=0, state={"scheduler": second.scheduler, "ema": second.ema}
        ) as site:
            second.net.load_state_dict(trained)  # as the outer state brings them
            second.go_on(4, 8, site)
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] < 0.01
    for name, value in whole.ema.state_dict().items():
        assert torch.equal(value, second.ema.state_dict()[name]), name


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


class CountsInTensors(torch.optim.SGD):
    """Steps and an average in its parameter groups, as timm's Lamb and others have them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group.setdefault("num_steps", torch.zeros((), dtype=torch.int64)).add_(1)
            group["norms"] = [torch.tensor([0.1, 1e-8]), torch.tensor([3.0], dtype=torch.bfloat16)]


def test_tensors_in_parameter_groups_are_kept(tmp_path: Path) -> None:
    first = Trained(tmp_path, {"n": Keeps({})}, kind=lambda p, lr: CountsInTensors(p, lr=lr, momentum=0.9))
    for number in range(3):
        train(first.net, first.optimizer, number)
    first.write()
    again = Trained(tmp_path, {"n": Keeps({})}, kind=lambda p, lr: CountsInTensors(p, lr=lr, momentum=0.9))
    again.go_on()
    (one,), (other,) = first.optimizer.param_groups, again.optimizer.param_groups
    assert other["num_steps"].item() == 3
    assert other["num_steps"].dtype == torch.int64
    for mine, its in zip(one["norms"], other["norms"], strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


@pytest.mark.parametrize(
    "table",
    [torch.zeros(100, 100), {"mean": torch.zeros(2)}, [{"of": (torch.zeros(2),)}], [torch.zeros(2), max]],
    ids=["large", "in a dict", "in a dict of a list", "beside a function"],
)
def test_a_tensor_in_a_group_that_cannot_be_kept_is_refused_by_name(
    table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else training would go on from a checkpoint without it, and nobody would know."""
    rank = Trained(tmp_path / "of", {}, kind=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    train(rank.net, rank.optimizer, 0)
    rank.optimizer.param_groups[0]["table"] = table
    rank.write()
    assert "keeps 'table' of parameter group 0" in capsys.readouterr().err
    assert not (tmp_path / "of").exists()


def test_a_state_of_a_kind_of_its_own_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class EightBit(torch.Tensor):
        """As torchao's states: fp32 by its dtype, and not in memory."""

    rank = Trained(tmp_path / "of", {}, kind=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    train(rank.net, rank.optimizer, 0)
    state = rank.optimizer.state[rank.net[0].get_parameter("weight")]
    state["momentum_buffer"] = state["momentum_buffer"].as_subclass(EightBit)
    rank.write()
    assert "is a EightBit, a tensor of a kind" in capsys.readouterr().err
    assert not (tmp_path / "of").exists()


@pytest.mark.parametrize("kind", [InState, Beside])
def test_masters_take_the_runs_values_after_a_crash(
    node: FakeNode, tmp_path: Path, kind: type[InState] | type[Beside]
) -> None:
    """Those of the checkpoint are of another moment: by their values nobody would know them. The file names them. Those
    that are in no checkpoint are the script's first ones, as its parameters are."""
    node.checkpoint_folder = str(tmp_path)
    settings = replace(SETTINGS, checkpoint_every=3)

    def elsewhere() -> Answer:
        sealed, outer = (torch.frombuffer(buffer, dtype=torch.float32) for buffer in (node.snapshot, node.publish))
        outer.copy_(sealed + 0.3)
        return apply(MergeMode.REPLACE, 100, fresh=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(join_module, "connect", lambda: node.connection(settings))
        patched.setattr(joined_site, "disconnect", node.close)
        net = network(torch.bfloat16)
        optimizer = kind(net.parameters(), lr=0.1)
        node.script = [*seeded(node, 2), (2, SNAPSHOT), (2, apply(MergeMode.REPLACE, 100))]
        with atoll.join(net, optimizer, ramp_steps=0) as site:
            for number in range(3):
                train(net, optimizer, number)
                site.step(tokens=1)
        moved = optimizer.state[net[0].get_parameter("weight")]["moved"].clone()
        again = network(torch.bfloat16)
        optimizer = kind(again.parameters(), lr=0.1)
        node.script = [(0, SNAPSHOT), (0, elsewhere)]
        with atoll.join(again, optimizer, ramp_steps=0):
            weight = again[0].get_parameter("weight")
            assert torch.equal(optimizer.state[weight]["moved"], moved)
            outer = torch.tensor(node.values(node.publish, "0.weight")).view(16, 8)
            assert torch.equal(weight, outer.bfloat16())
            masters = optimizer.masters[0] if isinstance(optimizer, Beside) else optimizer.state[weight]["w32"]
            assert torch.equal(masters, outer)


@pytest.mark.parametrize("how", ["kept", "following", "made after join", ""])
def test_a_scheduler_that_is_not_kept_is_said_once(
    node: FakeNode, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    node.checkpoint_folder = str(tmp_path)
    net = network()
    parameters = list(net.parameters())
    plain, rated = torch.optim.SGD(parameters[:1], lr=0.01), torch.optim.AdamW(parameters[1:], lr=0.01)
    node.script = seeded(node, 100)
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, rated, lambda step: 1 / (1 + step))
    scheduler = schedule() if how != "made after join" else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(join_module, "connect", lambda: node.connection(replace(SETTINGS, checkpoint_every=2)))
        patched.setattr(joined_site, "disconnect", node.close)
        with atoll.join(net, [plain, rated], state={"scheduler": scheduler} if how == "kept" else None) as site:
            scheduler = scheduler or schedule()
            for number in range(6):
                train(net, plain, number)
                rated.step()
                scheduler.step()
                if how == "following":
                    assert follow(scheduler, site.inner_step)
                site.step(tokens=1)
    said = [line for line in capsys.readouterr().err.splitlines() if "scheduler" in line]
    begins = "atoll: the learning-rate scheduler of AdamW is not in state=, and begins again after a crash: "
    assert [line.startswith(begins) for line in said] == ([] if how in ("kept", "following") else [True])
