"""The trace of a sync across sites. Every process computes the same ids, so all spans of a sync are in one trace, and
no process says a word of it to another (W3C Trace Context). Pure.

    sync                        the coordinator's: from the opening of a sync until its state is attested
      collect, attempt, attest  the coordinator's: until the first plan; of each plan; from the commit on
      site                      of each site: from the training of its window until its ranks have taken the result
        train, wait for plan, exchange, wait for commit, apply, publish, take

A span has no text of messages, errors or tensors in it: traces go to others than the run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from atoll.protocol.digest import Digest

TRACE_BYTES, SPAN_BYTES = 16, 8
DOMAIN = "atoll trace 1"
Attribute = str | int | float | tuple[str, ...]
Metadata = tuple[tuple[str, str], ...]
"""Of a call of gRPC."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of a span, in its trace."""

    trace_id: bytes
    span_id: bytes

    @property
    def traceparent(self) -> str:
        """As calls carry it: those that are made inside this span."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One that is over. Times are of its process's own monotonic clock."""

    name: str
    place: Place
    parent: Place | None = None
    begin_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    problem: str = ""
    """One of few words of this code; empty if it ended well."""


def of_sync(run_id: str, sync: int) -> Place:
    trace_id = Digest(DOMAIN).text("sync").text(run_id).uint(sync).finish()[:TRACE_BYTES]
    return Place(trace_id, inside(trace_id, "sync"))


def of_site(run_id: str, sync: int, site_id: int) -> Place:
    """Its part of the sync."""
    trace_id = of_sync(run_id, sync).trace_id
    return Place(trace_id, inside(trace_id, "site", site_id))


def of_exchange(run_id: str, sync: int, site_id: int, attempt: int) -> Place:
    """Of that site; its calls to peers are inside of it."""
    trace_id = of_sync(run_id, sync).trace_id
    return Place(trace_id, inside(trace_id, "exchange", site_id, attempt))


def of_session(run_id: str, site: str, incarnation: int, number: int) -> Place:
    """A stream to the coordinator outlasts many syncs, so it is a trace of its own."""
    trace_id = Digest(DOMAIN).text("session").text(run_id).text(site).uint(incarnation).uint(number).finish()
    return Place(trace_id[:TRACE_BYTES], inside(trace_id[:TRACE_BYTES], "session"))


def inside(trace_id: bytes, name: str, *numbers: int) -> bytes:
    """The id of the span of that name; the numbers tell it from others of the name in its trace."""
    return Digest(DOMAIN).data(trace_id).text(name).uints(numbers).finish()[:SPAN_BYTES]


CALLS: ContextVar[Place | None] = ContextVar("CALLS", default=None)
"""The span in which a task makes its calls, and the tasks that it starts; None where nothing is traced."""


def metadata() -> Metadata | None:
    """Of a call that is made here."""
    place = CALLS.get()
    return None if place is None else metadata_of(place)


def metadata_of(place: Place) -> Metadata:
    return (("traceparent", place.traceparent),)
