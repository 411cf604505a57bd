"""What a reducer says while it waits for others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from atoll.node.exchange.sync.upstream import Upstream
from atoll.protocol.v1 import peer_pb2


def test_no_more_of_a_sites_contributions_arrives_than_it_has_sent() -> None:
    moved: list[int] = []
    counters = SimpleNamespace(moved_bytes=0)
    upstream: Any = SimpleNamespace(
        attempt=SimpleNamespace(
            loop=SimpleNamespace(time=lambda: 1.0), num_others=2, hurry=lambda spare_ms: None, counters=counters
        ),
        progress=SimpleNamespace(moved=lambda num_bytes, now: moved.append(num_bytes)),
        all_sent=True,
        waits_for=(),
        _num_written_bytes=100,
        _peer_received_bytes=0,
        _peer_moved_bytes=0,
        _peer_moved_at=0.0,
        _is_excused=lambda now: False,
    )
    for received_bytes in (60, 60, 1 << 40, 1 << 41):
        Upstream._peer_waits(upstream, peer_pb2.Waiting(site_ids=[1], received_bytes=received_bytes))
    assert moved == [60, 40]
    assert counters.moved_bytes == 100
