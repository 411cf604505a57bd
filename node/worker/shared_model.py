"""A model as one rank of a site has it: its shares of the tensors, with their first values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from atoll.node.parallel.context import Context
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.parallelize import Divide, parallelize
from atoll.node.parallel.passes import Loss, Passes, Pipeline, SharedSequences, WholeModel, blocks_of, stages_of
from atoll.node.parallel.settings import V_SCHEDULES, ParallelSettings
from atoll.node.parallel.tensor import share_matrices
from atoll.node.worker.local_steps import local_of
from atoll.node.worker.model import Transformer, first_values
from atoll.node.worker.recipe import token_loss
from atoll.node.worker.tensors import named_tensors, slice_of
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings

TIED = {"head.weight": "embedding.weight"}
"""Of the built-in model, where the settings tie them, in whatever stages they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shareable:
    """A model, and what its ranks need to know of it to share it."""

    whole: Callable[[], nn.Module] | None
    """With its first values, in CPU memory. None: a rank that has it whole gets them as `values` gives them."""
    unset: Callable[[], nn.Module]
    """The same without values, on the meta device."""
    blocks: str
    """Name of the list or dictionary of its blocks, through which `forward` goes in their order."""
    first: Sequence[str]
    """Names of modules before the blocks, which a stage that is not the first has as None."""
    last: Sequence[str]
    """The same, behind them."""
    divide: Divide
    tied: Mapping[str, str]
    """Parameters that are another one, by its name."""
    loss: Loss
    values: Callable[[], Iterable[tuple[str, Tensor]]]
    """First values of parameters and persistent buffers, one after the other."""
    has_memory: Callable[[nn.Module], None]
    """Of a part that was just given memory: sets the buffers that are not persistent."""
    casts_inputs: bool
    """With precision=bf16 FSDP2 casts what a block is given, too."""


def built_in(
    settings: RunSettings, parallel: ParallelSettings, device: torch.device, context: Context | None
) -> Shareable:
    model, seed = settings.model, settings.seed
    positions = context.positions if context is not None else None

    def set_angles(part: nn.Module) -> None:
        assert isinstance(part, Transformer)
        part.set_angles(device, positions)

    return Shareable(
        whole=lambda: Transformer(model, seed),
        unset=lambda: Transformer(model),
        blocks="layers",
        first=("embedding",),
        last=("norm", "head"),
        divide=partial(share_matrices, is_tied=model.tie_embeddings, by_positions=parallel.sequence_parallel == 1),
        tied=TIED if model.tie_embeddings else {},
        loss=token_loss,
        values=lambda: first_values(model, seed),
        has_memory=set_angles,
        casts_inputs=False,  # the angles of the rotary embedding stay fp32
    )


def shared_model(settings: RunSettings, parallel: ParallelSettings, mesh: Mesh | None, device: torch.device) -> Passes:
    """The built-in one. `mesh`: None where a rank is alone."""
    context = None
    if mesh is not None and (cp := mesh.of("cp")) is not None:
        context = Context(cp, parallel.num_ulysses(settings.model), settings.trainer.sequence)
        mesh.limit(context.parts)
    return share(built_in(settings, parallel, device, context), parallel, mesh, device, context)


def share(
    model: Shareable,
    parallel: ParallelSettings,
    mesh: Mesh | None,
    device: torch.device,
    context: Context | None = None,
) -> Passes:
    """Where ranks share it, none ever has more than its shares and what `values` gives at a time."""
    made = partial(
        parallelize,
        settings=parallel,
        mesh=mesh,
        divide=model.divide,
        blocks=model.blocks,
        casts_inputs=model.casts_inputs,
        context=context,
    )
    if mesh is None or parallel.is_replicated_alone:
        if model.whole is not None:
            return WholeModel(made(model.whole().to(device)), model.loss, parallel)
        whole = stage_of(model, 0, 1)
        give_memory([whole], model, device)
        return WholeModel(made(whole), model.loss, parallel)
    parts = [stage_of(model, number, parallel.num_stages) for number in stages_of(mesh.stage, parallel)]
    wholes = [made(part) for part in parts]
    give_memory(parts, model, torch.device("cpu") if parallel.offload else device)
    loss = context.of_share(model.loss) if context is not None else model.loss
    passes: Passes = WholeModel(wholes[0], loss, parallel)
    if parallel.pp > 1:
        passes = Pipeline(wholes, loss, mesh, device, tie(parts, _across(model, parallel)))
    return SharedSequences(passes, context) if context is not None else passes


def give_memory(parts: Sequence[nn.Module], model: Shareable, device: torch.device) -> None:
    """To what is on the meta device, with the first values."""
    for part in parts:
        part.to_empty(device=device)
        tie([part], model.tied)
        model.has_memory(part)
    set_first_values(parts, model.values(), model.tied)


def tie(parts: Sequence[nn.Module], tied: Mapping[str, str]) -> nn.Parameter | None:
    """Given memory, modules get one each for a parameter that they have in common. What the parts have of a tied one,
    the last of them, if they have any."""
    here = {
        name: (part, parameter) for part in parts for name, parameter in part.named_parameters(remove_duplicate=False)
    }
    found = None
    for alias, name in tied.items():
        if alias in here and name in here:
            owner, _, key = alias.rpartition(".")
            part, _ = here[alias]
            setattr(part.get_submodule(owner), key, here[name][1])
        _, found = here.get(name, here.get(alias, (None, found)))
    return found


def _across(model: Shareable, parallel: ParallelSettings) -> dict[str, str]:
    """Of what is tied, what the first and the last stage of a pipeline have in common. Raises ConfigError for what
    other stages would have in common, or one rank twice."""

    def place(name: str) -> str:
        for number, modules in enumerate((model.first, model.last)):
            if any(name == module or name.startswith(f"{module}.") for module in modules):
                return ("first", "last")[number]
        return name.removeprefix(f"{model.blocks}.").partition(".")[0]

    across = {alias: name for alias, name in model.tied.items() if place(alias) != place(name)}
    for alias, name in across.items():
        if {place(alias), place(name)} != {"first", "last"} or len(across) > 1:
            raise ConfigError(
                f"--parallel pp={parallel.pp}: {alias!r} and {name!r} are one parameter; stages can have one in "
                "common, the first and the last: leave out pp"
            )
        if parallel.pp_schedule in V_SCHEDULES:
            raise ConfigError(
                f"--parallel pp_schedule={parallel.pp_schedule}: {alias!r} and {name!r} are one parameter, and the "
                "first and the last stage are on one rank, which would have it twice; choose another schedule"
            )
    return across


def stage_of(model: Shareable, number: int, num_stages: int) -> nn.Module:
    """Blocks of one stage, and what is before and behind them in the first and last one. The stages before it hand in
    what a block gives in place of the inputs."""
    with torch.device("meta"):
        part = model.unset()
    layers = part.get_submodule(model.blocks)
    names = [name for name, _ in layers.named_children()]
    if num_stages > len(names):
        raise ConfigError(
            f"{num_stages} stages of a pipeline, but the model has {len(names)} blocks; choose a smaller pp"
        )
    known = (model.blocks, *model.first, *model.last)
    for name, _ in part.named_parameters() if num_stages > 1 else ():
        if not any(name == own or name.startswith(f"{own}.") for own in known):
            raise ConfigError(
                f"{name!r} is neither in a block nor before or behind them, so all stages of a pipeline would have it: "
                "name its module among first or last of atoll.share (a parameter of the model itself needs one), or "
                "leave out pp"
            )
    first, last = blocks_of(number, num_stages, len(names))
    for name in (*names[:first], *names[last:]):
        del layers._modules[name]
    for name in (*(model.first if first else ()), *(model.last if last < len(names) else ())):
        owner, _, key = name.rpartition(".")
        setattr(part.get_submodule(owner), key, None)
    return part


@torch.no_grad()
def set_first_values(parts: Sequence[nn.Module], values: Iterable[tuple[str, Tensor]], tied: Mapping[str, str]) -> None:
    """Each tensor of the parts gets its slice of what the whole model has."""
    here: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in named_tensors(part):
            here.setdefault(tied.get(name, name), []).append(tensor)
    for name, value in values:
        for tensor in here.pop(name, ()):
            offsets, sizes = slice_of(tensor, name)
            local = local_of(tensor)
            if local.numel():
                local.copy_(value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])
        del value  # before the next one is made
    assert not here, f"{min(here)!r} would begin with whatever was in memory"
