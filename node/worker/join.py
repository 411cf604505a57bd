"""`atoll.join`: a training loop becomes one site of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from atoll.node.worker.connection import connect
from atoll.node.worker.joined_site import JoinedSite
from atoll.node.worker.losses import DEFAULT_MAX_SKIPPED
from atoll.node.worker.naming import Naming, SharedParts
from atoll.node.worker.ramp import RampSteps
from atoll.node.worker.site import Site
from atoll.node.worker.tensors import BufferPolicy
from atoll.node.worker.wrapped import unwrapped
from atoll.protocol.errors import ConfigError


def join(
    model: nn.Module | Sequence[nn.Module] | SharedParts,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    buffers: Mapping[str, BufferPolicy] | None = None,
    ramp_steps: RampSteps | None = None,
    data_fingerprint: bytes = b"",
    data_rank: int | None = None,
    names: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    frozen: Literal["run", "own"] = "run",
    state: Mapping[str, Any] | None = None,
    max_skipped: int = DEFAULT_MAX_SKIPPED,
) -> Site:
    """Make this process a rank of its site. Returns when the model holds the run's parameters; use it in `with`.

    `model`: one or several modules, or what `atoll.share` gives, which knows its data rank, names and ties.

    `buffers`: patterns of buffers' names to "mean", "summed", "lowest", "local" or "constant" (by default
    floating-point buffers are averaged, others taken from the lowest contributor). One that training adds to is
    "summed": it is averaged too, and keeps what was added while the sites exchanged. A large one that nothing changes,
    as a mask, is "constant": it travels once, with the first values, and a change of it ends the site by name. A
    pattern may name frozen parameters, which a script changes by hand (a teacher, a target network): without a policy
    they keep the run's first values. `ramp_steps`: the learning rate of a fresh optimizer rises over so many steps
    after joining a run that is under way, and so does that of any optimizer when the run has made more steps than that
    without this site, or beyond the checkpoint that it comes back from; "beta2" is 2 / (1 - beta2), 0 turns it off,
    None takes the run's setting. `data_fingerprint`: 32 bytes, needed unless the run says data = "local"; sites with
    other ones are refused. `data_rank`: the same on ranks that see the same batch. `names`: where the modules of this
    rank are parts of the model, what they are called in all of it, as {"layers.0": "layers.4"} for the first block of a
    second stage; {} says that the names are those of the whole model, though ranks hold different tensors, as ranks
    with experts do. `tied`: which tensors of the whole model are one though they are in two stages, as {"head.weight":
    "embedding.weight"}; the script sums up their gradients. Both are said alike on all ranks.
    `frozen`: parameters that are not trained travel once, with the starting state, and are kept by the node ("run"), or
    every site has them by itself ("own", as the base of a LoRA): they are compared by hash, never carried, and in
    memory where the model has them alone; saved models are without them.
    `state`: what goes on after a crash with the optimizers' checkpoint, as {"scheduler": scheduler, "ema": ema}:
    anything with state_dict and load_state_dict, of tensors and plain values. A scheduler that is kept keeps its
    optimizer's learning rates too.
    `max_skipped`: the site ends after so many steps in a row that have a loss that is not finite, or that the script
    left out. Fewer are counted and said, and training goes on while the parameters are finite.

    Without a node the same script trains alone, and says so. Raises ConfigError, naming the tensor or optimizer, for
    what cannot be kept in step with other sites; RefusedError if the run does not want this model or data.
    """
    if frozen not in ("run", "own"):
        raise ConfigError(f'atoll.join got frozen = {frozen!r}; choose "run" or "own"')
    naming = Naming(names or {}, tied or {}, is_said=names is not None or tied is not None)
    is_shared = isinstance(model, SharedParts)
    if isinstance(model, SharedParts):
        modules, data_rank, naming = list(model.parts), model.data_rank, model.naming
    else:
        modules = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = [unwrapped(each) for each in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    connection = connect()
    if connection is None:
        site = Site()
        if site.rank == 0:
            sys.stderr.write("atoll: no node started this process (see `atoll node --help`); it trains alone\n")
        return site
    try:
        if connection.greeting.parallel and not is_shared:
            raise ConfigError(
                f"--parallel {connection.greeting.parallel}: the script does not share its model by atoll.share; leave "
                "out --parallel, and say how many ranks with --ranks"
            )
        return JoinedSite(
            connection,
            modules=modules,
            optimizers=optimizers,
            buffers=buffers,
            ramp_steps=ramp_steps,
            data_fingerprint=data_fingerprint,
            data_rank=data_rank,
            naming=naming,
            has_own_frozen=frozen == "own",
            state=state,
            max_skipped=max_skipped,
        )
    except BaseException as error:
        connection.tell(error)
        raise
