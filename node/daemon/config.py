"""What one node needs to know beside the run's settings, which it gets from the coordinator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.node.daemon.interfaces import LOOPBACK
from atoll.node.daemon.rank_commands import LAUNCHERS, LaunchConfig
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import SITE_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    coordinator: str
    """HOST:PORT of the coordinator."""
    name: str
    """Name of the site, unique within the run."""
    data_paths: tuple[Path, ...] = ()
    """Text files and folders to train on; empty: what the run's `data` names."""
    advertise: str = ""
    """HOST:PORT where other nodes reach this one; empty: the listen address."""
    listen: str = ""
    """HOST:PORT this node listens on; empty: the local address of its connection to the coordinator, any port."""
    home: Path | None = None
    """The node's own folder (key, outer state, log); None: by run and name, see `default_home`."""
    from_saved: Path | None = None
    """Folder of a saved model that a resumed run starts from."""
    num_ranks: int = 1
    """Worker processes of this site."""
    num_threads: int = 0
    """Threads of each worker and of the node's kernels; 0: cores / ranks."""
    command: tuple[str, ...] = ()
    """The user's script and its arguments; empty: the built-in trainer."""
    launcher: str = "python"
    """python: the node starts the script once for each rank; exec: the same with any command; torchrun: its agent does.
    """
    interface: str = ""
    """torchrun: the network interface of its ranks' groups; empty: loopback."""
    max_retained_bytes: int | None = None
    """Contributions of other sites that this node holds at most as a reducer; a plan that needs more is refused. None:
    what the machine has room for, see room.py."""
    reduce_buffer_bytes: int | None = None
    """Of these, in memory; the rest is on the disk below `home`. None: see room.py."""
    bandwidth_bytes_per_s: int = 0
    """Uplink, for the coordinator's spreading of reducers; 0: unknown."""
    http_listen: str = ""
    """HOST:PORT of /metrics; empty: off."""
    save_dir: Path | None = None
    """Where the trained model is saved; None: `model` in the node's folder."""
    debug: bool = False
    """Tracebacks and debug lines in the log."""

    @property
    def num_rank_threads(self) -> int:
        return self.num_threads or max(1, _num_cores() // self.num_ranks)

    @property
    def launch(self) -> LaunchConfig:
        return LaunchConfig(
            launcher=self.launcher,
            command=self.command,
            num_ranks=self.num_ranks,
            num_threads=self.num_rank_threads,
            interface=self.interface or LOOPBACK,
        )

    @property
    def num_kernel_threads(self) -> int:
        """Of the node's own kernels, which run while the workers wait."""
        return self.num_threads or _num_cores()


def validate(config: NodeConfig) -> None:
    """Raises ConfigError, naming the flag, if a value is out of range."""
    if not SITE_NAME.fullmatch(config.name):
        raise ConfigError(
            f'--name "{config.name}": 1 to 64 letters, digits, ".", "_" or "-", the first a letter or digit'
        )
    if config.num_ranks < 1:
        raise ConfigError(f"--ranks {config.num_ranks}: a site has at least one rank")
    if config.num_threads < 0:
        raise ConfigError(f"--threads {config.num_threads}: must be at least 1, or 0 for cores / ranks")
    if config.launcher not in LAUNCHERS:
        raise ConfigError(f"--launcher {config.launcher}: choose one of {', '.join(LAUNCHERS)}")
    if config.launcher == "exec" and not config.command:
        raise ConfigError("--launcher exec needs a command after --")
    if config.interface and config.launcher != "torchrun":
        raise ConfigError(
            f"--interface {config.interface}: only with --launcher torchrun; otherwise ranks use {LOOPBACK} alone"
        )
    if min(config.max_retained_bytes or 0, config.reduce_buffer_bytes or 0, config.bandwidth_bytes_per_s) < 0:
        raise ConfigError("--max-retained-mib, --reduce-buffer-mib and --bandwidth-mbit cannot be negative")


def default_home(run_id: str, name: str, environment: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/atoll/RUN/NAME`, or the same below `~/.local/state`."""
    state = environment.get("XDG_STATE_HOME") or str(Path(environment.get("HOME", ".")) / ".local" / "state")
    return Path(state) / "atoll" / run_id / name


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
