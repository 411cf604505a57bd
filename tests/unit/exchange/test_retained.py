"""Contributions that a reducer retains."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.retained import Retained
from atoll.protocol.errors import DigestMismatch, InvalidMessage, RefusedError, StaleError

POOL = ThreadPoolExecutor(1)


def encoded(chunk: int, data: bytes) -> Encoded:
    return Encoded(chunk, data, data[:1] * 32)


def test_the_first_contribution_of_a_key_stays() -> None:
    held = Retained(POOL)
    for _ in range(2):
        held.add(1, 1, encoded(5, b"abc"))
        assert not held.is_new(1, 1, encoded(5, b"abc"))
    held.add(1, 1, encoded(5, b"xyz"))
    with pytest.raises(InvalidMessage, match="site 1 sent chunk 5 again with other bytes"):
        held.is_new(1, 1, encoded(5, b"xyz"))
    assert held.is_new(1, 2, encoded(5, b"xyz"))  # another incarnation is another contributor
    held.add(1, 2, encoded(5, b"xyz"))
    assert held.get(1, 1, 5) == encoded(5, b"abc")
    assert held.get(2, 1, 5) is None
    assert held.num_bytes == 6


def test_what_is_held_of_whom() -> None:
    held = Retained(POOL)
    for site, chunk in ((1, 0), (1, 3), (2, 3)):
        held.add(site, 1, encoded(chunk, b"1234"))
    assert held.chunks_of(1, 1) == {0, 3}
    assert held.chunks_of(1, 2) == set()
    asyncio.run(held.keep(lambda key: key[2] == 3))
    assert held.chunks_of(1, 1) == {3}
    assert held.num_bytes == 8


def test_refusals_are_counted_by_reason() -> None:
    counters = Counters()
    for error in (DigestMismatch(""), InvalidMessage(""), StaleError(""), RefusedError(""), InvalidMessage("")):
        counters.refuse(error)
    assert counters.refused == {DigestMismatch: 1, InvalidMessage: 2, StaleError: 1, RefusedError: 1}
