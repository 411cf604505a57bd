"""Where a process may be in plain text: on its own machine, or where its people say that they trust a network. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.protocol.addresses import is_loopback
from atoll.protocol.errors import ConfigError


def check(addresses: Mapping[str, str]) -> None:
    """Of what is in plain text on this machine alone, by the flags that say them. Raises ConfigError."""
    for flag, address in addresses.items():
        if address and not is_loopback(address):
            raise ConfigError(
                f"{flag} {address} with --insecure: whoever is on that network could read all of it, and join or "
                "disturb the run. Leave out --insecure, and invite sites (`atoll invite`); or say --insecure-network "
                "in its place where everybody on that network is trusted"
            )
