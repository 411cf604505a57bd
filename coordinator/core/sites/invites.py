"""Who was invited, who has used the invite, and which key of a name counts: the one that used its newest invite."""

from __future__ import annotations

import logging
from dataclasses import replace

from atoll.coordinator.core.events import InviteAsked, InviteRecord, JoinAsked, RenewAsked, RotateAsked, TakeBackAsked
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites import bans
from atoll.protocol.dates import utc
from atoll.protocol.messages import RefusedKind
from atoll.protocol.trust.names import ROLES, is_name, site_of

DAY_S = 86_400
MAX_LIFE_S = 90 * DAY_S
MAX_TOKEN_LIFE_S = 366 * DAY_S
OF_SITES = ("site", "host")
"""Roles of whoever trains."""
MAX_INVITES = 4096
"""Of which a run knows. Those that were used and replaced, and those that have expired, are forgotten first."""


def invite(run: Run, asked: InviteAsked) -> str:
    """Why that cannot be done; empty if it is."""
    if asked.role not in ROLES:
        return f"there is no role {asked.role!r}: {', '.join(ROLES)}"
    if not is_name(ROLES[asked.role], asked.name):
        if asked.role == "host":
            return f"{asked.name!r} is no host of a site: write NAME/K, K from 1"
        return f"{asked.name!r} is no name: 1 to 64 letters, digits, ., _ or -, the first a letter or digit"
    if asked.role in OF_SITES and (banned := run.banned.get(site_of(asked.name))) is not None:
        return f"{site_of(asked.name)} is banned ({banned.reason}): lift the ban before it is invited"
    if len(run.invites) >= MAX_INVITES and not _forget(run):
        return f"{MAX_INVITES} invites are open or in use: this run keeps no more"
    if asked.is_token and asked.role != "viewer":
        return f"a token is for viewers: a {asked.role} joins by an invite"
    most_s = MAX_TOKEN_LIFE_S if asked.is_token else MAX_LIFE_S
    if not 0 < asked.life_s <= most_s:
        what = "a token" if asked.is_token else "an invite"
        return f"{what} holds for at most {most_s / DAY_S:g} days, not {asked.life_s / DAY_S:g}"
    expires_s = run.wall_s + asked.life_s
    number = max((known.number for known in run.invites.values()), default=0) + 1
    run.keep_invite(
        InviteRecord(
            invite_id=asked.invite_id,
            number=number,
            role=asked.role,
            name=asked.name,
            expires_s=expires_s,
            is_token=asked.is_token,
        )
    )
    may = "may look by a token" if asked.is_token else "is invited"
    run.report(logging.INFO, f"{asked.role} {asked.name} {may} until {utc(expires_s)}")
    return ""


def _forget(run: Run) -> bool:
    """One invite that nothing depends on; whether there was one."""
    for known in sorted(run.invites.values(), key=lambda known: known.number):
        if known.expires_s < run.wall_s if not known.key_digest else newest(run, known.role, known.name) != known:
            run.forget_invite(known.invite_id)
            return True
    return False


def take_back(run: Run, asked: TakeBackAsked) -> str:
    """Why that cannot be done; empty if it is."""
    found = [i for i in run.invites.values() if (i.role, i.name) == (asked.role, asked.name)]
    if asked.role == "site":  # its hosts are a part of it
        found += [i for i in run.invites.values() if i.role == "host" and site_of(i.name) == asked.name]
    if not found:
        return f"run {run.run_id!r} has invited no {asked.role} {asked.name}"
    for known in found:
        run.forget_invite(known.invite_id)
    run.report(logging.WARNING, f"what was given to {asked.role} {asked.name} is taken back")
    if asked.role == "site":
        _send_away(run, asked.name, b"", "its invite was taken back")
        run.tell_banned()
    return ""


def _send_away(run: Run, name: str, key_digest: bytes, why: str) -> None:
    """The certified site of that name, if it is here with another key."""
    site = run.members.sites.get(name)
    if site is None or not site.is_certified or site.key_digest == key_digest:
        return
    if site.live:
        run.send_away(site, why)
    run.refuse(site.stream, RefusedKind.NAME_TAKEN, f"{name} is sent away: {why}")


def newest(run: Run, role: str, name: str) -> InviteRecord | None:
    """The last invite of that name that was used; None if there is none."""
    return run.invites.newest(role, name)


def use(run: Run, asked: JoinAsked) -> tuple[str, str]:
    """Why this key cannot have what the invite is for, or the role and the name that it has: `site/berlin`."""
    known = run.invites.get(asked.invite_id)
    if known is None or known.is_token:
        return f"run {run.run_id!r} knows no invite {asked.invite_id}: it was taken back, or the store is another", ""
    who = f"the invite for {known.role} {known.name}"
    if known.key_digest and known.key_digest != asked.key_digest:
        if run.is_first_misuse(known.invite_id):
            text = f"{who}, used at {utc(known.used_s)}, was shown by somebody with another key{_from(asked)}"
            run.report(logging.WARNING, f"{text}; it is said once")
            shown = f"refused key {asked.key_digest.hex()}{_from(asked)}: it was used by another key"
            run.note(_holder(known), f"join {known.role} {known.name}", shown)
        by = f"another key ({known.key_digest.hex()[:16]}, in the run's audit log)"
        return f"{who} was used at {utc(known.used_s)} by {by}: ask for a new one", ""
    if not known.key_digest and run.wall_s > known.expires_s:
        return f"{who} has expired at {utc(known.expires_s)}: ask for a new one", ""
    if problem := refusal(run, known.role, known.name, asked.key_digest, is_new=True):
        return problem, ""
    if (later := newest(run, known.role, known.name)) is not None and later.number > known.number:
        return f"{who} is older than one that was used at {utc(later.used_s)}: ask for a new one", ""
    if not known.key_digest:
        run.keep_invite(replace(known, key_digest=asked.key_digest, used_s=run.wall_s))
        run.report(logging.INFO, f"{known.role} {known.name} has used its invite")
        used = f"key {asked.key_digest.hex()}{_from(asked)}"
        run.note(_holder(known), f"join {known.role} {known.name}", used)
        if known.role == "site":
            _send_away(run, known.name, asked.key_digest, "another key has used a newer invite for its name")
            if known.name in run.members.sites:
                run.tell_banned()
    return "", f"{known.role}/{known.name}"


def renew(run: Run, asked: RenewAsked) -> str:
    """Why an identity cannot be renewed; empty if it is."""
    if problem := refusal(run, asked.role, asked.name, asked.key_digest):
        return problem
    if (known := newest(run, asked.role, asked.name)) is not None:
        run.keep_invite(replace(known, renewed_s=run.wall_s))
    return ""


def rotate(run: Run, asked: RotateAsked) -> str:
    """Who has no identity of the next root yet; said once the old one is retired."""
    run.report(logging.WARNING, f"the run's root is rotated: {asked.step}")
    used = [i for i in run.invites.values() if i.key_digest and newest(run, i.role, i.name) == i]
    left = [i for i in used if max(i.used_s, i.renewed_s) < asked.since_s]
    return ", ".join(sorted(f"{known.role} {known.name}" for known in left))


def _from(asked: JoinAsked) -> str:
    return f" from {asked.came_from}" if asked.came_from else ""


def _holder(known: InviteRecord) -> str:
    return f"whoever has invite {known.invite_id}"


def refusal(run: Run, role: str, name: str, key_digest: bytes, *, is_new: bool = False) -> str:
    """Why a key, certified for that role and name, is not let in any more; empty if it is."""
    if role in OF_SITES and (banned := bans.refusal(run, site_of(name), key_digest)) is not None:
        return banned[1]
    if is_new:
        return ""
    known = newest(run, role, name)
    if known is None:
        return f"run {run.run_id!r} has invited no {role} {name}: its store is another one, or was restored; ask anew"
    if known.key_digest != key_digest:
        return f"another key has been {role} {name} since {utc(known.used_s)}, by a newer invite"
    return ""
