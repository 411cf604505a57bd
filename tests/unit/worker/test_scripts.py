"""Scripts that would go wrong without a word, against a node in memory: each is put right, or ends with its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import Dataset

import atoll
from atoll.node.core.events import Answer, MergeMode
from atoll.node.worker.other_optimizers import IN_A_ROW, OtherOptimizers
from atoll.node.worker.script_checks import ScriptChecks
from atoll.node.worker.site import Step
from atoll.node.worker.taken_back import NUM_STEPS
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings
from tests.harness.copying_optimizers import InState, Lookahead, Unfindable, Within
from tests.harness.fake_group import fake_rank
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, go_on, in_memory

SETTINGS = RunSettings(run_id="r", steps=100)
REPLACE, MERGE = MergeMode.REPLACE, MergeMode.MERGE
BETWEEN = 8
"""Steps from an update to the next one."""
Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    dtype = next(net.parameters()).dtype
    inputs, targets = (torch.randn(16, 8, generator=generator).to(dtype) for _ in range(2))
    loss: Tensor = (net(inputs) - targets).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def seeded(node: FakeNode, next_step: int = BETWEEN) -> list[tuple[int, Answer | Callable[[], Answer]]]:
    def take() -> Answer:
        node.publish[:] = node.snapshot
        return apply(REPLACE, next_step, fresh=True)

    return [(0, SNAPSHOT), (0, take)]


def updates(
    node: FakeNode, num: int, mode: MergeMode = REPLACE, *, between: int = BETWEEN
) -> list[tuple[int, Answer | Callable[[], Answer]]]:
    """Each moves every weight at random, by much more than a step does."""

    def update(number: int) -> Callable[[], Answer]:
        def take() -> Answer:
            generator = torch.Generator().manual_seed(100 + number)
            sealed = torch.frombuffer(node.snapshot, dtype=torch.float32)
            moved = torch.frombuffer(node.publish, dtype=torch.float32)
            moved.copy_(sealed + 0.5 * torch.randn(len(sealed), generator=generator))
            return apply(mode, (number + 2) * between, version=number + 1)

        return take

    questions: list[tuple[int, Answer | Callable[[], Answer]]] = []
    for number in range(num):
        questions += [((number + 1) * between, SNAPSHOT), ((number + 1) * between, update(number))]
    return questions


@pytest.mark.parametrize("mode", [REPLACE, MERGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [InState, Within])
def test_masters_that_are_found_take_the_update(
    node: FakeNode, kind: type[InState] | type[Within], dtype: torch.dtype, mode: MergeMode
) -> None:
    net = network(dtype)
    optimizer = kind(net.parameters(), lr=1e-3)
    node.script = [*seeded(node), *updates(node, 4, mode), (5 * BETWEEN, STOP)]
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            train(net, optimizer, site.inner_step)
            if not site.step(tokens=1).synced:
                continue
            outer = torch.tensor(node.values(node.publish, "0.weight")).view(16, 8)
            weight = net[0].get_parameter("weight")
            taken = weight.detach().clone()
            torch.testing.assert_close(taken.float(), outer.to(dtype).float())
            masters = optimizer._twins[0] if isinstance(optimizer, Within) else optimizer.state[weight]["w32"]
            if mode is REPLACE or dtype is torch.float32:
                assert torch.equal(masters, outer), "to the bit"
            else:
                assert 0 < ((masters - outer) / outer).abs().median() < 2**-8, "with what the cast had lost before"
            train(net, optimizer, 0)
            moved = (net[0].get_parameter("weight") - taken).abs().max()
            assert moved < 0.05, "a step, and not the way back"
            with torch.no_grad():
                net[0].get_parameter("weight").copy_(taken)
                masters.copy_(outer)
    assert len(node.said("merged")) == 5


def test_masters_take_each_update_though_the_casts_of_sums_are_no_sums_of_casts(node: FakeNode) -> None:
    """Updates between which the optimizer has done no step, as of two fragments."""
    net = network(torch.bfloat16)
    optimizer = InState(net.parameters(), lr=1e-3)
    once = updates(node, 4, MERGE)
    takes = [take for _, take in once[1::2] if callable(take)]
    at_once = [(BETWEEN, lambda take=take: replace(take(), next_step=BETWEEN)) for take in takes[:-1]]
    node.script = [*seeded(node), once[0], *at_once, (BETWEEN, takes[-1]), (5 * BETWEEN, STOP)]
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            train(net, optimizer, site.inner_step)
            if site.step(tokens=1).synced:
                for parameter in net.parameters():
                    torch.testing.assert_close(
                        optimizer.state[parameter]["w32"], parameter.float(), rtol=0.02, atol=0.02
                    )
    assert len(node.said("merged")) == 5


def lookahead(net: nn.Module) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.AdamW(net.parameters(), lr=1e-3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda net: Unfindable(net.parameters(), lr=1e-3), r"Unfindable took back (9\d|100)% of what came from the"),
        (lookahead, r"Lookahead took back (4\d|5\d)% of what came from the other sites"),
    ],
    ids=["masters", "look-ahead"],
)
def test_an_optimizer_that_takes_updates_back_is_refused_by_name(node: FakeNode, make: Make, words: str) -> None:
    net = network()
    optimizer = make(net)
    node.script = [*seeded(node), *updates(node, 4), (5 * BETWEEN, STOP)]
    with atoll.join(net, optimizer, ramp_steps=0) as site:

        def go_on() -> None:
            while site.running:
                train(net, optimizer, site.inner_step)
                site.step(tokens=1)

        with pytest.raises(ConfigError, match=words):
            go_on()
    assert site.inner_step <= 3 * BETWEEN + BETWEEN, "the second update showed it"


@pytest.mark.parametrize("between", [1, 2])
def test_that_updates_after_each_step_show_nothing_is_said_once(
    node: FakeNode, between: int, capfd: pytest.CaptureFixture[str]
) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [*seeded(node, between), *updates(node, 8, between=between), (9 * between, STOP)]
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        while site.running:
            train(net, optimizer, site.inner_step)
            site.step(tokens=1)
    assert len(node.said("merged")) == 9
    assert capfd.readouterr().err.count("an update comes after each step") == (between == 1)


@pytest.mark.parametrize("mode", [REPLACE, MERGE])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Muon", "Adafactor", "NAdam", "Rprop"])
def test_optimizers_of_torch_take_nothing_back(node: FakeNode, kind: str, mode: MergeMode) -> None:
    """With steps as large as the updates are, and one network that learns what it is given."""
    net = network()
    muon = [p for p in net.parameters() if p.dim() == 2]
    made = getattr(torch.optim, kind)(muon if kind == "Muon" else net.parameters(), lr=0.2)
    rest = [torch.optim.SGD([p for p in net.parameters() if p.dim() == 1], lr=0.2)] if kind == "Muon" else []
    node.script = [*seeded(node), *updates(node, 5, mode), (6 * BETWEEN, STOP)]
    with atoll.join(net, [made, *rest], ramp_steps=0) as site:
        while site.running:
            train(net, made, 0)
            for other in rest:
                other.step()
                other.zero_grad()
            site.step(tokens=1)
    assert len(node.said("merged")) == 6


def beside_one_that_stands_still(node: FakeNode, num_elements: int, window: int) -> None:
    """Six syncs, the average of each halfway back."""
    last = torch.empty(num_elements)

    def halfway(number: int) -> Callable[[], Answer]:
        def take() -> Answer:
            sealed, moved = (torch.frombuffer(memory, dtype=torch.float32) for memory in (node.snapshot, node.publish))
            moved.copy_((sealed + last) / 2 if number else sealed)
            last.copy_(moved)
            return apply(REPLACE, (number + 1) * window, version=number, fresh=not number)

        return take

    for number in range(6):
        node.script += [(number * window, SNAPSHOT), (number * window, halfway(number))]
    node.script.append((6 * window, STOP))


def test_momentum_that_goes_on_with_what_an_average_has_undone_takes_nothing_back(node: FakeNode) -> None:
    """Gradients are small and point anywhere."""
    net = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.99)
    beside_one_that_stands_still(node, 64, window=4)
    generator = torch.Generator().manual_seed(1)
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        size = 1.0
        while site.running:
            net.weight.grad = size * torch.randn(8, 8, generator=generator)
            optimizer.step()
            site.step(tokens=1)
            size = 1e-3
    assert len(node.said("merged")) == 6


def test_an_expert_that_rests_in_most_steps_and_goes_on_with_its_momentum_takes_nothing_back(node: FakeNode) -> None:
    """It moves in the first and the last step of a window alone."""
    net = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    always, seldom = (layer.get_parameter("weight") for layer in net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.99)
    window = 6
    beside_one_that_stands_still(node, 128, window)
    generator = torch.Generator().manual_seed(1)
    with atoll.join(net, optimizer, ramp_steps=0) as site:
        step = 0
        while site.running:
            always.grad = 1e-3 * torch.randn(8, 8, generator=generator)
            size = 1e-3 if step else 1.0
            seldom.grad = size * torch.randn(8, 8, generator=generator) if step % window in (0, window - 1) else None
            optimizer.step()
            site.step(tokens=1)
            step += 1
    assert len(node.said("merged")) == 6


@pytest.mark.parametrize("how", ["assigned", "replaced", "module"])
def test_a_parameter_that_was_replaced_after_join_is_refused(node: FakeNode, how: str) -> None:
    """The old one would be sent, and the new one never take an update."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [*seeded(node, 1), (1, SNAPSHOT)]
    with atoll.join(net, optimizer) as site:
        if how == "assigned":
            net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)
        elif how == "replaced":
            net[0].weight = nn.Parameter(net[0].get_parameter("weight").detach().clone())
        else:
            net[0] = nn.Linear(8, 8)  # as of a new head
        with pytest.raises(ConfigError, match=r"'0\.(bias|weight)' is another Parameter than at atoll\.join"):
            site.step(tokens=1)
    assert len(node.said("sealed")) == 1


def test_a_frozen_module_may_go_and_a_model_may_list_what_it_trains(node: FakeNode) -> None:
    """As a teacher that is needed no more, and LoRA models that say their own parameters."""

    class Lists(nn.Sequential):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return (p for p in super().parameters(recurse) if p.requires_grad)

    net = Lists(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].requires_grad_(False)
    net[1].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [*seeded(node, 1), (1, SNAPSHOT), (1, STOP)]
    with atoll.join(net, optimizer) as site:
        del net[1]
        train(net, optimizer, 0)
        site.step(tokens=1)
    assert len(node.said("sealed")) == 2


def test_calls_without_a_step_count_nothing_and_that_is_said_once(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a GradScaler leaves a step out: neither the step nor its tokens are in what the sites average, nor is
    its loss, which may not be finite."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    node.script = [*seeded(node, 3), (3, SNAPSHOT), (3, STOP)]
    steps: list[Step] = []
    bad = {0, 2, 3}  # the first one before any step
    with atoll.join(net, optimizer) as site:
        for number in range(6):
            loss = net(torch.ones(1, 8)).sum() * (float("inf") if number in bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            steps.append(site.step(tokens=10, loss=loss.detach()))
            optimizer.zero_grad()
    assert [step.inner_step for step in steps] == [0, 1, 1, 1, 2, 3]
    (_, sealed) = node.said("sealed")
    assert (sealed["tokens"], sealed["num_steps"]) == (30, 3)
    said = capsys.readouterr().err
    assert said.count("site.step was called without a step of the optimizer") == 1, "not of each row, 0 and 2, 3"
    assert "an error if 32 follow each other, or if more than 32 are a third of all calls" in said


def test_a_call_at_each_microbatch_is_an_error(node: FakeNode) -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    node.script = seeded(node, 1000)
    num_calls = 0
    with atoll.join(net, optimizer) as site:

        def go_on() -> None:
            nonlocal num_calls
            while True:
                net(torch.ones(1, 8)).sum().backward()
                num_calls += 1
                if num_calls % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                site.step(tokens=10)

        with pytest.raises(
            ConfigError, match=r"call site\.step once after each optimizer\.step.* more than 32 such calls"
        ) as caught:
            go_on()
        assert "in a row" not in str(caught.value)
    assert num_calls < 100


def test_steps_that_torch_does_not_tell_of_count(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    """A captured graph does the optimizer's step without calling it."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [*seeded(node, 20), (20, STOP)]
    num_calls = 0
    with atoll.join(net, optimizer) as site:
        train(net, optimizer, 0)
        while site.running:
            site.step(tokens=10)
            num_calls += 1
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1) if parameter.grad is not None else None
    assert num_calls == 21, "one before it was found out"
    assert "each call of site.step counts as one" in capsys.readouterr().err


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside-another"])
@pytest.mark.parametrize("after", [0, 3])
def test_an_optimizer_that_is_made_anew_after_join_is_refused_by_name(node: FakeNode, after: int, others: bool) -> None:
    """Also where the model's other half has its own optimizer, which goes on."""
    net = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    rest = torch.optim.AdamW(net[2].parameters(), lr=0.1)
    node.script = seeded(node, 1000)
    with atoll.join(net, [optimizer, rest]) as site:
        for number in range(after):
            train(net, optimizer, number)
            rest.step()
            site.step(tokens=10)
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.01)
        for number in range(IN_A_ROW):
            train(net, optimizer, after + number)
            if others:
                rest.step()
            if number < IN_A_ROW - 1:
                site.step(tokens=10)
        with pytest.raises(ConfigError, match=r"SGD does the steps of parameters that atoll\.join was given another"):
            site.step(tokens=10)


def said_to_train_nothing(text: str) -> int:
    return text.count("and nothing is seen of training: no optimizer given to atoll.join has done a step")


@pytest.mark.parametrize("how", ["copied", "rebuilt"])
def test_a_copy_that_is_trained_in_place_of_what_was_given_is_said_then_refused_by_name(
    node: FakeNode, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """What was given stays as it is, so the site would contribute zeros with the weight of its tokens for ever."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [*seeded(node, 2 * BETWEEN), *updates(node, 8, between=2 * BETWEEN)]
    with atoll.join(net, optimizer) as site:
        anew = deepcopy(net) if how == "copied" else network()
        of_anew = torch.optim.AdamW(anew.parameters(), lr=0.01)
        num_calls = said_at = 0

        def go_on() -> None:
            nonlocal num_calls, said_at
            while site.running:
                train(anew, of_anew, num_calls)
                num_calls += 1
                site.step(tokens=10)
                said_at = said_at or num_calls * said_to_train_nothing(capsys.readouterr().err)

        with pytest.raises(ConfigError, match=r"AdamW trains as many parameters of the same shapes, a copy of the m"):
            go_on()
    assert (said_at, num_calls) == (6 * BETWEEN, 8 * BETWEEN), "by the first window after 32 calls, and the next one"


@pytest.mark.parametrize("tokens", [10, 0])
@pytest.mark.parametrize("who", ["nobody", "another part"])
def test_a_script_of_which_nothing_is_seen_is_told_once_what_that_means(
    node: FakeNode, capsys: pytest.CaptureFixture[str], who: str, tokens: int
) -> None:
    """It may train what only this site has before the rest, or wait for something. Tokens of 0 have no weight."""
    net, discriminator = network(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    own = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    node.script = [*seeded(node), *updates(node, 10), (11 * BETWEEN, STOP)]
    with atoll.join(net, optimizer) as site:
        while site.running:
            if who == "another part":
                discriminator(torch.ones(1, 8)).sum().backward()
                own.step()
            site.step(tokens=tokens)
    assert len(node.said("merged")) == 11
    assert said_to_train_nothing(capsys.readouterr().err) == (tokens > 0)


def by_hand(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """No hook of torch's is called, and no gradient is left; one tensor of four changes, and that at the end of a
    window."""
    del optimizer
    if number % BETWEEN == BETWEEN - 1:
        with torch.no_grad():
            net.get_parameter("2.bias").sub_(0.1)


def at_rate_0(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(net, optimizer, number)
    optimizer.zero_grad()


def all_left_out(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """At first, by a scaler that begins at 2**16."""
    if number < 16:
        optimizer.zero_grad()
    else:
        train(net, optimizer, number)


@pytest.mark.parametrize("trains", [by_hand, at_rate_0, all_left_out])
@pytest.mark.parametrize("between", [1, BETWEEN])
def test_of_scripts_that_train_in_ways_of_their_own_nothing_is_said(
    node: FakeNode, capsys: pytest.CaptureFixture[str], trains: Callable[..., None], between: int
) -> None:
    """Also beside a network of the same shape that is no part of the run, and with an update after each step."""
    net, other = network(), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    num_updates = 80 // between
    node.script = [*seeded(node, between), *updates(node, num_updates, between=between)]
    node.script.append(((num_updates + 1) * between, STOP))
    with atoll.join(net, optimizer) as site:
        number = 0
        while site.running:
            trains(net, optimizer, number)
            train(other, of_other, number)
            site.step(tokens=10)
            number += 1
    assert not said_to_train_nothing(capsys.readouterr().err)


def test_what_a_script_changes_between_a_snapshot_and_the_update_is_seen(
    node: FakeNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where it trains a copy, and brings back what that has become just after a snapshot."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = seeded(node)
    for number in range(1, 8):
        step = number * BETWEEN
        taken = apply(MERGE, step + BETWEEN, version=number)
        node.script += [(step, SNAPSHOT), (step, go_on(step + 2)), (step + 2, taken)]
    node.script.append((8 * BETWEEN, STOP))
    with atoll.join(net, optimizer) as site:
        num_calls = 0
        while site.running:
            if num_calls > BETWEEN and num_calls % BETWEEN == 1:
                with torch.no_grad():
                    net.get_parameter("2.bias").sub_(0.1)
            site.step(tokens=10)
            num_calls += 1
    assert not said_to_train_nothing(capsys.readouterr().err)


def test_an_optimizer_that_is_made_anew_for_half_of_the_parameters_is_refused_by_name(node: FakeNode) -> None:
    """As for a head with rates of its own from some step on; the one that was given goes on for the rest."""
    net = network()
    optimizer = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters()}], lr=0.1)
    node.script = seeded(node, 1000)
    with atoll.join(net, optimizer) as site:
        for number in range(IN_A_ROW):
            train(net, optimizer, number)
            site.step(tokens=10)
        of_head = torch.optim.SGD(optimizer.param_groups.pop()["params"], lr=0.01)
        for number in range(IN_A_ROW):
            train(net, optimizer, number)
            of_head.step()
            if number < IN_A_ROW - 1:
                site.step(tokens=10)
        with pytest.raises(ConfigError, match=r"SGD does the steps of parameters that atoll\.join was given another"):
            site.step(tokens=10)


def test_calls_between_steps_of_another_optimizer_do_not_excuse_it(node: FakeNode) -> None:
    """As where site.step is called at each microbatch; the other half's optimizer goes on."""
    net = network()
    given = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.AdamW(net[2].parameters(), lr=0.1)
    node.script = seeded(node, 1000)
    with atoll.join(net, given) as site:
        anew = torch.optim.SGD(net[0].parameters(), lr=0.01)

        def go_on() -> None:
            for number in range(2 * IN_A_ROW):
                train(net, given[1] if number % 2 else anew, number)
                site.step(tokens=10)

        with pytest.raises(ConfigError, match="SGD does the steps of parameters"):
            go_on()


@pytest.mark.parametrize(("num_left_out", "of_calls"), [(1, 3), (IN_A_ROW - 1, 1000)])
def test_an_inner_loop_may_step_the_model_while_a_guard_leaves_out_outer_steps(
    node: FakeNode, num_left_out: int, of_calls: int
) -> None:
    """As MAML's: the inner optimizer is thrown away with what it did."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    node.script = [*seeded(node, 60), (60, STOP)]
    num_calls = 0
    with atoll.join(net, optimizer) as site:
        while site.running:
            before = [parameter.detach().clone() for parameter in net.parameters()]
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            train(net, inner, num_calls)
            with torch.no_grad():
                for parameter, value in zip(net.parameters(), before, strict=True):
                    parameter.copy_(value)
            if num_calls % of_calls >= num_left_out:
                optimizer.step()
            num_calls += 1
            site.step(tokens=10)
    assert site.inner_step == 60
    assert num_calls - 60 >= IN_A_ROW - 1, "calls whose step was left out"


@pytest.mark.parametrize("taken", [0, 1])
def test_an_object_that_all_that_were_given_share_excuses_no_other_one(taken: int) -> None:
    """As a trainer that each refers to: a step of the second one's inner optimizer is the second one's, and says
    nothing of the parameter of the first one."""
    ends = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    inner = [torch.optim.SGD([parameter], lr=0.1) for parameter in ends]
    given = [torch.optim.SGD([parameter], lr=0.1) for parameter in ends]
    shared = Parts(given[0])
    shared.all = given
    for each, within in zip(given, inner, strict=True):
        each.shared, each.within = shared, within  # type: ignore[attr-defined]
    others = OtherOptimizers(given)
    anew = torch.optim.SGD([ends[taken]], lr=0.1)

    def go_on() -> None:
        for _ in range(2 * IN_A_ROW):
            for parameter in ends:
                parameter.grad = torch.ones(2)
            anew.step()
            inner[1].step()
            others.check()

    with pytest.raises(ConfigError) if taken == 0 else nullcontext():
        go_on()
    others.close()


@pytest.mark.parametrize("in_turn", [False, True])
def test_one_optimizer_that_was_given_may_do_the_steps_of_two_beside_a_throw_away_one(in_turn: bool) -> None:
    """Of the same parameter; `in_turn`: in other calls than the throw-away one."""
    parameter = nn.Parameter(torch.ones(2))
    given = [torch.optim.SGD([parameter], lr=0.1) for _ in range(1 if in_turn else 2)]
    others = OtherOptimizers(given)
    inner = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    for number in range(4 * IN_A_ROW):
        if not in_turn or number % 2:
            inner.step()
        if not in_turn or not number % 2:
            given[0].step()
        others.check()
    others.close()


class Parts:
    all: Sequence[torch.optim.Optimizer]

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


@pytest.mark.parametrize("held_in", [list, Parts])
def test_optimizers_within_one_that_was_given_and_around_it_and_of_other_models_pass(
    node: FakeNode, held_in: type[list[torch.optim.Optimizer]] | type[Parts]
) -> None:
    """`Within` steps one that it has made; a wrapper of the script holds the one that was given, and leaves out steps;
    a discriminator that is no part of the run has its own."""

    class Every(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.held: object = Parts(inner) if held_in is Parts else [inner]
            self.num_calls = 0

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.num_calls += 1
            if self.num_calls % (2 * IN_A_ROW) == 0:
                given[1].step()

    class Late(torch.optim.Optimizer):
        """Makes what does its steps at the first one."""

        inner: torch.optim.Optimizer | None = None

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.inner = self.inner or torch.optim.SGD(self.param_groups, lr=0.1)
            self.inner.step()

    net, discriminator = network(), network()
    given = Late(net[0].parameters(), {}), torch.optim.SGD(net[2].parameters(), lr=0.1)
    around = Every(given[1])
    own = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    node.script = [*seeded(node, 40), (40, STOP)]
    with atoll.join(net, given) as site:
        while site.running:
            train(discriminator, own, 0)
            train(net, given[0], 0)
            around.step()
            site.step(tokens=10)
    assert site.inner_step == 40
    assert around.num_calls == 40


@pytest.mark.parametrize(
    ("draws", "data", "is_said"),
    [("itself", "stdlib", True), ("shard", "stdlib", False), ("loader", "stdlib", False), ("itself", "local", False)],
)
def test_a_script_that_draws_its_samples_itself_is_told_once_what_that_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], draws: str, data: str, is_said: bool
) -> None:
    node = in_memory(monkeypatch, replace(SETTINGS, data=data))
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [*seeded(node), *updates(node, 2), (3 * BETWEEN, STOP)]
    with atoll.join(net, optimizer) as site:
        stream = site.shard(range(1000)) if draws == "shard" else iter(range(1000))
        if draws == "loader":
            stream = iter(site.loader(Numbers(), 1))
        while site.running:
            train(net, optimizer, int(next(stream)))
            site.step(tokens=10)
    said = capsys.readouterr().err
    assert said.count("the script draws its samples itself, so sites may train the same ones") == is_said


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


class Teaching(nn.Module):
    """A student that is trained, and a teacher that follows it, as a target network does."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for mine, of_student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(of_student, 0.5)


def test_a_frozen_parameter_with_a_policy_is_averaged_and_comes_to_joiners(node: FakeNode) -> None:
    net = Teaching()
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1)

    def of_others() -> Answer:
        node.values(node.publish, "teacher.weight")[:] = 7.0
        return apply(REPLACE, 2, version=1)

    node.script = [*seeded(node, 1), (1, SNAPSHOT), (1, of_others), (2, STOP)]
    with atoll.join(net, optimizer, buffers={"teacher.*": "mean"}) as site:
        net.follow()
        sent = net.teacher.weight.detach().clone()
        site.step(tokens=1)
        assert node.values(node.snapshot, "teacher.weight").tolist() == sent.flatten().tolist()
        assert set(net.teacher.weight.flatten().tolist()) == {7.0}
        assert not net.teacher.weight.requires_grad
        site.step(tokens=1)


def test_a_frozen_parameter_that_changes_is_refused_with_the_policy_to_choose(node: FakeNode) -> None:
    net = Teaching()
    optimizer = torch.optim.SGD(net.student.parameters(), lr=0.1)
    node.script = [*seeded(node, 1), (1, SNAPSHOT)]
    with atoll.join(net, optimizer) as site:
        net.follow()
        with pytest.raises(ConfigError, match=r"'teacher\.bias' is frozen.*buffers=\{\"teacher\.bias\": \"mean\"\}"):
            site.step(tokens=1)
    with pytest.raises(ConfigError, match=r"no buffer and no frozen parameter is named \"student\.\*\""):
        atoll.join(net, optimizer, buffers={"student.*": "mean"})


@pytest.mark.parametrize("is_written", [False, True])
def test_large_buffers_that_never_change_are_said_once(
    node: FakeNode, capsys: pytest.CaptureFixture[str], is_written: bool
) -> None:
    net = network()
    net.register_buffer("mask", torch.zeros(512, 512))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def same(next_step: int) -> Callable[[], Answer]:
        def take() -> Answer:
            node.publish[:] = node.snapshot
            return apply(REPLACE, next_step, version=next_step - 1)

        return take

    node.script = [*seeded(node, 1), (1, SNAPSHOT), (1, same(2)), (2, SNAPSHOT), (2, same(3)), (3, STOP)]
    with atoll.join(net, optimizer) as site:
        while site.running:
            if is_written:
                net.get_buffer("mask").add_(1.0)
            site.step(tokens=1)
    said = capsys.readouterr().err
    words = (
        "1 buffers that training does not change: no sync sends their values, but each copies and compares them, 1 M"
    )
    assert said.count(words) == 1 - is_written
    assert ('buffers={"mask": "constant"}' in said) != is_written


@pytest.mark.parametrize("how", ["", "write", "assign", "data"])
def test_a_constant_buffer_travels_once_and_a_change_of_it_is_refused_by_name(node: FakeNode, how: str) -> None:
    net = network()
    mask = torch.full((8, 8), float("-inf"), dtype=torch.bfloat16).triu(1)
    net.register_buffer("mask", mask.clone())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    node.script = [*seeded(node, 1), (1, SNAPSHOT), (1, apply(REPLACE, 2, version=1)), (2, STOP)]
    with atoll.join(net, optimizer, buffers={"mask": "constant"}) as site:
        first = node.values(node.snapshot, "mask", "uint16").copy()
        assert first.tobytes() == mask.view(torch.uint16).numpy().tobytes(), "its own bytes, with the first values"
        node.snapshot[:] = bytes(len(node.snapshot))
        if how == "assign":
            net.mask = mask + 1.0
        elif how == "data":
            net.get_buffer("mask").data[7, 0] = 1.0
        elif how == "write":
            net.get_buffer("mask")[7, 0] = 1.0
        if how:
            with pytest.raises(ConfigError, match=r"the buffer 'mask' is \"constant\" by buffers= of atoll\.join, but"):
                site.step(tokens=1)
            return
        site.step(tokens=1)
        assert not node.values(node.snapshot, "mask", "uint16").any(), "never again"
        site.step(tokens=1)
    assert len(node.said("sealed")) == 2


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_of_a_kind_of_their_own_are_refused_by_name(sharded: bool) -> None:
    class WeightWithFloat8CastTensor(TwoTensor):
        """As torchao has one within each parameter, for an all-gather in float8."""

    values = WeightWithFloat8CastTensor(torch.ones(16, 8), torch.ones(16, 8))  # type: ignore[no-untyped-call]
    net = network()
    with fake_rank(0, 2):
        weight = DTensor.from_local(values, init_device_mesh("cpu", (2,))) if sharded else values
        net[0].weight = nn.Parameter(weight)
        with pytest.raises(
            ConfigError, match=r"'0\.weight' is a Weight.*enable_fsdp_float8_all_gather=True of torchao"
        ):
            find_tensors([net], [])
    net[0].weight = nn.Parameter(TwoTensor(*(torch.ones(16, 8) for _ in range(2))))  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=r"'0\.weight' is a TwoTensor, .* convert it to a plain tensor"):
        find_tensors([net], [])


def test_a_lazy_module_is_refused_by_name_until_a_batch_went_through_it() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(
        ConfigError, match=r"'0\.weight' has no shape yet.*run one batch through the model before atoll"
    ):
        find_tensors([net], [])
    net(torch.ones(2, 3))
    assert find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)]).manifest.tensors


def test_a_wrapper_that_only_passes_on_is_seen_through(node: FakeNode) -> None:
    """As accelerate's: no hook of torch is in it, which the rising learning rate of a joiner needs."""

    class Accelerated(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> list[dict[str, object]]:  # type: ignore[override]
            return self.optimizer.param_groups

        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            self.optimizer.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optimizer.zero_grad(set_to_none)

    net = network()
    optimizer = Accelerated(torch.optim.AdamW(net.parameters(), lr=0.01))
    node.script = [(0, apply(REPLACE, 2, run_step=500, fresh=True)), (2, STOP)]
    with atoll.join(net, optimizer, ramp_steps=3) as site:
        for number in range(2):
            train(net, optimizer, number)
            site.step(tokens=1)
    assert not site.running


class Sharded:
    """A rank's shards under checks, and updates of its own: what others do is not asked."""

    def __init__(self, kind: type[InState] | type[torch.optim.AdamW], net: nn.Module | None = None) -> None:
        self.net = network() if net is None else net
        fully_shard(self.net, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = kind(self.net.parameters(), lr=1e-3)
        self.tensors = find_tensors([self.net], [self.optimizer])
        self.checks = ScriptChecks(self.tensors, [self.optimizer])

    def go_on(self) -> list[int]:
        """How many parameters had copies at each update."""
        found = []
        for number in range(3):
            for _ in range(NUM_STEPS + 1):
                for parameter in self.net.parameters():
                    parameter.grad = torch.full_like(parameter, 0.1)
                self.optimizer.step()
                assert self.checks.is_step()
            self.checks.check(1, num_tokens=1)
            generator = torch.Generator().manual_seed(number)
            with self.checks.update() as copies, torch.no_grad():
                found.append(len(copies))
                for held in self.tensors.held:
                    assert held.parameter is not None
                    moved = torch.randn(held.local().shape, generator=generator)
                    for local in (held.local(), *copies.get(held.parameter, ())):
                        local.add_(moved)
        return found


@pytest.mark.parametrize("rank", [0, 1])
def test_of_shards_each_rank_looks_at_its_own(rank: int) -> None:
    """Masters of a DTensor are DTensors."""
    with fake_rank(rank, 2):
        assert Sharded(InState).go_on() == [4, 4, 4]
        with pytest.raises(ConfigError, match=r"Unfindable took back"):
            Sharded(Unfindable).go_on()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("kind", "num_copies"), [(InState, 2), (torch.optim.AdamW, 0)])
def test_a_rank_without_an_element_of_a_parameter_takes_updates(
    kind: type[InState] | type[torch.optim.AdamW], num_copies: int, last: bool
) -> None:
    """A matrix of one row, and a bias of one element, of which the second rank has nothing."""
    layers = [nn.Linear(8, 16), nn.Linear(16, 1)] if last else [nn.Linear(8, 1), nn.Linear(1, 16)]
    with fake_rank(1, 2):
        sharded = Sharded(kind, nn.Sequential(*layers))
        empty = [held.spec.name for held in sharded.tensors.held if not held.local().numel()]
        assert empty == [f"{int(last)}.bias", f"{int(last)}.weight"]
        assert sharded.go_on() == [num_copies] * 3
