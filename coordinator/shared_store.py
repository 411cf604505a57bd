"""A PostgreSQL database that several coordinators share, and the place of one of them. What imports psycopg, an extra,
is imported from here."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

from atoll.coordinator.authority import Authority
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.lease import Claim, Leading
from atoll.coordinator.postgresql import Database
from atoll.coordinator.postgresql_lease import PostgresqlLease
from atoll.coordinator.postgresql_store import PostgresqlStore
from atoll.coordinator.stage import NoRoots
from atoll.protocol.addresses import is_unspecified, parse_address
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.machine import Machine
from atoll.protocol.settings import RunSettings

HOLDER_BYTES = 8


class SharedStore:
    """The store, and this coordinator's place among those that share it. In threads: the database may not answer."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Raises ConfigError, HostError or StateError."""
        self._config = config
        self._database = Database.named(config.store)
        self.store = PostgresqlStore(self._database)

    def is_new(self) -> bool:
        """Whether no coordinator has led here."""
        return self.store.is_new

    async def place(
        self,
        settings: RunSettings,
        parent_json: str,
        authority: Authority | None,
        machine: Machine,
        stack: AsyncExitStack,
    ) -> Leading:
        """What this one claims is checked before it waits. Raises ConfigError: what of it is another run's."""
        config = self._config
        address = config.advertise or config.listen
        if is_unspecified(address) or not parse_address(address)[1]:
            raise ConfigError(
                f"--listen {config.listen} is no address that others reach: say with --advertise HOST:PORT where sites "
                "reach this coordinator; sites hear of all that share a store"
            )
        claim = Claim(machine.token_bytes(HOLDER_BYTES).hex(), address)
        roots = authority if authority is not None else NoRoots()
        lease = PostgresqlLease(self._database, claim)
        leading = Leading(lease, self.store.where, roots)
        await asyncio.to_thread(self.store.claims, claim, leading.takes, roots)
        await asyncio.to_thread(self.store.check, settings, parent_json)

        def end() -> None:
            with suppress(HostError):  # then it is over by itself
                leading.end()
            lease.close()

        stack.push_async_callback(asyncio.to_thread, end)
        return leading
