"""What members that mean harm do to a node's parts: in the simulator, and in a process (tests/workers/hostile_node.py).

mute: trains, and is never ready. ready: says that it is ready, and exchanges nothing. waiting: contributes, and as a
reducer says for ever that it waits. false: what it reduces is not the average. made-up: as a reducer it adds another
error than its codec had left, and gives that. silent: it gives no auditor what it added. scale: its contributions, of
codec topk2, have a scale that no value has, too large for any payload. narrow: they are of rows of 64 columns, where
the layout has wider ones. In the simulator alone: one
that pulls payloads again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atoll.node.core import outputs as out
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.errors_given import Given
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.peers.progress import Worth
from atoll.node.exchange.sync.exchange import Exchange
from atoll.node.exchange.sync.reducer import Made
from atoll.protocol import messages as m
from atoll.protocol.codecs import HEADER_BYTES, EncodedHeader
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.codecs.sparse import TOPK2
from atoll.protocol.errors import PeerError, StateError
from atoll.protocol.layout import Chunk, Role
from atoll.protocol.v1 import peer_pb2

KINDS = ("mute", "ready", "waiting", "false", "made-up", "silent", "scale", "narrow")


def is_never_ready(output: out.Output) -> bool:
    """Whether a member that is mute does this."""
    return not (isinstance(output, out.Send) and isinstance(output.message, m.Ready))


def exchanges_nothing(output: out.Output) -> bool:
    """Whether a member that is ready only does this."""
    return not isinstance(output, out.BeginExchange | out.WeighExchange)


class _KeptBack(list[Made]):
    """Payloads of which nobody hears."""

    def append(self, payload: Made) -> None:
        pass

    def __iadd__(self, payloads: Any) -> _KeptBack:  # type: ignore[override,misc]
        return self


def only_waits(
    exchange: Exchange,
    names: Callable[[Exchange], Sequence[int]],
    *,
    claims_to_move: bool,
    tells_the_coordinator: bool,
) -> None:
    """`names`: for whom it says that it waits, to its peers and, if it tells, to the coordinator."""
    exchange.reducer.payloads = _KeptBack()
    num_said = 0

    def waiting(for_site_id: int) -> peer_pb2.Waiting:
        nonlocal num_said
        num_said += claims_to_move
        exchange.attempt.counters.moved_bytes += claims_to_move and tells_the_coordinator
        return peer_pb2.Waiting(moved_bytes=num_said, site_ids=names(exchange), received_bytes=num_said)

    exchange.reducer.waiting = waiting  # type: ignore[method-assign]
    if tells_the_coordinator:
        exchange.waits_for = lambda: (list(names(exchange)), [])  # type: ignore[method-assign]


def averages_falsely(
    exchange: Exchange, *, lies: Callable[[], bool], lied: Callable[[], None], buffers_alone: bool = False
) -> None:
    """Whenever `lies` says so, a payload that it makes is of the last contribution alone."""
    data = exchange.attempt.data
    reduce = data.reduce

    def reduce_so(chunk: int, contributions: Any, *rest: Any) -> bytes:
        honest = reduce(chunk, contributions, *rest)
        if not lies() or (buffers_alone and data.layout.chunks[chunk].role is Role.TRAINABLE):
            return honest
        false = reduce(chunk, [(tokens, contributions[-1][1]) for tokens, _ in contributions], *rest)
        if false != honest:
            lied()
        return false

    data.reduce = reduce_so  # type: ignore[method-assign, assignment]


def contributes_what_spoils_bundles(exchange: Exchange, change: Callable[[bytes, int], bytes]) -> None:
    """Of trainable chunks, of codec topk2: what `change` makes of the encoded chunk of so many elements."""
    data = exchange.attempt.data
    encoded = data._contribution

    def encoded_so(spec: Chunk) -> bytes:
        honest = encoded(spec)
        return change(honest, spec.num_elements) if spec.role is Role.TRAINABLE and spec.num_elements else honest

    data._contribution = encoded_so  # type: ignore[method-assign]


def with_a_scale_too_large(data: bytes, num_elements: int) -> bytes:
    """All entries have the first level; that of the second, which none has, is 2^127."""
    scales, entries, _ = TOPK2.parts_bytes(num_elements)
    body = np.frombuffer(data, np.uint8, offset=HEADER_BYTES).copy()
    body[:scales].view(np.float32)[1::2] = np.float32(2.0**127)
    body[scales : scales + entries] &= 0xFF ^ TOPK2.bucket
    return data[:HEADER_BYTES] + body.tobytes()


def of_narrow_rows(data: bytes, num_elements: int) -> bytes:
    """The same entries, of a chunk that is 64 columns wide."""
    return (
        EncodedHeader(codec="topk2", zstd=False, dtype="F32", num_elements=num_elements, columns=64).pack()
        + (data[HEADER_BYTES:])
    )


def adds_made_up_errors(hub: Hub) -> None:
    """To its averages, three times what its codec had left. It signs that, and gives it to auditors."""
    errors, made_up = hub.average_errors, dict[tuple[AttemptKey | None, int], Floats]()
    audited, of, added = errors.audited, errors.of, errors.added
    assert audited is not None

    def of_so(chunk: int, attempt: AttemptKey | None) -> Floats:
        return made_up.setdefault((attempt, chunk), 3 * of(chunk, attempt))

    def added_so(attempt: AttemptKey, chunk: int) -> Given:
        earlier = audited.earlier(attempt, chunk)
        return replace(added(attempt, chunk), error=made_up[earlier, chunk].tobytes() if earlier else b"")

    assert hub.donor is not None
    errors.of, hub.donor.added = of_so, added_so  # type: ignore[method-assign]
    audited.whole = lambda chunk, attempt, error: error  # type: ignore[method-assign]


def gives_no_errors(hub: Hub) -> None:
    """To auditors, of its averages."""

    def added(attempt: AttemptKey, chunk: int) -> Given:
        raise StateError("it is not kept here any more")

    assert hub.donor is not None
    hub.donor.added = added


def pulls_again(exchange: Exchange, *, hangs_up: bool, claims_to_move: bool) -> None:
    """No payload is ever stored, so that its links open stream after stream and ask for all of them. It blames nobody.
    `hangs_up`: in the middle of what it gets. `claims_to_move`: for ever."""

    async def store(items: list[Encoded]) -> int:
        if hangs_up:
            raise PeerError("this site has had enough")
        return 0

    exchange.collection.store = store  # type: ignore[method-assign]
    exchange._overdue = lambda *, num_stalls: None  # type: ignore[method-assign]
    for upstream in exchange.upstreams:
        upstream.check = lambda now: None  # type: ignore[method-assign]
        if claims_to_move:
            upstream._worth_down = Worth(1 << 40)


def others(exchange: Exchange) -> list[int]:
    return [member.site_id for member in exchange.reducer.own.children]
