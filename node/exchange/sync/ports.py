"""What the exchange needs of the data plane. All of it is called from threads of a pool, several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from atoll.protocol.layout import Layout
from atoll.protocol.messages import Plan


class SyncData(Protocol):
    """The arithmetic of one sync."""

    @property
    def layout(self) -> Layout: ...

    @property
    def chunks(self) -> Sequence[int]:
        """The chunks that travel: those of the sync that have elements, ascending."""

    def max_bytes(self, chunk: int) -> int:
        """The most an encoded contribution or payload of this chunk can have."""

    def contribution(self, chunk: int) -> bytes:
        """This site's encoded contribution; the same bytes at every call. Raises NonFiniteError."""

    def check(self, chunk: int, data: bytes) -> None:
        """Raises InvalidMessage unless `data` can be an encoded chunk of this place."""

    def check_payload(self, chunk: int, data: bytes) -> None:
        """The same of a payload."""

    def reduce(self, chunk: int, contributions: Sequence[tuple[int, bytes | Callable[[], bytes]]]) -> bytes:
        """The payload of (tokens, contribution, or what reads it) in the order of site ids."""

    def stood_out(self) -> tuple[int, float, float] | None:
        """Of all that was averaged, the contribution (its place) that was nearest to its limit; norm and limit."""

    def payload_hash(self, data: bytes) -> bytes:
        """The hash that travels with an encoded chunk, contribution or payload."""


class PayloadWriter(Protocol):
    """Where the payloads of one sync and attempt go, in any order. An attempt that is begun again has what it had."""

    def missing(self) -> Sequence[int]:
        """Chunks whose payload is not here."""

    def read(self, chunk: int) -> bytes: ...

    def put(self, chunk: int, data: bytes, hash: bytes) -> None: ...

    def digest(self, plan: Plan) -> bytes:
        """The payload digest of `plan`; every chunk is there."""

    def seal(self, fsync: bool) -> None:
        """What was put is on the disk (with `fsync`: for a power cut as well)."""


class PayloadLog(Protocol):
    def begin(self, sync: int, term: int, attempt: int) -> PayloadWriter: ...
