"""The run goes back (`go_back`), and when it must: nobody can reach the newest commit any more, because disks lost what
was not synced. Then it goes back to one that is held, without a person only if everybody who may have more is accounted
for (docs/decisions/0006). To a commit that sites have passed: going_back.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.core.auditing import judging
from atoll.coordinator.core.events import AttestationRecord, CommitRecord, CommitsRead, ReadCommits, RollbackRecord
from atoll.coordinator.core.log import states
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site, Standing
from atoll.coordinator.core.sync import outcomes
from atoll.coordinator.core.sync.decision import Wait
from atoll.protocol import messages as m
from atoll.protocol.ranges import union


@dataclass(frozen=True, slots=True)
class Unreachable:
    """`commit` is the newest that somebody here holds, at `holders`, who cannot go on from it."""

    commit: int
    holders: tuple[Site, ...]
    obstacle: str  # why the run does not go back to it, whoever asks
    absent: tuple[str, ...]  # who may have more

    @property
    def is_safe(self) -> bool:
        """Everybody who may have more is accounted for."""
        return not self.obstacle and not self.absent


def look(run: Run) -> Unreachable | None:
    """What nobody here can reach; None while the newest commit may be reached. Asks the store for older commits if the
    log lacks those that are needed to know."""
    _read_older(run)
    return _assess(run)


def wait(run: Run, found: Unreachable) -> Wait:
    """For those who may have more, or for a person."""
    return Wait(_in_words(run, found), is_pause=True, is_unreachable=True)


def asked(run: Run, reason: str) -> tuple[str, str]:
    """An operator does not wait for those who are not here. Why the run does not go back; else why it had to."""
    found = _assess(run)
    problem = found.obstacle if found else "no need for it: the newest commit is held, or may still be reached"
    if found is None or problem:
        run.report(logging.WARNING, f"asked to roll back ({reason}): {problem}")
        return problem, ""
    was = _in_words(run, found)
    go_back_to(run, found, reason)
    return "", was


def _in_words(run: Run, found: Unreachable) -> str:
    text = (
        f"nobody who is here can reach commit {run.log.last}: commit {found.commit} is the newest that is held, by "
        f"{', '.join(s.label for s in found.holders)}, and the payloads of the next are on no disk here"
    )
    if found.obstacle or not found.absent:
        return f"{text}; {found.obstacle or 'everybody is here'}"
    todo = "start what is missing, or give the later commits up with `atoll rollback`"
    return f"{text}. {', '.join(found.absent)} may have them: {todo}"


def commits_read(run: Run, event: CommitsRead) -> None:
    """Who holds such an old commit tries its own payload log now, and says where that ends."""
    run.reads_commits = False
    older = run.log.first - 1
    run.log.extend_back(event.commits, event.attestations)
    for site in run.members.live():
        if site.applied is not None and site.applied < older:
            states.send_commits(run, site)


def shared_commit(run: Run, branch: int) -> int | None:
    """The newest commit that a site whose commits are numbered in `branch` shares with the run; None: all of them."""
    return min((r.commit for r in run.rollbacks if r.branch > branch), default=None)


def message(run: Run, commit: int) -> m.RolledBack:
    """That the commits after `commit` are void, in the newest branch."""
    return m.RolledBack(branch=run.branch, commit=commit, reason=run.rollbacks[-1].reason[:1024])


def _newest_held(run: Run) -> int | None:
    """By somebody who is here; None if nobody holds anything, or somebody holds the newest commit."""
    commit = max((s.applied for s in run.members.live() if s.applied is not None), default=None)
    if not run.lanes or commit is None or commit >= run.log.last:
        return None
    return commit


def _read_older(run: Run) -> None:
    """The log holds only the newest commits. Those that are here may be further behind, and all that there is."""
    commit = _newest_held(run)
    if commit is not None and all(s.stream is not None for s in run.members.live()):
        read_down_to(run, commit)


def read_down_to(run: Run, commit: int) -> None:
    """Asks the store for what the log lacks from `commit` on."""
    if not (run.reads_commits or run.log.goes_back_to(commit) or run.log.is_forgotten(commit)):
        run.reads_commits = True
        run.put_out(ReadCommits(first=max(1, commit), last=run.log.first - 1))


def _assess(run: Run) -> Unreachable | None:
    """None while somebody who is here has the newest commit, or has not yet tried its own log."""
    live, commit = run.members.live(), _newest_held(run)
    if commit is None:
        return None
    holders = [s for s in live if s.applied == commit]
    if not all(s.stream is not None for s in live) or not all(s.log_ends for s in holders):
        return None
    # They get no more than `commit` from the holders, but their own logs may lead on from it.
    coming = [
        f"{s.label} ({'fetching state' if s.applied is None else 'catching up'})" for s in live if s not in holders
    ]
    others = [s for s in run.members.sites.values() if not s.live]
    starting = [f"{s.label} (starting)" for s in others if s.stream is not None]
    bringing = [
        f"{s.label} is starting, and holds commit {s.hello.last_commit}"
        for s in others
        if s.standing is Standing.NEW and s.hello is not None and s.hello.has_state and s.hello.last_commit > commit
    ]
    absent = [s.label for s in others if s.stream is None and s.may_hold > commit]
    obstacle = ""
    if run.log.is_forgotten(commit):
        obstacle = (
            f"commit {commit} is older than those that the store keeps; bring the newest state back, or begin a run "
            "from a saved model (--resume)"
        )
    elif not run.log.goes_back_to(commit):
        obstacle = f"the coordinator reads what followed commit {commit} from its store"
    elif len({s.state_hash for s in holders}) > 1:
        obstacle = f"they do not agree on the state of commit {commit}"
    elif bringing:
        obstacle = ", ".join(bringing)
    return Unreachable(commit, tuple(holders), obstacle, tuple(coming + starting + absent))


def _listed(records: Sequence[CommitRecord]) -> tuple[m.LineRanges, ...]:
    """Positions of commits, by line."""
    by_line: dict[int, list[tuple[m.DataRange, ...]]] = {}
    for record in records:
        for line in record.commit.done:
            by_line.setdefault(line.line, []).append(line.ranges)
    return tuple(m.LineRanges(line=number, ranges=union(*parts)) for number, parts in sorted(by_line.items()))


def go_back_to(run: Run, found: Unreachable, reason: str) -> None:
    """To what is held. Requires that nothing stands against it."""
    go_back(run, found.commit, found.holders[0].state_hash, reason, holders=found.holders)


def go_back(
    run: Run,
    commit: int,
    state_hash: bytes,
    reason: str,
    *,
    holders: Sequence[Site],
    returning: Sequence[Site] = (),
    passed_over: int = 0,
    skip_samples: bool = False,
) -> None:
    """Commits after `commit` are void, for good. `state_hash`: of its state, if that is known. `holders` have just that
    commit; `returning` sites will soon, and are waited for. What is here of later commits is forgotten: those sites say
    what they hold once their disks are rolled back. `passed_over`: so many branches may have been there meanwhile.
    `skip_samples`: what void commits list stays done."""
    last = run.log.last
    for sync in run.lanes.values():
        sync.abandon(reason)
    voided = run.log.roll_back(commit)
    numbers = tuple(r.commit.commit for r in voided)
    record = RollbackRecord(
        branch=run.branch + 1 + passed_over,
        commit=commit,
        voided=numbers,
        reason=reason[:1024],
        skipped=_listed(voided) if skip_samples else (),
    )
    text = f"rolled back from commit {last} to commit {commit}, branch {record.branch}: {reason}"
    run.report(logging.ERROR, text)
    run.rollbacks.append(record)
    run.changes.take(run.log.changed_json)
    run.best.take(run.log.best)
    run.norms.forget()  # what they speak of is void
    run.same_samples.forget()
    run.curves.go_back(run.log.run_step)
    for curve in run.curves.due(run.now, is_over=True):  # else a start of the coordinator would bring them back
        run.persist(curve)
    for sync in run.lanes.values():
        run.note_abandoned(sync.open.sync, f"rolled back to commit {commit}")
    run.persist(record)
    if not skip_samples:
        for line in _listed(voided):
            run.ledger.void(line.line, line.ranges)
    run.persist_ledger()
    if state_hash and commit not in run.log.attested:
        run.log.attest(commit, state_hash)
        run.persist(AttestationRecord(commit, state_hash))
    states.drop_dispute(run)
    for site in holders:
        site.goes_on_from_there()
    for site in run.members.live():
        if site.counts_from_step is not None:
            site.counts_from(min(site.counts_from_step, run.log.run_step))
        if site.applied is not None and site.applied > commit:
            site.is_without_state()
            site.goes_on_from_there()
    # What is left of the void commits on other disks leads to no commit that will be looked for.
    for site in run.members.sites.values():
        if site.site_id and site.may_hold > commit:
            site.may_have(commit)
            run.persist_site(site)
    # One transaction: a run that went back without opening a sync would have none when it comes back from the store.
    outcomes.open_next(run, holders, before=message(run, commit), returning=returning)
    # Nobody hears of the branch again before its next Hello: a site that is starting hears of it now, too.
    for site in run.members.sites.values():
        if site.standing is not Standing.OUT and site not in holders:
            run.send(site, message(run, commit))
            if site.hello is not None and site.hello.has_state and site.hello.last_commit > commit:
                site.says_less()
            if site.applied is not None:
                states.send_pending(run, site)
    judging.gone_back(run, last)  # last: who is found out is sent away as one that is in the run
