"""Forward and backward of one batch: through a model that this rank has all blocks of, or through its stages of a
pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from atoll.node.parallel.context import Context
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.settings import SCHEDULES, V_SCHEDULES, ParallelSettings

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of outputs and targets, the mean over the batch."""


class Passes(Protocol):
    """What computes the gradients of a batch."""

    parts: Sequence[nn.Module]
    """What this rank has of the model."""
    counted_elsewhere: Sequence[nn.Parameter]
    """Of these, what another stage has too, which counts it in the norm of the gradients."""
    why_no_loss: str
    """Why there is no `loss_of`; empty if there is."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The mean loss of this rank's share of the batch, whose gradients are there then, averaged over the data
        ranks; None where another stage of the pipeline has the loss."""

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """The same without gradients, and without a trace in the model: of a batch as large as those of training."""


def parameters_of(passes: Passes) -> list[nn.Parameter]:
    """Of all parts that this rank has."""
    return [parameter for part in passes.parts for parameter in part.parameters()]


def computing(settings: ParallelSettings, device: torch.device) -> AbstractContextManager[object]:
    """In the settings' precision. FSDP2 casts what it gathers by itself: autocast would keep a copy of each matrix."""
    if settings.precision == "bf16" and not settings.has_fsdp:
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def _evaluating(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Without gradients, and with modules as they are when they do not train."""
    training = [part.training for part in parts]
    try:
        for part in parts:
            part.eval()
        with torch.no_grad():
            yield
    finally:
        for part, was_training in zip(parts, training, strict=True):
            part.train(was_training)


def _letting_go(loss: Loss) -> Loss:
    """While nothing trains torch holds the outputs of all microbatches until the last one: as many logits as the whole
    batch has, where training holds those of a few. So their memory is given back as soon as their loss is known."""

    def of(outputs: Tensor, targets: Tensor) -> Tensor:
        found = loss(outputs, targets)
        if not torch.is_grad_enabled():
            local = outputs.to_local() if isinstance(outputs, DTensor) else outputs
            local.untyped_storage().resize_(0)
        return found

    return of


class WholeModel:
    """With `accumulation`, in parts one after the other; gradients go to the other ranks with the last one."""

    def __init__(self, model: nn.Module, loss: Loss, settings: ParallelSettings) -> None:
        self.parts: Sequence[nn.Module] = (model,)
        self.counted_elsewhere: Sequence[nn.Parameter] = ()
        self.why_no_loss = ""
        self._model, self._loss, self._settings = model, loss, settings

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        num_parts = self._settings.accumulation
        total = torch.zeros((), device=inputs.device)
        for part, (x, y) in enumerate(zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True)):
            with self._alone(part < num_parts - 1):
                with computing(self._settings, inputs.device):
                    outputs = self._model(x)
                loss = self._loss(outputs, y) / num_parts
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        num_parts = self._settings.accumulation
        total = torch.zeros((), device=inputs.device)
        with _evaluating(self.parts), computing(self._settings, inputs.device):
            for x, y in zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True):
                total += self._loss(self._model(x), y) / num_parts
        return total

    def _alone(self, waits: bool) -> AbstractContextManager[object]:
        """Without a word to other ranks if more is to come."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(not waits)
        elif waits and isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync()
        return nullcontext()


class SharedSequences:
    """Of a batch whose sequences ranks share: this rank's positions go through `passes`."""

    def __init__(self, passes: Passes, context: Context) -> None:
        """`passes` have the loss `context.of_share`."""
        self.parts, self.counted_elsewhere = passes.parts, passes.counted_elsewhere
        self.why_no_loss = passes.why_no_loss
        self._passes, self._context = passes, context

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        loss = self._passes(self._context.take(inputs), self._context.take(targets))
        return None if loss is None else self._context.mean(loss)

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        loss = self._passes.loss_of(self._context.take(inputs), self._context.take(targets))
        return None if loss is None else self._context.mean(loss)


def stages_of(rank: int, settings: ParallelSettings) -> tuple[int, ...]:
    """That a rank of the pipeline has, of all its stages."""
    if settings.num_stages_of_rank == 1:
        return (rank,)
    last = settings.num_stages - 1
    return (rank, last - rank) if settings.pp_schedule in V_SCHEDULES else (rank, rank + settings.pp)


def blocks_of(stage: int, num_stages: int, num_layers: int) -> tuple[int, int]:
    """First and last + 1 of a stage's blocks; the later stages have one more where they cannot be shared equally."""
    return stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages


class Pipeline:
    """This rank's stages, in torch's schedule (GPipe 1811.06965, 1F1B 2006.09503, interleaved 2104.04473, looped
    breadth-first 2211.05953, zero bubble and ZBV 2401.10241, DualPipeV 2412.19437)."""

    def __init__(
        self, parts: Sequence[nn.Module], loss: Loss, mesh: Mesh, device: torch.device, tied: nn.Parameter | None = None
    ) -> None:
        """`parts`: the modules of `stages_of` this rank, in that order. `tied`: this rank's copy of the matrix that the
        first and the last stage share."""
        from torch.distributed.pipelining import PipelineStage  # half a second, with all that it imports
        from torch.distributed.pipelining.schedules import get_schedule_class

        settings, group = mesh.settings, mesh.whole.get_group("pp")
        self._tied, self._group = tied, group
        self.why_no_loss = ""
        if (name := settings.pp_schedule) in V_SCHEDULES:  # a stage takes the gradients of its neighbour on this rank
            self.why_no_loss = f"torch's schedule pp_schedule={name} has no forward passes alone"
        self.parts = parts
        self._settings, self._device = settings, device
        numbers = stages_of(mesh.stage, settings)
        stages = [
            PipelineStage(part, number, settings.num_stages, device, group=group)
            for number, part in zip(numbers, parts, strict=True)
        ]
        made = get_schedule_class(SCHEDULES[settings.pp_schedule])
        of = stages[0] if settings.num_stages_of_rank == 1 else stages
        self._stages = stages
        self._schedule = made(of, settings.num_microbatches, loss_fn=_letting_go(loss))
        self._has_first, self._has_last = 0 in numbers, settings.num_stages - 1 in numbers
        self.counted_elsewhere: Sequence[nn.Parameter] = (tied,) if tied is not None and self._has_last else ()

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        given = (inputs,) if self._has_first else ()
        earlier = {parameter: parameter.grad for parameter in parameters_of(self)}
        for parameter in earlier:  # else torch would scale them again, and `_sum_up` count them twice
            parameter.grad = None
        with computing(self._settings, self._device):
            if self._has_last:
                self._schedule.step(*given, target=targets, losses=losses, return_outputs=False)
            else:
                self._schedule.step(*given, return_outputs=False)
        if self._tied is not None:
            self._sum_up(self._tied)
        for parameter, gradient in earlier.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return torch.stack(losses).mean() if self._has_last else None

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        given = (inputs,) if self._has_first else ()
        with _evaluating(self.parts), computing(self._settings, self._device):
            if self._has_last:
                self._schedule.eval(*given, target=targets, losses=losses, return_outputs=False)
            else:
                self._schedule.eval(*given, return_outputs=False)
        for stage in self._stages:
            stage.clear_runtime_states()  # else torch holds all outputs until the next step
        return torch.stack(losses).mean() if self._has_last else None

    def _sum_up(self, tied: nn.Parameter) -> None:
        """The gradients of both copies, which are alike after it to the bit: a sum of two has no order."""
        mine = tied.grad
        assert mine is not None
        if isinstance(tied, DTensor) and isinstance(mine, DTensor):
            tied.grad = mine.redistribute(placements=tied.placements)  # that of an embedding may be whole
            mine = tied.grad.to_local()
        other = torch.empty_like(mine)
        at = dist.get_global_rank(self._group, 0 if self._has_last else dist.get_world_size(self._group) - 1)
        operations = [dist.P2POp(dist.isend, mine, at, self._group), dist.P2POp(dist.irecv, other, at, self._group)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        mine += other
