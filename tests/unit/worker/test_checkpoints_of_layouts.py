"""A site comes back in another layout: ranks take their slices of the optimizer's state from the files of all."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from atoll.node.core.ranks.pieces import merge_ranks
from atoll.node.dataplane import safetensors_file
from atoll.node.worker.checkpoint import LocalCheckpoints
from atoll.node.worker.optimizer_state import OptimizerState
from atoll.node.worker.stored_state import Needed, Slice, StoredState
from atoll.node.worker.tensors import ModelTensors, find_tensors, slice_of
from atoll.protocol.errors import HostError
from tests.harness.fake_group import fake_rank
from tests.harness.ranks import offer
from tests.harness.zero import ZeroRedundancyOptimizer

SHAPES = {"a": (5, 6), "b": (7,), "s": ()}
STEPS = 3
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Layout:
    mesh: tuple[int, ...] = (1,)
    placements: tuple[Placement, ...] = ()
    """Of `a`; of vectors those of their first dimension. None: each rank has plain tensors."""
    names: tuple[str, ...] = ("abs",)
    """Of which each rank of a pipeline has some."""
    is_zero: bool = False

    @property
    def world(self) -> int:
        return len(self.names) * torch.Size(self.mesh).numel()


LAYOUTS = {
    "one": Layout(),
    "replicas": Layout((3,)),
    "rows": Layout((2,), (Shard(0),)),
    "rows of three": Layout((3,), (Shard(0),)),  # of five rows: 2, 2 and 1
    "more ranks than rows": Layout((6,), (Shard(0),)),
    "columns": Layout((2,), (Shard(1),)),
    "rows of columns": Layout((2, 2), (Shard(0), Shard(1))),
    "replicas of rows": Layout((2, 2), (Replicate(), Shard(0))),
    "pipeline": Layout(names=("a", "bs")),
    "zero-1": Layout((2,), is_zero=True),
}


class Rank:
    def __init__(self, folder: Path, layout: Layout, rank: int, make: Make) -> None:
        per_stage = layout.world // len(layout.names)
        mesh = init_device_mesh("cpu", layout.mesh) if layout.placements else None
        self.net = nn.Module()
        self.of: dict[str, nn.Parameter] = {}
        for name in layout.names[rank // per_stage]:
            values: Tensor = torch.empty(SHAPES[name])
            if mesh is not None:
                dims = len(SHAPES[name])
                placements = [p if not isinstance(p, Shard) or p.dim < dims else Replicate() for p in layout.placements]
                sizes, _ = compute_local_shape_and_global_offset(SHAPES[name], mesh, placements)
                values = DTensor.from_local(
                    torch.empty(sizes), mesh, placements, run_check=False, shape=values.shape, stride=values.stride()
                )
            self.of[name] = nn.Parameter(values)
            self.net.register_parameter(name, self.of[name])
        parameters = list(self.of.values())
        self.optimizer = (
            ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01) if layout.is_zero else make(parameters)
        )
        self.tensors: ModelTensors = find_tensors([self.net], [self.optimizer])
        self.state = OptimizerState(self.tensors, [self.optimizer])
        self.rank, self.world = rank, layout.world
        self.open(folder)

    def open(self, folder: Path, **of_hosts: Any) -> None:
        """`of_hosts`: more that `LocalCheckpoints` is given."""
        self.checkpoints = LocalCheckpoints(folder, self.state, "run", self.rank, self.world, **of_hosts)

    def slice(self, name: str, values: Tensor) -> Tensor:
        offsets, sizes = slice_of(self.of[name], name)
        return values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    @torch.no_grad()
    def set(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.of.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(self.slice(name, values[name]))

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            for name, parameter in self.of.items():
                mine = self.slice(name, gradient(name, step)).clone()
                if isinstance(parameter, DTensor):
                    mine = DTensor.from_local(
                        mine,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                parameter.grad = mine
            self.optimizer.step()

    def local(self, name: str) -> Tensor:
        parameter = self.of[name].detach()
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def kept(self) -> dict[str, dict[str, Tensor]]:
        keeper = self.optimizer.optim if isinstance(self.optimizer, ZeroRedundancyOptimizer) else self.optimizer
        return {
            name: {
                key: value.to_local() if isinstance(value, DTensor) else value
                for key, value in keeper.state[parameter].items()
            }
            for name, parameter in self.of.items()
            if parameter in keeper.state
        }


def gradient(name: str, step: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + ord(name)))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def kept_names(folder: Path, layout: Layout, ranks_a_host: int = 0) -> list[set[str]]:
    """By each rank, as its node tells it. 0: all are on one host."""
    offers = []
    for rank in range(layout.world):
        with fake_rank(rank, layout.world):
            tensors = Rank(folder, layout, rank, adamw).tensors
            offers.append(offer(tensors.manifest, tensors.pieces))
    kept = merge_ranks(offers, ranks_a_host).kept
    return [{offers[rank].pieces[i].name for i in indices} for rank, indices in enumerate(kept)]


def whole(steps: int) -> Rank:
    rank = Rank(Path("/nowhere"), LAYOUTS["one"], 0, adamw)
    rank.set({name: torch.ones(shape) for name, shape in SHAPES.items()})
    rank.train(0, steps)
    return rank


def leave(folder: Path, layout: Layout, make: Make = adamw, ranks_a_host: int = 0) -> None:
    """A checkpoint of all ranks after STEPS steps."""
    names = kept_names(folder / "none", layout, ranks_a_host)
    for rank in range(layout.world):
        with fake_rank(rank, layout.world):
            mine = Rank(folder, layout, rank, make)
            mine.checkpoints.go_on(None, 1, 1, names[rank])
            mine.set({name: torch.ones(shape) for name, shape in SHAPES.items()})
            mine.train(0, STEPS)
            mine.checkpoints.write(STEPS, STEPS)
            mine.checkpoints.finish()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with what a site of this layout left."""

    @functools.cache
    def made(layout: str) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        leave(folder, LAYOUTS[layout])
        return folder

    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(before, after, marks=() if "one" in (before, after) or before == after else pytest.mark.slow)
        for before in LAYOUTS
        for after in LAYOUTS
    ],
)
def test_any_layout_goes_on_from_what_any_other_one_left(left: Callable[[str], Path], before: str, after: str) -> None:
    left(before)  # as it has process groups of its own
    reference, later = whole(STEPS), whole(STEPS + 2)
    states, layout = reference.kept(), LAYOUTS[after]
    num_kept = 0
    for rank in range(layout.world):
        with fake_rank(rank, layout.world):
            mine = Rank(left(before), layout, rank, adamw)
            mine.set({name: p.detach() for name, p in reference.of.items()})
            (offered,) = mine.checkpoints.usable
            assert mine.checkpoints.go_on(offered, 2, 1) is not None
            for name, state in mine.kept().items():
                num_kept += 1
                assert state.keys() == states[name].keys()
                assert state["step"] == STEPS
                for key in ("exp_avg", "exp_avg_sq"):
                    torch.testing.assert_close(state[key], mine.slice(name, states[name][key]), rtol=1e-6, atol=1e-9)
            mine.train(STEPS, STEPS + 2)
            for name in mine.kept():
                torch.testing.assert_close(mine.local(name), mine.slice(name, later.local(name)), rtol=1e-6, atol=1e-8)
    per_rank = 1 if layout.is_zero or len(layout.names) > 1 else layout.world
    assert num_kept == len(SHAPES) * per_rank


def test_replicas_that_each_wrote_all_are_read_once() -> None:
    """Scripts that are told nothing of shares write all they have."""
    piece = Slice((0, 0), (2, 3))
    stored = StoredState(described([piece, piece], (2, 3)))
    fits: dict[str, object] = {"optimizer": "K", "switches": {}, "shape": (2, 3)}
    (tensor,) = stored.wanted([needed(piece, fits)])
    assert [str(part.path) for part in tensor.parts] == ["0"]


@pytest.mark.parametrize("layout", ["replicas", "replicas of rows", "zero-1", "rows"])
def test_what_ranks_have_alike_is_written_once(tmp_path: Path, layout: str) -> None:
    leave(tmp_path, LAYOUTS[layout])
    files = sorted(tmp_path.iterdir())
    assert len(files) == LAYOUTS[layout].world
    num_elements = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0)
    for file in files:
        with closing(safetensors_file.Reader(file)) as reader:
            for name, stored in reader.tensors.items():
                if (key := name.rpartition("/")[2]) in num_elements:
                    num_elements[key] += math.prod(stored.shape)
    assert set(num_elements.values()) == {5 * 6 + 7 + 1}
    names = kept_names(tmp_path / "none", LAYOUTS[layout])
    if layout == "replicas":
        assert sorted(map(sorted, names)) == [["a"], ["b"], ["s"]]


def test_a_state_of_very_slices_is_not_taken_by_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adafactor has sums of rows and of columns."""

    def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters, lr=0.01)

    one, rows = LAYOUTS["one"], LAYOUTS["rows"]
    with fake_rank(0, 1):
        first = Rank(tmp_path, one, 0, adafactor)
        first.checkpoints.go_on(None, 1, 1)
        first.set({name: torch.ones(shape) for name, shape in SHAPES.items()})
        first.train(0, STEPS)
        first.checkpoints.write(STEPS, STEPS)
        first.checkpoints.finish()
        assert Rank(tmp_path, one, 0, adafactor).checkpoints.usable
    with fake_rank(1, 2):
        assert not Rank(tmp_path, rows, 1, adafactor).checkpoints.usable
    assert "of 'a' belongs to slices that ranks do not have any more" in capsys.readouterr().err


class OfOneRank(torch.optim.Optimizer):
    """Each rank has the state of the parameters whose steps it does, as distributed forms of Muon have."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number % 2 == dist.get_rank():
                state = self.state[parameter]
                state["momentum"] = state.get("momentum", 0) + parameter.grad
                state["norm"] = float(parameter.grad.norm()) + dist.get_rank()


class OfItsShard(torch.optim.Optimizer):
    """Numbers that belong to a rank's own shard; a rank without values has none."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.to_local().numel():
                self.state[parameter]["norm"] = float(parameter.grad.to_local().norm())


@pytest.mark.parametrize(
    ("layout", "make"),
    [(Layout((2,)), OfOneRank), (LAYOUTS["rows"], OfItsShard), (LAYOUTS["more ranks than rows"], OfItsShard)],
)
def test_in_the_same_layout_a_rank_has_again_what_it_had(tmp_path: Path, layout: Layout, make: Make) -> None:
    leave(tmp_path, layout, make)
    for rank in range(layout.world):
        with fake_rank(rank, layout.world):
            before, again = Rank(tmp_path, layout, rank, make), Rank(tmp_path, layout, rank, make)
            before.train(0, STEPS)
            (offered,) = again.checkpoints.usable
            is_restored = again.checkpoints.go_on(offered, 2, 1) is not None
            assert is_restored == bool(before.optimizer.state)
            now = {p: state for p, state in again.optimizer.state.items() if state}
            names = {id(p): name for name, p in again.of.items()}
            assert {names[id(p)] for p in now} == {
                name for name, p in before.of.items() if before.optimizer.state.get(p)
            }
            for parameter, state in now.items():
                expected = before.optimizer.state[before.of[names[id(parameter)]]]
                assert state.keys() == expected.keys()
                assert state["norm"] == expected["norm"]
                assert torch.equal(state.get("momentum", torch.zeros(())), expected.get("momentum", torch.zeros(())))


def test_numbers_of_shards_are_not_taken_by_other_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, LAYOUTS["rows"], OfItsShard)
    with fake_rank(0, 3):
        assert not Rank(tmp_path, LAYOUTS["rows of three"], 0, OfItsShard).checkpoints.usable
    assert "'norm' of 'a' differs from rank to rank" in capsys.readouterr().err


def test_files_of_a_rank_that_are_missing_or_torn_cost_the_whole(tmp_path: Path) -> None:
    leave(tmp_path, LAYOUTS["rows"])
    one = LAYOUTS["one"]
    with fake_rank(0, 1):
        assert Rank(tmp_path, one, 0, adamw).checkpoints.usable
        path = tmp_path / "rank-1-of-2.1-1-3.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert not Rank(tmp_path, one, 0, adamw).checkpoints.usable
        path.unlink()
        assert not Rank(tmp_path, one, 0, adamw).checkpoints.usable


def grid(shape: tuple[int, ...], rng: random.Random) -> list[Slice]:
    """The tensor in pieces, cut across in each dimension at random."""
    pieces = [Slice((), ())]
    for size in shape:
        cuts = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 3)))})
        parts = list(itertools.pairwise(cuts)) or [(0, 0)]
        pieces = [Slice((*p.offsets, a), (*p.sizes, b - a)) for p in pieces for a, b in parts]
    return pieces


def described(pieces: list[Slice], shape: tuple[int, ...]) -> dict[Path, dict[str, object]]:
    return {
        Path(str(number)): {
            "slices": {"w": {"offsets": p.offsets, "sizes": p.sizes, "shape": shape}},
            "optimizers": [{"kind": "K", "written": ["w"],
                            "groups": [{"names": ["w"], "switches": {}, "first": {}, "now": {}}]}],
            "tensors": {
                "0/w/m": {
                    "optimizer": 0, "parameter": "w", "key": "m", "shape": p.sizes, "dtype": "F32", "hash": str(number),
                    "is_slice": True, "on_cpu": True,
                }
            },
            "plain": [],
            "run_step": 7,
        }
        for number, p in enumerate(pieces)
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_slices_of_any_two_cuts_fit_together(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(0, 6) for _ in range(rng.randint(0, 3)))
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    old, new = grid(shape, rng), grid(shape, rng)
    stored = StoredState(described(old, shape))
    fits: dict[str, object] = {"optimizer": "K", "switches": {}, "shape": shape}
    for piece in new:
        (tensor,) = stored.wanted([needed(piece, fits)])
        result = torch.full(piece.sizes, -1)
        for part in tensor.parts:
            taken, place = tensor.places(part)
            result[place] = values[part.slice.within(Slice((0,) * len(shape), shape))][taken]
        assert torch.equal(result, values[piece.within(Slice((0,) * len(shape), shape))])
    lost = rng.choice([number for number, p in enumerate(old) if p.num_elements] or [-1])
    if lost >= 0:
        files = {path: file for path, file in described(old, shape).items() if path != Path(str(lost))}
        whole_slice = needed(Slice((0,) * len(shape), shape), fits)
        with pytest.raises(HostError, match=r"no rank wrote|has no 'w'"):
            StoredState(files).wanted([whole_slice])


def needed(piece: Slice, fits: dict[str, object]) -> Needed:
    return Needed(optimizer=0, parameter="w", slice=piece, fits=fits)
