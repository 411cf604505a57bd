"""Sites that a person does not want in the run: asked to leave (`atoll drain`), sent away (`atoll evict`), or banned by
name and key (`atoll ban`).

A ban holds until it is lifted, or until a time. Sites that were found out too often (`conduct`) are banned alike. That
time is over when the clock says so and as much time of this process has gone by, so a clock that is set forward lifts
nothing. A ban whose time is over is kept for a day: nor does a clock that was ahead when the coordinator started, if it
is set right meanwhile.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf

from atoll.coordinator.core.audit import COORDINATOR
from atoll.coordinator.core.events import BanAsked, BanRecord
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites.conduct import Cause
from atoll.protocol import messages as m
from atoll.protocol.dates import utc
from atoll.protocol.messages import RefusedKind
from atoll.protocol.settings import SITE_NAME

MAX_BAN_S = 10 * 365 * 86_400
"""With an end."""
MOST_NAMES = 20
"""Of sites that are known, as whoever bans another one is told them."""
STEP_S = 60.0
"""A clock may be set forward by so much, and that is right."""
OVER_S = 86_400.0
"""By the coordinator's own clock: so long a ban whose time is over is kept."""


def evict(run: Run, name: str, reason: str) -> str:
    """Why that cannot be done; empty if it is."""
    site = run.members.sites.get(name)
    if site is None:
        return f"no site of run {run.run_id!r} is called {name!r}: `atoll status` names them"
    if not site.live:
        return f"{site.label} is not in the run; `atoll ban` keeps it from coming back"
    run.evict(site, reason, Cause.OPERATOR, is_strike=False)
    return ""


def drain(run: Run, name: str, reason: str) -> str:
    """The site leaves by itself. Why it cannot be asked to; empty if it is."""
    site = run.members.sites.get(name)
    if site is None or not site.live:
        return f"no site of run {run.run_id!r} that is here is called {name!r}: `atoll status` names them"
    if site.stream is None:
        return f"{site.label} is away: ask again when it is back, or send it away (atoll evict)"
    run.report(logging.INFO, f"{site.label} is asked to leave: {reason}")
    run.send(site, m.Drain(reason=reason[:1024]))
    return ""


def ban(run: Run, asked: BanAsked) -> tuple[str, str]:
    """Why that cannot be done, empty if it is; then that nobody of that name was here, if so. A new ban of a name takes
    the place of the one before."""
    if not SITE_NAME.fullmatch(asked.name):  # sites keep bans by name, and take no longer ones
        return f"{asked.name[:64]!r} is no name of a site, so none can come by it: `atoll status` names those here", ""
    until_s = run.wall_s + asked.for_s if asked.for_s else asked.until_s
    if until_s and not 0 < until_s - run.wall_s <= MAX_BAN_S:
        ends = "is over" if until_s <= run.wall_s else "is more than ten years from now: leave out the end"
        return f"the end of the ban {ends}; it is {utc(run.wall_s)} at the coordinator", ""
    digest = _key_of(run, asked.name)
    record = BanRecord(name=asked.name, key_digest=digest, reason=asked.reason[:1024], until_s=until_s)
    _ban(run, record)
    return "", "" if digest or asked.name in run.members.sites else _unknown(run)


def _unknown(run: Run) -> str:
    """A name that is banned before its site comes, or one that is mistyped."""
    names = sorted(run.members.sites) or ["none"]
    known = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")
    return f"banned, though no site of that name is known here; known are {known}"


def _ban(run: Run, record: BanRecord) -> None:
    """Whoever has that name or key is sent away."""
    run.ban(record, Cause.OPERATOR)
    run.report(logging.WARNING, f"{record.name} is banned{_until(record)}: {record.reason}")
    for site in run.sites_of(record):
        run.send_away(site, f"banned: {record.reason}")
        run.refuse(site.stream, *_banned(run, site.name, record))


def _key_of(run: Run, name: str) -> bytes:
    """As it was seen last: of the site, of the newest invite that it has used, or of the ban before; empty if it never
    was."""
    over, _ = run.bans_over.get(name, (None, 0.0))
    site, before = run.members.sites.get(name), run.banned.get(name, over)
    newest = run.invites.newest("site", name)
    known = (found.key_digest for found in (site, newest, before) if found is not None)
    return next((digest for digest in known if digest), b"")


def lift(run: Run, name: str) -> str:
    """What is held against the site is forgotten, also where the time of its ban is over. Why that cannot be done;
    empty if it is."""
    site = run.members.sites.get(name)
    if name in run.banned:
        run.lift_ban(name)
    elif name in run.bans_over:
        run.forget_ban(name)
    elif site is None or not site.conduct.is_held_against:
        known = ", ".join(sorted(run.banned)) or "nobody"
        return f"{name!r} is not banned from run {run.run_id!r}: {known} is"
    if site is not None:
        site.conduct = site.conduct.pardoned(run.log.last)
        run.persist_site(site)
    run.report(logging.INFO, f"{name} may come in again, and nothing is held against it")
    return ""


def expire(run: Run) -> None:
    """Ends the bans whose time is over. One that ended by a clock that was ahead holds again when that is set back."""
    for record in [record for record in run.banned.values() if _is_over(run, record)]:
        run.end_ban(record.name)
        run.note(COORDINATOR, f"lift-ban name={record.name!r}", "its time is over")
    for record, since in list(run.bans_over.values()):
        if record.until_s > run.wall_s:
            _ban(run, replace(record, is_over=False))
            run.note(COORDINATOR, f"ban name={record.name!r}", f"holds again{_until(record)}: the clock was set back")
        elif run.now - since >= OVER_S:
            run.forget_ban(record.name)


def _is_over(run: Run, record: BanRecord) -> bool:
    """Of those that hold."""
    return 0 < record.until_s <= run.wall_s and run.bans_due[record.name] - STEP_S <= run.now


def clock_was_set_forward(run: Run, by_s: float) -> None:
    """It went on by so much more than this process's time."""
    ends = sorted(record.name for record in run.banned.values() if record.until_s)
    if ends and by_s > STEP_S:
        what = f"this machine's clock was set forward by {by_s:.0f} s, or the machine slept"
        then = f"that shortens no ban (of {', '.join(ends)}): `atoll ban NAME --lift` ends one"
        run.report(logging.WARNING, f"{what}; {then}")
        run.note(COORDINATOR, "clock", f"{what}; {then}")


def next_due(run: Run) -> float:
    """Own time at which the next ban is over, or forgotten."""
    ends = (
        max(run.now + record.until_s - run.wall_s, run.bans_due[record.name] - STEP_S)
        for record in run.banned.values()
        if record.until_s
    )
    forgotten = min((since + OVER_S for _, since in run.bans_over.values()), default=inf)
    return min(max(run.now, min(ends, default=inf)), forgotten)


def refusal(run: Run, name: str, key_digest: bytes) -> Refusal | None:
    """Of whoever comes by a name that is banned, or under another one with a key that is; whether or not it was seen
    yet that its time is over, or that the clock was set back."""
    holding = [record for record in run.banned.values() if not _is_over(run, record)]
    for record in (*holding, *(record for record, _ in run.bans_over.values() if record.until_s > run.wall_s)):
        if record.name == name or record.key_digest == key_digest:
            return _banned(run, name, record)
    return None


def _banned(run: Run, name: str, record: BanRecord) -> Refusal:
    until = _until(record) or "; only its operator can lift that (atoll ban --lift)"
    return RefusedKind.BANNED, f"{name} is banned from run {run.run_id!r}: {record.reason}{until}"


def _until(record: BanRecord) -> str:
    return f" until {utc(record.until_s)}" if record.until_s else ""
