"""The site's state machine, driven by hand: every scenario says what the core is told and what it must want."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.protocol import messages as m
from atoll.protocol.errors import AverageError, NoRoomError, StateError
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.plans import weights, with_weights
from atoll.protocol.sample_order import GLOBAL_LINE
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.site_questions import PROCESS, SiteQuestions, a_core, wanted

SETTINGS = RunSettings(run_id="run", steps=40, sync=SyncSettings(every=10), time_limits="local")
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(8,), dtype="F32", role=Role.TRAINABLE)])
HASH = bytes(32)


def member(site_id: int, incarnation: int = 1, tokens: int = 100) -> m.Member:
    return m.Member(site_id=site_id, incarnation=incarnation, address=f"127.0.0.1:{site_id}", tokens=tokens)


class Driver(SiteQuestions):
    """A core with a clock and a record of what it wants; answers of slow outputs are given by the test."""

    def __init__(
        self,
        held: Outer | None = None,
        *,
        from_saved_model: bool = False,
        settings: RunSettings | None = None,
        held_errors: tuple[int | None, ...] = (),
        num_hosts: int = 1,
    ) -> None:
        self.now, known = 100.0, settings or SETTINGS
        self.core = a_core(
            known, held, self.now, from_saved_model=from_saved_model, held_errors=held_errors, num_hosts=num_hosts
        )
        self.out: list[out.Output] = []

    def __call__(self, event: e.Event) -> list[out.Output]:
        self.out = wanted(self.core, event, self.now)
        return self.out

    def receive(self, message: m.CoordinatorMessage, term: int = 1) -> list[out.Output]:
        """A plan with weights is said as the coordinator does: they follow it."""
        if isinstance(message, m.Plan) and any(tokens := weights(message)):
            none = (0,) * len(tokens)
            said = self.receive(with_weights(message, none), term)
            self.out = said + self.receive(weights_of(message, *tokens), term)
            return self.out
        return self(e.Received(term, message))

    def sent(self) -> list[m.SiteMessage]:
        return [o.message for o in self.out if isinstance(o, out.Send)]

    def answer(self) -> e.Answer:
        answers = [o.answer for o in self.out if isinstance(o, out.AnswerWorkers)]
        assert len(answers) == 1, self.out
        return answers[0]

    def wants(self, kind: type[out.Output]) -> out.Output:
        found = [o for o in self.out if isinstance(o, kind)]
        assert len(found) == 1, self.out
        return found[0]

    def ask(self, step: int, seq: int = 0) -> list[out.Output]:
        return self(e.BoundaryAsked(generation=self.generation, step=step, seq=seq))

    def sealed(self, step: int, tokens: int = 100, num_steps: int = 10) -> list[out.Output]:
        return self(
            e.SnapshotSealed(
                generation=self.generation, step=step, tokens=tokens, num_steps=num_steps, mean_loss=1.0, train_s=1.0
            )
        )

    def merged(self, version: int) -> list[out.Output]:
        return self(e.Merged(generation=self.generation, version=version, wait_s=0.1))

    def joined(self) -> list[out.Output]:
        joined = e.WorkersJoined(
            generation=self.generation, manifest=MANIFEST, data_fingerprint=b"", max_retained_bytes=1 << 20
        )
        return self(joined)

    def up_to_admitted(self, admitted_as: m.AdmittedAs, site_id: int = 1) -> None:
        self(e.SessionOpened())
        self.receive(m.Welcome(settings_json=settings_to_json(self.core.settings)))
        self.joined()
        self.receive(m.Admitted(site_id=site_id, admitted_as=admitted_as, run_seed=7))


def opened(sync: int, base: int, num_steps: int = 10) -> m.Open:
    return m.Open(sync=sync, base_commit=base, run_step=base * 10, run_tokens=base * 300, num_steps=num_steps)


def plan(
    sync: int,
    attempt: int = 1,
    base: int = 0,
    contributors: tuple[int, ...] = (1, 2),
    receivers: tuple[int, ...] = (),
) -> m.Plan:
    return m.Plan(
        sync=sync,
        attempt=attempt,
        term=1,
        base_commit=base,
        contributors=tuple(member(i) for i in contributors),
        receivers=tuple(member(i, tokens=0) for i in receivers),
        trees=(),
        stall_limit_s=6.0,
        num_steps=10,
        deadline_s=600.0,
        slowest_bytes_per_s=1 << 10,
    )


def weights_of(found: m.Plan, *tokens: int) -> m.Weights:
    return m.Weights(sync=found.sync, attempt=found.attempt, term=found.term, tokens=tokens)


def commit(
    number: int,
    sync: int,
    *,
    contributors: tuple[int, ...] = (1, 2),
    attempt: int = 1,
    final: bool = False,
    done: tuple[m.DataRange, ...] = (),
) -> m.Commit:
    return m.Commit(
        done=(m.LineRanges(line=GLOBAL_LINE, ranges=done),) if done else (),
        commit=number,
        sync=sync,
        attempt=attempt,
        term=1,
        contributors=tuple(member(i) for i in contributors),
        payload_digest=HASH,
        run_step=number * 10,
        run_tokens=number * 300,
        final=final,
        next=None if final else opened(sync + 1, number),
    )


def starting(*, site_id: int = 1, settings: RunSettings | None = None) -> Driver:
    """A member whose workers were told to take commit 0, and to train towards step 10."""
    drive = Driver(Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0), settings=settings)
    drive.up_to_admitted(m.AdmittedAs.MEMBER, site_id)
    drive.ask(0)
    drive.receive(opened(1, 0))
    drive(e.Published(e.Values(0)))
    assert drive.answer() == e.Answer(kind=AnswerKind.APPLY, version=0, next_step=10, fresh=True)
    return drive


def started(*, site_id: int = 1, settings: RunSettings | None = None) -> Driver:
    """A member at commit 0 whose workers train towards step 10."""
    drive = starting(site_id=site_id, settings=settings)
    drive.merged(0)
    return drive


def at_boundary(drive: Driver, step: int = 10) -> None:
    drive.ask(step)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    drive.sealed(step)
    assert [s.sync for s in drive.sent() if isinstance(s, m.Ready)] == [drive.open_sync()]
    drive.ask(step, 1)
    assert not drive.out


def exchanged(drive: Driver, sync: int, attempt: int = 1) -> None:
    drive(ExchangeFinished(plan=plan(sync, attempt), payload_digest=HASH))


@pytest.mark.parametrize("contributors", [(1, 2), (2, 3)])
def test_the_site_says_how_links_were_used_as_a_contributor_and_as_a_receiver(contributors: tuple[int, ...]) -> None:
    drive = started()
    at_boundary(drive)
    planned = plan(1, contributors=contributors, receivers=() if 1 in contributors else (1,))
    drive.receive(planned)
    drive.sent()
    links = (m.LinkUse(site_id=2, received_bytes=7, seconds=0.5),)
    drive(ExchangeFinished(plan=planned, payload_digest=HASH, links=links))
    assert [s.links for s in drive.sent() if isinstance(s, m.Done)] == [links]


def test_the_seeder_makes_commit_0_from_its_workers() -> None:
    drive = Driver()
    drive(e.SessionOpened())
    hello = drive.sent()[0]
    assert isinstance(hello, m.Hello)
    assert hello.process_id == PROCESS
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    assert drive.wants(out.StartWorkers) == out.StartWorkers(1, settings_to_json(SETTINGS))
    drive.joined()
    offer = drive.sent()[0]
    assert isinstance(offer, m.Offer)
    drive.receive(m.SendManifest())
    assert drive.wants(out.Fulfil) == out.Fulfil(m.SendManifest())
    assert offer.manifest_digest == MANIFEST.digest
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.SEEDER, run_seed=7))
    assert drive.wants(out.SendLayout) == out.SendLayout(generation=1, site_id=1, run_seed=7)
    drive.ask(0)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    drive.sealed(0, tokens=0, num_steps=0)
    drive.wants(out.SeedState)
    drive(e.StateSeeded(state_hash=HASH))
    assert drive.sent() == [m.Applied(commit=0, state_hash=HASH)]
    drive.ask(0, 1)
    drive.receive(opened(1, 0))
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(0))
    drive(e.Published(e.Values(0)))
    assert drive.answer().fresh


def test_a_joiner_fetches_before_its_workers_start() -> None:
    drive = Driver()
    drive.up_to_admitted(m.AdmittedAs.JOINER, 3)
    assert drive.sent() == [m.FindSources(has_state=False, after_commit=0)]
    drive.ask(0)
    assert not drive.out
    sources = m.Sources(
        attested=(m.Attestation(commit=4, state_hash=HASH),),
        donors=(m.Donor(site_id=1, incarnation=1, address="127.0.0.1:1", commit=4),),
    )
    drive.receive(sources)
    assert drive.wants(out.FetchState) == out.FetchState(sources)
    drive(e.StateFetched(commit=4, state_hash=HASH, run_step=40, run_tokens=1200))
    assert drive.sent() == [m.Applied(commit=4, state_hash=HASH)]
    drive.receive(opened(6, 4, num_steps=10))
    drive(e.Published(e.Values(4)))
    assert drive.answer() == e.Answer(
        kind=AnswerKind.APPLY, version=4, next_step=10, run_step=40, run_tokens=1200, fresh=True
    )


def test_a_sync_from_boundary_to_the_next_window() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    assert drive.wants(out.BeginExchange) == out.BeginExchange(with_weights(plan(1), (0, 0)), 100, (100, 100))
    exchanged(drive, 1)
    assert isinstance(drive.sent()[0], m.Done)
    drive.receive(commit(1, 1))
    assert drive.wants(out.ApplyCommit) == out.ApplyCommit(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.sent() == [m.Applied(commit=1, state_hash=HASH)]
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.kind, answer.mode, answer.next_step, answer.run_step) == (
        AnswerKind.APPLY,
        MergeMode.REPLACE,
        20,
        10,
    )
    drive.merged(1)
    at_boundary(drive, 20)


def test_a_commit_waits_until_its_payloads_are_in_the_log() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    drive.receive(commit(1, 1))
    assert not any(isinstance(o, out.ApplyCommit) for o in drive.out)
    exchanged(drive, 1)
    drive.wants(out.ApplyCommit)


def test_a_straggler_keeps_its_progress_by_a_shift_and_contributes_it_next_time() -> None:
    drive = started()
    drive.receive(plan(1, contributors=(2, 3), receivers=(1,)))
    found = with_weights(plan(1, contributors=(2, 3), receivers=(1,)), (0, 0))
    assert drive.wants(out.BeginExchange) == out.BeginExchange(found, 0, (100, 100))
    exchanged(drive, 1)
    assert not drive.sent(), "a receiver is not waited for"
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    assert drive.wants(out.PublishState) == out.PublishState(e.Difference(0, 1))
    drive(e.Published(e.Difference(0, 1)))
    answer = drive.answer()
    assert (answer.mode, answer.next_step) == (MergeMode.SHIFT, 10)
    drive.merged(1)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive.ask(10, 1)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    drive.sealed(10)
    assert [s.sync for s in drive.sent() if isinstance(s, m.Ready)] == [2]


def missed(drive: Driver, *, asked_after_s: float) -> int:
    """At 100 s sync 1 opens, at 110 s commit 1 without this site; the first boundary, at step 10, is so much later."""
    drive.now = 110.0
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.now += asked_after_s
    drive.ask(10)
    drive(e.Published(e.Difference(0, 1)))
    answer = drive.answer()
    assert answer.mode is MergeMode.SHIFT
    return answer.next_step


def test_after_a_missed_sync_the_workers_train_until_the_others_are_ready_again() -> None:
    # 13 s for 10 steps; the others are ready at about 120 s, this site wants to be at 119 s.
    assert missed(started(), asked_after_s=3.0) == 10 + 4
    assert missed(started(), asked_after_s=0.0) == 10 + 9
    assert missed(started(), asked_after_s=9.5) == 10, "they are about to be"
    assert missed(started(), asked_after_s=50.0) == 10


def test_who_was_ready_just_too_late_is_ready_at_once_for_the_next_sync() -> None:
    drive = started()
    drive.now = 110.0
    at_boundary(drive)
    drive.now = 110.1
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().next_step == 10, "else it could be too late for ever"
    drive.merged(1)
    drive(e.Published(e.Values(1)))
    drive.ask(10, 2)
    assert drive.answer().kind is AnswerKind.SNAPSHOT


def test_a_commit_waits_while_a_shift_is_under_way() -> None:
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    drive.receive(commit(2, 2, contributors=(2, 3)))
    assert not drive.out, "PUBLISH is being written"
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().mode is MergeMode.SHIFT
    drive.merged(1)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(1))
    drive(e.Published(e.Values(1)))
    drive.wants(out.ApplyCommit)


def test_a_late_ready_site_gives_its_snapshot_up_and_shifts() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.PublishState) == out.PublishState(e.Difference(0, 1))
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().next_step == 10
    drive.merged(1)
    drive(e.Published(e.Values(1)))
    drive.ask(10, 2)
    assert drive.answer().kind is AnswerKind.SNAPSHOT


def test_steps_beyond_the_boundary_survive_the_commit_by_a_merge() -> None:
    drive = started()
    at_boundary(drive)
    drive(e.SessionLost("connection reset"))
    assert not any(isinstance(o, out.AnswerWorkers) for o in drive.out)
    drive.now = drive.deadline() or 0.0
    drive(e.Tick())
    assert drive.answer() == e.Answer(kind=AnswerKind.CONTINUE, next_step=11)
    for step in range(11, 20):
        drive.ask(step)
        assert drive.answer().next_step == step + 1
    drive.ask(20)
    assert not drive.out, "the overrun is bounded"
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7), term=2)
    drive.receive(opened(1, 0), term=2)
    assert any(isinstance(s, m.Ready) for s in drive.sent())
    drive.receive(plan(1), term=2)
    exchanged(drive, 1)
    drive.receive(commit(1, 1), term=2)
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.mode, answer.next_step) == (MergeMode.MERGE, 20), "10 steps towards the next sync are done"


def test_a_second_attempt_replaces_the_first_and_older_plans_are_ignored() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1, contributors=(1, 2, 3)))
    drive.receive(plan(1, attempt=2))
    assert [type(o) for o in drive.out] == [out.CancelExchange, out.BeginExchange]
    exchanged(drive, 1, attempt=1)
    assert not drive.out, "the result of an older attempt is dropped"
    drive.receive(plan(1, attempt=1, contributors=(1, 2, 3)))
    assert not drive.out


def test_after_eviction_local_progress_is_replaced() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(m.Evicted(reason="silent for 3 s"))
    assert isinstance(drive.sent()[0], m.Hello)
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    drive.receive(opened(2, 0))
    assert not any(isinstance(s, m.Ready) for s in drive.sent())
    answer = drive.answer()
    assert (answer.kind, answer.mode, answer.next_step) == (AnswerKind.APPLY, MergeMode.REPLACE, 20)


def test_what_a_restart_would_not_cure_leaves_with_its_exit_code() -> None:
    drive = started()
    drive(e.WorkersFailed(generation=1, kind=e.FailureKind.FATAL, text="the loss is not finite", exit_code=6))
    assert next(s for s in drive.sent() if isinstance(s, m.Leave)).fatal
    exit_output = drive.wants(out.Exit)
    assert isinstance(exit_output, out.Exit)
    assert (exit_output.code, exit_output.text) == (6, "the loss is not finite")


def test_a_sealed_snapshot_outlives_the_workers_that_wrote_it() -> None:
    drive = started()
    at_boundary(drive)
    drive(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed by signal 9"))
    drive.receive(plan(1))
    drive.wants(out.BeginExchange)
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.joined()
    drive.ask(0)
    drive(e.Published(e.Values(1)))
    answer = drive.answer()
    assert (answer.version, answer.fresh, answer.next_step) == (1, True, 10)


def put_in_place(drive: Driver, commit: int) -> None:
    """The model of the last commit: written, confirmed by the coordinator, put in place."""
    drive(e.ModelSaved(commit=commit))
    assert not drive.out, "it may be wrong"
    drive.receive(m.Finished(commit=commit, reason="complete", run_step=10 * commit, run_tokens=1, state_hash=HASH))
    assert drive.wants(out.KeepModel) == out.KeepModel(commit)
    drive(e.ModelKept(commit=commit))


def test_the_last_commit_is_applied_saved_and_left() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1, final=True))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.SaveModel) == out.SaveModel(commit=1, run_step=10, run_tokens=300)
    drive(e.Published(e.Values(1)))
    assert drive.answer().next_step == 10
    drive.merged(1)
    drive.ask(10, 2)
    assert (stop := drive.answer()).kind is AnswerKind.STOP
    assert stop.run_over
    drive(e.WorkersLeft(generation=1, reason="stopped"))
    assert not drive.out
    put_in_place(drive, 1)
    assert isinstance(drive.sent()[0], m.Leave)
    assert drive.wants(out.Exit) == out.Exit(0, "the run is complete")


def test_leaving_finishes_the_sync_under_way() -> None:
    drive = started()
    drive(e.LeaveAsked("Ctrl-C"))
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(e.Published(e.Values(1)))
    assert drive.answer().next_step == 10, "no further window"
    drive.merged(1)
    drive.ask(10, 2)
    assert (stop := drive.answer()).kind is AnswerKind.STOP
    assert not stop.run_over, "for others it goes on"
    drive(e.WorkersLeft(generation=1, reason="stopped"))
    assert drive.wants(out.Exit) == out.Exit(0, "Ctrl-C")


def test_leaving_has_a_limit() -> None:
    drive = started()
    drive(e.LeaveAsked("Ctrl-C"))
    drive.now = drive.deadline() or 0.0
    drive(e.Tick())
    assert isinstance(drive.sent()[-1], m.Leave)
    drive.wants(out.StopWorkers)
    drive.wants(out.Exit)


def test_a_loader_that_ends_early_leaves_the_run() -> None:
    drive = started()
    drive(e.WorkersLeft(generation=1, reason="the loader ended"))
    assert drive.sent() == [m.Leave(reason="the loader ended")]
    assert drive.wants(out.Exit) == out.Exit(0, "the loader ended")


def test_a_wait_for_the_coordinator_ends() -> None:
    drive = started()
    drive(e.SessionLost("gone"))
    drive.now += drive.core.limits.give_up_s
    drive(e.Tick())
    exit_output = drive.wants(out.Exit)
    assert isinstance(exit_output, out.Exit)
    assert "no coordinator" in exit_output.text


def test_messages_of_an_older_term_are_ignored() -> None:
    drive = started()
    drive.receive(m.Pulse(), term=3)
    drive.receive(m.Finished(commit=0, reason="old", run_step=0, run_tokens=0), term=2)
    assert [type(o) for o in drive.out] == [out.Report]


def test_commits_between_welcome_and_admission_are_asked_for() -> None:
    """The workers were starting."""
    drive = Driver(Outer(commit=1, state_hash=HASH, run_step=0, run_tokens=0))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), last_commit=1))
    drive.joined()
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7, last_commit=2))
    assert m.FindSources(has_state=True, after_commit=1) in drive.sent()


def test_a_commit_that_is_missing_in_between_is_fetched() -> None:
    drive = started()
    drive.receive(commit(2, 2))
    assert drive.sent() == [m.FindSources(has_state=True, after_commit=0)]
    sources = m.Sources(
        donors=(m.Donor(site_id=2, incarnation=1, address="127.0.0.1:2", commit=2),),
        commits=(commit(1, 1), commit(2, 2)),
    )
    drive.receive(sources)
    drive.wants(out.FetchState)
    drive(e.StateFetched(commit=2, state_hash=HASH, run_step=20, run_tokens=600))
    drive.receive(opened(3, 2))
    drive.ask(10)
    assert drive.wants(out.PublishState) == out.PublishState(e.Difference(0, 2))


def test_a_failed_fetch_is_tried_again() -> None:
    drive = Driver()
    drive.up_to_admitted(m.AdmittedAs.JOINER)
    drive.receive(
        m.Sources(
            attested=(m.Attestation(commit=0, state_hash=HASH),),
            donors=(m.Donor(site_id=1, incarnation=1, address="127.0.0.1:1", commit=0),),
        )
    )
    drive(e.FetchFailed("donor 1 at 127.0.0.1:1 stalled"))
    drive.now = drive.deadline() or 0.0
    drive(e.Tick())
    assert drive.sent() == [m.FindSources(has_state=False, after_commit=0)]


def test_refusal_ends_the_node_with_the_reason() -> None:
    drive = Driver()
    drive(e.SessionOpened())
    drive.receive(m.Refused(kind=m.RefusedKind.NAME_TAKEN, text="the name a is taken"))
    exit_output = drive.wants(out.Exit)
    assert isinstance(exit_output, out.Exit)
    assert "the name a is taken" in exit_output.text


def test_every_dispatch_is_silent_after_the_exit() -> None:
    drive = Driver()
    drive.receive(m.Refused(kind=m.RefusedKind.RUN, text="another run"))
    probes: list[Callable[[], list[out.Output]]] = [lambda: drive.ask(0), lambda: drive(e.Tick())]
    assert [probe() for probe in probes] == [[], []]


def test_a_commit_that_cannot_be_applied_is_not_tried_again_while_the_coordinator_is_away() -> None:
    drive = started()
    drive(e.SessionLost("connection reset"))
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
    drive(e.ApplyFailed(1, "its payloads are not in the log"))
    assert not any(isinstance(o, out.ApplyCommit) for o in drive.out)
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1, last_commit=1))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    assert m.FindSources(has_state=True, after_commit=0, lacks_commit=1) in drive.sent()


def test_a_question_for_sources_that_was_dropped_is_asked_again_on_admission() -> None:
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.SessionLost("connection reset"))
    drive(e.SessionOpened())
    drive(e.ApplyFailed(1, "its payloads are not in the log"))  # the coordinator has evicted the site and does not hear
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1, last_commit=1))
    drive.receive(m.Evicted(reason="silent for 3 s"))
    drive.receive(commit(3, 3, contributors=(2, 3)))
    assert not any(isinstance(s, m.FindSources) for s in drive.sent()), "not admitted yet"
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1, last_commit=3))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))
    assert m.FindSources(has_state=True, after_commit=0, lacks_commit=1) in drive.sent()


def test_a_fetch_waits_while_a_shift_is_under_way() -> None:
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().mode is MergeMode.SHIFT
    drive.receive(commit(3, 3, contributors=(2, 3)))
    assert m.FindSources(has_state=True, after_commit=1) in drive.sent()
    sources = m.Sources(
        attested=(m.Attestation(commit=3, state_hash=HASH),),
        donors=(m.Donor(site_id=2, incarnation=1, address="127.0.0.1:2", commit=3),),
        commits=(commit(2, 2), commit(3, 3)),
    )
    drive.receive(sources)
    assert not any(isinstance(o, out.FetchState) for o in drive.out), "PUBLISH has to get the workers' version back"


def test_what_an_evicted_site_takes_last_is_not_written_again_while_its_state_moves_on() -> None:
    """It takes a whole state next: the values under the shift are not needed, and are gone."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.ask(10)
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().mode is MergeMode.SHIFT
    drive.receive(commit(2, 2, contributors=(2, 3)))
    drive.receive(m.Evicted(reason="silent for 3 s"))
    drive.wants(out.ApplyCommit)
    drive.merged(1)
    assert not [o for o in drive.out if isinstance(o, out.PublishState)], "commit 2 is on its way"
    drive(e.CommitApplied(commit=2, state_hash=HASH))
    drive.ask(10, 1)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(2))
    drive(e.Published(e.Values(2)))
    assert drive.answer().mode is MergeMode.REPLACE


def test_a_snapshot_that_a_commit_overtakes_while_it_is_written_is_taken_again() -> None:
    drive = started()
    drive.ask(10)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.sealed(10)
    drive.ask(10, 1)
    drive(e.Published(e.Difference(0, 1)))
    assert drive.answer().mode is MergeMode.SHIFT
    drive.merged(1)
    drive(e.Published(e.Values(1)))
    drive.ask(10, 2)
    assert drive.answer().kind is AnswerKind.SNAPSHOT
    drive.sealed(10, num_steps=0)
    assert [s.sync for s in drive.sent() if isinstance(s, m.Ready)] == [2]


GOOD_HASH = b"g" * 32


def at_the_end(*, workers_left: bool = True) -> Driver:
    """The last commit is applied, and the model of it is being written."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3), final=True))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.wants(out.SaveModel)
    if workers_left:
        drive(e.WorkersLeft(generation=1, reason="stopped"))
    return drive


def finished(state_hash: bytes = b"") -> m.Finished:
    return m.Finished(commit=1, reason="complete", run_step=10, run_tokens=1, state_hash=state_hash)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_written", [True, False])
def test_a_wrong_state_of_the_last_commit_leaves_no_model(*, is_written: bool, is_kept: bool) -> None:
    drive = at_the_end(workers_left=not is_kept)  # else their script goes on: the site is still here
    drive.receive(m.Evicted(reason="its state has another hash"))
    if is_written:
        drive(e.ModelSaved(commit=1))
    if is_written and is_kept:
        drive.receive(finished(HASH))
        drive(e.ModelKept(commit=1))
    drive.receive(finished(GOOD_HASH))
    assert drive.wants(out.DropModel) == out.DropModel(1)
    exit_output = drive.wants(out.Exit)
    assert isinstance(exit_output, out.Exit)
    assert exit_output.code == StateError.exit_code
    assert "the run's is 676767676767" in exit_output.text


def test_a_model_that_nobody_contradicts_in_time_is_kept() -> None:
    drive = at_the_end()
    drive.receive(finished())
    drive(e.ModelSaved(commit=1))
    assert not drive.out
    drive.now = drive.deadline() or 0.0
    assert drive.now == 100.0 + drive.core.limits.lease_s
    drive(e.Tick())
    assert drive.wants(out.KeepModel) == out.KeepModel(1)
    drive(e.ModelKept(commit=1))
    assert drive.wants(out.Exit) == out.Exit(0, "the run is complete")


def test_a_dispute_over_the_last_commit_that_nobody_settles_leaves_no_model() -> None:
    drive = at_the_end()
    drive.receive(m.Disputed(commit=1))
    drive(e.ModelSaved(commit=1))
    drive.now += 100.0
    drive(e.Tick())
    assert not drive.has_ended(), "it is being found out whose is right"
    drive.receive(m.Disputed(commit=1, is_over=True))
    drive.now += drive.core.limits.lease_s
    drive(e.Tick())
    exit_output = drive.wants(out.Exit)
    assert isinstance(exit_output, out.Exit)
    assert exit_output.code == StateError.exit_code
    assert "nobody knows whose is right" in exit_output.text


def test_a_dispute_that_is_looked_into_for_long_is_waited_for_without_spinning() -> None:
    """It began after the model was written, when nobody had contradicted yet; the answer to what is found needs time
    as well."""
    drive = at_the_end()
    drive(e.ModelSaved(commit=1))
    drive.receive(m.Disputed(commit=1))
    drive.out.clear()
    for _ in range(3):
        drive.now += drive.core.limits.lease_s
        drive(e.Tick())
        assert not drive.out
        deadline = drive.deadline()
        assert deadline is None or deadline > drive.now, "a deadline that has passed is waited for"
    drive.receive(m.Disputed(commit=1, is_over=True))
    assert not drive.has_ended(), "whose state is right is said next"
    drive.receive(finished(HASH))
    assert drive.wants(out.KeepModel) == out.KeepModel(1)


def test_a_dispute_over_an_earlier_commit_is_none_over_the_last() -> None:
    drive = started()
    drive.receive(m.Disputed(commit=0))
    drive.receive(commit(1, 1, contributors=(2, 3), final=True))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(e.ModelSaved(commit=1))
    drive.now += drive.core.limits.lease_s
    drive(e.Tick())
    assert drive.wants(out.KeepModel) == out.KeepModel(1), "nobody contradicts"


def saving_every_commit() -> Driver:
    """The first commit is applied, and its model is being written."""
    drive = started(settings=replace(SETTINGS, save_every=1))
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.SaveModel) == out.SaveModel(commit=1, run_step=10, run_tokens=300)
    return drive


def test_commits_and_catching_up_do_not_wait_for_a_model_that_is_written() -> None:
    drive = saving_every_commit()
    drive.receive(commit(2, 2, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
    drive(e.CommitApplied(commit=2, state_hash=HASH))
    assert not [o for o in drive.out if isinstance(o, out.SaveModel)], "one at a time"
    assert "commit 2 is not saved: that of commit 1 is still being written" in drive.wants(out.Report).text  # type: ignore[union-attr]
    drive.receive(commit(4, 4, contributors=(2, 3)))
    donor = m.Donor(site_id=2, incarnation=1, address="b:1", commit=4)
    drive.receive(m.Sources(attested=(m.Attestation(commit=4, state_hash=HASH),), donors=(donor,)))
    drive.wants(out.FetchState)
    drive(e.StateFetched(commit=4, state_hash=HASH, run_step=40, run_tokens=1, final=True))
    drive(e.ModelSaved(commit=1))
    assert drive.wants(out.KeepModel) == out.KeepModel(1)
    drive(e.ModelKept(commit=1))
    assert drive.wants(out.SaveModel) == out.SaveModel(commit=4, run_step=40, run_tokens=1), (
        "the last one is not left out"
    )


@pytest.mark.parametrize("why", ["rolled back", "wrong"])
def test_a_model_of_a_void_commit_is_not_put_in_place(why: str) -> None:
    drive = saving_every_commit()
    if why == "rolled back":
        drive.receive(m.RolledBack(branch=1, commit=0, reason="a disk is lost"))
        drive.wants(out.RollBack)  # does not wait for it
    else:
        drive.receive(m.Evicted(reason="its state has another hash"))
        drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings)))
        joiner = m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7, state_hash=GOOD_HASH)
        drive.receive(joiner)
        drive.wants(out.DistrustState)
    drive(e.ModelSaved(commit=1))
    assert drive.wants(out.DropModel) == out.DropModel(1)


def sources_of(commit_number: int, *commits: m.Commit) -> m.Sources:
    return m.Sources(
        attested=(m.Attestation(commit=commit_number, state_hash=GOOD_HASH),),
        donors=(m.Donor(site_id=2, incarnation=1, address="b:1", commit=commit_number),),
        commits=commits,
    )


def evicted_and_a_joiner_again(drive: Driver) -> None:
    drive.receive(m.Evicted(reason="its state has another hash; it must fetch the state again"))
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7))


def test_another_state_of_the_same_commit_is_published_again() -> None:
    drive = started()
    evicted_and_a_joiner_again(drive)
    drive.wants(out.DistrustState)
    drive.receive(sources_of(0))
    assert not [o for o in drive.out if isinstance(o, out.FetchState)], "every chunk is being checked"
    drive(e.StateVerified())
    drive.wants(out.FetchState)
    drive(e.StateFetched(commit=0, state_hash=GOOD_HASH, run_step=0, run_tokens=0))
    drive.receive(opened(1, 0))
    drive.ask(10)
    assert drive.wants(out.PublishState) == out.PublishState(e.Values(0))


def test_a_contributor_that_fetches_the_commit_does_not_contribute_the_same_again() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    drive.wants(out.BeginExchange)
    drive(e.ExchangeBroken(plan(1), OSError("EIO")))
    drive.receive(commit(1, 1))
    drive.wants(out.ApplyCommit)
    drive(e.ApplyFailed(1, "its payloads are not in the log"))
    drive.receive(sources_of(1))
    drive.wants(out.FetchState)
    drive(e.StateFetched(commit=1, state_hash=GOOD_HASH, run_step=10, run_tokens=300))
    drive.receive(opened(2, 1))
    published = drive.wants(out.PublishState)
    assert isinstance(published, out.PublishState)
    assert isinstance(published.content, e.Values)


def test_30_a_site_without_room_to_reduce_names_itself() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    site_id = drive.site_id
    drive(e.ExchangeBroken(plan(1), NoRoomError("make room")))
    failed = [message for message in drive.sent() if isinstance(message, m.ExchangeFailed)]
    assert [(message.peer_site_id, message.phase) for message in failed] == [(site_id, "holding contributions")]


def test_what_has_no_average_is_said_with_its_tensor_and_in_finite_numbers() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    drive(e.ExchangeBroken(plan(1), AverageError("w has no average", "w", ((2, math.inf, 1.0),))))
    (failed,) = [message for message in drive.sent() if isinstance(message, m.ExchangeFailed)]
    assert (failed.phase, failed.tensor, failed.peer_site_id) == ("averaging", "w", 0)
    assert failed.outliers == (m.Outlier(site_id=2, norm=sys.float_info.max, limit=1.0),)


def test_an_exchange_that_is_finished_once_the_state_is_gone_is_not_said() -> None:
    """The run has gone back meanwhile, and the exchange is void."""
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    evicted_and_a_joiner_again(drive)
    assert drive.holds() is None
    drive(ExchangeFinished(plan=plan(1), payload_digest=HASH))
    assert not [message for message in drive.sent() if isinstance(message, m.Done)]


def test_a_state_is_discarded_once_nothing_works_on_it() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    exchanged(drive, 1)
    drive.receive(commit(1, 1))
    drive.wants(out.ApplyCommit)
    evicted_and_a_joiner_again(drive)
    assert not any(isinstance(o, out.DistrustState) for o in drive.out)
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.wants(out.DistrustState)
    assert drive.holds() is None
    assert not any(isinstance(s, m.Applied) for s in drive.sent())


def test_a_wrong_state_is_an_error_that_names_both_hashes_and_is_counted() -> None:
    drive = started()
    drive.receive(m.Evicted(reason="its state has another hash; it must fetch the state again"))
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7, state_hash=GOOD_HASH))
    (text,) = [o.text for o in drive.out if isinstance(o, out.Report) and o.level == logging.ERROR]
    assert HASH.hex()[:12] in text
    assert GOOD_HASH.hex()[:12] in text
    assert drive.num_wrong_states() == 1
    drive.wants(out.DistrustState)


def test_a_site_that_is_asked_lists_the_payloads_of_the_attempt_it_is_done_with() -> None:
    drive = started()
    at_boundary(drive)
    drive.receive(plan(1))
    asked = m.ListPayloads(sync=1, attempt=1, term=1)
    drive.receive(asked)
    assert not drive.out, "it is not done yet"
    exchanged(drive, 1)
    drive.receive(m.ListPayloads(sync=1, attempt=2, term=1))
    assert not drive.out, "another attempt"
    drive.receive(asked)
    wanted = drive.wants(out.ListPayloads)
    assert isinstance(wanted, out.ListPayloads)
    of = wanted.plan
    assert (of.sync, of.attempt, of.term, of.trees) == (1, 1, 1, plan(1).trees)
    listed = m.PayloadList(sync=1, attempt=1, term=1, hashes=HASH)
    drive(e.Fulfilled(listed))
    assert drive.sent() == [listed]


def test_a_site_that_is_asked_shows_what_settles_a_dispute() -> None:
    drive = started()
    asked = m.Show(commit=7, evidence=m.Evidence.RECORD, chunk=3, first_byte=5)
    drive.receive(asked)
    assert drive.wants(out.Fulfil) == out.Fulfil(asked)
    shown = m.Shown(commit=7, evidence=m.Evidence.RECORD, chunk=3, first_byte=5, total_bytes=9, data=b"data")
    drive(e.Fulfilled(shown))
    assert drive.sent() == [shown]


def test_a_dispute_is_said_once_for_what_changes() -> None:
    drive = started()
    drive.receive(m.Disputed(commit=7))
    assert not drive.out, "it does not hold that"
    for is_over, num_said in ((False, 1), (False, 0), (True, 1), (True, 0), (False, 1)):
        drive.receive(m.Disputed(commit=0, is_over=is_over))
        assert len(drive.out) == num_said, is_over
        drive.out.clear()


def test_a_version_that_was_on_its_way_at_an_eviction_does_not_count_as_the_new_state() -> None:
    drive = starting()
    evicted_and_a_joiner_again(drive)
    drive(e.Merged(generation=1, version=0, wait_s=0.0))
    drive(e.StateVerified())
    drive.receive(sources_of(0))
    drive(e.StateFetched(commit=0, state_hash=GOOD_HASH, run_step=0, run_tokens=0))
    drive.receive(opened(1, 0))
    drive.out.clear()
    assert any(isinstance(o, out.PublishState) for o in drive.ask(10)), "the ranks hold the discarded state"


def test_a_site_that_is_started_after_the_end_saves_what_it_holds_and_ends() -> None:
    """Nobody admits its workers any more."""
    drive = Driver(Outer(commit=4, state_hash=HASH, run_step=0, run_tokens=0))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    drive.receive(m.Finished(commit=4, reason="complete", run_step=40, run_tokens=1200))
    assert drive.wants(out.SaveModel) == out.SaveModel(commit=4, run_step=40, run_tokens=1200)
    put_in_place(drive, 4)
    drive.wants(out.StopWorkers)
    assert drive.wants(out.Exit) == out.Exit(0, "the run is complete")


def test_a_state_that_is_to_be_discarded_is_not_fetched_any_further() -> None:
    """Else the fetch ends with a state that is not on the disk any more."""
    drive = started()
    drive.receive(commit(3, 4))
    attested = (m.Attestation(commit=3, state_hash=HASH),)
    donor = m.Donor(site_id=2, incarnation=1, address="127.0.0.1:2", commit=3)
    drive.receive(m.Sources(attested=attested, donors=(donor,)))
    drive.wants(out.FetchState)
    drive.receive(m.Evicted(reason="its state has another hash"))
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
    drive.receive(m.Admitted(site_id=1, admitted_as=m.AdmittedAs.JOINER, run_seed=7))
    kinds = [type(o) for o in drive.out]
    assert kinds.index(out.CancelFetch) < kinds.index(out.DistrustState)
    assert [type(x) for x in drive.sent()] == [m.FindSources]


def over_at(commit: int, here: int) -> out.Exit:
    """The exit of a site that cannot have the last commit, which it says."""
    text = f"the run is over at commit {commit}: complete; this site holds commit {here}: another one has the model"
    return out.Exit(0, text)


def test_a_site_that_missed_the_end_applies_the_last_commit_if_it_has_the_payloads() -> None:
    for applied in (True, False):
        drive = Driver(Outer(commit=3, state_hash=HASH, run_step=0, run_tokens=0))
        drive(e.SessionOpened())
        drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS)))
        drive.receive(commit(4, 4, final=True))
        drive.wants(out.ApplyCommit)
        drive.receive(m.Finished(commit=4, reason="complete", run_step=40, run_tokens=1200))
        assert not drive.out
        if applied:
            drive(e.CommitApplied(commit=4, state_hash=HASH))
            assert drive.wants(out.SaveModel) == out.SaveModel(commit=4, run_step=40, run_tokens=1200)
            put_in_place(drive, 4)
            assert drive.wants(out.Exit) == out.Exit(0, "the run is complete")
        else:
            drive(e.ApplyFailed(4, "its payloads are not in the log"))
            assert drive.wants(out.Exit) == over_at(4, 3)


def test_a_site_that_is_one_commit_behind_at_the_end_ends_when_it_has_applied_what_it_has() -> None:
    """Who heard of the last commit has left: nobody would ever give it to this site."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
    drive.receive(m.Finished(commit=2, reason="complete", run_step=20, run_tokens=300))
    assert not drive.has_ended()
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    assert drive.wants(out.Exit) == over_at(2, 1)


@pytest.mark.parametrize("num_failed_before", [0, 7])
def test_a_site_that_cannot_have_the_last_commit_from_anybody_ends(num_failed_before: int) -> None:
    """Where no donor is left the coordinator says so; those that it names may be leaving."""
    drive = started()
    donor = m.Donor(site_id=2, incarnation=1, address="b:1", commit=1)
    sources = m.Sources(attested=(m.Attestation(commit=1, state_hash=HASH),), donors=(donor,))
    for _ in range(num_failed_before):
        drive.receive(sources)
        drive.wants(out.FetchState)
        drive(e.FetchFailed("its link is cut"))
        drive.now += 8.0
        drive(e.Tick())
        assert isinstance(drive.sent()[-1], m.FindSources)
    drive.receive(m.Sources())
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.receive(m.Finished(commit=1, reason="complete", run_step=10, run_tokens=300))
    drive(e.ApplyFailed(1, "its payloads are not in the log"))
    num_fetches = 1 if num_failed_before else 3
    for attempt in range(num_fetches):
        assert isinstance(drive.sent()[-1], m.FindSources), "others may still be here"
        drive.receive(sources)
        drive.wants(out.FetchState)
        drive(e.FetchFailed("it has left"))
        if attempt < num_fetches - 1:
            drive.now += 8.0
            drive(e.Tick())
    assert drive.wants(out.Exit) == over_at(1, 0)


def test_a_site_whose_fetch_ends_before_the_last_commit_ends() -> None:
    """The run ended meanwhile, and who holds the rest has left."""
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
    drive.receive(m.Finished(commit=2, reason="complete", run_step=20, run_tokens=300))
    drive(e.ApplyFailed(1, "its payloads are not in the log"))
    donor = m.Donor(site_id=2, incarnation=1, address="b:1", commit=2)
    drive.receive(m.Sources(attested=(m.Attestation(commit=2, state_hash=HASH),), donors=(donor,)))
    drive.wants(out.FetchState)
    drive(e.StateFetched(commit=1, state_hash=HASH, run_step=10, run_tokens=1, final=False))
    assert drive.wants(out.Exit) == over_at(2, 1)


def test_sources_of_the_commit_that_is_being_applied_are_not_asked_for_again() -> None:
    drive = started()
    drive.receive(commit(1, 1, contributors=(2, 3)))
    drive.wants(out.ApplyCommit)
    drive.receive(m.Sources(commits=(commit(1, 1, contributors=(2, 3)),)))
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive.now += 8.0
    drive(e.Tick())
    assert not [sent for sent in drive.sent() if isinstance(sent, m.FindSources)]


def test_a_site_that_fetches_the_last_commit_saves_the_model_before_it_departs() -> None:
    drive = started()
    donor = m.Donor(site_id=2, incarnation=1, address="b:1", commit=5)
    drive.receive(m.Sources(attested=(m.Attestation(commit=5, state_hash=HASH),), donors=(donor,)))
    drive.wants(out.FetchState)
    drive(e.StateFetched(commit=5, state_hash=HASH, run_step=50, run_tokens=1, final=True))
    assert drive.wants(out.SaveModel) == out.SaveModel(commit=5, run_step=50, run_tokens=1)
    drive.receive(m.Finished(commit=5, reason="done", run_step=50, run_tokens=1))
    assert not [o for o in drive.out if isinstance(o, out.SaveModel)], "once"
    drive(e.WorkersLeft(generation=drive.generation, reason="told to stop"))
    assert not drive.has_ended()
    put_in_place(drive, 5)
    assert drive.wants(out.Exit) == out.Exit(0, "the run is complete")
