"""The built-in model as one rank of a site has it: its shares of the tensors, with their first values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.node.parallel.context import Context
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.parallelize import parallelize
from atoll.node.parallel.passes import Passes, Pipeline, SharedSequences, WholeModel, blocks_of, stages_of
from atoll.node.parallel.settings import ParallelSettings
from atoll.node.worker.model import Transformer, first_values
from atoll.node.worker.recipe import token_loss
from atoll.node.worker.tensors import named_tensors, slice_of
from atoll.protocol.model_settings import ModelSettings
from atoll.protocol.settings import RunSettings

TIED = {"head.weight": "embedding.weight"}
"""Where the settings tie them, in whatever stages they are."""


def shared_model(settings: RunSettings, parallel: ParallelSettings, mesh: Mesh | None, device: torch.device) -> Passes:
    """No rank ever has more than its shares and one whole tensor. `mesh`: None where a rank is alone."""
    if mesh is None or parallel.is_replicated_alone:
        model = Transformer(settings.model, settings.seed).to(device)
        whole = parallelize(model, parallel, mesh, context=None, is_tied=settings.model.tie_embeddings)
        return WholeModel(whole, token_loss, parallel)
    numbers = stages_of(mesh.stage, parallel)
    parts = [_stage(settings.model, number, parallel.num_stages) for number in numbers]
    is_tied = settings.model.tie_embeddings
    context = None
    if (cp := mesh.of("cp")) is not None:
        context = Context(cp, parallel.num_ulysses(settings.model), settings.trainer.sequence)
    wholes = [parallelize(part, parallel, mesh, context, is_tied) for part in parts]
    for part in parts:
        part.to_empty(device="cpu" if parallel.offload else device)
        part.tie()
        part.set_angles(device, context.positions if context is not None else None)
    set_first_values(parts, settings.model, settings.seed)
    loss = context.of_share(token_loss) if context is not None else token_loss
    ends = [end for part in parts for end in (part.embedding, part.head) if end is not None]
    tied = cast(nn.Parameter, ends[0].weight) if is_tied and ends else None
    passes: Passes = WholeModel(wholes[0], loss, parallel)
    if parallel.pp > 1:
        passes = Pipeline(wholes, loss, mesh, device, tied)
    return SharedSequences(passes, context) if context is not None else passes


def _stage(settings: ModelSettings, number: int, num_stages: int) -> Transformer:
    with torch.device("meta"):
        model = Transformer(settings)
    model.keep(*blocks_of(number, num_stages, settings.num_layers))
    return model


@torch.no_grad()
def set_first_values(parts: Sequence[nn.Module], settings: ModelSettings, seed: int) -> None:
    """Each tensor of the parts gets its slice of what the whole model has for this seed."""
    here: dict[str, list[Tensor]] = {}
    tied = TIED if settings.tie_embeddings else {}
    for part in parts:
        for name, tensor in named_tensors(part):
            here.setdefault(tied.get(name, name), []).append(tensor)
    for name, values in first_values(settings, seed):
        for tensor in here.pop(name, ()):
            offsets, sizes = slice_of(tensor, name)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel():
                local.copy_(values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])
    assert not here, f"{min(here)!r} would begin with whatever was in memory"
