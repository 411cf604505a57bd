"""Optimizers and loaders of real libraries against a node in memory, beside their stand-ins in tests/unit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import atoll
from atoll.node.worker.checkpoint import LocalCheckpoints
from atoll.node.worker.optimizer_state import OptimizerState
from atoll.node.worker.script_state import ScriptState
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.errors import ConfigError
from tests.harness.fake_node import STOP, FakeNode, in_memory
from tests.unit.worker.test_scripts import BETWEEN, SETTINGS, network, seeded, train, updates

pytestmark = [pytest.mark.more, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

SIDE = 64
"""Its square is the least that libraries keep in 8 bits."""


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Some libraries compile their steps: what they keep is the same without, and a minute is saved."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


@pytest.fixture
def of_timm() -> Iterator[Callable[[str], Any]]:
    """An optimizer of timm by its name, from its own file. timm itself imports torchvision, of which there is none for
    the CPU's torch; its optimizers need torch alone."""
    try:
        folder = Path(str(distribution("timm").locate_file("timm")))
    except ModuleNotFoundError:
        pytest.skip("timm is not installed: make test-more")
    for name, path in (("timm", folder), ("timm.optim", folder / "optim")):
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(path)]
    yield lambda kind: getattr(import_module(f"timm.optim.{kind.lower()}"), kind)
    for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
        del sys.modules[name]


def wide() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, SIDE), nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 8))


def test_a_lookahead_of_timm_is_refused_by_name(of_timm: Callable[[str], Any], node: FakeNode) -> None:
    net = network()
    optimizer = of_timm("Lookahead")(torch.optim.AdamW(net.parameters(), lr=1e-3))
    node.script = [*seeded(node), *updates(node, 4), (5 * BETWEEN, STOP)]
    with atoll.join(net, optimizer, ramp_steps=0) as site:

        def go_on() -> None:
            while site.running:
                train(net, optimizer, site.inner_step)
                site.step(tokens=1)

        with pytest.raises(ConfigError, match=r"Lookahead took back (4\d|5\d)% of what came from the other sites"):
            go_on()
    assert site.inner_step <= 4 * BETWEEN


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "Adan", "NAdamW"])
def test_optimizers_of_timm_take_nothing_back(of_timm: Callable[[str], Any], node: FakeNode, kind: str) -> None:
    net = network()
    optimizer = of_timm(kind)(net.parameters(), lr=0.02)
    node.script = [*seeded(node), *updates(node, 5), (6 * BETWEEN, STOP)]
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            train(net, optimizer, 0)
            site.step(tokens=1)
    assert len(node.said("merged")) == 6


def test_madgrad_of_timm_is_refused_by_name(of_timm: Callable[[str], Any], node: FakeNode) -> None:
    """Without momentum it has no point of its own."""
    net = network()
    node.script = [*seeded(node), *updates(node, 3), (4 * BETWEEN, STOP)]
    with pytest.raises(ConfigError, match=r"MADGRAD would overwrite what comes from the other sites \(dual averaging"):
        atoll.join(net, of_timm("MADGRAD")(net.parameters(), lr=0.02))
    optimizer = of_timm("MADGRAD")(net.parameters(), lr=0.02, momentum=0.0)
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            train(net, optimizer, 0)
            site.step(tokens=1)
    assert len(node.said("merged")) == 4


class Kept:
    """A network that has trained, and the checkpoint of its optimizer."""

    def __init__(self, folder: Path, kind: Any) -> None:
        self.net = wide()
        self.optimizer = kind(self.net.parameters())
        tensors = find_tensors([self.net], [self.optimizer])
        self.checkpoints = LocalCheckpoints(
            folder, OptimizerState(tensors, [self.optimizer], [set()]), "run", 0, 1, script=None
        )

    def write(self) -> None:
        self.checkpoints.go_on(None, 1, 1)
        self.checkpoints.write(5, 5)
        self.checkpoints.finish()


def test_lamb_of_timm_goes_on_after_a_crash(of_timm: Callable[[str], Any], tmp_path: Path) -> None:
    first = Kept(tmp_path, lambda p: of_timm("Lamb")(p, lr=0.01))
    for number in range(3):
        train(first.net, first.optimizer, number)
    first.write()
    again = Kept(tmp_path, lambda p: of_timm("Lamb")(p, lr=0.01))  # reads what is there
    again.net.load_state_dict(first.net.state_dict())  # as the outer state brings them
    again.checkpoints.go_on(max(again.checkpoints.usable), 1, 2)
    for one in (first, again):
        train(one.net, one.optimizer, 7)
    assert torch.equal(*(one.net[1].get_parameter("weight") for one in (first, again)))


@pytest.mark.parametrize("is_gathered_in_float8", [False, True])
def test_float8_of_torchao_is_shared_as_it_is_and_its_all_gather_refused_by_name(is_gathered_in_float8: bool) -> None:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed: make test-more")
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=is_gathered_in_float8, emulate=True)
    float8.convert_to_float8_training(net, config=config)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if is_gathered_in_float8:
        with pytest.raises(ConfigError, match=r"'0\.weight' is a Weight.*a tensor of a kind of its own, whose values"):
            find_tensors([net], [optimizer])
    else:
        assert [spec.name for spec in find_tensors([net], [optimizer]).manifest.tensors][1] == "0.weight"


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_states_of_torchao_train_without_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed: make test-more")
    node = in_memory(monkeypatch, replace(SETTINGS, checkpoint_every=3))
    node.checkpoint_folder = str(tmp_path)
    net = wide()
    optimizer = getattr(optim, kind)(net.parameters(), lr=0.01)
    node.script = [*seeded(node), *updates(node, 3), (4 * BETWEEN, STOP)]
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            train(net, optimizer, site.inner_step)
            site.step(tokens=1)
    assert len(node.said("merged")) == 4
    said = capsys.readouterr().err
    assert "no checkpoint of the inner optimizer is written, it starts fresh after a crash" in said
    assert "a tensor of a kind of its own" in said


def test_eight_bits_of_bitsandbytes_are_plain_tensors_that_go_on_after_a_crash(tmp_path: Path) -> None:
    """Its 8-bit step needs a GPU; what it keeps, and in which form, is the same on a CPU."""
    optim = pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed: make test-more")
    first = Kept(tmp_path, lambda p: optim.AdamW8bit(p, lr=0.01))
    for place, parameter in enumerate(first.net.parameters()):
        first.optimizer.init_state(first.optimizer.param_groups[0], parameter, 0, place)
    weight = first.net[1].weight
    state = first.optimizer.state[weight]
    assert state["state1"].dtype == torch.uint8
    state["state1"].random_(255)
    state["absmax1"].uniform_()
    state["step"] = 5
    first.write()
    again = Kept(tmp_path, lambda p: optim.AdamW8bit(p, lr=0.01))
    again.checkpoints.go_on(max(again.checkpoints.usable), 1, 2)
    found = again.optimizer.state[again.net[1].weight]
    assert found["step"] == 5
    assert {key for key in found if isinstance(found[key], torch.Tensor)} >= {"state1", "qmap1", "absmax1", "absmax2"}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_of_torchdata_goes_on_where_it_was(tmp_path: Path, num_workers: int) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed: make test-more")

    def loader() -> Any:
        data = TensorDataset(torch.arange(40.0))
        generator = torch.Generator().manual_seed(5)
        return module.StatefulDataLoader(data, 4, shuffle=True, num_workers=num_workers, generator=generator)

    def checkpoints(kept: Any) -> LocalCheckpoints:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = OptimizerState(find_tensors([net], [optimizer]), [optimizer], [set()])
        return LocalCheckpoints(tmp_path, state, "run", 0, 1, script=ScriptState({"loader": kept}, [optimizer]))

    whole = [batch[0].tolist() for batch in loader()]
    first = loader()
    written = checkpoints(first)
    batches = iter(first)
    got = [next(batches)[0].tolist() for _ in range(3)]
    written.go_on(None, 1, 1)
    written.write(3, 3)
    written.finish()
    again = loader()
    read = checkpoints(again)
    read.go_on(max(read.usable), 1, 2)
    assert got + [batch[0].tolist() for batch in again] == whole
