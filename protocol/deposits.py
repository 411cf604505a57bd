"""Records of the coordinator's store that sites keep for it, sealed: only the coordinator can make one. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator
from dataclasses import replace

from atoll.protocol.deposit_messages import DEPOSITS_PART_BYTES, MAX_DEPOSITS_AT_ONCE
from atoll.protocol.digest import Digest
from atoll.protocol.messages import Deposit

MAX_NUMBER = (1 << 63) - 1
OVERHEAD_BYTES = 128
"""Of a deposit beside its body, about."""


def fits(deposit: Deposit) -> bool:
    """A database takes its numbers."""
    return max(deposit.seq, deposit.number, deposit.part) <= MAX_NUMBER


class Seal:
    """Of one run. `secret`: of the run's root; nothing in a run in plain text."""

    def __init__(self, secret: bytes, run_id: str) -> None:
        self._key = Digest("atoll/deposit-key/v1").data(secret).data(run_id.encode()).finish()

    def sealed(self, deposit: Deposit) -> Deposit:
        return replace(deposit, seal=self._of(deposit))

    def is_whole(self, deposit: Deposit) -> bool:
        """This coordinator, or one before it, made it as it is."""
        return fits(deposit) and hmac.compare_digest(self._of(deposit), deposit.seal)

    def _of(self, d: Deposit) -> bytes:
        texts = (d.record, d.kind, d.name, d.kept_at.hex())
        digest = Digest("atoll/deposit/v1").data(self._key).uints((d.seq, d.number, d.part))
        for text in texts:
            digest.data(text.encode())
        return digest.data(d.body).finish()


def parts_of(deposits: Iterable[Deposit]) -> Iterator[tuple[Deposit, ...]]:
    """In order, each for one message."""
    part: list[Deposit] = []
    num_bytes = 0
    for deposit in deposits:
        size = len(deposit.body) + OVERHEAD_BYTES
        if part and (num_bytes + size > DEPOSITS_PART_BYTES or len(part) == MAX_DEPOSITS_AT_ONCE):
            yield tuple(part)
            part, num_bytes = [], 0
        part.append(deposit)
        num_bytes += size
    if part:
        yield tuple(part)
