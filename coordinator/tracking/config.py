"""Which tools are told of a run, and where."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from atoll.protocol.errors import ConfigError

WANDB_MODES = ("", "online", "offline")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Tools that are told the curves of the run and of its sites; empty: not this one. A tool that is missing or away
    ends no run."""

    project: str = "atoll"
    """Of Weights & Biases and of Trackio, MLflow's experiment. The run is one run of it, under its run_id."""
    tensorboard: str = ""
    """A folder for event files of TensorBoard."""
    wandb: str = ""
    """Weights & Biases: "online" (`wandb login` first) or "offline" (files for `wandb sync`, beside the run's
    database). It needs pip install 'atoll[wandb]'."""
    mlflow: str = ""
    """The address of an MLflow server, or of a file of its own, such as "sqlite:///mlflow.db". It needs pip install
    'atoll[mlflow]'."""
    trackio: str = ""
    """Trackio: "local" (its database is beside the run's), or a Space of Hugging Face's, NAME/SPACE. It needs pip
    install 'atoll[trackio]'."""


def validate(config: TrackConfig) -> None:
    """Raises ConfigError, naming the key."""
    if config.wandb not in WANDB_MODES:
        raise ConfigError(f'track.wandb = "{config.wandb}"; write "online", "offline" or nothing')
    if has_password(config.mlflow):
        raise ConfigError(
            "track.mlflow has a password in it, which logs and the status page would show: leave it out, and put it "
            "into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD of the coordinator's environment"
        )
    if not config.project or "/" in config.project:
        raise ConfigError(f'track.project = "{config.project}": a name without a slash')


def has_password(address: str) -> bool:
    try:
        return urlsplit(address).password is not None
    except ValueError:
        return "@" in address
