"""Handshakes of TLS with pages: whoever begins many keeps out nobody else."""

from __future__ import annotations

import pytest

from atoll.protocol import handshakes
from atoll.protocol.addresses import source_of
from atoll.protocol.handshakes import OF_ALL, OF_ONE, Crowd, Handshakes

VIEWER, OTHER_VIEWER = "198.51.100.7", "198.51.100.8"
SECONDS = 30


def flood(shaking: Handshakes, sources: list[str], now: float) -> int:
    """Each begins as many as it may. How many that are."""
    num = 0
    for source in sources:
        while shaking.begin(source, now):
            num += 1
    return num


def test_four_addresses_that_begin_all_that_they_may_keep_out_neither_a_known_viewer_nor_a_new_one() -> None:
    shaking = Handshakes()
    shaking.let_in(VIEWER)
    strangers, num_known = [f"203.0.113.{number}" for number in range(4)], 0
    for now in range(SECONDS):
        flood(shaking, strangers, float(now))
        num_known += sum(shaking.begin(VIEWER, float(now)) is Crowd.KNOWN for _ in range(8))
    assert num_known == 8 * SECONDS, "a page in eight tabs that looks each second"
    assert shaking.begin(OTHER_VIEWER, float(SECONDS)), "nobody was let in from there before"


def test_addresses_that_were_let_in_and_begin_all_that_they_may_keep_out_no_viewer() -> None:
    """A NAT that viewers share, say. Neither one that was let in before nor a new one."""
    shaking, known = Handshakes(), [f"192.0.2.{number}" for number in range(8)]
    for source in (*known, VIEWER):
        shaking.let_in(source)
    for now in range(SECONDS):
        flood(shaking, known, float(now))
        for source in (VIEWER, OTHER_VIEWER):
            assert shaking.begin(source, float(now)) is Crowd.FEW


def test_strangers_of_many_addresses_keep_out_nobody_who_was_let_in_and_nobody_on_this_machine() -> None:
    shaking = Handshakes()
    shaking.let_in(VIEWER)
    strangers = [f"203.0.{number // 250}.{number % 250}" for number in range(1000)]
    num = flood(shaking, strangers, 0.0)
    assert num == OF_ALL[Crowd.MANY].at_once + OF_ALL[Crowd.FEW].at_once
    assert flood(shaking, strangers, 10.0) <= 10.0 * (OF_ALL[Crowd.MANY].per_s + OF_ALL[Crowd.FEW].per_s)
    assert not shaking.begin(OTHER_VIEWER, 10.0), "a flood from a thousand addresses is a firewall's affair"
    for source in (VIEWER, source_of("127.0.0.1"), source_of("::1"), source_of("::ffff:127.0.0.1")):
        assert shaking.begin(source, 10.0)


def test_an_address_that_was_let_in_has_a_pace_too_and_is_forgotten_after_many_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshakes, "MAX_KNOWN", 2)
    shaking = Handshakes()
    for source in (VIEWER, OTHER_VIEWER, VIEWER, "192.0.2.1"):
        shaking.let_in(source)
    assert flood(shaking, [VIEWER], 0.0) == OF_ONE.at_once
    assert flood(shaking, [VIEWER], 10.0) == 10 * OF_ONE.per_s
    flood(shaking, [f"203.0.113.{number}" for number in range(200)], 10.0)
    assert shaking.begin("192.0.2.1", 10.0)
    assert not shaking.begin(OTHER_VIEWER, 10.0), "the one that was let in least recently"
