"""Whatever happens to leases, every position is done, leased to one holder or open, and never two of these."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.core.data.ledger import KEPT, MAX_GRANTED, RETURNED_SHARE, RETURNED_TAKEN, Ledger
from atoll.coordinator.core.events import DoneRecord, LeaseRecord, LineRecord, Record
from atoll.protocol import wire
from atoll.protocol.errors import StateError
from atoll.protocol.messages import DataRange, Leases
from atoll.protocol.ranges import Ranges
from tests.harness.coordinator_story import ranges_of

NUM_SAMPLES = 10


def positions(ranges: object) -> set[int]:
    return {p for r in ranges for p in range(r.first, r.end)}  # type: ignore[attr-defined]


class Kept:
    """Records as a store keeps them."""

    def __init__(self) -> None:
        self.lines: dict[int, LineRecord] = {}
        self.done: dict[int, DoneRecord] = {}
        self.leases: dict[tuple[int, int, int], LeaseRecord] = {}

    def keep(self, records: tuple[Record, ...]) -> None:
        for record in records:
            if isinstance(record, LineRecord):
                self.lines[record.line] = record
            elif isinstance(record, DoneRecord):
                self.done[record.line] = record
            elif isinstance(record, LeaseRecord):
                key = (record.line, record.site_id, record.incarnation)
                self.leases.pop(key, None)
                if record.ranges:
                    self.leases[key] = record

    def load(self) -> Ledger:
        return Ledger(self.lines.values(), self.done.values(), self.leases.values())


def check_count(ledger: Ledger) -> None:
    line = ledger.lines[0]
    parts = [line.done, line.returned, *line.leases.values()]
    assert sum(part.num_samples for part in parts) == line.frontier, "done + leased + open = all that was ever leased"


def check(ledger: Ledger) -> None:
    check_count(ledger)
    line = ledger.lines[0]
    parts = [line.done, line.returned, *line.leases.values()]
    assert set().union(*map(positions, parts)) == set(range(line.frontier)), "and no position is in two of them"
    assert all(line.leases.values()), "holders of nothing are forgotten"
    assert set(ledger.kept()) == {(0, site_id) for site_id, incarnation in line.leases if incarnation == KEPT}


@settings(max_examples=300)
@given(st.data())
def test_any_sequence_of_lease_commit_and_return_balances(data: st.DataObject) -> None:
    ledger, kept = Ledger(), Kept()
    ledger.begin_line(0, NUM_SAMPLES)
    done_once: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        holder = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
        lease = ledger.held(0, holder).as_tuple()
        part: list[DataRange] = data.draw(st.lists(st.sampled_from(lease), unique=True)) if lease else []
        action: str = data.draw(
            st.sampled_from(["grant", "grant", "finish", "finish", "lose", "end", "void", "restart"])
        )
        if action == "grant":
            ledger.grant(0, holder, data.draw(st.integers(0, 25)))
        elif action == "finish" and part:
            assert not done_once & positions(part)
            ledger.finish(0, holder, part)
            done_once |= positions(part)
        elif action == "lose":
            ledger.give_back(0, holder, part)
            if data.draw(st.booleans()) and part:
                ledger.finish(0, holder, part)  # its sync committed after all
                done_once |= positions(part)
        elif action == "end":
            for number, site_id in ledger.kept():
                ledger.give_back(number, (site_id, KEPT))
        elif action == "void" and done_once:
            first = min(done_once)
            ledger.void(0, [DataRange(first=first, num_samples=1)])
            done_once.discard(first)
        kept.keep(ledger.changes())
        if action == "restart":
            ledger = kept.load()
        check(ledger)
        assert positions(ledger.lines[0].done) == done_once
    ledger.give_back_all()
    check(ledger)
    assert not ledger.lines[0].leases


def test_what_came_back_is_leased_first() -> None:
    ledger = Ledger()
    ledger.begin_line(0, NUM_SAMPLES)
    ledger.grant(0, (1, 1), 10)
    ledger.grant(0, (2, 1), 10)
    ledger.give_back(0, (1, 1))
    ledger.grant(0, (2, 1), 25)
    assert ledger.held(0, (2, 1)).as_tuple() == (DataRange(first=0, num_samples=25),)


def test_wanting_is_in_all_and_asking_again_changes_nothing() -> None:
    ledger = Ledger()
    ledger.begin_line(0, NUM_SAMPLES)
    ledger.grant(0, (1, 1), 8)
    ledger.grant(0, (1, 1), 8)
    assert ledger.lines[0].frontier == 8
    ledger.finish(0, (1, 1), [DataRange(first=0, num_samples=3)])
    ledger.grant(0, (1, 1), 8)
    assert ledger.lines[0].frontier == 11


def test_a_scattered_pool_does_not_make_an_endless_list() -> None:
    ledger = Ledger()
    ledger.begin_line(0, 1 << 20)
    ledger.grant(0, (1, 1), 4000)
    ledger.finish(0, (1, 1), [DataRange(first=p, num_samples=1) for p in range(0, 4000, 2)])
    ledger.give_back(0, (1, 1))
    ledger.grant(0, (2, 1), 3000)
    held = ledger.held(0, (2, 1))
    assert held.num_samples == 3000
    num_taken = 2000 // RETURNED_SHARE
    assert len(held) == num_taken + 1
    assert ledger.lines[0].returned == Ranges(
        DataRange(first=p, num_samples=1) for p in range(2 * num_taken + 1, 4000, 2)
    )


def test_of_a_few_scattered_positions_so_many_are_leased_at_once() -> None:
    ledger = Ledger()
    ledger.begin_line(0, 1 << 20)
    ledger.grant(0, (1, 1), 400)
    ledger.finish(0, (1, 1), [DataRange(first=p, num_samples=1) for p in range(0, 400, 2)])
    ledger.give_back(0, (1, 1))
    ledger.grant(0, (2, 1), 1000)
    assert len(ledger.held(0, (2, 1))) == RETURNED_TAKEN + 1


def test_holes_that_a_site_leaves_behind_again_and_again_do_not_make_the_account_longer_and_longer() -> None:
    """It lists every second position of what it leases, leaves, and comes back; two others train on what they get."""
    ledger, sizes = Ledger(), []
    ledger.begin_line(0, 1 << 40)
    for start in range(1, 101):
        ledger.grant(0, (1, start), 1024)
        largest = max(ledger.held(0, (1, start)), key=lambda r: r.num_samples)
        ledger.finish(0, (1, start), [DataRange(first=p, num_samples=1) for p in range(largest.first, largest.end, 2)])
        ledger.give_back(0, (1, start))
        for site_id in (2, 3):
            ledger.grant(0, (site_id, 1), 1000)
            ledger.finish(0, (site_id, 1), ledger.held(0, (site_id, 1)).as_tuple())
        sizes.append(len(ledger.lines[0].returned))
        assert len(ledger.lines[0].done) <= sizes[-1] + 1024
    assert sizes[-1] < 1.1 * sizes[50] < 10_000
    check_count(ledger)


def test_a_lease_always_fits_into_a_message() -> None:
    """Two holders that take turns, one sample at a time: no two of a holder's positions are adjacent."""
    ledger = Ledger()
    ledger.begin_line(0, 1 << 40)
    for wanted in range(1, MAX_GRANTED + 10):
        for site_id in (1, 2):
            ledger.grant(0, (site_id, 1), wanted)
    check(ledger)
    held = ledger.held(0, (1, 1))
    assert len(held) == held.num_samples == MAX_GRANTED
    wire.from_proto(Leases, wire.to_proto(Leases(ranges=held.as_tuple())))
    ledger.grant(0, (2, 1), MAX_GRANTED + 10)
    assert ledger.held(0, (2, 1)).num_samples == MAX_GRANTED + 10, "its last interval grows"
    ledger.finish(0, (1, 1), held.as_tuple()[:100])
    ledger.grant(0, (1, 1), MAX_GRANTED)
    assert ledger.held(0, (1, 1)).num_samples == MAX_GRANTED, "what a commit lists makes room"
    check(ledger)


@pytest.mark.parametrize(
    ("frontier", "returned", "done", "leased", "says"),
    [
        (30, "20-29", "0-9", "10-19", ""),
        (0, "", "", "", ""),
        (22, "20-29", "0-9", "10-19", "positions 22 to 29 are open again and beyond the frontier"),
        (31, "20-29", "0-9", "10-19", "positions 30 to 30 are neither done, leased nor open"),
        (30, "20-29", "0-9", "11-19", "positions 10 to 10 are neither done, leased nor open"),
        (30, "20-29", "0-10", "10-19", r"positions 10 to 10 are done and leased to site 3 \(incarnation 4\)"),
        (30, "20-29", "0-9", "0-9,10-19", "that are leased to site 3 .* are not in order"),
        (30, "20-29", "5-9,0-4", "10-19", "that are done are not in order"),
    ],
)
def test_records_that_are_no_account_are_refused(
    frontier: int, returned: str, done: str, leased: str, says: str
) -> None:
    """A position that is done and open would be leased again: counted twice, in silence."""
    lines = [LineRecord(line=0, num_samples=10, frontier=frontier, returned=ranges_of(returned))]
    dones = [DoneRecord(line=0, ranges=ranges_of(done))]
    leases = [LeaseRecord(line=0, site_id=3, incarnation=4, ranges=ranges_of(leased))]
    if not says:
        Ledger(lines, dones, leases)
        return
    with pytest.raises(StateError, match=f"line 0: .*{says}"):
        Ledger(lines, dones, leases)


def test_records_of_no_line_are_refused() -> None:
    with pytest.raises(StateError, match="positions of line 7 are done; there is no such line"):
        Ledger([], [DoneRecord(line=7, ranges=ranges_of("0-9"))])
