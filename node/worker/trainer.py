"""The built-in trainer: what a node runs when it is not given a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.node.worker import data
from atoll.node.worker.connection import Connection, connect, disconnect
from atoll.node.worker.join import join
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import TextWindows, learning_rate, next_byte_loss, optimizer_of
from atoll.protocol.errors import AtollError, ConfigError


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
    if trainer.batch_size % connection.world:
        raise ConfigError(
            f"trainer.batch_size = {trainer.batch_size} sequences cannot be shared equally "
            f"by {connection.world} ranks; choose another number of --ranks"
        )
    listing = data.list_for_run(settings.data, connection.greeting.data_paths)
    corpus = data.load(listing)
    fingerprint = data.fingerprint_for_run(settings.data, listing)
    with _device_of_rank(connection) as device:
        bare = Transformer(settings.model, settings.seed).to(device)
        model: nn.Module = bare if connection.world == 1 else DistributedDataParallel(bare)
        optimizer = optimizer_of(model, settings)
        windows_of_text = TextWindows(corpus.training, trainer.sequence)
        batch_size = trainer.batch_size // connection.world
        with join(model, optimizer, data_fingerprint=fingerprint) as site:
            for batch in site.loader(windows_of_text, batch_size):
                total_steps = site.run_length
                assert total_steps is not None
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(trainer, site.inner_step, total_steps)
                optimizer.zero_grad(set_to_none=True)
                loss = next_byte_loss(model, batch.to(device))
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), trainer.grad_clip)
                optimizer.step()
                site.step(tokens=batch_size * trainer.sequence, loss=loss)


@contextmanager
def _device_of_rank(connection: Connection) -> Iterator[torch.device]:
    """A GPU of its own if this host has any; with several ranks, a process group around it."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {connection.rank} has no GPU: this host has {torch.cuda.device_count()}; lower --ranks"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    sys.stdout.write(f"rank {connection.rank} trains on {device} ({name})\n")
    if connection.world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        if connection.world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
