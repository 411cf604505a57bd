"""Optimizers that take back what came from the other sites, against a node in memory: in fragments, with few steps
between updates, and none of those that only train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.node.core.events import Answer, MergeMode
from atoll.node.worker import join as join_module
from atoll.node.worker.ramp import LearningRateRamp
from atoll.node.worker.taken_back import NUM_STEPS, NUM_UPDATES, TakenBack
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import fragments_of
from tests.harness.copying_optimizers import DualAveraging, InState, Lookahead, Unfindable, Wrapper
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, in_memory
from tests.unit.worker.test_scripts import REPLACE, SETTINGS, Make, train

MERGE = MergeMode.MERGE


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def layers() -> nn.Sequential:
    """Four, each of a fragment of its own where there are so many."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def run_of(
    monkeypatch: pytest.MonkeyPatch,
    node: FakeNode,
    num: int,
    *,
    fragments: int,
    every: int,
    mode: MergeMode = REPLACE,
) -> None:
    """A start and so many updates, of one fragment after the other; each moves the fragment's weights at random, by
    much more than a step does."""
    settings = replace(SETTINGS, checkpoint_every=3, sync=replace(SETTINGS.sync, fragments=fragments))
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(settings))
    step = every // fragments

    def snapshot(fragment: int) -> Answer:
        return replace(SNAPSHOT, fragment=fragment)

    def seed(fragment: int) -> Answer:
        node.publish[:] = node.snapshot
        is_last = fragment == fragments - 1
        return replace(apply(REPLACE, step if is_last else 0, fresh=fragment == 0), fragment=fragment)

    def update(number: int, fragment: int) -> Answer:
        generator = torch.Generator().manual_seed(100 + number)
        sealed, moved = (torch.frombuffer(memory, dtype=torch.float32) for memory in (node.snapshot, node.publish))
        moved.copy_(sealed + 0.5 * torch.randn(len(sealed), generator=generator))
        return replace(apply(mode, (number + 1) * step, version=number), fragment=fragment)

    node.script = [(0, snapshot(fragments if fragments > 1 else 0))]
    node.script += [(0, partial(seed, fragment)) for fragment in range(fragments)]
    for number in range(1, num + 1):
        fragment = (number - 1) % fragments
        node.script += [(number * step, snapshot(fragment)), (number * step, partial(update, number, fragment))]
    node.script.append(((num + 1) * step, STOP))


def lookahead(net: nn.Module) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.AdamW(net.parameters(), lr=1e-3))


def unfindable(net: nn.Module) -> torch.optim.Optimizer:
    return Unfindable(net.parameters(), lr=1e-3)


def join_and_train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            train(net, optimizer, site.inner_step)
            site.step(tokens=1)


@pytest.mark.parametrize(
    ("make", "fragments", "every"),
    [
        (unfindable, 2, 8),
        (unfindable, 4, 8),
        (unfindable, 4, 4),
        (unfindable, 1, 2),
        (lookahead, 2, 16),
        (lookahead, 4, 40),
        (lookahead, 1, 2),
        (lookahead, 1, 3),
        (lookahead, 1, 4),
        (lookahead, 2, 4),
    ],
)
def test_it_is_refused_in_fragments_and_with_few_steps_between_updates(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode, make: Make, fragments: int, every: int
) -> None:
    run_of(monkeypatch, node, 12 * fragments, fragments=fragments, every=every)
    net = layers()
    with pytest.raises(ConfigError, match=r"took back (4\d|5\d|9\d|100)% of what came from the other sites"):
        join_and_train(net, make(net))


@pytest.mark.parametrize(
    ("fragments", "every", "mode"),
    [(1, 1, REPLACE), (1, 2, MERGE), (1, 3, REPLACE), (2, 4, REPLACE), (2, 16, MERGE), (4, 4, MERGE), (4, 24, REPLACE)],
)
def test_optimizers_of_torch_take_nothing_back(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode, fragments: int, every: int, mode: MergeMode
) -> None:
    """With steps as large as the updates are, and a network that learns what it is given."""
    for kind in ("SGD", "AdamW", "NAdam", "RMSprop", "Rprop"):
        run_of(monkeypatch, node, 8 * fragments, fragments=fragments, every=every, mode=mode)
        net = layers()
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.2)
        node.told.clear()
        with atoll.join(net, optimizer, ramp_steps=0) as site:
            while site.running:
                train(net, optimizer, 0)
                site.step(tokens=1)
        assert len(node.said("merged")) == 9 * fragments, kind


def test_lbfgs_that_solves_the_sites_problem_in_a_step_takes_nothing_back(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode
) -> None:
    run_of(monkeypatch, node, 6, fragments=1, every=8)
    net = nn.Linear(8, 8, bias=False)
    scale = torch.logspace(-1, 1, 64).view(8, 8)  # no gradient points to the solution
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (scale * net.weight.square()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            optimizer.step(closure)  # type: ignore[no-untyped-call]
            site.step(tokens=1)
    assert len(node.said("merged")) == 7


def test_momentum_and_a_gradient_together_explain_a_step() -> None:
    """Neither does alone. They undo each update, and then the gradient undoes the momentum."""
    net = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    watch = TakenBack(find_tensors([net], [optimizer]), [optimizer])
    generator = torch.Generator().manual_seed(1)

    def random(size: float) -> Tensor:
        return size * torch.randn(8, 8, generator=generator)

    def step_with(momentum: Tensor) -> None:
        had = optimizer.state[net.weight].get("momentum_buffer")
        net.weight.grad = momentum - (0.9 * had if had is not None else 0.0)
        optimizer.step()
        watch.stepped()

    for _ in range(4):
        step_with(random(1.0))
        undone = 0.9 * optimizer.state[net.weight]["momentum_buffer"] + random(1.0)
        with watch.update(), torch.no_grad():
            net.weight.add_(undone)
        step_with(undone)
        for _ in range(NUM_STEPS):
            step_with(random(0.1))


def test_an_optimizer_for_each_parameter_is_watched_for_as_little_as_one_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where steps are done within backward. Each looks at the gradient of its own."""
    net = layers()
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in net.parameters() if parameter.dim() > 1]
    rest = torch.optim.SGD([parameter for parameter in net.parameters() if parameter.dim() == 1], lr=0.01)
    watch = TakenBack(find_tensors([net], [*optimizers, rest]), [*optimizers, rest])
    num_rows, row = 0, TakenBack._row

    def counted(self: TakenBack, index: int, value: Tensor) -> Tensor | None:
        nonlocal num_rows
        num_rows += 1
        return row(self, index, value)

    def step() -> None:
        net(torch.ones(1, 8)).sum().backward()
        for optimizer in (*optimizers, rest):
            optimizer.step()
            optimizer.zero_grad()
        watch.stepped()

    step()
    with watch.update(), torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    monkeypatch.setattr(TakenBack, "_row", counted)
    step()
    assert num_rows == 2 * len(optimizers), "values and gradients; tensors below 16 elements are not watched"


class Scaled(torch.optim.Optimizer):
    """Each element's gradient has a scale of its own, as of an optimizer that has learnt them."""

    scales = torch.logspace(-2, 2, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(1))].view(8, 8)

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], None] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / self.scales, alpha=0.9)


def solve(monkeypatch: pytest.MonkeyPatch, node: FakeNode, *, in_closure: bool) -> None:
    """One step solves nearly all of so small a problem, which is a little different in each."""
    run_of(monkeypatch, node, 6, fragments=1, every=8)
    net = nn.Linear(8, 8, bias=False)
    optimizer = Scaled(net.parameters())
    generator = torch.Generator().manual_seed(1)

    def closure() -> None:
        solution = 0.05 * torch.randn(8, 8, generator=generator)
        net.weight.grad = Scaled.scales * (net.weight.detach() - solution)

    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            if in_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            site.step(tokens=1)
    assert len(node.said("merged")) == 7


def test_a_gradient_that_is_scaled_for_each_element_explains_its_step(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode
) -> None:
    solve(monkeypatch, node, in_closure=False)


def test_a_closure_whose_gradient_explains_the_step_takes_nothing_back(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode
) -> None:
    """Before the step there is the gradient of the last one."""
    solve(monkeypatch, node, in_closure=True)


class Watched:
    """A network under watch, whose updates come from this test."""

    def __init__(self, make: Make, num_fragments: int) -> None:
        self.net = layers()
        self.optimizer = make(self.net)
        tensors = find_tensors([self.net], [self.optimizer])
        self._tensors = [(held.local(), held.spec.name) for held in tensors.held]
        self._fragments = fragments_of(tensors.manifest, num_fragments)
        self.watch = TakenBack(tensors, [self.optimizer], num_fragments)

    def steps(self, num: int) -> None:
        for number in range(num):
            train(self.net, self.optimizer, number)
            self.watch.stepped()

    def update(self, fragment: int, change: Callable[[Tensor], Tensor]) -> None:
        with self.watch.update(fragment), torch.no_grad():
            for local, name in self._tensors:
                if self._fragments[name] == fragment:
                    local.copy_(change(local))

    @property
    def is_watching(self) -> bool:
        return len(self.optimizer._optimizer_step_post_hooks) > 0


@pytest.mark.parametrize("every", [1, 2, 3, 20])
@pytest.mark.parametrize("fragments", [1, 2, 4])
@pytest.mark.parametrize("moves", [True, False])
def test_watching_ends_after_some_updates_of_each_fragment(fragments: int, every: int, moves: bool) -> None:
    """Also of one that no update moves."""
    watched = Watched(lambda net: torch.optim.SGD(net.parameters(), lr=0.01), fragments)
    num = NUM_UPDATES if every in (1, 20) else -(-2 * NUM_STEPS // every)
    watched.steps(1)
    for number in range(num):
        for fragment in range(fragments):
            watched.update(fragment, lambda local: local + moves * torch.randn_like(local))
            assert watched.is_watching, number
        watched.steps(every)
    watched.update(0, lambda local: local)  # it ends the last windows that are as short as this
    for fragment in range(1, fragments):
        watched.update(fragment, lambda local: local)
    assert not watched.is_watching


@contextmanager
def no_sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("it looks at the parameters")

    with monkeypatch.context() as patched:
        patched.setattr(TakenBack, "_sample", fail)
        yield


def test_a_watch_that_has_ended_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(lambda net: torch.optim.SGD(net.parameters(), lr=0.01), 2)
    watched.steps(1)
    for _ in range(NUM_UPDATES):
        for fragment in range(2):
            watched.update(fragment, lambda local: local + 1)
            watched.steps(NUM_STEPS)
    with no_sample(monkeypatch):
        watched.update(0, lambda local: local + 1)
        watched.steps(2)


@pytest.mark.parametrize("rare", [0, 1])
def test_a_few_large_elements_are_no_direction(rare: int) -> None:
    """An update and a step that are nearly all of one element point the same way, or the opposite one, by chance."""
    watched = Watched(lambda net: torch.optim.SGD(net.parameters(), lr=0.0), 1)
    generator = torch.Generator().manual_seed(rare)

    def large(local: Tensor, sign: float) -> Tensor:
        moved = 0.03 * torch.randn(local.shape, generator=generator)
        moved.view(-1)[rare - 1] = sign
        return moved

    watched.steps(1)
    for _ in range(NUM_UPDATES + 1):
        watched.update(0, lambda local: local + large(local, 1.0))
        watched.steps(1)
        for number in range(3):
            with torch.no_grad():
                for parameter in watched.net.parameters():
                    parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
                    if number == 0:
                        parameter.view(-1)[rare - 1] -= 1.0
            watched.steps(1)


@pytest.mark.parametrize("kind", ["MADGRAD", "MirrorMADGRAD", "DAdaptSGD"])
def test_dual_averaging_is_refused_by_name_before_it_trains(kind: str) -> None:
    """Each of its steps takes back a tenth of every update before, as momentum and gradients might."""
    net = layers()
    optimizer = type(kind, (DualAveraging,), {})(net.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=rf"{kind} would overwrite what comes from the other sites \(dual averaging"):
        find_tensors([net], [optimizer])
    optimizer.param_groups[0]["momentum"] = 0.0
    find_tensors([net], [optimizer])  # it is none then, or takes all of an update back in one step


def test_the_learning_rate_of_a_joiner_rises_within_a_wrapper(monkeypatch: pytest.MonkeyPatch, node: FakeNode) -> None:
    """One that holds its optimizer under a name of its own, without the constructor of torch's."""
    node.script = [(0, apply(REPLACE, 99, run_step=500, fresh=True))]
    net = layers()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    seen: list[float] = []
    with atoll.join(net, Wrapper(inner), ramp_steps=3) as site:
        inner.register_step_pre_hook(lambda *_: seen.append(inner.param_groups[0]["lr"]))
        for number in range(5):
            train(net, Wrapper(inner), number)
            site.step(tokens=1)
    assert seen == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert not inner._optimizer_step_post_hooks


def test_the_learning_rate_of_a_joiner_rises_in_each_optimizer_of_a_wrapper() -> None:
    """As of one for matrices and one for the rest, which have one face."""
    net = layers()
    inner = [torch.optim.SGD([p for p in net.parameters() if p.dim() == dim], lr=1.0) for dim in (1, 2)]
    both = Wrapper(inner[0])
    both.other = Wrapper(inner[1])  # type: ignore[attr-defined]
    seen: list[float] = []
    ramp = LearningRateRamp([both], 3)
    for each in inner:
        each.register_step_pre_hook(lambda of, *_: seen.append(of.param_groups[0]["lr"]))
        each.step()
    ramp.remove()
    assert seen == [0.25, 0.25]


def test_masters_of_all_fragments_take_the_runs_values_after_a_crash(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode, tmp_path: Path
) -> None:
    """Each fragment comes with an answer of its own, before any step."""
    net = layers()
    optimizer = InState(net.parameters(), lr=0.1)
    node.checkpoint_folder = str(tmp_path)
    run_of(monkeypatch, node, 1, fragments=2, every=4)
    join_and_train(net, optimizer)
    again = layers()
    optimizer = InState(again.parameters(), lr=0.1)
    run_of(monkeypatch, node, 0, fragments=2, every=4)
    with atoll.join(again, optimizer, ramp_steps=0):
        for name, parameter in again.named_parameters():
            assert optimizer.state[parameter]["steps"] > 0
            masters = optimizer.state[parameter]["w32"].flatten()
            assert torch.equal(masters, torch.tensor(node.values(node.publish, name))), name
