"""The built-in trainer: what a node runs when it is not given a script."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from atoll.node.parallel.gradients import clip
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.passes import Passes, parameters_of
from atoll.node.parallel.settings import parse
from atoll.node.worker import data
from atoll.node.worker.connection import Connection, connect, disconnect
from atoll.node.worker.device import device_of_rank
from atoll.node.worker.experts import BUFFERS, balance
from atoll.node.worker.held_out import HeldOut
from atoll.node.worker.join import join
from atoll.node.worker.naming import SharedParts
from atoll.node.worker.recipe import TextWindows, learning_rate, optimizer_of
from atoll.node.worker.shared_model import TIED, shared_model
from atoll.node.worker.tensors import BufferPolicy
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.time_limits import time_limits


def main() -> None:
    try:
        connection = connect()
        if connection is None:
            raise ConfigError("the built-in trainer is started by `atoll node`; to try it on this machine: atoll demo")
        try:
            train(connection)
        except AtollError as error:
            connection.tell(error)
            raise
        finally:
            disconnect()
    except AtollError as error:
        sys.stderr.write(f"atoll: {error}\n")
        sys.exit(error.exit_code)


def train(connection: Connection) -> None:
    """One rank, from its settings to the end of the run. Raises AtollError."""
    settings, trainer = connection.settings, connection.settings.trainer
    parallel = parse(connection.greeting.parallel).resolved(connection.world)
    source = data.source_for_run(settings.data, connection.greeting.data_paths)
    corpus = data.load(source)
    if corpus.vocab_size > settings.model.vocab_size:
        raise ConfigError(
            f"the data has a vocabulary of {corpus.vocab_size} tokens, the model one of {settings.model.vocab_size}: "
            f"begin the run with model.vocab_size = {corpus.vocab_size} or more"
        )
    fingerprint = data.fingerprint_for_run(settings.data, source)
    collective_s = time_limits(settings.time_limits).collective_s
    with device_of_rank(has_host_tensors=parallel.offload == 1, collective_s=collective_s) as device:
        mesh = Mesh.of_site(device, parallel, collective_s) if connection.world > 1 else None
        passes = shared_model(settings, parallel, mesh, device)
        optimizer = optimizer_of(parameters_of(passes), settings, shares_state=parallel.zero == 1 and mesh is not None)
        windows_of_text = TextWindows(corpus.training, trainer.sequence)
        batch_size = trainer.batch_size // parallel.num_data_ranks
        tied = TIED if settings.model.tie_embeddings else {}
        parts = SharedParts(passes.parts, mesh.data_rank if mesh is not None else 0, tied)
        buffers: dict[str, BufferPolicy] = {BUFFERS: "summed"} if settings.model.num_experts else {}
        with join(parts, optimizer, buffers=buffers, data_fingerprint=fingerprint) as site:
            held_out = HeldOut(
                passes,
                site,
                corpus.held_out,
                settings,
                batch_size=batch_size,
                device=device,
                is_first_reader=parts.data_rank == 0,
            )
            for batch in site.loader(windows_of_text, batch_size):
                total_steps = site.run_length
                assert total_steps is not None
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(trainer, site.inner_step, total_steps)
                loss = train_step(passes, optimizer, batch.to(device), trainer.grad_clip, mesh)
                step = site.step(tokens=batch_size * trainer.sequence, loss=loss)
                if held_out.is_due(step):
                    optimizer.zero_grad(set_to_none=True)  # its room is for what the outer parameters take the place of
                    held_out.evaluate()


def train_step(
    passes: Passes, optimizer: torch.optim.Optimizer, windows: Tensor, max_norm: float, mesh: Mesh | None
) -> Tensor | None:
    """One step of this rank, a collective of its site. windows: (batch, sequence + 1). The mean loss, where this
    rank has it."""
    optimizer.zero_grad(set_to_none=True)
    tokens = windows.long()
    loss = passes(tokens[:, :-1], tokens[:, 1:])
    clip(parameters_of(passes), max_norm, mesh, passes.counted_elsewhere)
    optimizer.step()
    balance(passes.parts, mesh)
    return loss
