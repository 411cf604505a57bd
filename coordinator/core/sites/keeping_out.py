"""What a person takes back: sites that are not wanted in the run, and before training the model of the first offer and
the starting state (`atoll reset`).

Sites that were found out too often (`conduct`) are kept out alike, by name and key, until they are let in again.
"""

from __future__ import annotations

import logging

from atoll.coordinator.core.data.ledger import Ledger
from atoll.coordinator.core.events import KeptOutRecord, ResetRecord
from atoll.coordinator.core.log import states
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites.conduct import Conduct
from atoll.coordinator.core.sites.membership import Membership
from atoll.coordinator.core.sites.offers import Offers
from atoll.protocol import messages as m
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
            run.refuse(site.stream, *_kept_out(run, name, reason))
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


def reset(run: Run, reason: str) -> str:
    """Forgets sites, model, starting state and leases; who is here is sent away, and may be started again. What is
    kept out stays so. Why that cannot be done; empty if it is."""
    if run.finished is not None:
        return f"the run is over at commit {run.finished.commit}"
    if run.started:
        return (
            f"training has started, and the run is at commit {run.log.last}: undo commits with `atoll rollback --to`, "
            "or start another run, with a run_id and a store of its own"
        )
    held = {s.state_hash for s in run.members.live() if s.applied == 0}
    held |= {value for value in (run.claim, run.log.attested.get(0)) if value is not None}
    run.void_starts |= held
    run.persist(ResetRecord(tuple(sorted(run.void_starts)), run.members.last_id))
    run.report(logging.WARNING, f"the model and the starting state are taken back: {reason}")
    for stream in list(run.members.streams):
        text = f"run {run.run_id!r} begins anew before its training ({reason}): start this node again"
        run.refuse(stream, RefusedKind.STATE, text)
    run.members = Membership((), run.members.last_id, run.now, run.limits.lease_s)
    run.forget_model()
    states.drop_claim(run)
    run.offers = Offers()
    run.ledger = Ledger((), (), ())
    run.log.forget_start()
    return ""


def refusal(run: Run, message: m.Hello, digest: bytes) -> Refusal | None:
    """Of a site that says Hello and is kept out, by its name or under another one; or that comes with a starting state
    that was taken back, which would be the run's again. `digest`: of its key."""
    name = message.name
    for record in run.kept_out.values():
        if record.name == name or record.key_digest == digest:
            return _kept_out(run, name, record.reason)
    if not (message.has_state and message.last_commit == 0 and message.state_hash in run.void_starts):
        return None
    return RefusedKind.STATE, (
        f"{name} holds the starting state {message.state_hash.hex()[:12]} of run {run.run_id!r}, which "
        "was taken back: give the node another --home, or remove the state, payloads and snapshots of this one"
    )


def _kept_out(run: Run, name: str, reason: str) -> Refusal:
    text = f"{name} is kept out of run {run.run_id!r}: {reason}; only its operator can let it in (atoll evict --let-in)"
    return RefusedKind.KEPT_OUT, text
