"""How many bytes each site has had carried today, and whether it may have more. Pure.

Charged is the site that called, for both directions: nobody can use up what another has.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

DAY_S = 86_400.0
MAX_SITES = 4096
"""That are remembered; those that had something carried last."""


@dataclass(slots=True)
class _Account:
    total_bytes: int = 0
    """Since the relay's start."""
    day_bytes: int = 0
    day_ends: float = 0.0


class Quotas:
    def __init__(self, bytes_a_day: int) -> None:
        """0: no bound."""
        self._bytes_a_day = bytes_a_day
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self.num_ended = 0
        """Times that a site came to its end."""

    def charge(self, name: str, num_bytes: int, now: float) -> bool:
        """Whether the site is at the end of its quota by that."""
        account = self._account(name, now)
        had_some = self._has_some(account)
        account.total_bytes += num_bytes
        account.day_bytes += num_bytes
        is_at_end = had_some and not self._has_some(account)
        self.num_ended += is_at_end
        return is_at_end

    def refusal(self, name: str, now: float) -> str:
        """Why nothing more is carried for that site; empty if something is."""
        account = self._account(name, now)
        if self._has_some(account):
            return ""
        return (
            f"site {name} has used its quota of {self._bytes_a_day / 1e9:g} GB a day (`atoll relay --quota-gb`): it is "
            f"served again in {max(1.0, account.day_ends - now) / 60:.0f} minutes"
        )

    @property
    def totals(self) -> dict[str, float]:
        """Bytes carried since the relay's start, by the site that called."""
        return {name: account.total_bytes for name, account in self._accounts.items()}

    def _has_some(self, account: _Account) -> bool:
        return not self._bytes_a_day or account.day_bytes < self._bytes_a_day

    def _account(self, name: str, now: float) -> _Account:
        account = self._accounts.pop(name, None) or _Account(day_ends=now + DAY_S)
        self._accounts[name] = account
        while len(self._accounts) > MAX_SITES:
            self._accounts.popitem(last=False)
        if now >= account.day_ends:
            account.day_bytes, account.day_ends = 0, now + DAY_S
        return account
