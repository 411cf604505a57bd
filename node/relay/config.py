"""What a relay needs to know beside its home."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    home: Path
    """The folder with which this machine has joined, as a relay."""
    listen: str
    """For sites, which attach and call here; the one port that has to be open."""
    http_listen: str = ""
    """Where /metrics is served; without it, nowhere."""
    quota_gb: float = 0.0
    """Bytes a day that are carried for each site that calls another, in units of 10^9; 0 for any number."""
    log_format: str = "text"
    """text or json: what the relay says; as json an object a line."""


def validate(config: RelayConfig) -> None:
    """Raises ConfigError."""
    for address in filter(None, (config.listen, config.http_listen)):
        parse_address(address)
    if not 0 <= config.quota_gb < 1e9:
        raise ConfigError(f"--quota-gb {config.quota_gb:g}: must be 0, for no quota, or more")
