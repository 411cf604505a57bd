"""The account of positions: each is done, leased to one incarnation of a site, or open. Plain intervals; no policy.

A line begins at position 0 and has no end. Positions below `frontier` were leased at least once; those of them that
came back and wait for another site are in `returned`. Everything from `frontier` on is open as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.coordinator.core.events import DoneRecord, LeaseRecord, LineRecord, Record
from atoll.protocol.errors import StateError
from atoll.protocol.messages import MAX_RANGES_OF_SITE, DataRange
from atoll.protocol.ranges import Ranges, is_canonical
from atoll.protocol.sample_order import MAX_POSITION

Holder = tuple[int, int]
"""Site id and incarnation. Incarnation 0: a contribution that outlives its site until its sync has ended."""
KEPT = 0
MAX_GRANTED = MAX_RANGES_OF_SITE // 2
"""Intervals of one lease that grants lead to: commits that list parts of them may split some, and all of it has to fit
into one message."""
RETURNED_TAKEN = 32
"""Intervals of returned positions in one grant, so that the lists of sites and of commits stay short."""
RETURNED_SHARE = 16
"""Of all of them, where these are more: else a site that leaves holes behind, again and again, makes the account longer
than the others make it shorter."""


@dataclass(slots=True, kw_only=True)
class Line:
    num_samples: int
    frontier: int = 0
    done: Ranges = field(default_factory=Ranges)
    returned: Ranges = field(default_factory=Ranges)
    leases: dict[Holder, Ranges] = field(default_factory=dict)

    @property
    def num_passes(self) -> int:
        """That were begun."""
        return -(-self.frontier // self.num_samples)


def _check_account(
    lines: tuple[LineRecord, ...], done: tuple[DoneRecord, ...], leases: tuple[LeaseRecord, ...]
) -> None:
    """Raises StateError unless each position below a line's frontier is in one record, and none is beyond it."""
    parts: dict[int, list[tuple[str, tuple[DataRange, ...]]]] = {r.line: [("open again", r.returned)] for r in lines}
    named = [(r.line, "done", r.ranges) for r in done]
    named += [(r.line, f"leased to site {r.site_id} (incarnation {r.incarnation})", r.ranges) for r in leases]
    for number, name, ranges in named:
        if number not in parts:
            raise StateError(f"positions of line {number} are {name}; there is no such line")
        parts[number].append((name, ranges))
    for line in lines:
        for name, ranges in parts[line.line]:
            if not is_canonical(ranges, MAX_POSITION):
                raise StateError(f"line {line.line}: the positions that are {name} are not in order")
        place, last = 0, ""
        pieces = sorted((r.first, r.end, name) for name, ranges in parts[line.line] for r in ranges)
        for first, end, name in [*pieces, (line.frontier, line.frontier, "beyond the frontier")]:
            if first > place:
                raise StateError(
                    f"line {line.line}: positions {place} to {first - 1} are neither done, leased nor open"
                )
            if first < place:
                raise StateError(f"line {line.line}: positions {first} to {place - 1} are {last} and {name}")
            place, last = end, name


class Ledger:
    """All lines of a run. What changed since the last `changes` is collected there, for one transaction.

    Raises StateError if the records are no account.
    """

    def __init__(
        self, lines: Iterable[LineRecord] = (), done: Iterable[DoneRecord] = (), leases: Iterable[LeaseRecord] = ()
    ) -> None:
        lines, done, leases = tuple(lines), tuple(done), tuple(leases)
        _check_account(lines, done, leases)
        self.lines: dict[int, Line] = {
            r.line: Line(num_samples=r.num_samples, frontier=r.frontier, returned=Ranges(r.returned)) for r in lines
        }
        for d in done:
            self.lines[d.line].done = Ranges(d.ranges)
        for r in leases:
            self.lines[r.line].leases[r.site_id, r.incarnation] = Ranges(r.ranges)
        self._changed: dict[tuple[str, int, Holder], None] = {}  # in order

    def begin_line(self, line: int, num_samples: int) -> None:
        """No position of the line was leased before."""
        self.lines[line] = Line(num_samples=num_samples)
        self._note_line(line)

    def forget(self, site_id: int) -> None:
        """The line of a site that is forgotten, if each site has its own. After `changes`."""
        self.lines.pop(site_id, None)

    def kept(self) -> list[tuple[int, int]]:
        """(line, site id) of contributions that outlived their sites."""
        return [(n, site_id) for n, line in self.lines.items() for site_id, inc in line.leases if inc == KEPT]

    def held(self, line: int, holder: Holder) -> Ranges:
        """What the holder leases of that line; nothing if there is no such line."""
        found = self.lines.get(line)
        return found.leases.get(holder, Ranges()) if found else Ranges()

    # --- changes

    def grant(self, number: int, holder: Holder, wanted: int) -> None:
        """Leases the lowest open positions until the holder has `wanted`; fewer if its lease would be too scattered."""
        line = self.lines[number]
        lease = line.leases.get(holder, Ranges())
        missing = min(wanted - lease.num_samples, MAX_POSITION - line.frontier)
        if missing <= 0:
            return
        room = min(max(RETURNED_TAKEN, len(line.returned) // RETURNED_SHARE), MAX_GRANTED - len(lease))
        if room > 0 and line.returned:
            taken = line.returned.take(missing, room)
            lease.update(taken)
            missing -= sum(r.num_samples for r in taken)
        if missing and (len(lease) < MAX_GRANTED or lease.holds(line.frontier - 1, line.frontier)):
            lease.add(line.frontier, line.frontier + missing)
            line.frontier += missing
        line.leases[holder] = lease
        self._note_line(number)
        self._note_lease(number, holder)

    def finish(self, number: int, holder: Holder, ranges: Iterable[DataRange]) -> None:
        """They are in a commit. The holder leases them, or did until it was lost."""
        line = self.lines[number]
        ranges = tuple(ranges)
        for who in (holder, (holder[0], KEPT)):
            lease = line.leases.get(who)
            if lease is not None and lease.holds_all(ranges):
                lease.difference_update(ranges)
                self._note_lease(number, who)
                break
        else:
            raise AssertionError(f"site {holder[0]} does not lease what it contributed to line {number}: {ranges}")
        line.done.update(ranges)
        self._changed["done", number, (0, 0)] = None

    def give_back(self, number: int, holder: Holder, keep: Iterable[DataRange] = ()) -> None:
        """The holder is gone: all it leases is open, but for `keep`, which a commit may still list."""
        line = self.lines.get(number)
        lease = line.leases.get(holder) if line is not None else None
        if line is None or lease is None:
            return
        returned = lease.minus(keep)
        kept = lease.minus(returned)
        line.returned.update(returned)
        del line.leases[holder]
        self._note_lease(number, holder)
        if kept:
            line.leases.setdefault((holder[0], KEPT), Ranges()).update(kept)
            self._note_lease(number, (holder[0], KEPT))
        self._note_line(number)

    def give_back_all(self) -> None:
        """The run is over: nothing is in flight any more."""
        for number, line in self.lines.items():
            for holder in list(line.leases):
                self.give_back(number, holder)

    def finish_unheard(self, number: int, ranges: Iterable[DataRange]) -> None:
        """They are in a commit of which this account has not heard, while nobody leases anything. What was leased
        beside them is open. Raises StateError if it has them otherwise."""
        line, ranges = self.lines.get(number), tuple(ranges)
        if line is None:
            raise StateError(f"line {number} is not known")
        end = max((r.end for r in ranges), default=0)
        if end > line.frontier:
            line.returned.add(line.frontier, end)
            line.frontier = end
        if not line.returned.holds_all(ranges):
            raise StateError(f"positions of line {number} are done twice")
        line.returned.difference_update(ranges)
        line.done.update(ranges)
        self._changed["done", number, (0, 0)] = None
        self._note_line(number)

    def void(self, number: int, ranges: Iterable[DataRange]) -> None:
        """The commit that listed them counts no longer: they are open again."""
        line = self.lines[number]
        ranges = tuple(ranges)
        assert line.done.holds_all(ranges), ranges
        line.done.difference_update(ranges)
        line.returned.update(ranges)
        self._changed["done", number, (0, 0)] = None
        self._note_line(number)

    def _note_line(self, number: int) -> None:
        self._changed["line", number, (0, 0)] = None

    def _note_lease(self, number: int, holder: Holder) -> None:
        line = self.lines[number]
        if holder in line.leases and not line.leases[holder]:
            del line.leases[holder]
        self._changed["lease", number, holder] = None

    def changes(self) -> tuple[Record, ...]:
        """What has to be kept, as it is now."""
        changed, self._changed = self._changed, {}
        records: list[Record] = []
        for kind, number, holder in changed:
            line = self.lines[number]
            if kind == "line":
                records.append(
                    LineRecord(
                        line=number,
                        num_samples=line.num_samples,
                        frontier=line.frontier,
                        returned=line.returned.as_tuple(),
                    )
                )
            elif kind == "done":
                records.append(DoneRecord(line=number, ranges=line.done.as_tuple()))
            else:
                ranges = line.leases[holder].as_tuple() if holder in line.leases else ()
                records.append(LeaseRecord(line=number, site_id=holder[0], incarnation=holder[1], ranges=ranges))
        return tuple(records)
