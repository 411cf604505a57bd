"""A site's core hears any messages from its coordinator, between workers and a data plane that do as they are told."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.node.core.host_events import HostErrors, HostsChanged
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import AverageError, InvalidMessage, NoRoomError, PeerError
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.envelopes import response
from tests.harness.fuzzing import COORDINATOR_MESSAGES, SMALL, fuzz, instances
from tests.harness.site_questions import SiteQuestions, a_core, decisions, without_fault

MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(8,), dtype="F32", role=Role.TRAINABLE)])
HEADER = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run")

ME = st.just(m.Member(site_id=1, incarnation=1, address="a:1", tokens=5))
OTHER = st.just(m.Member(site_id=2, incarnation=1, address="b:1", tokens=5))
MEMBERS = st.lists(ME | OTHER, max_size=2).map(tuple)
UNWEIGHED = MEMBERS.map(lambda members: tuple(replace(member, tokens=0) for member in members))
FRAGMENTS = {1: [0] * 15 + [1], 2: [0] * 8 + [1] * 8 + [2] * 4 + [3]}
"""By the number of fragments that the run has: those that messages name."""


RUNS = [
    (1, 0, "keep", 0.0),
    (1, 0, "keep", 0.5),
    (1, 5, "keep", 0.0),
    (1, 5, "mix", 0.0),
    (2, 0, "keep", 0.0),
    (2, 5, "mix", 0.0),
    (2, 10, "keep", 0.0),
    (2, 10, "mix", 0.0),
    (2, 10, "mix", 0.5),
]
"""Fragments, steps of overlap, how an update is taken, and error feedback: with 2 and 10 two syncs are in flight."""
ENDPOINTS = st.lists(
    st.sampled_from([m.Endpoint(address="a:2", first_chunk=1), m.Endpoint(address="a:3", first_chunk=2)]), max_size=2
).map(tuple)
"""Of the other hosts of the site."""


def errors_held(num_fragments: int) -> st.SearchStrategy[tuple[int | None, ...]]:
    """On a disk, of each fragment or of none."""
    return st.just(()) | st.tuples(*[st.sampled_from([0, 1, 2, None])] * num_fragments)


def messages(
    num_fragments: int, overlap_steps: int, merge: str, error_feedback: float
) -> st.SearchStrategy[m.CoordinatorMessage]:
    fragment = st.sampled_from(FRAGMENTS[num_fragments])
    plans = {"fragment": fragment, "sync": SMALL, "attempt": SMALL, "term": SMALL, "base_commit": SMALL}
    opens = instances(m.Open, fragment=fragment, sync=SMALL, base_commit=SMALL)
    commits = instances(
        m.Commit,
        commit=SMALL,
        sync=SMALL,
        attempt=SMALL,
        term=SMALL,
        fragment=fragment,
        contributors=MEMBERS,
        next=st.none() | opens,
    )
    names_a_fragment: dict[type, dict[str, Any]] = {
        m.Open: {"fragment": fragment},
        m.Plan: {"fragment": fragment},
        m.Commit: {"fragment": fragment, "next": st.none() | opens},
        m.Abandoned: {"next": st.none() | opens},
        m.Sources: {"commits": st.lists(commits, max_size=2).map(tuple)},
    }
    attested = st.lists(instances(m.Attestation, commit=SMALL), max_size=2).map(tuple)
    return st.one_of(
        [instances(cls, **names_a_fragment.get(cls, {})) for cls in COORDINATOR_MESSAGES if cls is not m.Refused]
        + [
            opens,
            commits,
            instances(m.Plan, **plans, contributors=UNWEIGHED, receivers=UNWEIGHED),
            instances(m.Plan, **plans, contributors=MEMBERS),
            instances(m.Weights, sync=SMALL, attempt=SMALL, term=SMALL, tokens=st.lists(SMALL, max_size=2).map(tuple)),
            instances(
                m.Influences, sync=SMALL, attempt=SMALL, term=SMALL, influences=st.lists(SMALL, max_size=2).map(tuple)
            ),
            instances(m.Abandoned, sync=SMALL, next=st.none() | opens),
            instances(m.Sources, attested=attested, commits=st.lists(commits, max_size=2).map(tuple)),
            instances(
                m.Welcome,
                settings_json=st.just(settings_to_json(settings(num_fragments, overlap_steps, merge, error_feedback))),
            ),
            instances(m.Admitted, site_id=st.just(1)),
            instances(m.Finished, commit=SMALL),
            instances(m.RolledBack, commit=SMALL, branch=SMALL),
            instances(m.Leases, ranges=st.just((m.DataRange(first=0, num_samples=50),))),
            st.just(m.Evicted(reason="slow")),
        ]
    )


def settings(num_fragments: int, overlap_steps: int, merge: str, error_feedback: float) -> RunSettings:
    sync = SyncSettings(
        every=10,
        fragments=num_fragments,
        overlap_steps=overlap_steps,
        merge=merge,
        alpha=0.5 if merge == "mix" else 0.0,
        error_feedback=error_feedback,
    )
    return RunSettings(run_id="run", steps=40, sync=sync, time_limits="local")


MESSAGES = {run: messages(*run) for run in RUNS}


class Host(SiteQuestions):
    """Workers and data plane. What the core asks for is done when the test says so, or fails."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.now = 100.0
        self.run = self.num_fragments, _, _, _ = data.draw(st.sampled_from(RUNS))
        held = data.draw(st.sampled_from([None, Outer(commit=1, state_hash=bytes(32), run_step=0, run_tokens=0)]))
        self.core = a_core(
            settings(*self.run),
            held,
            self.now,
            from_saved_model=data.draw(st.booleans()),
            held_errors=data.draw(errors_held(self.num_fragments)),
        )
        self.due: list[e.Event] = []
        self.is_fetching = False
        self.disk_has_moved = False

    def happens(self, event: e.Event) -> list[out.Output]:
        match event:
            case e.FetchFailed(has_moved=has_moved) if self.is_fetching:
                self.is_fetching, self.disk_has_moved = False, self.disk_has_moved or has_moved
            case e.ApplyFailed(has_moved=True):
                self.disk_has_moved = True
            case e.StateFetched() if self.is_fetching:
                self.is_fetching = self.disk_has_moved = False
            case e.CommitApplied() | e.StateVerified() | e.DiskRolledBack():
                self.disk_has_moved = False
        outputs = without_fault(self.core.handle(event, self.now))
        for output in outputs:
            self._carry_out(output)
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now or isinstance(event, e.SessionLost | e.FetchFailed), deadline
        return outputs

    def _carry_out(self, output: out.Output) -> None:
        flip = self.data.draw(st.integers(0, 3)) == 0
        moved = flip and self.data.draw(st.booleans()) and self.holds() is not None
        match output:
            case out.Send(message):
                wire.request(message, HEADER, 1, 0)  # nothing that cannot be written
            case out.StartWorkers(generation, _):
                self.due.append(
                    e.WorkersJoined(
                        generation=generation,
                        manifest=MANIFEST,
                        data_fingerprint=b"",
                        max_retained_bytes=1 << 20,
                        endpoints=self.data.draw(ENDPOINTS),
                    )
                )
            case out.SendLayout(generation=generation):
                self.due.append(
                    e.DataAnnounced(generation=generation, num_samples=100, round_samples=2, rounds_ahead=1)
                )
                self.due.append(e.BoundaryAsked(generation=generation, step=0, seq=0))
            case out.SeedState():
                self.due.append(e.StateSeeded(state_hash=bytes(32)))
            case out.FetchState(sources):
                newest = max([c.commit for c in sources.attested] + [c.commit for c in sources.commits])
                touched = self.data.draw(st.sampled_from([(), (newest, *[0] * (self.num_fragments - 1))]))
                fetched = e.StateFetched(commit=newest, state_hash=bytes(32), run_step=1, run_tokens=1, touched=touched)
                self.is_fetching = True
                self.due.append(e.FetchFailed("gone", moved) if flip else fetched)
            case out.CancelFetch():
                self.is_fetching = False
            case out.BeginExchange(plan):
                outlying = ((2, math.inf, 1e308),)
                errors = (
                    PeerError("y" * 2000, 2, sending=True, phase="x" * 100),
                    AverageError("no average", "w" * 2000, outlying),
                    NoRoomError("full"),
                    OSError("EIO"),
                )
                broken = e.ExchangeBroken(plan, self.data.draw(st.sampled_from(errors)))
                done = ExchangeFinished(plan=plan, payload_digest=bytes(32), stood_out=outlying[0])
                self.due.append(broken if flip else done)
            case out.AdvanceErrors():
                self.due.append(e.ErrorsAdvanced("host 1 is not here" if flip else None, share=0.5))
            case out.ApplyCommit(commit):
                applied = e.CommitApplied(commit=commit.commit, state_hash=bytes(32))
                self.due.append(e.ApplyFailed(commit.commit, "no payloads", moved) if flip else applied)
            case out.PublishState(content):
                assert not self.disk_has_moved, "it is at no commit, or at another one"
                self.due.append(e.Published(content))
            case out.DistrustState():
                self.due.append(e.StateVerified())
            case out.RollBack(commit, branch):
                held = (commit, bytes(32)) if flip else None
                self.due.append(e.DiskRolledBack(branch=branch, held=held))
            case out.SaveModel(commit=commit):
                self.due.append(e.ModelSaved(commit=commit))
            case out.KeepModel(commit):
                self.due.append(e.ModelKept(commit=commit))
            case out.AnswerWorkers():
                self._answered(output)

    def _answered(self, said: out.AnswerWorkers) -> None:
        generation, step, seq, answer = said.generation, said.step, said.seq, said.answer
        match answer.kind:
            case AnswerKind.CONTINUE:
                assert answer.next_step > step
                self.due.append(e.BoundaryAsked(generation=generation, step=answer.next_step, seq=0))
            case AnswerKind.SNAPSHOT:
                assert self.is_written()
                is_arriving = self.data.draw(st.booleans())
                sealed = e.SnapshotSealed(
                    generation=generation, step=step, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0,
                    is_arriving=is_arriving,
                )  # fmt: skip
                self.due += [sealed, e.BoundaryAsked(generation=generation, step=step, seq=seq + 1)]
                if is_arriving:
                    fragment = answer.fragment
                    whole = e.SnapshotArrived(generation=generation, fragment=fragment, step=step, seq=seq)
                    self.due.insert(self.data.draw(st.integers(0, len(self.due))), whole)
            case AnswerKind.APPLY:
                assert answer.next_step >= step
                assert answer.mode is not MergeMode.MIX or self.run[2] == "mix"
                merged = e.Merged(generation=generation, version=answer.version, wait_s=0.1)
                again = seq + 1 if answer.next_step == step else 0
                self.due += [merged, e.BoundaryAsked(generation=generation, step=answer.next_step, seq=again)]
            case AnswerKind.STOP:
                self.due.append(e.WorkersLeft(generation=generation, reason="told to stop"))

    def step(self) -> None:
        match self.data.draw(st.integers(0, 20)):
            case 0:
                self.happens(e.SessionLost("reset"))
            case 1:
                self.happens(e.SessionOpened())
            case 2:
                self.now += self.data.draw(st.sampled_from([0.1, 2.0, 10.0]))
                self.happens(e.Tick())
            case 3:
                kind = self.data.draw(st.sampled_from(e.FailureKind)) if self.workers_run() else None
                if kind is e.FailureKind.CRASHED:
                    self.happens(e.WorkersFailed(generation=self.generation, kind=kind, text="killed"))
            case 5:
                first = self.queue_places()[0] + self.data.draw(st.integers(0, 3))
                epoch = max(0, self.data_epoch() - self.data.draw(st.integers(0, 1)))
                draw = e.DrawAsked(generation=self.generation, rank=0, epoch=epoch, first=first, num_samples=4)
                self.happens(draw)
            case 4:
                match self.data.draw(st.integers(0, 6)):
                    case 3:
                        self.happens(HostErrors(self.data.draw(errors_held(self.num_fragments))))
                    case 0:
                        self.happens(e.LeaveAsked("ctrl-c"))
                    case 1:
                        self.happens(HostsChanged((1,), "host 1 is lost"))
                    case 2:
                        self.happens(HostsChanged(()))
            case n if n < 13 and self.due:
                self.happens(self.due.pop(0))
            case _:
                self.hear_anything()

    def hear_anything(self) -> None:
        message = self.data.draw(MESSAGES[self.run])
        try:  # as it comes through the door
            _, message = wire.unpack(response(message, HEADER, 1, 0))
        except InvalidMessage:
            return
        term = self.data.draw(st.sampled_from([1, 1, 1, 2, 0]))
        before, heard = copy.deepcopy(self.core), self.newest_term()
        outputs = self.happens(e.Received(term, message))
        if term < heard:
            before.handle(e.Tick(), self.now)
            assert not [o for o in outputs if isinstance(o, out.Send | out.Exit | out.BeginExchange | out.ApplyCommit)]
            assert decisions(self.core) == decisions(before)


@fuzz(120)
@given(st.data())
def test_no_message_crashes_it_and_one_of_an_old_term_changes_nothing(data: st.DataObject) -> None:
    host = Host(data)
    stage = data.draw(st.sampled_from(["new", "admitted", "training", "sealed"]))
    if stage != "new":
        host.happens(e.SessionOpened())
        host.happens(e.Received(1, m.Welcome(settings_json=settings_to_json(settings(*host.run)), last_commit=1)))
        host.happens(host.due.pop(0))
        as_what = m.AdmittedAs.SEEDER if host.holds() is None else m.AdmittedAs.MEMBER
        host.happens(e.Received(1, m.Admitted(site_id=1, admitted_as=as_what, run_seed=1)))
    if stage in ("training", "sealed"):
        host.happens(
            e.Received(1, m.Open(sync=1, base_commit=host.holds() or 0, run_step=0, run_tokens=0, num_steps=10))
        )
        for _ in range(12 if stage == "sealed" else 4):
            if host.due:
                host.happens(host.due.pop(0))
    for _ in range(data.draw(st.integers(5, 40))):
        host.step()
