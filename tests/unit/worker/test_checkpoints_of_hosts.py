"""A site of several hosts comes back in another layout: what a rank needs may be in a file on another host."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from atoll.node.local_protocol import CheckpointId
from atoll.node.worker import checkpoint_file, checkpoint_together
from atoll.node.worker.ranks_together import RanksTogether
from atoll.node.worker.reading_rounds import Asked, rounds_of
from atoll.node.worker.script_state import ScriptState
from atoll.node.worker.stored_state import Part
from atoll.protocol.errors import HostError
from tests.harness.fake_group import fake_rank
from tests.harness.ranks_in_threads import RankInThread, in_threads
from tests.harness.sockets import free_address
from tests.unit.worker.test_checkpoints_of_layouts import (
    LAYOUTS,
    SHAPES,
    STEPS,
    Layout,
    Make,
    Rank,
    adamw,
    leave,
    whole,
)

SEED = 20261129
FIRST, SECOND = (
    CheckpointId(incarnation=1, generation=1, step=STEPS),
    CheckpointId(incarnation=1, generation=1, step=5),
)


def hosts_of(world: int, num_hosts: int) -> list[range]:
    """As many ranks on each."""
    each = world // num_hosts
    return [range(host * each, (host + 1) * each) for host in range(num_hosts)]


def leave_on_hosts(folder: Path, layout: str, *, make: Make = adamw, twice: bool = False) -> list[Path]:
    """A checkpoint, each file at the host of the rank that wrote it, of two. `twice`: another one of step 5."""
    world = LAYOUTS[layout].world
    leave(folder / "all", LAYOUTS[layout], make, ranks_a_host=world // 2)
    homes = [folder / "a", folder / "b"]
    for home, ranks in zip(homes, hosts_of(world, 2), strict=True):
        home.mkdir()
        for rank in ranks:
            name = f"rank-{rank}-of-{world}.1-1-{STEPS}.safetensors"
            shutil.copy(folder / "all" / name, home / name)
            if twice:
                shutil.copy(folder / "all" / name, home / name.replace(f"-{STEPS}.", "-5."))
    return homes


class Site:
    """That has come back, its ranks on several hosts."""

    def __init__(
        self,
        layout: Layout,
        homes: Sequence[Path],
        hosts: Sequence[range],
        *,
        make: Make = adamw,
        crashed_from: Sequence[CheckpointId] = (),
        script: Callable[[Rank], ScriptState] | None = None,
    ) -> None:
        reference = whole(STEPS)
        self.ranks = []
        for rank in range(layout.world):
            with fake_rank(rank, layout.world):
                self.ranks.append(Rank(Path("/nowhere"), layout, rank, make))
                self.ranks[-1].set({name: p.detach() for name, p in reference.of.items()})

        def open_and_go_on(together: RankInThread) -> bool:
            rank = self.ranks[together.rank]
            home, here = next((home, ranks) for home, ranks in zip(homes, hosts, strict=True) if rank.rank in ranks)
            kept = script(rank) if script is not None else None
            rank.open(home, here=here, together=together, crashed_from=crashed_from, script=kept)
            told = together.told([[i.incarnation, i.generation, i.step] for i in rank.checkpoints.usable])
            common = set.intersection(*({tuple(item) for item in each} for each in told))
            chosen = max((CheckpointId(incarnation=a, generation=b, step=c) for a, b, c in common), default=None)
            return rank.checkpoints.go_on(chosen, 2, 1) is not None

        self.has_gone_on, self.together = in_threads(layout.world, open_and_go_on)

    def check(self, layout: Layout) -> None:
        """All have what one rank that trained alone has."""
        states, num_kept = whole(STEPS).kept(), 0
        for mine in self.ranks:
            for name, state in mine.kept().items():
                num_kept += 1
                assert state["step"] == STEPS
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(state[key], mine.slice(name, states[name][key]), rtol=1e-6, atol=1e-9)
        assert num_kept == len(SHAPES) * (1 if len(layout.names) > 1 else layout.world)


LAYOUTS_OF_HOSTS = ["rows", "columns", "pipeline", "rows of columns", "replicas of rows"]


@pytest.mark.parametrize(
    ("before", "after"),
    [(before, after) for before in LAYOUTS_OF_HOSTS for after in LAYOUTS_OF_HOSTS if before != after],
)
def test_any_layout_goes_on_from_what_any_other_one_left_on_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setattr(checkpoint_together, "PIECE_BYTES", 8)
    homes = leave_on_hosts(tmp_path, before)
    site = Site(LAYOUTS[after], homes, hosts_of(LAYOUTS[after].world, 2))
    assert all(site.has_gone_on)
    site.check(LAYOUTS[after])
    if before == "replicas of rows":
        assert not any(rank.received for rank in site.together), "each host has all"
    else:
        assert any(rank.received for rank in site.together), "none of it came from the other host"


def test_one_host_becomes_two(tmp_path: Path) -> None:
    leave(tmp_path / "a", LAYOUTS["one"])
    (tmp_path / "b").mkdir()
    site = Site(LAYOUTS["rows"], [tmp_path / "a", tmp_path / "b"], hosts_of(2, 2))
    assert all(site.has_gone_on)
    site.check(LAYOUTS["rows"])
    assert [rank.received > 0 for rank in site.together] == [False, True]


def test_in_the_same_layout_nothing_is_read_for_others(tmp_path: Path) -> None:
    homes, hosts = leave_on_hosts(tmp_path, "rows of columns"), hosts_of(4, 2)
    site = Site(LAYOUTS["rows of columns"], homes, hosts)
    assert all(site.has_gone_on)
    site.check(LAYOUTS["rows of columns"])
    assert [rank.received for rank in site.together] == [0] * 4


TWINS = Layout((2,), (Replicate(),))


def test_ranks_that_had_parts_of_the_state_become_replicas(tmp_path: Path) -> None:
    homes = leave_on_hosts(tmp_path, "zero-1")
    site = Site(TWINS, homes, hosts_of(2, 2))
    assert all(site.has_gone_on)
    site.check(TWINS)


class LeavesEmptyOut(torch.optim.Optimizer):
    """A rank without values of a parameter has no state of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.to_local().numel():
                self.state[parameter]["momentum"] = parameter.grad.clone()


def test_a_rank_asks_for_what_no_file_of_its_own_host_tells_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one row in two parts the second rank had none, and its file no state: that means nothing for replicas."""
    monkeypatch.setitem(SHAPES, "a", (1, 6))
    monkeypatch.setitem(SHAPES, "b", (1,))
    homes = leave_on_hosts(tmp_path, "rows", make=LeavesEmptyOut)
    site = Site(TWINS, homes, hosts_of(2, 2), make=LeavesEmptyOut)
    assert all(site.has_gone_on)
    first, second = (rank.optimizer.state[rank.of["a"]]["momentum"].to_local() for rank in site.ranks)
    assert torch.equal(first, second)
    assert first.shape == (1, 6)


def test_hosts_that_have_changed_places_find_their_files(tmp_path: Path) -> None:
    """Host 0's disk is host 1's now: each rank's own file is on the other host."""
    homes = leave_on_hosts(tmp_path, "rows")
    site = Site(LAYOUTS["rows"], homes[::-1], hosts_of(2, 2))
    assert all(site.has_gone_on)
    site.check(LAYOUTS["rows"])


@pytest.mark.parametrize("damage", ["values", "description", "missing"])
def test_one_that_is_damaged_on_either_host_is_passed_over_by_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    """All take the one before it, and no rank waits for another."""
    homes = leave_on_hosts(tmp_path, "rows", twice=True)
    path = homes[1] / "rank-1-of-2.1-1-5.safetensors"
    data = bytearray(path.read_bytes())
    data[-1 if damage == "values" else data.index(b"run_step")] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data)
    site = Site(LAYOUTS["columns"], homes, hosts_of(2, 2))
    assert all(site.has_gone_on)
    assert [rank.checkpoints.usable for rank in site.ranks] == [(FIRST,), (FIRST,)]
    site.check(LAYOUTS["columns"])
    said = capfd.readouterr().err
    assert ("passed over" in said and str(path) in said) == (damage != "missing"), said


@pytest.mark.parametrize("run", ["of this run", "of another run"])
def test_another_layouts_file_of_the_same_number_is_no_part_of_it(tmp_path: Path, run: str) -> None:
    """The third host was of another site or run, and has what is left of that."""
    homes = leave_on_hosts(tmp_path, "rows")
    (tmp_path / "c").mkdir()
    other = tmp_path / "c" / f"rank-2-of-4.1-1-{STEPS}.safetensors"
    shutil.copy(homes[1] / f"rank-1-of-2.1-1-{STEPS}.safetensors", other)
    if run == "of another run":
        other.write_bytes(b"not to be read")
    site = Site(LAYOUTS["rows of three"], [*homes, tmp_path / "c"], hosts_of(3, 3))
    assert all(site.has_gone_on)
    site.check(LAYOUTS["rows of three"])


def test_descriptions_that_are_too_long_to_tell_cost_the_checkpoint_and_not_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = RankInThread.told

    def limited(self: RankInThread, value: object) -> list[object]:
        said = told(self, value)
        if len(str(said)) > 2000:
            raise HostError("too long")
        return said

    monkeypatch.setattr(RankInThread, "told", limited)
    homes = leave_on_hosts(tmp_path, "rows")
    site = Site(LAYOUTS["columns"], homes, hosts_of(2, 2))
    assert site.has_gone_on == [False, False]
    assert capfd.readouterr().err.count("passed over: too long") == 2


def test_a_rank_lets_go_of_a_tensor_before_it_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, all_say = checkpoint_file.check, RankInThread.all_say
    taken: dict[int, weakref.ref[Tensor]] = {}

    def noted(values: Tensor, part: Part, *, is_finite: bool) -> None:
        taken[threading.get_ident()] = weakref.ref(values)
        check(values, part, is_finite=is_finite)

    def after_a_round(self: RankInThread, *, yes: bool) -> bool:
        if (values := taken.get(threading.get_ident())) is not None:
            assert values() is None, "it is in its place"
        return all_say(self, yes=yes)

    homes = leave_on_hosts(tmp_path, "rows")
    monkeypatch.setattr(checkpoint_file, "check", noted)
    monkeypatch.setattr(RankInThread, "all_say", after_a_round)
    Site(LAYOUTS["columns"], homes, hosts_of(2, 2)).check(LAYOUTS["columns"])
    assert len(taken) == 2


def test_one_that_workers_crashed_with_is_left_alone_by_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    homes = leave_on_hosts(tmp_path, "rows", twice=True)
    site = Site(LAYOUTS["columns"], homes, hosts_of(2, 2), crashed_from=[SECOND])
    assert [rank.checkpoints.usable for rank in site.ranks] == [(FIRST,), (FIRST,)]
    assert capfd.readouterr().err.count("went on from it crashed before their first step") == 2
    site = Site(LAYOUTS["columns"], homes, hosts_of(2, 2), crashed_from=[FIRST, SECOND])
    assert [rank.checkpoints.usable for rank in site.ranks] == [(), ()], "two of them: all others too"


def test_files_of_a_host_that_is_gone_cost_the_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    homes = leave_on_hosts(tmp_path, "rows")
    shutil.rmtree(homes[1])
    homes[1].mkdir()
    capfd.readouterr()
    site = Site(LAYOUTS["columns"], homes, hosts_of(2, 2))
    assert site.has_gone_on == [False, False]
    assert capfd.readouterr().err.count("starts fresh: no checkpoint is usable on every rank") == 2


class Kept:
    """Of a script: a number and a tensor."""

    def __init__(self) -> None:
        self.epoch, self.ema = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self.epoch, "ema": self.ema}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert isinstance(state["epoch"], int)
        assert isinstance(state["ema"], Tensor)
        self.epoch, self.ema = state["epoch"], state["ema"]


@pytest.mark.parametrize("ema", [torch.tensor([1.0, 2.0, 3.0]), torch.empty(0, 3), torch.tensor(4.0)])
def test_what_the_script_keeps_comes_from_the_first_rank_wherever_that_was(tmp_path: Path, ema: Tensor) -> None:
    one = LAYOUTS["one"]
    kept = Kept()
    with fake_rank(0, 1):
        first = Rank(Path("/nowhere"), one, 0, adamw)
        first.open(tmp_path / "a", script=ScriptState({"mine": kept}, [first.optimizer]))
        first.checkpoints.go_on(None, 1, 1)
        first.set({name: torch.ones(shape) for name, shape in SHAPES.items()})
        first.train(0, STEPS)
        kept.epoch, kept.ema = 7, ema
        first.checkpoints.write(STEPS, STEPS)
        first.checkpoints.finish()
    (tmp_path / "b").mkdir()
    found = [Kept(), Kept()]
    homes = [tmp_path / "b", tmp_path / "a"]  # rank 0 has come to the host without files

    def script(rank: Rank) -> ScriptState:
        return ScriptState({"mine": found[rank.rank]}, [rank.optimizer])

    site = Site(LAYOUTS["rows"], homes, hosts_of(2, 2), script=script)
    assert all(site.has_gone_on)
    assert [each.epoch for each in found] == [7, 7]
    for each in found:
        torch.testing.assert_close(each.ema, ema)


def test_ranks_of_a_process_group_hear_what_others_say() -> None:
    script = Path(__file__).parents[2] / "workers" / "ranks_together.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    address = free_address()
    commands = [[sys.executable, str(script), str(rank), address] for rank in range(3)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for command in commands]
    errors = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], errors


@pytest.mark.parametrize(
    ("backend", "model", "expected"),
    [
        ("gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cpu"),
        ("nccl", "cuda:1", "cuda:1"),
        ("nccl", "cpu", "cuda"),
    ],
)
def test_ranks_talk_by_what_their_group_takes(
    monkeypatch: pytest.MonkeyPatch, backend: str, model: str, expected: str
) -> None:
    """A model may be offloaded to the host, or a rank have none, where the group takes tensors of GPUs only."""
    config = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
    with fake_rank(0, 2):
        monkeypatch.setattr(dist, "get_backend_config", lambda: config)
        assert RanksTogether(torch.device(model)).device == torch.device(expected)


@pytest.mark.parametrize("seed", range(SEED, SEED + 40))
def test_rounds_bring_each_rank_all_it_asked_for_a_tensor_at_a_time(seed: int) -> None:
    draw = random.Random(seed)
    num_hosts, each = draw.randint(2, 4), draw.randint(1, 3)
    hosts, world = hosts_of(num_hosts * each, num_hosts), num_hosts * each
    writers = range(draw.randint(1, 5))
    sizes: dict[Asked, int] = {(w, f"t{n}"): draw.choice([0, 1, 7, 10, 95]) for w in writers for n in range(4)}
    holders = {writer: draw.choice(hosts) for writer in writers}
    asked = [draw.sample(sorted(sizes), draw.randint(0, len(sizes))) for _ in range(world)]
    rounds = rounds_of(asked, sizes, holders, 10)
    taken: list[list[tuple[Asked, int]]] = [[] for _ in range(world)]
    for pieces in rounds:
        busy = Counter(rank for piece in pieces for rank in {piece.reader, *piece.takers})
        assert all(count == 1 for count in busy.values()), "a rank has to do with one piece a round"
        for piece in pieces:
            assert piece.reader in holders[piece.of[0]], "the reader's host has the file"
            for taker in piece.takers:
                assert taker == piece.reader or taker not in holders[piece.of[0]], "ranks read for themselves"
                so_far = [size for of, size in taken[taker] if of == piece.of]
                assert sum(so_far) == piece.first_byte
                assert not so_far or taken[taker][-1][0] == piece.of, "another tensor is begun before the end"
                taken[taker].append((piece.of, piece.num_bytes))
                assert piece.is_last == (piece.first_byte + piece.num_bytes == sizes[piece.of])
    for rank in range(world):
        assert {of for of, _ in taken[rank]} == set(asked[rank])
        assert sum(size for _, size in taken[rank]) == sum(sizes[item] for item in asked[rank])
    assert all(pieces for pieces in rounds)
