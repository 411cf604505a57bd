"""Which connections of a relay belong together, and what each site may have carried."""

from __future__ import annotations

from itertools import count

import pytest

from atoll.node.relay import pairing
from atoll.node.relay.pairing import TICKET_LIMIT_S, Pairing, SessionCertificate
from atoll.node.relay.quota import DAY_S, MAX_SITES, Quotas
from atoll.node.relay.words import MAX_START
from atoll.protocol.errors import RefusedError

NUMBERS = count()


def tickets() -> tuple[bytes, bytes]:
    return next(NUMBERS).to_bytes(32, "big"), next(NUMBERS).to_bytes(32, "big")


def signed(key: str = "key", since_s: float = 0.0) -> SessionCertificate:
    return SessionCertificate(key.encode(), since_s, since_s + DAY_S)


def with_b(bytes_a_day: int = 0, max_pairs: int = 9, each: int = 9) -> Pairing:
    """Site b is attached."""
    found = Pairing(Quotas(bytes_a_day), max_pairs, each)
    found.attach("b", signed(), 1)
    return found


def test_a_pair_is_whole_when_both_have_come_each_with_its_own_ticket() -> None:
    relay, both = with_b(), tickets()
    control = relay.call("a", "b", both, 0.0)
    assert control == relay.control_of("b")
    first = relay.come(both[1], 1.0)
    assert first is not None
    assert (first.caller, first.called, first.is_whole) == ("a", "b", False)
    assert relay.come(both[1], 1.0) is None, "it is used up"
    assert relay.come(both[0], 1.0) is first
    assert first.is_whole
    assert relay.come(both[0], 1.0) is None
    assert relay.late(1e9) == []
    assert relay.pairs == [first]
    relay.end(first)
    relay.end(first)
    assert relay.pairs == []


def test_a_ticket_is_good_for_a_while() -> None:
    relay, both = with_b(), tickets()
    relay.call("a", "b", both, 5.0)
    assert relay.late(4.9 + TICKET_LIMIT_S) == []
    (late,) = relay.late(5.0 + TICKET_LIMIT_S)
    assert relay.come(both[0], 4.9 + TICKET_LIMIT_S) is late
    assert relay.come(both[1], 5.0 + TICKET_LIMIT_S) is None
    assert relay.late(5.0 + TICKET_LIMIT_S) == [late], "the one that came is still to be told"
    relay.end(late)
    assert relay.come(both[1], 5.0) is None
    relay.call("a", "b", both, 0.0)
    relay.end(relay.pairs[0])
    assert relay.come(both[0], 0.0) is None, "ended before anybody came"


def test_nobody_is_led_to_a_site_that_is_not_attached() -> None:
    relay = with_b()
    with pytest.raises(RefusedError, match="site c is not attached"):
        relay.call("a", "c", tickets(), 0.0)
    control = relay.control_of("b")
    assert control is not None
    relay.detach("b", control)
    with pytest.raises(RefusedError, match="site b is not attached"):
        relay.call("a", "b", tickets(), 0.0)


def test_the_newest_connection_of_the_newest_start_is_the_one_that_hears() -> None:
    relay = Pairing(Quotas(0), 9)
    first, before = relay.attach("b", signed(), 2)
    assert before is None
    second, before = relay.attach("b", signed(), 2)
    assert before == first
    relay.detach("b", first)
    assert relay.control_of("b") == second, "the end of one that was replaced changes nothing"
    with pytest.raises(RefusedError, match="start 1 of site b is over: start 2 is attached"):
        relay.attach("b", signed(), 1)
    relay.detach("b", second)
    assert relay.attached == []
    relay.attach("b", signed(), 1)  # nobody keeps a site out by a number that it said once


def test_a_newer_certificate_takes_the_place_of_an_older_one_whatever_the_start() -> None:
    relay = Pairing(Quotas(0), 9)
    thief, _ = relay.attach("b", signed("captured", 100.0), MAX_START - 1)
    owner, before = relay.attach("b", signed("owner's", 101.0), 1)
    assert before == thief
    with pytest.raises(RefusedError, match="a newer certificate of site b is attached"):
        relay.attach("b", signed("captured", 100.0), MAX_START - 1)
    assert relay.control_of("b") == owner
    renewed, before = relay.attach("b", signed("renewed", 200.0), 1)
    assert before == owner, "the same start, by the certificate that it has renewed while it was attached"
    relay.detach("b", renewed)
    relay.attach("b", signed("of a clock that is behind", 150.0), 2)  # nobody is kept out by who has gone


def test_of_certificates_of_one_second_the_newest_connection_hears_whatever_the_start() -> None:
    """A start that a thief says would keep the owner out until its certificate is renewed."""
    relay = Pairing(Quotas(0), 9)
    thief, _ = relay.attach("b", signed("captured"), MAX_START - 1)
    _, before = relay.attach("b", signed("owner's"), 1)
    assert before == thief


def test_connections_are_bounded_for_each_site_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = with_b(max_pairs=3, each=2)
    for _ in range(2):
        relay.call("a", "b", tickets(), 0.0)
    with pytest.raises(RefusedError, match="site a has 2 connections through this relay"):
        relay.call("a", "b", tickets(), 0.0)
    relay.call("c", "b", tickets(), 0.0)
    with pytest.raises(RefusedError, match="this relay has 3 connections"):
        relay.call("d", "b", tickets(), 0.0)
    relay.end(relay.pairs[0])
    relay.call("a", "b", tickets(), 0.0)
    monkeypatch.setattr(pairing, "MAX_PAIRS_BETWEEN", 1)
    relay.end(relay.pairs[-1])
    with pytest.raises(RefusedError, match="site a has 1 connections to site b: no more"):
        relay.call("a", "b", tickets(), 0.0)
    relay.attach("d", signed(), 1)
    relay.call("a", "d", tickets(), 0.0)
    assert [pair.caller for pair in relay.of_caller("a")] == ["a", "a"]
    monkeypatch.setattr(pairing, "MAX_SITES", 1)
    with pytest.raises(RefusedError, match="1 sites are attached"):
        relay.attach("c", signed(), 1)
    relay.attach("b", signed(), 1)


def test_a_site_that_has_used_its_quota_is_refused_until_its_day_is_over() -> None:
    relay = with_b(bytes_a_day=1000)
    quotas = relay._quotas
    assert not quotas.charge("a", 999, 0.0)
    relay.call("a", "b", tickets(), 1.0)
    assert quotas.charge("a", 1, 60.0)
    assert not quotas.charge("a", 5, 60.0), "it is said once"
    with pytest.raises(RefusedError, match=r"site a has used its quota of 1e-06 GB a day .* in 1439 minutes"):
        relay.call("a", "b", tickets(), 60.0)
    relay.call("c", "b", tickets(), 60.0)
    relay.call("a", "b", tickets(), DAY_S)
    assert quotas.charge("a", 1000, DAY_S + 1)
    assert quotas.totals == {"a": 2005, "c": 0}
    assert quotas.num_ended == 2


def test_no_quota_is_no_bound_and_what_is_remembered_has_one() -> None:
    quotas = Quotas(0)
    assert not quotas.charge("a", 10**15, 0.0)
    assert quotas.refusal("a", 0.0) == ""
    for number in range(MAX_SITES):
        quotas.charge(f"s{number}", 1, 0.0)
    assert len(quotas.totals) == MAX_SITES
    assert "a" not in quotas.totals
