"""The coordinator's own configuration. The run's settings are in atoll.protocol.settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from atoll.coordinator.limits import CONNECTIONS_PER_ADDRESS
from atoll.coordinator.tracking import config as tracking
from atoll.coordinator.tracking.config import TrackConfig
from atoll.protocol.errors import ConfigError
from atoll.protocol.trust import plain_text


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Where one coordinator listens, and where it keeps its run."""

    store_path: Path
    """The run's SQLite file, on a local disk. A second coordinator on it is refused. Socket and root lie beside it, and
    beside where it would be if `store` is another one."""
    store: str = ""
    """A PostgreSQL database in place of the SQLite file, postgresql://USER@HOST/DATABASE without a password (~/.pgpass
    has it): a second coordinator on it stands by, and leads when the first one is gone."""
    listen: str = "127.0.0.1:7700"
    """HOST:PORT where nodes connect; port 0 takes any free one. Nodes of other machines need an address of this one."""
    http_listen: str = "127.0.0.1:7701"
    """HOST:PORT of the status page and /metrics (read-only); empty turns them off. Other machines see them over TLS
    alone, and with a viewer's token."""
    http_name: str = ""
    """By which name of this machine browsers come to the status page, beside the host of http_listen; on the machine
    itself, localhost."""
    advertise: str = ""
    """HOST:PORT where nodes reach the coordinator, for invites; without it, that of --listen."""
    trust: str = ""
    """The folder of the run's root: root.pem and root.key. Without it, the one beside the store, where a root is made
    at the first start."""
    connections_per_address: int = CONNECTIONS_PER_ADDRESS
    """Connections from one address on which nobody has shown a certificate yet, at once; as many new ones may come at
    once, and then as many in ten seconds. Sites that are in do not count, so hundreds may share an address behind a
    NAT; raise it if more than this start at the same moment behind one."""
    insecure: bool = False
    """Plain text, on this machine alone: each of its users can join the run or disturb it."""
    insecure_network: bool = False
    """Plain text for other machines too: whoever reaches the port can join the run or disturb it, and whoever is
    between can read. For a network in which everybody is trusted."""

    track: TrackConfig = field(default_factory=TrackConfig)

    @property
    def is_plain_text(self) -> bool:
        return self.insecure or self.insecure_network

    @property
    def kept_in(self) -> str:
        """In words."""
        return self.store or str(self.store_path)


@dataclass(frozen=True, slots=True)
class Restore:
    """The store is an old copy: sites say first what they have kept of the time since."""

    num_sites: int | None = None
    """That have to; None: more than half of those that were in the run, as far as is known."""


DATABASES = ("postgresql://", "postgres://")


def validate(config: CoordinatorConfig) -> None:
    """Raises ConfigError, naming the flag, if a value is out of range."""
    tracking.validate(config.track)
    if config.connections_per_address < 1:
        raise ConfigError(f"--connections-per-address {config.connections_per_address}: must be at least 1")
    if config.store and not config.store.startswith(DATABASES):
        raise ConfigError(f'store = "{config.store}": write postgresql://HOST/DATABASE; a SQLite file is --store PATH')
    if config.insecure and not config.insecure_network:
        plain_text.check({"--listen": config.listen, "--http-listen": config.http_listen})
