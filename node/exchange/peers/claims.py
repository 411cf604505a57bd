"""Whether whoever calls is the site that it says to be."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakSet

from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Donor, Member
from atoll.protocol.trust.security import PLAIN, Security

MAX_REMEMBERED = 8192


class Claims:
    """Names of sites by their ids, as the coordinator has said them, beside the names of certificates. In plain text
    everybody is believed."""

    def __init__(self, security: Security = PLAIN) -> None:
        self.security = security
        self._names: OrderedDict[int, str] = OrderedDict()
        self._banned: frozenset[str] = frozenset()
        self._calls: dict[str, WeakSet[asyncio.Task[Any]]] = {}  # by whom, those that were let in

    def ban(self, names: Collection[str]) -> None:
        """These, and no others: none of their calls is let in from now on, and those that were end."""
        self._banned = frozenset(names)
        for name in self._banned & self._calls.keys():
            for call in self._calls.pop(name):
                call.cancel()

    def ban_of(self, context: Any) -> str:
        """Why whoever calls is answered no more; empty if it is not banned."""
        caller = self.security.caller(context)
        return f"{caller.subject} is banned" if caller is not None and caller.subject.site in self._banned else ""

    def learn(self, sites: Iterable[Member | Donor]) -> None:
        for site in sites:
            if site.name:
                self._names[site.site_id] = site.name
                self._names.move_to_end(site.site_id)
        while len(self._names) > MAX_REMEMBERED:
            self._names.popitem(last=False)

    def check(self, context: Any, site_id: int) -> None:
        """In the task of a call: raises RefusedError if that is by another than that site, or by one that is banned.
        A site that the coordinator has not named here yet is taken at its word: it is in the run by its certificate."""
        caller = self.security.caller(context)
        if caller is None:
            return
        name, known = caller.subject.site, self._names.get(site_id)
        if reason := self.ban_of(context):
            raise RefusedError(reason)
        if known is not None and known != name:
            raise RefusedError(f"{caller.subject} says to be site {site_id}, which is {known}")
        if (call := asyncio.current_task()) is not None:
            self._calls.setdefault(name, WeakSet()).add(call)
