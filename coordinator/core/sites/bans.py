"""Sites that a person does not want in the run: asked to leave (`atoll drain`), sent away (`atoll evict`), or banned by
name and key (`atoll ban`).

A ban holds until it is lifted, or until a time. Sites that were found out too often (`conduct`) are banned alike.
"""

from __future__ import annotations

import logging
from math import inf

from atoll.coordinator.core.audit import COORDINATOR
from atoll.coordinator.core.events import BanAsked, BanRecord
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites.conduct import Cause, Conduct
from atoll.protocol import messages as m
from atoll.protocol.dates import utc
from atoll.protocol.messages import RefusedKind

MAX_BAN_S = 10 * 365 * 86_400
"""With an end."""


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


def ban(run: Run, asked: BanAsked) -> str:
    """Why that cannot be done; empty if it is. A new ban of a name takes the place of the one before."""
    until_s = run.wall_s + asked.for_s if asked.for_s else asked.until_s
    if until_s and not 0 < until_s - run.wall_s <= MAX_BAN_S:
        ends = "is over" if until_s <= run.wall_s else "is more than ten years from now: leave out the end"
        return f"the end of the ban {ends}; it is {utc(run.wall_s)} at the coordinator"
    site, digest = run.members.sites.get(asked.name), _key_of(run, asked.name)
    record = BanRecord(name=asked.name, key_digest=digest, reason=asked.reason[:1024], until_s=until_s)
    run.ban(record)
    run.report(logging.WARNING, f"{asked.name} is banned{_until(record)}: {asked.reason}")
    same_key = [s for s in run.members.sites.values() if digest and s.key_digest == digest and s.name != asked.name]
    for one in ([site] if site is not None else []) + same_key:
        run.send_away(one, f"banned: {asked.reason}")
        run.refuse(one.stream, *_banned(run, one.name, record))
    return ""


def _key_of(run: Run, name: str) -> bytes:
    """As it was seen last: of the site, of the newest invite that it has used, or of the ban before; empty if it never
    was."""
    site, before = run.members.sites.get(name), run.banned.get(name)
    used = [i for i in run.invites.values() if (i.role, i.name) == ("site", name) and i.key_digest]
    newest = max(used, key=lambda invite: invite.number, default=None)
    known = (found.key_digest for found in (site, newest, before) if found is not None)
    return next((digest for digest in known if digest), b"")


def lift(run: Run, name: str) -> str:
    """Why that cannot be done; empty if it is."""
    if name not in run.banned:
        known = ", ".join(sorted(run.banned)) or "nobody"
        return f"{name!r} is not banned from run {run.run_id!r}: {known} is"
    run.lift_ban(name)
    if (site := run.members.sites.get(name)) is not None:
        site.conduct = Conduct()
        run.persist_site(site)
    run.report(logging.INFO, f"{name} may come in again")
    return ""


def expire(run: Run) -> None:
    """Lifts the bans whose time is over."""
    over = [record.name for record in run.banned.values() if 0 < record.until_s <= run.wall_s]
    for name in over:
        lift(run, name)
        run.note(COORDINATOR, f"lift-ban name={name!r}", "its time is over")


def next_due(run: Run) -> float:
    """Own time at which the next ban is over."""
    ends = (record.until_s for record in run.banned.values() if record.until_s)
    return run.now + max(0.0, min(ends, default=inf) - run.wall_s)


def refusal(run: Run, name: str, key_digest: bytes) -> Refusal | None:
    """Of whoever comes by a name that is banned, or under another one with a key that is."""
    for record in run.banned.values():
        if 0 < record.until_s <= run.wall_s:
            continue  # over, and not lifted yet
        if record.name == name or record.key_digest == key_digest:
            return _banned(run, name, record)
    return None


def _banned(run: Run, name: str, record: BanRecord) -> Refusal:
    until = _until(record) or "; only its operator can lift that (atoll ban --lift)"
    return RefusedKind.BANNED, f"{name} is banned from run {run.run_id!r}: {record.reason}{until}"


def _until(record: BanRecord) -> str:
    return f" until {utc(record.until_s)}" if record.until_s else ""
