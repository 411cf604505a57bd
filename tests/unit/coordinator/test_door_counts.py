from __future__ import annotations

import itertools
import random

import pytest

from atoll.coordinator import limits
from atoll.coordinator.door_counts import Counts, Turned
from atoll.protocol.addresses import source_of

HERE, THERE = "10.0.0.1", "10.0.0.2"


def test_an_address_has_so_many_on_which_nobody_has_shown_a_certificate_and_another_has_its_own() -> None:
    counts = Counts(per_address=2, in_all=100)
    assert [counts.come(n, HERE, 0.0) for n in (1, 2, 3)] == [(), (), Turned.ADDRESS]
    assert counts.come(4, THERE, 0.0) == ()
    counts.gone(1)
    assert counts.come(5, HERE, 10.0) == (), "a place is free again"


def test_an_address_opens_so_many_after_a_rest_and_then_at_a_pace() -> None:
    counts = Counts(per_address=2, in_all=100)

    def passes(number: int, now: float) -> bool:
        if counts.come(number, HERE, now) == ():
            counts.gone(number)
            return True
        return False

    assert [passes(n, 0.0) for n in range(4)] == [True, True, False, False]
    assert counts.come(9, HERE, 0.0) is Turned.PACE
    assert passes(5, limits.REFILL_S / 2)
    assert counts.come(6, THERE, 0.0) == ()


def test_sites_that_are_in_do_not_count_for_the_address_that_they_share() -> None:
    """Hundreds behind one NAT, each of which takes a place for its handshake alone."""
    counts = Counts(per_address=4, in_all=10_000)
    for number in range(1000):
        assert counts.come(number, HERE, 0.0) == ()
        assert counts.is_of(number, f"site {number}", 0.0) == ()
    assert [counts.come(n, HERE, 0.0) for n in range(1000, 1005)] == [(), (), (), (), Turned.ADDRESS]


def test_a_certificate_that_opens_connections_too_fast_pays_with_its_address_pace() -> None:
    counts = Counts(per_address=4, in_all=10_000)
    for number in itertools.count():
        if (found := counts.come(number, HERE, 0.0)) != ():
            break
        counts.is_of(number, "site", 0.0)
        counts.gone(number)
    assert (found, number) == (Turned.PACE, limits.CONNECTIONS_OF_ONE.at_once + 4)


def test_the_newest_connections_of_a_certificate_stay() -> None:
    """A node that starts again is not locked out by those that died with it."""
    counts = Counts(per_address=100, in_all=100)
    most = limits.MAX_CONNECTIONS_OF_ONE
    ended: list[int] = []
    for number in range(most + 3):
        counts.come(number, HERE, 0.0)
        ended += counts.is_of(number, "site", 0.0)
    assert ended == [0, 1, 2]
    assert not counts.is_here(0)
    assert counts.is_of(most, "site", 0.0) == (), "another call on one of them"
    counts.come(99, HERE, 0.0)
    assert counts.is_of(99, "another", 0.0) == ()


def test_whoever_says_nothing_is_late_and_whoever_is_known_is_not() -> None:
    counts = Counts(per_address=100, in_all=100)
    counts.come(1, HERE, 0.0)
    counts.come(2, HERE, 1.0)
    counts.is_of(1, "site", 0.5)
    assert counts.late(limits.HANDSHAKE_LIMIT_S + 0.9) == ()
    assert counts.late(limits.HANDSHAKE_LIMIT_S + 1.0) == (2,)
    assert len(counts) == 1


def a_crowd(counts: Counts, num: int, now: float = 0.0, first: int = 0, per_address: int = 1) -> list[int]:
    """Connections that have come and said their first words, from as many addresses as that takes."""
    numbers = list(range(first, first + num))
    for number in numbers:
        network = number // per_address
        assert counts.come(number, f"10.1.{network // 256}.{network % 256}", now) == ()
        counts.wait(number)
    return numbers


def test_so_many_handshakes_are_under_way_and_the_others_wait_for_places() -> None:
    counts = Counts(per_address=2, in_all=10_000)
    most = limits.MAX_HANDSHAKES
    numbers = a_crowd(counts, most + 5)
    assert list(counts.enter(0.0)) == numbers[:most]
    assert counts.enter(1.0) == ()
    counts.is_of(0, "site", 1.0)
    counts.gone(1)
    assert list(counts.enter(1.0)) == numbers[most : most + 2]
    for number in numbers:
        counts.gone(number)
    assert not counts.enter(2.0)


def test_one_address_leaves_handshakes_to_others() -> None:
    counts = Counts(per_address=1000, in_all=10_000)
    most = limits.MAX_HANDSHAKES_OF_ADDRESS
    numbers = a_crowd(counts, most + 1, per_address=1000)
    assert list(counts.enter(0.0)) == numbers[:most]
    counts.come(5000, HERE, 0.0)
    counts.wait(5000)
    assert counts.enter(0.0) == (5000,)
    counts.gone(0)
    assert counts.enter(0.0) == (most,)


KNOWN, NEWCOMER = "10.3.0.0", "10.2.0.0"
FEW_KNOWN = tuple(f"10.8.0.{number}" for number in range(8))
"""Of which sites came in: a NAT of a campus, say. Whoever sits behind it may begin all that a site there might."""
FEW_STRANGERS = tuple(f"10.9.0.{number}" for number in range(16))
MANY_STRANGERS = tuple(f"10.10.{number // 250}.{number % 250}" for number in range(300))


@pytest.mark.parametrize("breaks_off", [False, True], ids=["holds its places", "breaks off"])
@pytest.mark.parametrize(
    "flooding",
    [FEW_KNOWN[:3], FEW_KNOWN, FEW_STRANGERS, FEW_KNOWN + FEW_STRANGERS, FEW_KNOWN + MANY_STRANGERS],
    ids=["three known", "eight known", "strangers", "both", "a crowd"],
)
def test_addresses_that_begin_all_that_they_may_keep_out_neither_a_site_that_was_there_before_nor_a_newcomer(
    flooding: tuple[str, ...], breaks_off: bool
) -> None:
    """They end no handshake. Each of the two honest ones gets its turn before its connection is too late."""
    counts, numbers = Counts(per_address=limits.CONNECTIONS_PER_ADDRESS, in_all=2000), itertools.count()
    for source in (*FEW_KNOWN, KNOWN):
        number = next(numbers)
        assert counts.come(number, source, 0.0) == ()
        assert counts.is_of(number, f"site {number}", 0.0) == ()
        counts.gone(number)
    honest, entered, now = dict[str, int](), set[int](), 0.0
    num_begun, from_s = 0, 30.0
    while now < from_s + limits.HANDSHAKE_LIMIT_S:
        for source in flooding:
            while not isinstance(counts.come(number := next(numbers), source, now), Turned):
                counts.wait(number)
        if now == from_s:
            for source in (NEWCOMER, KNOWN):
                honest[source] = next(numbers)
                assert not isinstance(counts.come(honest[source], source, now), Turned)
                counts.wait(honest[source])
        while begun := counts.enter(now):
            num_begun += len(begun)
            entered.update(begun)
            if not breaks_off:
                break
            for number in set(begun) - set(honest.values()):
                counts.gone(number)
        if entered >= set(honest.values()) and honest:
            break
        assert not set(honest.values()) & set(counts.late(now)), "they are let in before they are too late"
        now += limits.LOOK_EVERY_S
    assert honest
    assert entered >= set(honest.values())
    assert num_begun > limits.HANDSHAKES.at_once, "what there is for handshakes was used up"


def test_strangers_of_any_number_keep_out_no_site_that_was_there_before() -> None:
    """Each address of theirs is a new one."""
    counts = Counts(per_address=limits.CONNECTIONS_PER_ADDRESS, in_all=10_000)
    assert counts.come(0, KNOWN, 0.0) == ()
    counts.is_of(0, "site", 0.0)
    counts.gone(0)
    a_crowd(counts, 1000, first=1)
    begun = counts.enter(0.0)
    assert counts.come(5000, KNOWN, 0.0) == ()
    counts.wait(5000)
    counts.gone(begun[0])
    assert counts.enter(0.0) == (5000,)


def test_handshakes_that_ended_well_hold_nobody_up_afterwards() -> None:
    """A crowd of sites from one address has come in. One more from there has the turn of the oldest."""
    counts = Counts(per_address=limits.MAX_HANDSHAKES, in_all=10_000)
    for number in range(2 * limits.MAX_HANDSHAKES):
        assert counts.come(number, HERE, 0.0) == ()
        counts.wait(number)
        assert counts.enter(0.0) == (number,)
        counts.is_of(number, f"site {number}", 0.0)
    for number, source in ((1000, HERE), (1001, KNOWN), (1002, NEWCOMER)):
        assert counts.come(number, source, 0.0) == ()
        counts.wait(number)
    assert counts.enter(0.0) == (1000, 1001, 1002)


def test_handshakes_have_a_pace_and_those_of_sites_that_come_in_do_not_count() -> None:
    """However many addresses there are."""
    counts = Counts(per_address=2, in_all=100_000)
    for number in range(10 * limits.HANDSHAKES.at_once):
        a_crowd(counts, 1, first=number)
        assert counts.enter(0.0) == (number,)
        counts.is_of(number, f"site {number}", 0.0)
    a_crowd(counts, 2 * limits.HANDSHAKES.at_once, first=50_000)
    num_begun = 0
    while numbers := counts.enter(0.0):
        num_begun += len(numbers)
        for number in numbers:
            counts.gone(number)
    assert num_begun == limits.HANDSHAKES.at_once
    assert len(counts.enter(1 / limits.HANDSHAKES.per_s)) == 1


def test_whoever_takes_long_over_a_handshake_makes_room_where_others_wait() -> None:
    counts = Counts(per_address=2, in_all=10_000)
    numbers = a_crowd(counts, limits.MAX_HANDSHAKES)
    counts.enter(0.0)
    limit_s = limits.CROWDED_HANDSHAKE_LIMIT_S
    assert counts.late(limit_s) == (), "nobody waits"
    (waits,) = a_crowd(counts, 1, limit_s, first=1000)
    assert counts.late(limit_s - 0.1) == ()
    assert list(counts.late(limit_s)) == numbers
    assert counts.enter(limit_s) == (waits,)


def test_whoever_is_through_its_handshake_makes_room_and_has_time_to_be_heard() -> None:
    """In a crowd calls wait for the coordinator; that is not the site's fault."""
    counts = Counts(per_address=2, in_all=10_000)
    numbers = a_crowd(counts, limits.MAX_HANDSHAKES + 1)
    counts.enter(0.0)
    counts.through(0, 1.0)
    assert counts.enter(1.0) == (numbers[-1],)
    counts.through(0, 2.0)
    assert 0 not in counts.late(limits.FIRST_CALL_LIMIT_S + 0.9), "and a second time changes nothing"
    assert counts.is_here(0)
    assert counts.late(limits.FIRST_CALL_LIMIT_S + 1.0) == (0,)
    assert not counts.is_here(0)


def test_a_crowd_whose_calls_wait_uses_up_no_pace_of_handshakes() -> None:
    counts = Counts(per_address=2, in_all=10_000)
    for number in range(4 * limits.HANDSHAKES.at_once):
        a_crowd(counts, 1, first=number)
        assert counts.enter(0.0) == (number,)
        counts.through(number, 0.0)


def test_the_time_for_a_handshake_begins_when_it_does() -> None:
    counts = Counts(per_address=2, in_all=10_000)
    (number,) = a_crowd(counts, 1)
    assert counts.enter(limits.HANDSHAKE_LIMIT_S - 0.1) == (number,)
    assert counts.late(2 * limits.HANDSHAKE_LIMIT_S - 0.2) == ()
    assert counts.late(2 * limits.HANDSHAKE_LIMIT_S - 0.1) == (number,)


def test_strangers_are_taken_from_the_kernel_at_a_pace_and_sites_that_come_in_do_not_count() -> None:
    counts = Counts(per_address=2, in_all=100_000)
    for number in range(2 * limits.ACCEPTED.at_once):
        assert counts.may_come(0.0)
        a_crowd(counts, 1, first=number)
        counts.enter(0.0)
        counts.is_of(number, f"site {number}", 0.0)
    assert [counts.may_come(0.0) for _ in range(limits.ACCEPTED.at_once + 1)].count(True) == limits.ACCEPTED.at_once
    assert counts.may_come(1 / limits.ACCEPTED.per_s)


def test_where_all_places_are_taken_the_address_with_the_most_makes_room() -> None:
    counts = Counts(per_address=100, in_all=5)
    for number in range(4):
        counts.come(number, HERE, 0.0)
    counts.come(4, THERE, 0.0)
    assert counts.come(5, "10.0.0.3", 0.0) == (0,)
    assert counts.come(6, "10.0.0.4", 0.0) == (1,)
    for number in (2, 3, 4, 5, 6):
        counts.is_of(number, f"site {number}", 0.0)
    assert counts.come(7, "10.0.0.5", 0.0) is Turned.FULL, "nobody who is known makes room for a stranger"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::7", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_a_machine_has_one_address_or_a_network_of_64_bits(one: str, other: str, is_same: bool) -> None:
    assert (source_of(one) == source_of(other)) is is_same


def test_counts_stay_true_whatever_happens() -> None:
    draw = random.Random(7)
    counts = Counts(per_address=5, in_all=20)
    here: set[int] = set()
    for number in range(20_000):
        now = number / 50
        match draw.randrange(5):
            case 4:
                for one in counts.enter(now):
                    assert one in here
                    if draw.random() < 0.5:
                        counts.through(one, now)
            case 0 | 1:
                found = counts.come(number, f"10.0.0.{draw.randrange(12)}", now)
                if not isinstance(found, Turned):
                    here = here - set(found) | {number}
                    counts.wait(number)
            case 2 if here:
                one = draw.choice(sorted(here))
                here -= set(counts.is_of(one, f"site {draw.randrange(3)}", now))
            case 3 if here:
                one = draw.choice(sorted(here))
                counts.gone(one)
                here.remove(one)
        here -= set(counts.late(now))
        assert len(counts) == len(here) <= 20
        assert all(counts.is_here(one) for one in here)
    for one in here:
        counts.gone(one)
    assert len(counts) == 0
    left = (counts._of_source, counts._of_identity, counts._waiting, counts._entered, counts._entered_of)
    assert not any(left), "nothing stays behind"
