"""Whether whoever calls is the site that it says to be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Donor, Member
from atoll.protocol.trust.security import PLAIN, Security

MAX_REMEMBERED = 8192


class Claims:
    """Names of sites by their ids, as the coordinator has said them, beside the names of certificates. In plain text
    everybody is believed."""

    def __init__(self, security: Security = PLAIN) -> None:
        self._security = security
        self._names: OrderedDict[int, str] = OrderedDict()

    def learn(self, sites: Iterable[Member | Donor]) -> None:
        for site in sites:
            if site.name:
                self._names[site.site_id] = site.name
                self._names.move_to_end(site.site_id)
        while len(self._names) > MAX_REMEMBERED:
            self._names.popitem(last=False)

    def check(self, context: Any, site_id: int) -> None:
        """Raises RefusedError if the call of this context is by another than that site. One that the coordinator has
        not named here yet is taken at its word: it is in the run by its certificate, and says so of itself alone."""
        caller = self._security.caller(context)
        known = self._names.get(site_id)
        if caller is None or known is None or known == caller.subject.name:
            return
        raise RefusedError(f"{caller.subject} says to be site {site_id}, which is {known}")
