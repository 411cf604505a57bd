"""The tools that a configuration names, each with its feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from atoll.coordinator.tracking.config import TrackConfig
from atoll.coordinator.tracking.feed import Feed
from atoll.coordinator.tracking.mlflow import MlflowTracker
from atoll.coordinator.tracking.tensorboard import TensorBoard
from atoll.coordinator.tracking.tracker import About, Tracker
from atoll.coordinator.tracking.trackio import TrackioTracker
from atoll.coordinator.tracking.wandb import WandbTracker
from atoll.protocol.machine import Machine


def feeds(config: TrackConfig, about: About, folder: Path, machine: Machine) -> Iterator[Feed]:
    """None is started. `folder`: for what they keep here."""
    for name, where, opened in _wanted(config, about, folder, machine):
        yield Feed(name, opened, folder / f"{name}.told", f"{about.run_id} {config.project} {where}")


def _wanted(
    config: TrackConfig, about: About, folder: Path, machine: Machine
) -> Iterator[tuple[str, str, Callable[[], Tracker]]]:
    if where := config.tensorboard:
        name = f"events.out.tfevents.{machine.wall_time():.0f}.{machine.token_bytes(4).hex()}"
        yield "tensorboard", where, partial(TensorBoard, Path(where), name, machine.wall_time)
    if where := config.wandb:
        yield "wandb", where, partial(WandbTracker, where, config.project, about, folder)
    if where := config.mlflow:
        yield "mlflow", where, partial(MlflowTracker, where, config.project, about)
    if where := config.trackio:
        yield "trackio", where, partial(TrackioTracker, where, config.project, about, folder / "trackio")
