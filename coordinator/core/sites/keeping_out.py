"""Sites that a person does not want in the run, or that were found out too often (`conduct`): evicted, and kept out by
name and key until they are let in again."""

from __future__ import annotations

import logging

from atoll.coordinator.core.events import KeptOutRecord
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites.conduct import Conduct
from atoll.coordinator.core.sites.membership import key_digest
from atoll.protocol.messages import RefusedKind


def evict(run: Run, name: str, reason: str, *, keep_out: bool) -> str:
    """Why that cannot be done; empty if it is."""
    site = run.members.sites.get(name)
    if keep_out:
        digest = site.key_digest if site is not None else b""
        run.keep_out(KeptOutRecord(name=name, key_digest=digest, reason=reason[:1024]))
        run.report(logging.WARNING, f"{name} is kept out: {reason}")
        if site is not None:
            run.send_away(site, f"kept out: {reason}")
            run.refuse(site.stream, *_refusal(run, name, reason))
        return ""
    if site is None:
        return f"no site of run {run.run_id!r} is called {name!r}: `atoll status` names them"
    if not site.live:
        return f"{site.label} is not in the run; with --keep-out it cannot come back"
    run.evict(site, reason, is_strike=False)
    return ""


def let_in(run: Run, name: str) -> str:
    """Why that cannot be done; empty if it is."""
    if name not in run.kept_out:
        known = ", ".join(sorted(run.kept_out)) or "nobody"
        return f"{name!r} is not kept out of run {run.run_id!r}: {known} is"
    run.let_in(name)
    if (site := run.members.sites.get(name)) is not None:
        site.conduct = Conduct()
        run.persist_site(site)
    run.report(logging.INFO, f"{name} may come in again")
    return ""


def refusal(run: Run, name: str, key: bytes) -> Refusal | None:
    """Of a site that says Hello and is kept out, by its name or under another one."""
    digest = key_digest(key)
    found = (r for r in run.kept_out.values() if r.name == name or r.key_digest == digest)
    return next((_refusal(run, name, record.reason) for record in found), None)


def _refusal(run: Run, name: str, reason: str) -> Refusal:
    text = f"{name} is kept out of run {run.run_id!r}: {reason}; only its operator can let it in (atoll evict --let-in)"
    return RefusedKind.KEPT_OUT, text
