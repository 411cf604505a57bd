"""The account of the data as people see it: every line, every pass, every range is done, leased or open."""

from __future__ import annotations

from atoll.coordinator.core.data.ledger import Line
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.view.document import LeasedView, LineView, PassView, RangeView
from atoll.protocol.ranges import Ranges

MAX_PASSES_SHOWN = 64


def data_view(run: Run) -> tuple[LineView, ...]:
    """By line, ascending."""
    names = {s.site_id: s.name for s in run.members.sites.values()}
    return tuple(_line_view(number, line, names) for number, line in sorted(run.ledger.lines.items()))


def _line_view(number: int, line: Line, names: dict[int, str]) -> LineView:
    first = next(iter(line.done), None)
    num_passes_done = (first.num_samples // line.num_samples) if first is not None and first.first == 0 else 0
    leased = sum(lease.num_samples for lease in line.leases.values())
    shown = range(num_passes_done, min(line.num_passes, num_passes_done + MAX_PASSES_SHOWN))
    return LineView(
        line=number,
        site=names.get(number, "") if number else "",
        num_samples=line.num_samples,
        num_passes_begun=line.num_passes,
        num_passes_done=num_passes_done,
        num_done=line.done.num_samples,
        num_leased=leased,
        num_open=_open(line).num_samples,
        passes=tuple(_pass_view(line, n, names) for n in shown),
    )


def _open(line: Line) -> Ranges:
    """In passes that were begun."""
    result = line.returned.copy()
    result.add(line.frontier, line.num_passes * line.num_samples)
    return result


def _pass_view(line: Line, number: int, names: dict[int, str]) -> PassView:
    first, end = number * line.num_samples, (number + 1) * line.num_samples
    leased: dict[str, int] = {}
    for (site_id, _), lease in sorted(line.leases.items()):
        if count := lease.within(first, end).num_samples:
            name = names.get(site_id, str(site_id))
            leased[name] = leased.get(name, 0) + count
    return PassView(
        number=number,
        num_done=line.done.within(first, end).num_samples,
        num_leased=sum(leased.values()),
        num_open=_open(line).within(first, end).num_samples,
        leased=tuple(LeasedView(site=name, num_samples=count) for name, count in leased.items()),
    )


def range_views(run: Run) -> tuple[RangeView, ...]:
    """Every range of every pass that was begun, by line and position."""
    names = {s.site_id: s.name for s in run.members.sites.values()}
    views: list[RangeView] = []
    for number, line in sorted(run.ledger.lines.items()):
        of_line = [("done", "", r) for r in line.done] + [("open", "", r) for r in _open(line)]
        for (site_id, _), lease in line.leases.items():
            of_line += [("leased", names.get(site_id, str(site_id)), r) for r in lease]
        of_line.sort(key=lambda item: item[2].first)
        views += [
            RangeView(line=number, first=r.first, num_samples=r.num_samples, state=state, site=site)
            for state, site, r in of_line
        ]
    return tuple(views)
