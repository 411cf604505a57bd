"""Back to a commit that sites have passed, because a person, or the core itself, wants what followed it undone.

Sites put the state at that commit together beside the one that they hold. Once one of them has it on its disk, with the
hash that it had, the rollback is decided; until then nothing is lost, and a crash of anybody leaves the run where it
was. Nothing is planned or committed meanwhile.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from atoll.coordinator.core.log import rollback
from atoll.coordinator.core.log.rebuilding import GoingBack
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync import unusable
from atoll.protocol import messages as m
from atoll.protocol.digest import DIGEST_BYTES


def begin(run: Run, commit: int, reason: str, request: int = 0, *, without: int = 0, skip_samples: bool = False) -> str:
    """The run goes back to `commit` once a site has put it together; if none can, it goes on where it is.

    Returns why that is not even tried, and nothing changes then; empty if it is under way.
    """
    problem = _obstacle(run, commit)
    if problem:
        run.report(logging.WARNING, f"asked to go back to commit {commit} ({reason}): {problem}")
        return problem
    until = run.now + run.limits.give_up_s
    run.going_back = GoingBack(
        commit=commit, reason=reason, until=until, request=request, without=without, skip_samples=skip_samples
    )
    run.report(
        logging.WARNING,
        f"going back from commit {run.log.last} to commit {commit}: {reason}; sites are asked to put its state "
        "together, and nothing is planned meanwhile",
    )
    return ""


def _obstacle(run: Run, commit: int) -> str:
    if run.finished is not None:
        return f"the run is over at commit {run.finished.commit}; start a new run from a model that it saved"
    if not run.lanes:
        return "training has not started"
    if run.going_back is not None:
        return f"the run is going back to commit {run.going_back.commit} already"
    if not 0 <= commit < run.log.last:
        return f"the newest commit is {run.log.last}; one goes back to a commit before it, down to 0"
    if not run.members.live():
        return "no site is here"
    return ""


def rebuilt(run: Run, site: Site, message: m.CommitRebuilt) -> None:
    """The answer of a site that was asked on this stream; another one counts no longer."""
    going = run.going_back
    if going is None or site.stream is None or site.stream not in going.answers or message.commit != going.commit:
        return
    if len(message.state_hash) not in (0, DIGEST_BYTES):
        message = replace(message, state_hash=b"", text=f"it says a hash of {len(message.state_hash)} bytes")
    going.answers[site.stream] = message


def advance(run: Run) -> bool:
    """Asks, and does what that leads to. True if the run went back, or gave it up."""
    going = run.going_back
    if going is None:
        return False
    able: list[Site] = []
    problem = _hopeless(run, going)
    if not problem and not run.log.goes_back_to(going.commit):
        rollback.read_down_to(run, going.commit)
    elif not problem:
        _ask(run, going)
        able, problem = _outcome(run, going)
    if able:
        _go_back(run, going, able)
    elif problem:
        text = f"the run does not go back to commit {going.commit}: {problem}"
        run.report(logging.ERROR, f"{text}; it goes on from commit {run.log.last}")
        run.going_back = None
        run.answer(going.request, text)
    return bool(able or problem)


def _hopeless(run: Run, going: GoingBack) -> str:
    """Why nothing more is waited for; empty if something is."""
    if run.finished is not None:
        return f"the run is over ({run.finished.reason})"
    if going.commit >= run.log.last:
        return "it was rolled back otherwise meanwhile"
    if run.log.is_forgotten(going.commit):
        return "it is older than those that the store keeps"
    if run.now >= going.until:
        return f"no site has put it together within {run.limits.give_up_s:g} s"
    return ""


def _outcome(run: Run, going: GoingBack) -> tuple[list[Site], str]:
    """Sites that have the state as it was, or else why none can; neither while some may still answer."""
    live, known = run.members.live(), run.log.attested.get(going.commit, b"")
    able = {s.site_id: a.state_hash for s in live if (a := going.answer_of(s)) is not None and a.state_hash}
    right = [s for s in live if s.site_id in able and known in (b"", able[s.site_id])]
    if right and known:
        return right, ""
    if any(going.answer_of(s) is None for s in live):
        return [], ""  # where nobody knows what the hash was, all have to agree on it
    if right and len(set(able.values())) > 1:
        return [], "the sites that put it together do not agree on its state, and its hash was never attested"
    return right, "" if right else _nobody_can(going, live)


def _ask(run: Run, going: GoingBack) -> None:
    known = run.log.attested.get(going.commit, b"")
    for site in run.members.connected():
        assert site.stream is not None
        if site.stream not in going.answers:
            going.answers[site.stream] = None
            run.send(site, m.RebuildCommit(commit=going.commit, state_hash=known, last_commit=run.log.last))


def _go_back(run: Run, going: GoingBack, able: list[Site]) -> None:
    answers = {s: a for s in run.members.live() if (a := going.answer_of(s)) is not None}
    state_hash = answers[able[0]].state_hash
    names = ", ".join(s.label for s in able)
    run.report(logging.INFO, f"{names} has the state {state_hash.hex()[:12]} of commit {going.commit} on its disk")
    holders = [s for s in run.members.live() if s.applied == going.commit and s.state_hash == state_hash]
    returning = [s for s in run.members.live() if s not in answers or answers[s].state_hash]
    run.going_back = None
    rollback.go_back(
        run,
        going.commit,
        state_hash,
        going.reason,
        holders=holders,
        returning=returning,
        skip_samples=going.skip_samples,
    )
    if going.without:
        unusable.leave_out(run, going.without, going.commit)
    run.answer(going.request, "")


def _nobody_can(going: GoingBack, live: list[Site]) -> str:
    answers = {s.label: a for s in live if (a := going.answer_of(s)) is not None}
    reach = {label: a.oldest_commit for label, a in answers.items() if a.has_oldest}
    why = "; ".join(f"{label}: {a.text or 'it has another state of it'}" for label, a in answers.items())
    if not answers:
        return "no site is here"
    if reach and going.commit < min(reach.values()):
        oldest = min(reach.values())
        who = ", ".join(label for label, commit in reach.items() if commit == oldest)
        return f"it is out of reach of every site's snapshots and log; the oldest possible is {oldest}, at {who}"
    return why


def in_words(run: Run, going: GoingBack) -> str:
    """Who puts the commit together, and who cannot."""
    live = run.members.live()
    busy = [s.label for s in live if going.answer_of(s) is None]
    unable = [s.label for s in live if (a := going.answer_of(s)) is not None and not a.state_hash]
    text = f"going back to commit {going.commit} ({going.reason}): "
    text += f"{', '.join(busy)} put{'s' if len(busy) == 1 else ''} its state together" if busy else "reading the store"
    return text + (f"; {', '.join(unable)} cannot" if unable else "")
