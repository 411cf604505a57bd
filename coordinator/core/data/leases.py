"""Data leases: who gets which positions, what a Ready may list, what a commit finishes. The account is in `ledger`."""

from __future__ import annotations

from atoll.coordinator.core.data.ledger import KEPT
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from atoll.protocol.ranges import is_canonical, union
from atoll.protocol.sample_order import MAX_POSITION, MAX_SAMPLES
from atoll.protocol.settings import RunSettings

MAX_SAMPLES_A_STEP = 1 << 20
"""Of one site. What it may lease is bounded by what it can train on before the next commits list it."""
MAX_WANTED = 1 << 32


def request(run: Run, site: Site, message: m.LeaseRequest) -> None:
    """Persists what is leased, then answers with everything that this incarnation leases."""
    if run.finished is not None:
        return
    most = most_wanted(run.settings)
    if not 0 < message.num_samples <= MAX_SAMPLES or message.wanted > most:
        text = f"{site.label} asks for {message.wanted} samples of a data set of {message.num_samples}"
        run.refuse(site.stream, RefusedKind.INVALID, f"{text}; at most {most} can be leased")
        return
    number = run.line_of(site.site_id)
    line = run.ledger.lines.get(number)
    if line is None:
        run.ledger.begin_line(number, message.num_samples)
        run.persist_ledger()  # as it begins, it is deposited with sites
    elif line.num_samples != message.num_samples:
        run.refuse(site.stream, RefusedKind.DATA, _other_data(run, site, message.num_samples, line.num_samples))
        return
    run.ledger.grant(number, site.start, message.wanted)
    run.persist_ledger()
    run.send(site, m.Leases(ranges=run.ledger.held(number, site.start).as_tuple()))


def most_wanted(settings: RunSettings) -> int:
    """Positions that one site may lease: of three times the steps that it leases for, the overrun, and one more."""
    num_steps = 4 * settings.sync.leased_steps + settings.most_overrun_steps
    return min(MAX_WANTED, num_steps * MAX_SAMPLES_A_STEP)


def _other_data(run: Run, site: Site, theirs: int, ours: int) -> str:
    if run.settings.data == "local":
        return (
            f"{site.label} has {theirs} samples now and had {ours} when it joined: give it the same data again, or "
            "join under another --name"
        )
    return (
        f"{site.label} cuts the run's data into {theirs} samples, the sites before it into {ours}: use the same "
        "script and settings"
    )


def may_list(run: Run, site: Site, message: m.Ready) -> bool:
    """Whether a Ready of this site may list these positions: it leases them, and its Ready for another sync that is
    open does not list them. If not, its progress is on others' samples, or counts twice."""
    held = run.ledger.held(run.line_of(site.site_id), site.start)
    for sync in run.lanes.values():
        if sync.open.sync != message.sync and (known := sync.ready.get(site.site_id)) is not None:
            held = held.minus(known.ranges)
    return is_canonical(message.ranges, MAX_POSITION) and held.holds_all(message.ranges)


def finish(run: Run, attempt: Attempt) -> tuple[m.LineRanges, ...]:
    """What the commit of this attempt lists; it is done in the ledger now. Persist both in one transaction."""
    by_line: dict[int, list[tuple[m.DataRange, ...]]] = {}
    for member, ranges in zip(attempt.plan.contributors, attempt.weights.ranges, strict=True):
        if ranges:
            number = run.line_of(member.site_id)
            run.ledger.finish(number, (member.site_id, member.incarnation), ranges)
            by_line.setdefault(number, []).append(ranges)
    return tuple(m.LineRanges(line=number, ranges=union(*parts)) for number, parts in sorted(by_line.items()))


def settle(run: Run) -> None:
    """Contributions of lost sites that no commit can list any more are open again. A site that was started again may
    be in the next attempt, with others."""
    for number, site_id in run.ledger.kept():
        gone = (sync.attempt for sync in run.lanes.values() if site_id in sync.gone())
        keep = union(*(attempt.ranges_of(site_id) for attempt in gone if attempt is not None))
        if run.ledger.held(number, (site_id, KEPT)).minus(keep):
            run.ledger.give_back(number, (site_id, KEPT), keep)
    run.persist_ledger()
