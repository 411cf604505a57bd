"""Checkpoints of inner optimizers on disk: the same bits come back, and misfits are refused."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from atoll.node.dataplane import safetensors_file
from atoll.node.local_protocol import CheckpointCounts, CheckpointId
from atoll.node.worker import checkpoint, checkpoint_reading
from atoll.node.worker.checkpoint import LocalCheckpoints
from atoll.node.worker.naming import Naming
from atoll.node.worker.optimizer_state import OptimizerState
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.errors import HostError
from tests.harness.devices import DEVICES
from tests.harness.ranks import Ranks
from tests.harness.small_disk import small_disk
from tests.harness.zero import ZeroRedundancyOptimizer, rank_of_two

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:], "weight_decay": 0.25}], lr=0.01
    ),
    "channels last": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


SWITCHED: dict[str, tuple[Make, Make]] = {
    "AdamW amsgrad": (OPTIMIZERS["channels last"], OPTIMIZERS["AdamW"]),
    "AdamW fused": (OPTIMIZERS["channels last"], lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "RMSprop momentum": (
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    ),
    "RMSprop centered": (
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    ),
    "SGD momentum": (OPTIMIZERS["SGD"], lambda p: torch.optim.SGD(p, lr=0.1)),
}
"""What the optimizer keeps depends on what differs."""


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Rank:
    """A model, its optimizer and their checkpoints."""

    def __init__(
        self,
        folder: Path,
        make: Make = adamw,
        *,
        run_id: str = "run",
        rank: int = 0,
        world: int = 1,
        width: int = 4,
        order: torch.memory_format = torch.contiguous_format,
        device: str = "cpu",
        stage: str = "",
        here: range | None = None,
        crashed_from: Sequence[CheckpointId] = (),
        busy: Callable[[str, float], None] = lambda what, limit_s: None,
    ) -> None:
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Conv2d(3, width, 2), nn.Flatten(), nn.Linear(width * 4, 1))
        weight = self.net.get_parameter("0.weight")
        weight.data = weight.data.contiguous(memory_format=order)
        self.net.register_parameter("small", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
        self.net.to(device)
        self.optimizer = make(list(self.net.parameters()))
        naming = Naming({name: f"{stage}{name}" for name in ("0", "2", "small")} if stage else {}, {}, is_said=True)
        self.state = OptimizerState(find_tensors([self.net], [self.optimizer], naming=naming), [self.optimizer])
        self.checkpoints = LocalCheckpoints(
            folder, self.state, run_id, rank, world, here=here, crashed_from=crashed_from, busy=busy
        )

    def train(self, num_steps: int) -> None:
        small = self.net.get_parameter("small")
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss: Tensor = self.net(torch.ones(2, 3, 3, 3, device=small.device)).sum() + small.square().sum().float()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def write(self, *steps: int) -> None:
        for step in steps:
            self.checkpoints.write(step, 1000 + step)
            self.checkpoints.finish()

    def begin(self, generation: int = 1) -> None:
        self.checkpoints.go_on(None, 1, generation)

    def go_on(self) -> bool:
        usable = self.checkpoints.usable
        return self.checkpoints.go_on(max(usable, default=None), 1, 2) is not None


def at(step: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(incarnation=1, generation=generation, step=step)


def written(folder: Path, *steps: int) -> Rank:
    """A rank that trained and left checkpoints."""
    rank = Rank(folder)
    rank.begin()
    for step in steps:
        rank.train(1)
        rank.write(step)
    return rank


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits(tmp_path: Path, kind: str, device: str) -> None:
    order = torch.channels_last if kind == "channels last" else torch.contiguous_format
    first = Rank(tmp_path, OPTIMIZERS[kind], order=order, device=device)
    first.begin()
    first.train(3)
    first.write(3)
    again = Rank(tmp_path, OPTIMIZERS[kind], order=order, device=device)
    again.net.load_state_dict(first.net.state_dict())  # as the outer state brings them
    assert again.go_on()
    for one, other in zip(first.optimizer.state.values(), again.optimizer.state.values(), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, Tensor):
                assert value.device == other[key].device
                assert torch.equal(value, other[key])
                assert (value.dtype, value.stride()) == (other[key].dtype, other[key].stride())
            else:
                assert (value, type(value)) == (other[key], type(other[key]))
    for rank in (first, again):
        rank.train(2)
    for name, value in first.net.named_parameters():
        assert torch.equal(value, again.net.get_parameter(name)), name


def zero(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    for parameter in parameters:
        parameter.data = parameter.data.float()  # it wants one dtype
    groups = [{"params": parameters[:-1]}, {"params": parameters[-1:], "weight_decay": 0.5}]
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.01)


def test_each_rank_keeps_its_part_of_a_zero_redundancy_optimizer(tmp_path: Path) -> None:
    """Its own `state` is empty on every rank."""
    kept: list[list[str]] = []
    written_values, later = [], []
    for rank in range(2):
        with rank_of_two(rank):
            first = Rank(tmp_path, zero, rank=rank, world=2)
            first.begin()
            first.train(3)
            first.optimizer.param_groups[0]["betas"] = (0.5, 0.75)
            first.write(3)
            kept.append([item.name for item in first.state.tensors() if item.key == "exp_avg"])
            state = {item.name: item.values.clone() for item in first.state.tensors()}
            written_values.append((state, {name: value.clone() for name, value in first.net.state_dict().items()}))
            first.train(2)
            later.append(first.net.state_dict())
    for rank, (state, parameters) in enumerate(written_values):
        with rank_of_two(rank):
            again = Rank(tmp_path, zero, rank=rank, world=2)
            again.net.load_state_dict(parameters)
            assert again.go_on()
            for item in again.state.tensors():
                assert torch.equal(item.values, state.pop(item.name)), item.name
            assert not state
            again.train(2)
            for name, value in again.net.state_dict().items():
                assert torch.equal(value, later[rank][name]), name
            assert again.optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert all(kept)
    assert sorted(kept[0] + kept[1]) == sorted(f"0/{name}/exp_avg" for name, _ in first.net.named_parameters())


def test_a_checkpoint_says_what_it_restores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 7)
    assert capsys.readouterr().err == ""
    assert Rank(tmp_path).go_on()
    assert capsys.readouterr().err == "atoll: the inner optimizer is restored from step 1007 of the run\n"


def test_nothing_is_said_where_there_was_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank(tmp_path, lambda p: torch.optim.SGD(p, lr=0.1))
    assert rank.checkpoints.go_on(None, 1, 1) is None
    rank.train(1)
    rank.write(1)
    assert list(tmp_path.iterdir()) == [], "SGD without momentum keeps nothing"
    assert capsys.readouterr().err == ""


def test_two_are_kept(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3, 4)
    assert Rank(tmp_path).checkpoints.usable == (at(3), at(4))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_later_start_counts_as_newer(tmp_path: Path) -> None:
    written(tmp_path, 200)
    rank = Rank(tmp_path)
    rank.begin(generation=2)
    rank.train(1)
    rank.write(100)
    assert Rank(tmp_path).checkpoints.usable == (at(200), at(100, 2))


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "no header"])
def test_a_damaged_file_is_passed_over(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 1, 2)
    path = tmp_path / "rank-0-of-1.1-1-2.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    elif damage == "no header":
        data[:8] = b"\xff" * 8
    else:
        del data[len(data) - 5 if damage == "torn" else 0 :]
    path.write_bytes(data)
    rank = Rank(tmp_path)
    assert rank.checkpoints.usable == (at(1),)
    assert "passed over" in (said := capsys.readouterr().err)
    assert str(path) in said
    assert rank.go_on()


def test_no_flipped_bit_of_the_header_changes_what_is_restored(tmp_path: Path) -> None:
    first = written(tmp_path, 1)
    path = tmp_path / "rank-0-of-1.1-1-1.safetensors"
    data = path.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    for place in range(0, header_bytes, header_bytes // 60):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        rank = Rank(tmp_path)
        if rank.go_on():  # the bit is of no meaning, as in the shapes that safetensors keeps beside ours
            for one, other in zip(first.optimizer.state.values(), rank.optimizer.state.values(), strict=True):
                assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_process_that_dies_at_any_moment_of_a_write_leaves_one_that_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "optimizer"
    rank = written(folder, 1)
    at_death: list[Path] = []

    def dies() -> None:
        at_death.append(tmp_path / f"moment-{len(at_death)}")
        shutil.copytree(folder, at_death[-1])

    def pieces_of(entry: safetensors_file.Entry) -> Iterator[safetensors_file.Buffer]:
        for piece in entry.pieces:
            dies()
            yield piece

    write = safetensors_file.write
    with monkeypatch.context() as patched:
        patched.setattr(
            safetensors_file,
            "write",
            lambda path, entries, about: write(path, [replace(e, pieces=pieces_of(e)) for e in entries], about),
        )
        patched.setattr(os, "fsync", lambda descriptor: dies())
        rank.write(2)
    dies()
    assert len(at_death) > 10
    *during, behind_fsync, after = at_death
    for moment in during:
        assert Rank(moment).checkpoints.usable == (at(1),)
    for moment in (behind_fsync, after):
        assert Rank(moment).checkpoints.usable == (at(1), at(2))
    assert not list(tmp_path.glob("moment-*/*.new"))


def test_what_is_left_of_a_torn_write_is_removed(tmp_path: Path) -> None:
    written(tmp_path, 1)
    left = tmp_path / "rank-0-of-1.1-1-2.new"
    left.write_bytes(b"small")
    other = tmp_path / "rank-10-of-11.1-1-2.new"
    other.write_bytes(b"of another rank")
    assert Rank(tmp_path).checkpoints.usable == (at(1),)
    assert not left.exists()
    assert other.exists()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"run_id": "other"}, 'it is of the run "run", this is "other"'),
        ({"make": OPTIMIZERS["SGD"]}, 'another model or optimizer: small.optimizer was "AdamW", now "SGD"'),
        ({"width": 5}, "another model or optimizer: 0.weight.shape[0] was 4, now 5"),
        ({"make": SWITCHED["AdamW amsgrad"][1]}, "optimizer: small.switches.amsgrad was null, now true"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, changed: dict[str, str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, 1)
    rank = Rank(tmp_path, **changed)  # type: ignore[arg-type]
    assert rank.checkpoints.usable == ()
    assert not rank.go_on()
    said = capsys.readouterr().err
    assert reason in said
    assert "the inner optimizer starts fresh: no checkpoint is usable on every rank" in said
    assert not rank.optimizer.state


def test_a_crash_before_the_first_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not Rank(tmp_path).go_on()  # workers of a second generation
    assert "the inner optimizer starts fresh: no checkpoint was written before" in capsys.readouterr().err
    first = Rank(tmp_path)
    assert first.checkpoints.go_on(None, 1, 1) is None
    assert not capsys.readouterr().err, "nothing was trained before"


def test_values_that_are_not_finite_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = written(tmp_path, 1)
    next(iter(rank.optimizer.state.values()))["exp_avg"].view(-1)[0] = torch.inf
    rank.write(2)
    assert Rank(tmp_path).checkpoints.usable == (at(1),)
    assert "'0/small/exp_avg' holds values that are not finite" in capsys.readouterr().err


def test_hyperparameters_that_moved_go_on_unless_the_script_changed_them(tmp_path: Path) -> None:
    first = Rank(tmp_path)
    first.begin()
    first.train(1)
    (group,) = first.optimizer.param_groups
    group.update(lr=7.0, weight_decay=0.25, betas=(0.5, 0.75))
    first.write(1)
    again = Rank(tmp_path)
    again.go_on()
    (group,) = again.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.25, (0.5, 0.75))
    assert group["lr"] == 0.01, "the script's schedule"
    changed = Rank(tmp_path, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.125))
    changed.go_on()
    (group,) = changed.optimizer.param_groups
    assert (group["weight_decay"], group["betas"]) == (0.125, (0.5, 0.75))


def test_state_of_lists_is_said_and_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank(tmp_path)
    rank.begin()
    rank.train(1)
    next(iter(rank.optimizer.state.values()))["history"] = [1]
    rank.write(1, 2)
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "AdamW keeps 'history' of 'small' as list" in said


def test_a_failed_write_is_said_once_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = written(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _no_space)
        rank.write(2, 3)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "could not be written; training goes on" in said
    assert "make room" in said
    assert [p.name for p in tmp_path.iterdir()] == ["rank-0-of-1.1-1-1.safetensors"]
    rank.write(4)
    assert Rank(tmp_path).checkpoints.usable == (at(1), at(4))
    assert capsys.readouterr().err == "atoll: checkpoints of the inner optimizer are written again; 2 were not\n"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _no_space)
        rank.write(5)
    assert "could not be written" in capsys.readouterr().err, "a new failure is said again"
    assert rank.checkpoints.counts == CheckpointCounts(written=2, failed=3)


def _no_space(descriptor: int) -> None:
    del descriptor
    raise OSError(28, "No space left on device")


def test_the_node_keeps_room_on_a_disk_that_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 2000))
    written(tmp_path, 1)
    assert "as much must stay free for the node" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def four_ranks(folder: Path) -> tuple[list[Rank], int]:
    """Which have done a step, and the size of a checkpoint of one of them."""
    ranks = [Rank(folder, rank=rank, world=4, width=1024) for rank in range(4)]
    for rank in ranks:
        rank.begin()
        rank.train(1)
    return ranks, sum(tensor.values.nbytes for tensor in ranks[0].state.tensors())


def small(monkeypatch: pytest.MonkeyPatch, disk_bytes: int, at_each_look: Callable[[], object]) -> None:
    def usage(folder: Path) -> object:
        used_bytes = sum(path.stat().st_size for path in folder.iterdir())
        at_each_look()
        return shutil._ntuple_diskusage(disk_bytes, used_bytes, disk_bytes - used_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)


@pytest.mark.parametrize(("room_for", "num_written"), [(7.5, 0), (8.5, 4)])
def test_ranks_that_look_at_the_same_moment_leave_room_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_for: float, num_written: int
) -> None:
    """Four files, and as much stays free."""
    ranks, each_bytes = four_ranks(tmp_path)
    all_look = threading.Barrier(len(ranks))
    small(monkeypatch, int(room_for * each_bytes), lambda: all_look.wait(60))
    for rank in ranks:
        rank.checkpoints.write(1, 1001)
    for rank in ranks:
        rank.checkpoints.finish()
    assert len(list(tmp_path.iterdir())) == num_written


def test_what_others_have_written_is_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, each_bytes = four_ranks(tmp_path)
    small(monkeypatch, int(8.5 * each_bytes), lambda: None)
    for rank in ranks:
        rank.write(1)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.root
@pytest.mark.parametrize("is_seen_before", [True, False])
def test_a_full_disk_costs_checkpoints_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_seen_before: bool
) -> None:
    """It is full before the write, or becomes so in the middle of it."""
    folder = tmp_path / "optimizer"
    with small_disk(folder, 1 << 20) as fill:
        rank = written(folder, 1)
        filler = fill()
        with monkeypatch.context() as patched:
            if not is_seen_before:
                patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 0, 1 << 30))
            for step in (2, 3):
                rank.train(1)
                rank.write(step)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "training goes on" in said
        assert str(folder) in said
        assert "make room" in said
        assert sorted(p.name for p in folder.iterdir()) == ["filler", "rank-0-of-1.1-1-1.safetensors"]
        assert Rank(folder).checkpoints.usable == (at(1),)
        filler.unlink()
        rank.write(4)
        assert rank.checkpoints.counts == CheckpointCounts(written=2, failed=2)
        assert Rank(folder).checkpoints.usable == (at(1), at(4))


def test_one_that_is_due_during_a_write_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = written(tmp_path, 1)
    reading, writing = os.pipe()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: os.read(reading, 1))
        rank.checkpoints.write(2, 1002)
        for step in (3, 4):
            rank.checkpoints.write(step, 1000 + step)
        os.close(writing)  # the disk goes on
        rank.checkpoints.finish()
    os.close(reading)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "left out at step 1003" in said
    rank.write(5)
    assert Rank(tmp_path).checkpoints.usable == (at(2), at(5))
    assert rank.checkpoints.counts == CheckpointCounts(written=3, skipped=2)


def offered(folder: Path, world: int) -> tuple[CheckpointId, ...]:
    """By each rank, as it needs the files of all."""
    (found,) = {Rank(folder, rank=rank, world=world).checkpoints.usable for rank in range(world)}
    return found


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_another_rank_still_needs_is_kept(tmp_path: Path) -> None:
    """Rank 1 left out the second one: the first stays until there are two that both have, within a bound."""
    ranks = [Rank(tmp_path, rank=rank, world=2) for rank in range(2)]
    for rank in ranks:
        rank.begin()
        rank.train(1)
    ranks[0].write(1, 2)
    ranks[1].write(1)
    ranks[0].write(3)
    assert offered(tmp_path, 2) == (at(1),)
    ranks[1].write(3)
    ranks[0].write(4)
    ranks[1].write(4)
    assert offered(tmp_path, 2) == (at(3), at(4))
    ranks[0].write(5, 6, 7, 8, 9)
    assert left(tmp_path) == [f"rank-0-of-2.1-1-{n}.safetensors" for n in (4, 7, 8, 9)] + [
        f"rank-1-of-2.1-1-{n}.safetensors" for n in (3, 4)
    ]
    assert offered(tmp_path, 2) == (at(4),), "a crash now needs it"


def test_what_a_much_slower_rank_is_writing_is_kept(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, rank=rank, world=2) for rank in range(2)]
    for rank in ranks:
        rank.begin()
        rank.train(1)
        rank.write(1)
    aside = tmp_path / "rank-1-of-2.1-1-2.new"
    aside.touch()
    ranks[0].write(2, 3, 4, 5, 6, 7)
    assert len([name for name in left(tmp_path) if name.startswith("rank-0")]) == checkpoint.MAX_KEPT
    ranks[1].write(2)
    assert not aside.exists()
    assert offered(tmp_path, 2) == (at(1), at(2))


def test_what_a_rank_of_another_host_may_still_need_is_kept(tmp_path: Path) -> None:
    """Nothing here says how far its disk is: the first stays, within the same bound."""
    rank = Rank(tmp_path, world=2, here=range(1))
    rank.begin()
    rank.train(1)
    rank.write(1, 2, 3)
    assert left(tmp_path) == [f"rank-0-of-2.1-1-{n}.safetensors" for n in (1, 2, 3)]
    rank.write(4, 5, 6)
    assert left(tmp_path) == [f"rank-0-of-2.1-1-{n}.safetensors" for n in (3, 4, 5, 6)]


def test_a_rank_whose_optimizer_keeps_nothing_does_not_cost_the_others_theirs(tmp_path: Path) -> None:
    """Of a pipeline, for example, whose stages have different optimizers."""

    def ranks() -> list[Rank]:
        return [
            Rank(tmp_path, rank=0, world=2, stage="first."),
            Rank(tmp_path, lambda p: torch.optim.SGD(p, lr=0.1), rank=1, world=2, stage="second."),
        ]

    for rank in ranks():
        rank.begin()
        rank.train(1)
        rank.write(1)
    again = ranks()
    assert [rank.checkpoints.usable for rank in again] == [(at(1),), (at(1),)]
    assert again[0].go_on()
    assert not again[1].go_on(), "it is as fresh as any: its learning rate rises"
    assert again[0].optimizer.state
    assert not again[1].optimizer.state
    for rank in again:
        rank.train(1)


def test_files_of_ranks_that_are_no_more_are_removed_once_they_are_not_needed(tmp_path: Path) -> None:
    for index in range(2):
        rank = Rank(tmp_path, rank=index, world=2)
        rank.begin()
        rank.train(1)
        rank.write(1)
    (tmp_path / "rank-1-of-2.1-1-2.new").write_bytes(b"it was killed in the middle of a write")
    alone = Rank(tmp_path)
    assert alone.go_on()
    alone.train(1)
    alone.write(1)
    names = ["rank-0-of-1.1-2-1.safetensors", "rank-0-of-2.1-1-1.safetensors", "rank-1-of-2.1-1-1.safetensors"]
    assert left(tmp_path) == names, "the one before still has all its files"
    alone.write(2)
    assert left(tmp_path) == ["rank-0-of-1.1-2-1.safetensors", "rank-0-of-1.1-2-2.safetensors"]


def test_only_the_newest_is_read_whole_before_one_is_chosen(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    path = tmp_path / "rank-0-of-1.1-1-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    rank = Rank(tmp_path)
    assert rank.checkpoints.usable == (at(1), at(2))
    with pytest.raises(HostError, match=r"rank-0-of-1\.1-1-1.*does not have its own hash"):
        rank.checkpoints.go_on(at(1), 1, 2)
    assert Rank(tmp_path).go_on()


def test_an_older_one_is_taken_if_another_rank_lacks_the_newest(tmp_path: Path) -> None:
    first = written(tmp_path, 1)
    then = {key: value.clone() for key, value in first.optimizer.state[first.net.get_parameter("2.weight")].items()}
    first.train(1)
    first.write(2)
    again = Rank(tmp_path)
    assert again.checkpoints.go_on(at(1), 1, 2)
    now = again.optimizer.state[again.net.get_parameter("2.weight")]
    assert all(torch.equal(now[key], value) for key, value in then.items())


def test_reading_for_longer_than_workers_have_to_start_is_getting_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read takes 25 s; a node that has 60 for the start is never beyond its deadline, nor is the coordinator."""
    start_s = 60.0
    written(tmp_path, 1)
    now_s = 0.0
    group = Ranks(1, 1, 0.0)
    group.hello(0, 100, 0.0)
    seen: list[str] = []

    def look() -> None:
        watch = group.watch(start_s, start_s)
        assert watch is not None
        assert now_s < watch.deadline
        seen.append(watch.doing)

    def busy(what: str, limit_s: float) -> None:
        group.busy(0, what, limit_s, now_s)
        look()

    read = safetensors_file.Reader.read

    def slow(reader: safetensors_file.Reader, name: str, first_byte: int, num_bytes: int) -> bytes:
        nonlocal now_s
        now_s += 25.0
        look()
        return read(reader, name, first_byte, num_bytes)

    monkeypatch.setattr(safetensors_file.Reader, "read", slow)
    monkeypatch.setattr(checkpoint_reading, "monotonic", lambda: now_s)
    assert Rank(tmp_path, busy=busy).go_on()
    assert now_s > 3 * start_s
    assert "busy: reading its optimizer's checkpoint" in seen[0]
    assert len(set(seen)) > now_s / start_s, "the text changes as it gets on"
    assert seen[-1] == "building its model"


@pytest.mark.parametrize("kind", SWITCHED)
def test_an_optimizer_that_would_keep_something_else_starts_fresh(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = SWITCHED[kind]
    first = Rank(tmp_path, before)
    first.begin()
    first.train(2)
    first.write(2)
    again = Rank(tmp_path, after)
    assert not again.go_on()
    assert ".switches." in capsys.readouterr().err
    again.train(1)
    assert Rank(tmp_path, before).go_on()


def test_weight_decay_may_be_turned_on(tmp_path: Path) -> None:
    first = Rank(tmp_path, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0))
    first.begin()
    first.train(1)
    first.write(1)
    again = Rank(tmp_path, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True))
    assert again.go_on()
    again.train(1)


def test_one_that_workers_crashed_with_is_not_taken_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 1, 2)
    again = Rank(tmp_path, crashed_from=[at(2), at(7)])
    assert again.checkpoints.usable == (at(1),)
    path = tmp_path / "rank-0-of-1.1-1-2.safetensors"
    assert f"{path}: workers that went on from it crashed before their first step" in capsys.readouterr().err
    assert again.go_on()


def test_after_two_that_workers_crashed_with_all_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = written(tmp_path, 1)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    first.write(2, 3)
    for path, data in kept.items():
        path.write_bytes(data)  # as if it had been kept for a slower rank
    assert Rank(tmp_path).checkpoints.usable == (at(1), at(2), at(3))
    again = Rank(tmp_path, crashed_from=[at(3), at(2)])
    assert not again.go_on()
    said = capsys.readouterr().err
    assert said.count("workers that went on from it crashed") == 2
    assert said.count("workers that went on from others crashed") == 1
    assert "starts fresh" in said


def test_no_memory_is_taken_for_checkpoints_that_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = written(tmp_path, 1)
    asked: list[int] = []
    monkeypatch.setattr(rank.checkpoints._room, "prepare", lambda tensors: asked.append(len(tensors)))
    rank.checkpoints.prepare()
    rank.checkpoints.discard()
    rank.checkpoints.prepare()
    assert len(asked) == 1


def test_discarding_removes_all(tmp_path: Path) -> None:
    rank = written(tmp_path, 1, 2)
    rank.checkpoints.discard()
    rank.write(3)
    assert list(tmp_path.iterdir()) == []
