"""`atoll.share`: a model of a script's own, shared by the ranks of its site as `atoll node --parallel` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from atoll.node.parallel.gradients import clip
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import Loss, Passes, parameters_of
from atoll.node.parallel.settings import ALONE, ParallelSettings, check_batch, parse
from atoll.node.worker.connection import connect, rank_and_world
from atoll.node.worker.device import device_of_rank
from atoll.node.worker.given_values import GivenValues
from atoll.node.worker.naming import SharedParts
from atoll.node.worker.shared_model import Shareable
from atoll.node.worker.shared_model import share as share_parts
from atoll.node.worker.tensors import TRANSPARENT_CHILDREN, named_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.time_limits import time_limits

OF_THE_BUILT_IN = ("cp", "ep", "sequence_parallel")
"""Settings that need to know more of a model than its names say."""


class SharedModel(SharedParts):
    """Of one rank, within `atoll.share`."""

    def __init__(
        self,
        passes: Passes,
        parallel: ParallelSettings,
        mesh: Mesh | None,
        device: torch.device,
        tied: Mapping[str, str],
    ) -> None:
        super().__init__(passes.parts, mesh.data_rank if mesh is not None else 0, tied)
        self._passes, self._parallel, self._mesh = passes, parallel, mesh
        self.device = device
        """Of inputs and targets."""

    def parameters(self) -> list[nn.Parameter]:
        """For the optimizer: this rank's shares."""
        return parameters_of(self._passes)

    def batch_size(self, of_site: int) -> int:
        """Of this rank, where the site trains so many samples in a step. Raises ConfigError unless they can be shared
        equally."""
        check_batch(self._parallel, of_site)
        return of_site // self._parallel.num_data_ranks

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Forward and backward of this rank's batch, a collective of the site; gradients are there then, added to those
        of earlier calls. The mean loss of the batch, or None where another stage of the pipeline has it."""
        self.batch_size(len(inputs) * self._parallel.num_data_ranks)
        return self._passes(inputs, targets)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; the norm before that. A
        collective of the site."""
        return clip(self.parameters(), max_norm, self._mesh, self._passes.counted_elsewhere)


@contextmanager
def share(
    build: Callable[[], nn.Module],
    loss: Loss,
    *,
    blocks: str,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
    seed: int = 0,
    values: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
) -> Iterator[SharedModel]:
    """Build a model, of which this rank gets its shares, and a process group around it; `with` ends that.

        with atoll.share(build, loss, blocks="layers", first=["embedding"], last=["head"]) as model:
            optimizer = torch.optim.AdamW(model.parameters())
            with atoll.join(model, optimizer, ...) as site:
                for inputs, targets in site.loader(dataset, model.batch_size(64)):
                    loss = model(inputs.to(model.device), targets.to(model.device))
                    model.clip(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    site.step(tokens=..., loss=loss)

    `build`: makes the whole model, and works under `torch.device("meta")` too. Each rank builds it once in CPU memory
    for its first values, with `seed`. `values`: gives these instead, one after the other, for a model that is too large
    for that: names and values of all parameters and buffers. `loss`: outputs and targets to the mean over the batch.
    `blocks`: name of the ModuleList or ModuleDict through which `forward` goes (`for block in self.layers`); FSDP2
    gathers one at a time, and stages of a pipeline have some each. `first`, `last`: names of modules before and behind
    them; a stage without them has None there, and `forward` leaves them out: what a block takes and gives is one
    tensor. `columns`, `rows`: of a block, names of nn.Linear (patterns too, as in fnmatch) whose outputs ranks of
    tensor parallelism share, and those that take such outputs; heads are then counted with `view(..., -1, head_dim)`,
    and nothing between the two has parameters. Tied parameters stay tied. In a stage the blocks keep their names, and
    not their places in the list.

    Raises ConfigError, naming the option, for what the model or `--parallel` does not allow. Without a node, each
    of the ranks that torchrun started has the whole model (DDP).
    """
    connection = connect()
    _, world = rank_and_world()
    said, collective_s = "", None
    if connection is not None:
        said, collective_s = connection.greeting.parallel, time_limits(connection.settings.time_limits).collective_s
    parallel = parse(said).resolved(world)
    try:
        _check(parallel, columns, rows)
        with device_of_rank(has_host_tensors=parallel.offload == 1, collective_s=collective_s) as device:
            mesh = Mesh.of_site(device, parallel, collective_s) if world > 1 else None
            names = Names(blocks=blocks, first=first, last=last, columns=columns, rows=rows)
            model = own(build, loss, names, parallel, device, seed=seed, values=values)
            passes, tied = share_parts(model, parallel, mesh, device), model.tied
            del model  # and with it the whole one
            yield SharedModel(passes, parallel, mesh, device, tied)
    except ConfigError as error:
        if connection is not None:
            connection.tell(error)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Arguments of `share`."""

    blocks: str
    first: Sequence[str]
    last: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[str]


def _check(parallel: ParallelSettings, columns: Sequence[str], rows: Sequence[str]) -> None:
    for name in OF_THE_BUILT_IN:
        if (said := getattr(parallel, name)) != getattr(ALONE, name):
            raise ConfigError(f"--parallel {name}={said} is of the built-in model; leave out {name}")
    if parallel.tp > 1 and not (columns and rows):
        raise ConfigError(
            f"--parallel tp={parallel.tp}: say with columns= and rows= of atoll.share which matrices of a block ranks "
            "share, or leave out tp"
        )
    if parallel.zero == 1:
        raise ConfigError(
            "--parallel zero=1 is of the built-in trainer; leave it out, and make a ZeroRedundancyOptimizer in the "
            "script"
        )


def own(
    build: Callable[[], nn.Module],
    loss: Loss,
    names: Names,
    parallel: ParallelSettings,
    device: torch.device,
    *,
    seed: int = 0,
    values: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
) -> Shareable:
    """Raises ConfigError for a name that the model does not have, and for what cannot be shared so."""

    def unset() -> nn.Module:
        try:
            return build()
        except Exception as error:
            raise ConfigError(
                f'atoll.share: build does not work under torch.device("meta"), where nothing has values: {error}'
            ) from error

    if values is None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            whole = build()
    else:
        with torch.device("meta"):
            whole = unset()
    modules = dict(whole.named_modules())
    for name in (names.blocks, *names.first, *names.last):
        if name not in modules:
            raise ConfigError(f"atoll.share: blocks, first or last name {name!r}, which the model does not have")
    if not isinstance(modules[names.blocks], nn.ModuleList | nn.ModuleDict):
        raise ConfigError(f"atoll.share: blocks names {names.blocks!r}, which is no ModuleList and no ModuleDict")
    buffers = dict(whole.named_buffers(remove_duplicate=False))
    if kept := buffers.keys() & whole.state_dict().keys() if parallel.pp > 1 else ():
        raise ConfigError(
            f"--parallel pp={parallel.pp} with the buffer {min(kept)!r}: torch's pipeline goes forward once with "
            "whatever is in memory, which would be in it; register it with persistent=False if forward does not change "
            "it, or leave out pp"
        )

    given = GivenValues(values, whole, device) if values is not None else None

    def divide(model: nn.Module, parts: list[nn.Module], mesh: DeviceMesh) -> None:
        for part in parts:
            plan: dict[str, ParallelStyle] = {}
            for name, linear in _matrices(part, names.columns, "columns"):
                _check_divides(name, linear.out_features, mesh.size())
                plan[name] = ColwiseParallel()
            for name, linear in _matrices(part, names.rows, "rows"):
                if name in plan:
                    raise ConfigError(f"atoll.share: {name!r} is among columns and among rows")
                _check_divides(name, linear.in_features, mesh.size())
                plan[name] = RowwiseParallel()
            parallelize_module(part, mesh, plan)

    def set_buffers(part: nn.Module) -> None:
        for own_name, _ in list(part.named_buffers(remove_duplicate=False)):
            owner, _, key = own_name.rpartition(".")
            name = own_name
            for wrapper in TRANSPARENT_CHILDREN:
                name = name.replace(f"{wrapper}.", "")
            buffer = buffers[name].to(device) if given is None else given.buffer(name)
            setattr(part.get_submodule(owner), key, buffer)

    return Shareable(
        whole=(lambda: whole) if given is None else None,
        unset=unset,
        blocks=names.blocks,
        first=names.first,
        last=names.last,
        divide=divide,
        tied=_ties(whole),
        loss=loss,
        values=(lambda: named_tensors(whole)) if given is None else given.tensors,
        has_memory=set_buffers,
        casts_inputs=True,
    )


def _ties(model: nn.Module) -> dict[str, str]:
    """Each further name of a parameter, to its first one."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: known for name, p in named if (known := first.setdefault(id(p), name)) != name}


def _matrices(block: nn.Module, patterns: Sequence[str], argument: str) -> Iterator[tuple[str, nn.Linear]]:
    for pattern in patterns:
        found = [(name, module) for name, module in block.named_modules() if fnmatchcase(name, pattern)]
        for name, module in found:
            if not isinstance(module, nn.Linear):
                raise ConfigError(f"atoll.share: {name!r} of {argument} is {type(module).__name__}, and no nn.Linear")
            yield name, module
        if not found:
            raise ConfigError(f"atoll.share: a block has no module {pattern!r}, which {argument} names")


def _check_divides(name: str, size: int, num_ranks: int) -> None:
    if size % num_ranks:
        raise ConfigError(f"--parallel tp={num_ranks} does not divide the {size} of {name!r}; choose another tp")
