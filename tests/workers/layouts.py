"""One rank of several layouts, one after the other, each held against the same steps of one process.

layouts.py RANK WORLD ADDRESS LAYOUT ...: prints a line of JSON for each layout; exits with 1 if it could not go on.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while modules load

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from atoll.node.parallel.gradients import clip
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import parameters_of
from atoll.node.parallel.settings import (
    V_SCHEDULES,
    ParallelSettings,
    check_batch,
    check_model,
    check_sequence,
    parse,
)
from atoll.node.worker.experts import Router, balance
from atoll.node.worker.own_model import Names, own
from atoll.node.worker.recipe import zero_1
from atoll.node.worker.shared_model import share as share_parts
from atoll.node.worker.shared_model import shared_model
from atoll.node.worker.tensors import named_tensors
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from examples import own_model

STEPS, BATCH, SEQUENCE, MAX_NORM, RATE = 5, 16, 18, 2.0, 0.25
"""No ranks can share a sequence of 18 without filling it up."""
EVALUATED_AT = 2
"""The step after which its batch is evaluated: one loss more."""
SAME_LOSS = 2e-6
"""What ranks of one data rank may differ by: the last bits of a sum in another order."""
SETTINGS = RunSettings(
    run_id="layouts",
    steps=STEPS,
    data="mine",
    seed=3,
    model=ModelSettings(dim=32, num_layers=8, num_heads=4, num_kv_heads=2, ffn_dim=48, max_sequence=SEQUENCE),
    trainer=TrainerSettings(batch_size=BATCH, sequence=SEQUENCE),
)
OWN, HALVES = "own", "halves"
EXPERTS = replace(SETTINGS.model, num_layers=4, num_experts=6, num_shared_experts=1, router_bias_rate=0.01)
MODELS = {
    "": SETTINGS.model,
    "tied": replace(SETTINGS.model, tie_embeddings=True),
    "experts": EXPERTS,
    "crowded": EXPERTS,
    OWN: SETTINGS.model,  # of as many heads and blocks
    HALVES: SETTINGS.model,
}
"""By the word in front of a layout. tied: the output layer shares its weights with the embedding. crowded: all tokens
choose the first two of the experts. own: not the built-in model, but that of an example. halves: the same, and a step
has the gradients of two calls, with half of the batch each."""
GATED = ("feed_forward.up", "shared.up", "widen")
"""Matrices whose product is noted."""
CPU = torch.device("cpu")
LIMIT_S = 177.0
"""Of collectives of all groups. A stage of a pipeline waits in one while the stage before it is compiled."""


@dataclass(frozen=True, slots=True)
class Trained:
    """By one layout. `norms` are those of the gradients before they are clipped."""

    losses: list[float]
    norms: list[float]
    first: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Of the first step, at equal values. Those of later steps are in `norms` and in `values`."""
    values: dict[str, Tensor]
    num_elements: int
    """Of this rank."""
    computed_in: frozenset[str]
    """What matrix products gave."""
    num_graphs: int
    """That were compiled."""
    num_breaks: int
    """In them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A layout against one process: the largest difference of each, over all steps and ranks."""

    layout: str
    loss: float
    norm: float
    first: float
    gradients: float
    values: float
    biases: float
    """Of routers, which move by whole steps."""
    num_tensors: int
    """That ranks have together."""
    largest_share: float
    """Of the model's elements, the most that a rank has."""
    computed_in: list[str]
    num_graphs: int
    num_breaks: int


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(STEPS)]


def train(mesh: Mesh | None, parallel: ParallelSettings, model: str) -> Trained:
    settings = replace(SETTINGS, model=MODELS[model])
    torch._dynamo.reset()
    counters.clear()
    if model in (OWN, HALVES):
        shareable = own(own_model.Model, own_model.loss_of, Names(**own_model.PARTS), parallel, CPU, seed=3)
        passes = share_parts(shareable, parallel, mesh, CPU)
    else:
        passes = shared_model(settings, parallel, mesh, CPU)
    parameters = parameters_of(passes)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=RATE, foreach=False)
    if mesh is not None and mesh.settings.zero == 1:
        optimizer = zero_1(optimizer)
    losses, norms, first = list[float](), list[float](), whole(passes.parts)
    gradients = dict[str, Tensor]()
    dtypes = set[str]()
    if model == "crowded":
        for router in (m for part in passes.parts for m in part.modules() if isinstance(m, Router)):
            router.bias[:2] += 10.0

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        dtypes.add(str(output.dtype).removeprefix("torch."))

    # Not within what is compiled: the hook would break its graph.
    noted = "head" if parallel.compile else GATED
    for module in (m for part in passes.parts for name, m in part.named_modules() if name.endswith(noted)):
        module.register_forward_hook(note)
    for number, batch in enumerate(batches()):
        share = batch if mesh is None else batch.chunk(mesh.settings.num_data_ranks)[mesh.data_rank]
        optimizer.zero_grad(set_to_none=True)
        calls = [passes(part[:, :-1], part[:, 1:]) for part in share.chunk(2 if model == HALVES else 1)]
        gradients = gradients or whole_gradients(passes.parts)
        norms.append(clip(parameters, MAX_NORM, mesh, passes.counted_elsewhere).item())
        optimizer.step()
        balance(passes.parts, mesh)
        of_calls = [loss.item() for loss in calls if loss is not None]
        losses += [sum(of_calls) / len(of_calls)] if of_calls else []
        if number == EVALUATED_AT and not passes.why_no_loss:
            evaluated = passes.loss_of(share[:, :-1], share[:, 1:])
            losses += [] if evaluated is None else [evaluated.item()]
    num_elements = sum(local(parameter).numel() for parameter in parameters)
    num_graphs, num_breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    values = whole(passes.parts)
    return Trained(losses, norms, first, gradients, values, num_elements, frozenset(dtypes), num_graphs, num_breaks)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {name: gathered(tensor) for part in parts for name, tensor in named_tensors(part)}


def whole_gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Of every parameter that this rank has a part of."""
    found = {}
    for part in parts:
        for name, tensor in named_tensors(part):
            if isinstance(tensor, nn.Parameter):
                assert tensor.grad is not None, name
                found[name] = gathered(tensor.grad)
    return found


def gathered(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def read(layout: str) -> tuple[str, ParallelSettings]:
    model, _, text = layout.rpartition(" ")
    return model, parse(text)


def alone_of(layout: str) -> tuple[str, str]:
    """What decides what one process computes: the model and the precision."""
    model, settings = read(layout)
    return model, settings.precision


def held(layout: str, world: int, alone: dict[tuple[str, str], Trained]) -> Held:
    model, settings = read(layout)
    settings = settings.resolved(world)
    check_model(settings, MODELS[model])
    check_batch(settings, BATCH)
    check_sequence(settings, SEQUENCE)
    mesh = Mesh.of_site(CPU, settings, LIMIT_S)
    limits = limits_of_collectives()
    assert limits == {LIMIT_S}, f"{layout}: {limits}"
    expected, found = alone[alone_of(layout)], train(mesh, settings, model)
    everyone: list[tuple[int, list[float], list[str], frozenset[str]]] = [(0, [], [], frozenset())] * world
    dist.all_gather_object(everyone, (mesh.data_rank, found.losses, sorted(found.values), found.computed_in))
    said: dict[int, list[float]] = {}
    for data_rank, losses, _, _ in everyone:
        if losses:
            known = said.setdefault(data_rank, losses)
            assert difference_of(known, losses) <= SAME_LOSS, f"data rank {data_rank}: {known} and {losses}"
    means = [sum(of_step) / len(said) for of_step in zip(*said.values(), strict=True)]
    wanted = list(expected.losses)
    if settings.pp_schedule in V_SCHEDULES:
        del wanted[EVALUATED_AT + 1]
    assert len(means) == len(wanted) >= STEPS
    worst = torch.tensor(
        [
            difference(found.first, expected.first),
            difference(found.values, expected.values),
            difference_of(found.norms, expected.norms),
            found.num_elements / expected.num_elements,
            difference(biases(found.values), biases(expected.values)),
            difference(found.gradients, expected.gradients),
        ]
    )
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Held(
        layout=layout,
        loss=difference_of(means, wanted),
        norm=worst[2].item(),
        first=worst[0].item(),
        gradients=worst[5].item(),
        values=worst[1].item(),
        biases=worst[4].item(),
        num_tensors=len({name for _, _, names, _ in everyone for name in names}),
        largest_share=worst[3].item(),
        computed_in=sorted({dtype for *_, dtypes in everyone for dtype in dtypes}),
        num_graphs=found.num_graphs,
        num_breaks=found.num_breaks,
    )


def limits_of_collectives() -> set[float]:
    """Of all groups that there are."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]
    return {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(((found[name] - expected[name]).abs().max().item() for name in found), default=0.0)


def biases(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name.endswith("router.bias")}


def difference_of(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def main(rank: int, world: int, address: str, layouts: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world, timeout=limit)
    alone = {
        (model, precision): train(None, ParallelSettings(precision=precision), model)
        for model, precision in sorted({alone_of(layout) for layout in layouts})
    }
    for layout in layouts:
        found = held(layout, world, alone)
        if rank == 0:
            sys.stdout.write(json.dumps(asdict(found)) + "\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads now and then never let the interpreter end


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
