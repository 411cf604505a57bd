"""What a person takes back before training: the model of the first offer, and the starting state (`atoll reset`)."""

from __future__ import annotations

import logging

from atoll.coordinator.core.data.ledger import Ledger
from atoll.coordinator.core.events import ResetRecord
from atoll.coordinator.core.log import states
from atoll.coordinator.core.run import Refusal, Run
from atoll.coordinator.core.sites.membership import Membership
from atoll.coordinator.core.sites.offers import Offers
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind


def reset(run: Run, reason: str) -> str:
    """Forgets sites, model, starting state and leases; who is here is sent away, and may be started again. What is
    banned stays so. Why that cannot be done; empty if it is."""
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
    for site in run.members.sites.values():
        run.curves.forget(site.site_id)
    run.members = Membership((), run.members.last_id, run.now, run.limits.lease_s)
    run.forget_model()
    states.drop_claim(run)
    run.offers = Offers()
    run.ledger = Ledger((), (), ())
    run.log.forget_start()
    return ""


def refusal(run: Run, message: m.Hello) -> Refusal | None:
    """Of a site that says Hello with a starting state that was taken back, which would be the run's again."""
    if not (message.has_state and message.last_commit == 0 and message.state_hash in run.void_starts):
        return None
    return RefusedKind.STATE, (
        f"{message.name} holds the starting state {message.state_hash.hex()[:12]} of run {run.run_id!r}, which "
        "was taken back: give the node another --home, or remove the state, payloads and snapshots of this one"
    )
