"""What other hosts of a site keep of its contributions, for whoever asks host 0: sites that audit know one address of
the site, or wait for it to dial them, and a host that came back is at another address than plans say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from atoll.node.daemon.hosts.attached import Hosts
from atoll.node.exchange.catchup.donor_client import Answer, DonorClient, dialled
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Purpose
from atoll.node.exchange.peers.progress import Pace
from atoll.protocol import messages as m
from atoll.protocol.errors import NotYetError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptElsewhere:
    """Of the leader."""

    attached: Hosts
    hub: Hub
    donor: Callable[[], m.Donor]
    """The site."""
    num_hosts: int
    own_of: Callable[[int], range]
    pace: Pace
    _num_asked: Counter[str] = field(default_factory=Counter, init=False)
    """Requests that are not over, by address."""

    def client(self, chunk: int) -> DonorClient | None:
        """Of the host that has the chunk; None: that is host 0. Raises NotYetError while the host is not here."""
        number = next((number for number in range(1, self.num_hosts) if chunk in self.own_of(number)), None)
        if number is None:
            return None
        host = self.attached.get(number)
        if host is None or not host.addresses:
            raise NotYetError(f"host {number} of this site, which keeps chunk {chunk}, is not here")
        return DonorClient(
            donor=replace(self.donor(), address=host.site_address),
            ask=self._ask,
            answered=self.hub.dialer.reached,
            header=self.hub.identity(),
            counters=self.hub.counters,
            pace=self.pace,
        )

    async def _ask(self, donor: m.Donor, method: str, request: bytes) -> Answer:
        """Over the host's one connection, which ends with the last request: a host that comes back has another one."""
        self._num_asked[donor.address] += 1
        try:
            answer = await dialled(self.hub.dialer, Purpose.AUDIT)(donor, method, request)
        except BaseException:
            self._over(donor)
            raise
        return _Asked(answer, partial(self._over, donor))

    def _over(self, donor: m.Donor) -> None:
        self._num_asked[donor.address] -= 1
        if not self._num_asked[donor.address]:
            del self._num_asked[donor.address]
            self.hub.dialer.disconnect(donor, Purpose.AUDIT)


@dataclass(frozen=True, slots=True)
class _Asked:
    answer: Answer
    over: Callable[[], None]

    async def read(self) -> object:
        return await self.answer.read()

    def cancel(self) -> None:
        """Called once, by `DonorClient`."""
        self.answer.cancel()
        self.over()
