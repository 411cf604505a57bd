"""Gradients that are averaged at every step, as real processes: what all sites hold is a single-process reference in
numpy, over sites of different shape, kills, and a site that comes back."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file

from atoll.coordinator import admin
from atoll.protocol.errors import ConfigError, RefusedError
from atoll.protocol.messages import Commit
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.commit_records import commits_of
from tests.harness.local_run import LocalRun, Status
from tests.harness.phases import is_of_gradients, mean_momentum
from tests.harness.sockets import free_address

WORKER = str(Path(__file__).parents[1] / "workers" / "gradient_worker.py")
LIMIT_S = 100.0
ADAMW = OuterSettings(optimizer="adamw", momentum=0.9, beta2=0.95)
SETTINGS = RunSettings(
    run_id="gradients",
    steps=20,
    min_sites=2,
    data="some text",
    time_limits="local",
    sync=SyncSettings(strategy="gradient", every=1, codec="fp32"),
    outer=ADAMW,
)
ONE_BIT = SyncSettings(
    strategy="momentum", every=1, warmup_commits=20, codec="int4", up="sign1", error_feedback=1.0, log_commits=64
)
BOTH = replace(SETTINGS, quorum=2, time_limits="wan")
"""Both sites are in each commit, on however busy a machine."""
MATRICES = ("0.weight", "2.weight")
F32 = npt.NDArray[Any]

pytestmark = pytest.mark.timeout(240)


def committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def start(run: LocalRun, name: str, *arguments: str, ranks: int = 1, extra: Sequence[str] = ()) -> None:
    extra = ["--ranks", str(ranks), *extra] if ranks > 1 else extra
    run.start_node(name, [WORKER, str(trace(run, name)), *arguments], launcher="python", extra=extra)


def start_host(run: LocalRun, name: str, host: int, address: str, *arguments: str) -> None:
    """Of a site of two, each with a rank; the daemon of the second is called by both."""
    extra = ["--site-hosts", "2", "--site-rank", str(host), "--site-address", address, "--name", name]
    start(run, f"{name}-host1" if host else name, *arguments, extra=extra)


def trace(run: LocalRun, name: str) -> Path:
    return run.folder / f"{name}.trace"


def handed_in(run: LocalRun, name: str) -> dict[int, Any]:
    """By the step of the run; of one that was computed again, the last."""
    lines = trace(run, name).read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


Log = list[tuple[Commit, list[str]]]
"""Commits, and the names of their contributors."""


def log_of(run: LocalRun) -> Log:
    """Of a run that is over; its coordinator ends."""
    names = {site["site_id"]: site["name"] for site in run.status()["sites"]}
    assert run.coordinator is not None
    run.coordinator.interrupt()
    assert run.coordinator.wait(LIMIT_S) == 0
    found = [record.commit for record in commits_of(run.folder / "run.db")]
    return [(commit, [names[member.site_id] for member in commit.contributors]) for commit in found]


def first_values() -> dict[str, F32]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 3))
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def reference(run: LocalRun, log: Log, outer: OuterSettings) -> dict[str, F32]:
    """Of what the sites of each commit handed in: their mean, then the optimizer's step."""
    values, sites = first_values(), {name: handed_in(run, name) for name in run.nodes}
    m, v = ({name: np.zeros_like(x) for name, x in values.items()} for _ in range(2))
    for commit, contributors in log:
        lines = [sites[name][commit.run_step - 1] for name in contributors]
        assert all(tuple(line["rates"]) == commit.rates for line in lines)
        total = sum(member.tokens for member in commit.contributors)
        weights = [np.float32(member.tokens / total) for member in commit.contributors]
        bias1, bias2 = (np.float32(1 - beta**commit.run_step) for beta in (outer.momentum, outer.beta2))
        for name, x in values.items():
            arrived = [np.frombuffer(bytes.fromhex(line["gradients"][name]), np.float32) for line in lines]
            g: F32 = np.zeros(x.size, np.float32)
            for weight, gradient in zip(weights, arrived, strict=True):
                g = g + weight * gradient
            g = g.reshape(x.shape)
            group = int(name not in MATRICES) if outer.optimizer == "adamw" else 0
            rate, decay = (np.float32(number) for number in commit.rates[2 * group : 2 * group + 2])
            if outer.optimizer == "nesterov":
                m[name] = np.float32(outer.momentum) * m[name] + g
                values[name] = x - rate * (g + np.float32(outer.momentum) * m[name])
                continue
            m[name] = np.float32(outer.momentum) * m[name] + np.float32(1 - outer.momentum) * g
            v[name] = np.float32(outer.beta2) * v[name] + np.float32(1 - outer.beta2) * (g * g)
            step = (m[name] / bias1) / (np.sqrt(v[name] / bias2) + np.float32(outer.epsilon))
            values[name] = x - rate * (step + decay * x)
    return values


def is_as_the_reference(run: LocalRun, log: Log, outer: OuterSettings) -> None:
    """To the bit."""
    expected, last = reference(run, log, outer), len(log)
    assert len(set(run.hashes(last).values())) == 1
    for name in sorted({name for _, names in log for name in names}):
        saved = load_file(run.home(name) / "model" / "model.safetensors")
        assert sorted(saved) == sorted(expected)
        for tensor, values in expected.items():
            assert np.array_equal(saved[tensor], values), (name, tensor)
    assert not any(np.allclose(expected[name], value, atol=1e-3) for name, value in first_values().items())


def test_two_sites_of_different_shape_are_one_process_in_numpy(tmp_path: Path) -> None:
    with LocalRun(tmp_path, BOTH) as run:
        run.start_coordinator()
        start(run, "one")
        start(run, "two", "--fsdp2", ranks=2)
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
        log = log_of(run)
        assert [sorted(names) for _, names in log] == [["one", "two"]] * 20
        is_as_the_reference(run, log, ADAMW)


def test_a_gradient_of_one_rank_that_is_not_finite_is_in_no_commit(tmp_path: Path) -> None:
    """The other rank has a good half of it."""
    with LocalRun(tmp_path, replace(SETTINGS, time_limits="wan")) as run:
        run.start_coordinator()
        start(run, "one")
        start(run, "two", "--fsdp2", "--spoiled-call", "7", ranks=2)
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
        lines = (run.home("two") / "node.log").read_text().splitlines()
        said = [line for line in lines if "is left out on rank" in line]
        assert len(said) == 1
        assert "a step is left out on rank 1, as a gradient is not finite" in said[0]
        log = log_of(run)
        assert [names for _, names in log].count(["one"]) >= 1
        assert [sorted(names) for _, names in log].count(["one", "two"]) >= 10
        is_as_the_reference(run, log, ADAMW)


def test_a_site_of_two_hosts_hands_in_the_gradients_of_both(tmp_path: Path) -> None:
    with LocalRun(tmp_path, BOTH) as run:
        run.start_coordinator()
        start(run, "one")
        address = free_address()
        for host in (0, 1):
            start_host(run, "two", host, address, "--fsdp2")
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0, "two-host1": 0}
        log = log_of(run)
        assert [sorted(names) for _, names in log] == [["one", "two"]] * 20
        is_as_the_reference(run, log, ADAMW)


def test_a_site_of_two_exchange_processes_hands_in_the_same_gradients(tmp_path: Path) -> None:
    with LocalRun(tmp_path, BOTH) as run:
        run.start_coordinator()
        start(run, "one")
        start(run, "two", extra=["--exchange-processes", "2"])
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
        log = log_of(run)
        assert [sorted(names) for _, names in log] == [["one", "two"]] * 20
        is_as_the_reference(run, log, ADAMW)


@pytest.mark.slow
def test_1_bit_adam_where_a_site_has_two_hosts_and_loses_one(tmp_path: Path) -> None:
    """All hold the same bits, of which each host of the site has exchanged a part; and they learn."""
    with LocalRun(tmp_path, replace(SETTINGS, outer=ADAMW, steps=5000, sync=ONE_BIT, quorum=1)) as run:
        run.start_coordinator()
        address, worker = free_address(), ("--optimizer", "onebit", "--step-delay-s", "0.1")
        start(run, "one", *worker)
        for host in (0, 1):
            start_host(run, "two", host, address, "--fsdp2", *worker)
        run.wait(committed(25), LIMIT_S)
        run.nodes["two-host1"].kill()
        run.wait(lambda status: status["commits"][-1]["contributors"] == ["one"], LIMIT_S, "the other site goes on")
        start_host(run, "two", 1, address, "--fsdp2", *worker)
        run.wait(lambda status: len(status["commits"][-1]["contributors"]) == 2, LIMIT_S, "both contribute again")
        run.wait(committed(run.status()["last_commit"] + 10), LIMIT_S)
        admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0, "two-host1": 0}
        last = run.status()["last_commit"]
        assert len(run.hashes(last)) == 2
        assert len(set(run.hashes(last).values())) == 1
        assert "holds another state" not in (run.home("two") / "node.log").read_text()
        losses = [line["loss"] for line in run.journal("one", "window") if line["loss"] is not None]
        assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), ("--fsdp2",)], ids=["plain", "fsdp2"])
def test_a_site_on_a_gpu_and_one_on_a_cpu_are_one_process_in_numpy(tmp_path: Path, shape: tuple[str, ...]) -> None:
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        start(run, "one")
        start(run, "two", "--device", "cuda", *shape)
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
        log = log_of(run)
        assert [sorted(names) for _, names in log] == [["one", "two"]] * 20
        is_as_the_reference(run, log, ADAMW)


def test_ranks_of_tensor_parallelism_hand_in_gradients_of_the_whole_model() -> None:
    """Those of a replicated parameter are partial sums after the backward pass; one rank of them writes SNAPSHOT."""
    script = Path(WORKER).with_name("tensor_parallel_step.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    address = free_address()
    commands = [[sys.executable, str(script), str(rank), address] for rank in range(2)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for command in commands]
    errors = [rank.communicate(timeout=LIMIT_S)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def until_it_is_back(run: LocalRun, num_commits: int, at_least: int, *arguments: str) -> None:
    """Site b is killed after so many commits, and started again; the run ends once b contributes again, and there are
    `at_least` so many."""
    run.start_coordinator()
    for name in "abc":
        start(run, name, *arguments)
    run.wait(committed(num_commits), LIMIT_S)
    run.nodes["b"].kill()
    at_death = run.status()["last_commit"]
    run.wait(lambda status: {"a", "c"} == set(status["commits"][-1]["contributors"]), LIMIT_S)
    at_start = run.status()["last_commit"]
    start(run, "b", *arguments)
    back = run.wait(lambda status: {"a", "b", "c"} == set(status["commits"][-1]["contributors"]), LIMIT_S)
    assert back["last_commit"] >= at_start + 5, "the others do not wait while it starts and catches up"
    run.wait(committed(max(at_least, at_death + 2)), LIMIT_S)
    admin.ask(run.toml.with_name("run.db"), "stop", reason="the test is over")
    assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}


def test_momentum_over_sites_that_die_and_come_back(tmp_path: Path) -> None:
    outer = OuterSettings(optimizer="nesterov", momentum=0.5)
    with LocalRun(tmp_path, replace(SETTINGS, outer=outer, steps=5000)) as run:
        until_it_is_back(run, 15, 20, "--optimizer", "sgd", "--step-delay-s", "0.1")
        is_as_the_reference(run, log_of(run), outer)


@pytest.mark.slow
def test_1_bit_adam_over_the_switch_and_a_kill(tmp_path: Path) -> None:
    """What travels is not what sites hand in: the simulator computes that. Here all hold the same, and learn."""
    with LocalRun(tmp_path, replace(SETTINGS, outer=ADAMW, steps=5000, sync=ONE_BIT)) as run:
        until_it_is_back(run, 15, 40, "--optimizer", "onebit", "--step-delay-s", "0.1")
        last = run.status()["last_commit"]
        for number in (20, 21, 22, last):
            assert len(set(run.hashes(number).values())) == 1
        losses = [line["loss"] for line in run.journal("a", "window") if line["loss"] is not None]
        assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])


def reference_in_phases(run: LocalRun, log: Log, sync: SyncSettings) -> dict[str, F32]:
    """Of what the sites of each commit computed, by themselves or not: 0/1 Adam without codecs."""
    values, sites = first_values(), {name: handed_in(run, name) for name in run.nodes}
    m, v = ({name: np.zeros_like(x) for name, x in values.items()} for _ in range(2))
    beta1, num_gradients, before = np.float32(ADAMW.momentum), 0, 0
    for commit, contributors in log:
        lines = [[sites[name][step] for step in range(before, commit.run_step)] for name in contributors]
        before, is_of_gradients_ = commit.run_step, is_of_gradients(sync, commit.commit)
        num_gradients += is_of_gradients_
        bias1, bias2 = 1 - ADAMW.momentum**commit.run_step, 1 - ADAMW.beta2**num_gradients
        for name, x in values.items():
            group = int(name not in MATRICES)
            steps = [line["rates"][2 * group : 2 * group + 2] for line in lines[0]]
            rate, decay = sum(r for r, _ in steps), sum(r * d for r, d in steps) / sum(r for r, _ in steps)
            assert commit.rates[2 * group : 2 * group + 2] == pytest.approx((rate, decay))
            average: F32 = np.zeros_like(x)
            for member, of_site in zip(commit.contributors, lines, strict=True):
                found = [np.frombuffer(bytes.fromhex(line["gradients"][name]), np.float32) for line in of_site]
                gradients = [g.reshape(x.shape) for g in found]
                sent = gradients[0]
                if not is_of_gradients_:
                    sent = mean_momentum(m[name], ADAMW.momentum, gradients, [r for r, _ in steps])
                average = average + np.float32(member.tokens / sum(c.tokens for c in commit.contributors)) * sent
            m[name] = beta1 * m[name] + (1 - beta1) * average if is_of_gradients_ else average
            if is_of_gradients_:
                v[name] = np.float32(ADAMW.beta2) * v[name] + np.float32(1 - ADAMW.beta2) * (average * average)
            moved = (m[name] / bias1) / (np.sqrt(v[name] / bias2) + ADAMW.epsilon)
            moved = moved if is_of_gradients_ else moved.clip(-1, 1)
            values[name] = (x - rate * (moved + decay * x)).astype(np.float32)
    return values


IN_PHASES = SyncSettings(
    strategy="momentum", every=1, warmup_commits=12, gradient_doubling=2, local_doubling=4, most_local_steps=4,
    codec="fp32", warmup_codec="fp32", log_commits=64,
)  # fmt: skip
"""Commits of gradients that thin out, then of momenta, then of 2 and 4 steps that sites do by themselves."""


def is_nearly_the_reference(run: LocalRun, log: Log) -> None:
    """All hold the same to the bit; torch adds products up in another way than numpy."""
    steps = [b.run_step - a.run_step for (a, _), (b, _) in itertools.pairwise(log)]
    assert steps[:23] == [1] * 15 + [2] * 4 + [4] * 4
    expected = reference_in_phases(run, log, IN_PHASES)
    assert len(set(run.hashes(len(log)).values())) == 1
    for name in sorted({name for _, names in log for name in names}):
        saved = load_file(run.home(name) / "model" / "model.safetensors")
        for tensor, values in expected.items():
            np.testing.assert_allclose(saved[tensor], values, rtol=1e-4, atol=1e-5)


def test_0_1_adam_of_sites_of_different_shape_is_one_process_in_numpy(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(BOTH, steps=60, sync=IN_PHASES)) as run:
        run.start_coordinator()
        start(run, "one", "--optimizer", "zeroone")
        start(run, "two", "--optimizer", "zeroone", "--fsdp2", ranks=2)
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
        is_nearly_the_reference(run, log_of(run))


@pytest.mark.gpu
def test_0_1_adam_of_a_site_on_a_gpu_and_one_on_a_cpu(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=60, sync=IN_PHASES)) as run:
        run.start_coordinator()
        start(run, "one", "--optimizer", "zeroone")
        start(run, "two", "--optimizer", "zeroone", "--device", "cuda")
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0}
        is_nearly_the_reference(run, log_of(run))


def test_0_1_adam_over_all_phases_and_a_kill(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, steps=100_000, sync=IN_PHASES)) as run:
        until_it_is_back(run, 18, 30, "--optimizer", "zeroone", "--step-delay-s", "0.1")
        log = log_of(run)
        assert len({tuple(sorted(names)) for _, names in log}) > 1
        is_nearly_the_reference(run, log)


def test_a_site_with_another_learning_rate_is_refused_with_both(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=3)) as run:
        run.start_coordinator()
        for name in "ac":
            start(run, name)
        start(run, "b", "--learning-rate", "0.07")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": RefusedError.exit_code, "c": 0}
        said = "\n".join(run.nodes["b"].lines)
        assert "has the rates [0.07, 0.1, 0.07, 0.0]" in said
        assert "are [0.05, 0.1, 0.05, 0.0]" in said
        assert {tuple(sorted(names)) for _, names in log_of(run)} == {("a", "c")}


def test_an_optimizer_that_steps_alone_is_refused_by_name(tmp_path: Path) -> None:
    worker = str(Path(__file__).parents[1] / "workers" / "torch_worker.py")
    with LocalRun(tmp_path, replace(SETTINGS, min_sites=1)) as run:
        run.start_coordinator()
        run.start_node("a", [worker], launcher="python")
        assert run.wait_all(LIMIT_S) == {"a": ConfigError.exit_code}
        assert "use atoll.AdamW(params, lr=...)" in "\n".join(run.nodes["a"].lines)
