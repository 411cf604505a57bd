"""What the coordinator takes from outside, all in one place: connections, calls, messages, and how long it waits for
them. docs/decisions/0063-limits.md says why they are as they are; limits of a run (run.max_sites) are its settings'."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.protocol import messages as m
from atoll.protocol.pace import Pace

# --- connections

CONNECTIONS_PER_ADDRESS = 128
"""On which nobody has shown a certificate, at once; as many may come at once, and then as many in REFILL_S. Those of
sites that come in do not count any more."""
REFILL_S = 10.0
ACCEPTED = Pace(at_once=4096, per_s=250.0)
"""Connections that are taken from the kernel, of all addresses; those that show a certificate do not count. Each costs
up to 0.1 ms, however short it is."""
MAX_HANDSHAKES = 128
"""Connections that speak TLS with gRPC and on which nobody has shown a certificate, each some 75 kB there; the others
wait before the door, where they cost next to nothing."""
MAX_HANDSHAKES_OF_ADDRESS = 64
HANDSHAKES = Pace(at_once=256, per_s=64.0)
"""That are begun, for all addresses; those that end with a certificate do not count. Each costs some two
milliseconds."""
HALF_FORGOTTEN_S = 10.0
"""Half of what an address has begun and not ended is."""
CROWDED_HANDSHAKE_LIMIT_S = 4.0
"""From its beginning, while others wait."""
HANDSHAKE_LIMIT_S = 10.0
"""From a connection to its handshake, and again to the end of that."""
FIRST_CALL_LIMIT_S = 60.0
"""From there to the first call of somebody who may call is taken: in a crowd calls wait for this process."""
MAX_CONNECTIONS_OF_ONE = 16
"""Of one certificate's name; the newest stay, so a node that starts again is not locked out by its own dead ones."""
CONNECTIONS_OF_ONE = Pace(at_once=32, per_s=1.0)
"""Beyond that they count for their address."""
MORE_CONNECTIONS = 256
"""Beside those of each site, one of which may be broken: for whoever is not in the run, or looks at it."""
BUFFERED_BYTES = 64 << 10
"""Of a connection, in each direction, by the front door; beyond that the sender is not read."""
LAST_BYTES_S = 10.0
"""For them to be read where the other side has gone."""
DESCRIPTORS_EACH = 3
"""Of a connection through the front door: its own, and both ends of the one behind it."""
MAX_SOURCES = 4096
"""Addresses and identities of which the pace is remembered."""
LOOK_EVERY_S = 0.25
"""For connections that are late, and those that wait. An address that floods: protocol/accepting.py."""

# --- calls

MAX_CALLS_EACH = 4
"""At once on one connection: a node has one, for its session or the status. Each may hold a message that
gRPC reads, up to MAX_MESSAGE_BYTES, before anybody knows who sends it."""
CALLS_OF_ONE = Pace(at_once=40, per_s=4.0)
"""Of each method, by one certificate's name: sessions that begin anew, status, joins by one invite."""
STATUS_AGE_S = 0.5
"""At most, of what people are told of a run in which nothing was decided meanwhile."""
STATUS_OF_PAGES = Pace(at_once=8, per_s=2.0)
"""That are made for pages, however much is decided: each takes some five milliseconds, and grows with the run."""

# --- messages

MAX_MESSAGE_BYTES = 1 << 20
"""Of a site that is in the run, or was; PayloadList is the largest."""
MAX_FIRST_MESSAGE_BYTES = 1 << 14
"""Of Hello, and of whatever a stranger sends in its place."""
MAX_OFFER_BYTES = 1 << 16
"""Of a site that was welcomed for the first time."""
MAX_QUEUED_SENDS = 8192
"""A site that was away gets all commits of the longest log at once."""
MAX_QUEUED_BYTES = 1 << 28
"""Of these messages: a site that asks for what is large, and reads nothing, takes no more memory."""
MAX_QUEUED_EVENTS = 16
"""Of one stream: after that it is not read until they are handled."""
LARGE_MESSAGE_BYTES = 1 << 17
"""Beyond that it is parsed off the event loop; parts of a manifest hold one field only."""
PACE_OF_MESSAGES = Pace(at_once=200, per_s=20.0)
"""Of each kind, of one site, on all its streams. They are read no faster: whoever floods waits, and so does nobody
else."""
PACES_OF_MESSAGES: Mapping[type, Pace] = {
    # Of each sync, of which there may be one a step, in each fragment.
    m.Ready: Pace(at_once=1000, per_s=200.0),
    m.Done: Pace(at_once=1000, per_s=200.0),
    m.Applied: Pace(at_once=1000, per_s=200.0),
    m.LeaseRequest: Pace(at_once=1000, per_s=200.0),
    m.Products: Pace(at_once=1000, per_s=200.0),
    # Once a stream, and each ten seconds: a site whose streams end again and again waits at the calls alone.
    m.Hello: CALLS_OF_ONE,
    m.Telemetry: CALLS_OF_ONE,
    # Once a fetch, and again when a donor fails. The answer lists a whole log.
    m.FindSources: CALLS_OF_ONE,
    # Each heartbeat, where a script logs.
    m.Logged: Pace(at_once=30, per_s=4.0),
}
