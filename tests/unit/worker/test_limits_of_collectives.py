"""What ranks say to each other has the time limit that follows from the run's preset, in every group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import atoll
from atoll.node.parallel import mesh
from atoll.node.worker import own_model, trainer
from atoll.protocol.errors import StaleError
from examples.own_model import PARTS, Model, loss_of
from tests.harness.fake_node import FakeNode
from tests.unit.worker.test_worker_trainer import SETTINGS, start

MINUTES = {"local": 6.1, "lan": 10 + 1 / 6, "wan": 30.5}
LAYOUT = "dp_replicate=2,dp_shard=2,tp=2"
NUM_GROUPS = 5
"""All ranks, each dimension, and both of FSDP2 together, at least."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[timedelta]]:
    """Limits of groups, that of all ranks first. The ranks do nothing."""
    found: list[timedelta] = []
    really = dist.init_process_group

    def begin(backend: str, *, timeout: timedelta) -> None:
        found.append(timeout)
        really("fake", store=FakeStore(), rank=0, world_size=8)

    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(mesh, "_set_pg_timeout", lambda limit, group: found.append(limit))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield found
    assert not dist.is_initialized()


def are_of(preset: str, found: list[timedelta]) -> None:
    assert len(found) > NUM_GROUPS
    assert set(found) == {timedelta(minutes=MINUTES[preset])}


@pytest.mark.parametrize("preset", MINUTES)
def test_of_the_built_in_trainer(
    preset: str, told: list[timedelta], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    connection = start(
        FakeNode(), monkeypatch, (str(tmp_path / "text"),), world=8, settings=replace(SETTINGS, time_limits=preset)
    )
    connection.greeting = replace(connection.greeting, parallel=LAYOUT)

    def is_reached(*arguments: object) -> None:
        raise StaleError("the mesh is there")

    monkeypatch.setattr(trainer, "shared_model", is_reached)
    with pytest.raises(StaleError, match="the mesh is there"):
        trainer.train(connection)
    are_of(preset, told)


@pytest.mark.parametrize("preset", MINUTES)
def test_of_a_script_that_shares_its_model(preset: str, told: list[timedelta], monkeypatch: pytest.MonkeyPatch) -> None:
    connection = FakeNode().connection(replace(SETTINGS, time_limits=preset))
    connection.greeting = replace(connection.greeting, parallel=LAYOUT)
    monkeypatch.setattr(own_model, "connect", lambda: connection)
    with atoll.share(Model, loss_of, **PARTS):
        are_of(preset, told)
