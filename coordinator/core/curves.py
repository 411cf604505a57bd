"""Curves of a run, for people: what scripts log (`Logged`), and of each site at each commit its training loss, the
share of its time that it trained, and its bytes. Bounded in number and length. Nothing is decided by them.

A restart of the coordinator finds them as they were when they were kept last, half a minute before or so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from atoll.coordinator.core.records import CurveRecord
from atoll.protocol.logged import MAX_NAMES

TRAINING_LOSS = "training loss"
UTILIZATION = "share of time training"
SENT_BYTES = "bytes sent since its node started"
"""No script can log these names."""
OWN_NAMES = frozenset((TRAINING_LOSS, UTILIZATION, SENT_BYTES))
MAX_CURVES = 512
"""Of a run, those that came first; `Curves.num_left_out` counts values of others."""
MAX_POINTS = 256
KEEP_EVERY_S = 30.0


class Point(NamedTuple):
    step: int
    """Of the run."""
    run_tokens: int
    """Of the newest commit at that moment."""
    time_s: float
    """Since 1970, by the coordinator's clock."""
    value: float


class Series(NamedTuple):
    site_id: int
    name: str
    of_outer: bool = False


@dataclass(slots=True)
class Curve:
    """Evenly thinned: of a long one each 2nd, 4th, ... point, and the newest."""

    points: list[Point] = field(default_factory=list)
    newest: Point | None = None
    _stride: int = 1
    _since: int = 0  # points that came after the last one of `points`
    is_kept: bool = True

    def add(self, point: Point) -> None:
        """A site that says an earlier step has gone back: what it said beyond is void. Of one step the last counts."""
        if self.newest is not None and point.step == self.newest.step:
            if self.points[-1:] == [self.newest]:
                self.points[-1] = point
            self.newest, self.is_kept = point, False
            return
        self.cut(point.step - 1)
        self.newest, self.is_kept = point, False
        self._since += 1
        if self._since >= self._stride or not self.points:
            self.points.append(point)
            self._since = 0
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self._stride *= 2

    def cut(self, step: int) -> None:
        """Nothing beyond that step."""
        if self.newest is not None and self.newest.step > step:
            while self.points and self.points[-1].step > step:
                self.points.pop()
            self.newest, self._since = (self.points[-1] if self.points else None), 0
            self.is_kept = False

    def all(self) -> tuple[Point, ...]:
        """Ascending."""
        more = () if self.newest is None or self.points[-1:] == [self.newest] else (self.newest,)
        return (*self.points, *more)

    @classmethod
    def restored(cls, record: CurveRecord) -> Curve:
        """As it was kept."""
        points = [Point(*point) for point in record.points]
        return cls(points, points[-1] if points else None, record.stride)

    def record(self, series: Series) -> CurveRecord:
        """To be kept. The newest point is among them once it has a place."""
        self.is_kept = True
        site_id, name, of_outer = series
        return CurveRecord(
            site_id=site_id, name=name, of_outer=of_outer, stride=self._stride, points=tuple(self.points)
        )


class Curves:
    def __init__(self, kept: Iterable[CurveRecord], now: float) -> None:
        self._curves = {Series(r.site_id, r.name, r.of_outer): Curve.restored(r) for r in kept}
        self._keep_at = now + KEEP_EVERY_S
        self._spent: dict[int, tuple[float, float]] = {}  # by site, until its last commit
        self.num_left_out = 0

    def note(self, series: Series, point: Point) -> None:
        """Values that are not finite have no place on a curve."""
        curve = self._curves.get(series)
        if curve is None:
            if not self._has_room(series):
                self.num_left_out += 1
                return
            curve = self._curves[series] = Curve()
        if isfinite(point.value):
            curve.add(point)

    def note_spent(self, site_id: int, train_s: float, wait_s: float, at: Point) -> None:
        """Since its node started, as of a commit."""
        trained_s, waited_s = train_s, wait_s
        before = self._spent.get(site_id)
        self._spent[site_id] = train_s, wait_s
        if before is not None and before[0] <= train_s and before[1] <= wait_s:  # else it was started anew
            trained_s, waited_s = train_s - before[0], wait_s - before[1]
        if (total_s := trained_s + waited_s) > 0:
            self.note(Series(site_id, UTILIZATION), at._replace(value=trained_s / total_s))

    def _has_room(self, series: Series) -> bool:
        """A site has few names, each of its parameters and of the outer ones: it leaves room for the others."""
        if len(self._curves) >= MAX_CURVES:
            return False
        names = {other.name for other in self._curves if other.site_id == series.site_id} - OWN_NAMES
        return series.name in OWN_NAMES | names or len(names) < MAX_NAMES

    def forget(self, site_id: int) -> None:
        """The site is forgotten."""
        self._curves = {series: curve for series, curve in self._curves.items() if series.site_id != site_id}
        self._spent.pop(site_id, None)

    def go_back(self, run_step: int) -> None:
        """What was trained after that step is void."""
        for curve in self._curves.values():
            curve.cut(run_step)

    def due(self, now: float, *, is_over: bool) -> Iterator[CurveRecord]:
        """What is to be kept now and is not yet; all of it at the run's end."""
        if is_over or now >= self._keep_at:
            self._keep_at = now + KEEP_EVERY_S
            yield from (curve.record(series) for series, curve in self._curves.items() if not curve.is_kept)

    def newest(self, site_id: int) -> list[tuple[Series, Point]]:
        """What the site logged last, by name."""
        mine = [(s, c.newest) for s, c in self._curves.items() if s.site_id == site_id and s.name not in OWN_NAMES]
        return sorted((series, point) for series, point in mine if point is not None)

    def all(self) -> list[tuple[Series, tuple[Point, ...]]]:
        """In the order of sites and names."""
        return sorted((series, curve.all()) for series, curve in self._curves.items())
