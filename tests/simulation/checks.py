"""The invariants of the design, checked on everything that happens, and the sums at the end."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from atoll.coordinator.core.audit import break_in
from atoll.coordinator.core.events import (
    AttestationRecord,
    AuditRecord,
    CommitRecord,
    FinishedRecord,
    InfluencesRecord,
    OpenRecord,
    PlanRecord,
    RollbackRecord,
    WeightsRecord,
)
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.dataplane import saved_model
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.protocol import differences, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage, NonFiniteError, RefusedError, StateError
from atoll.protocol.history import History
from atoll.protocol.layout import Layout, Manifest, Role, chunk_hash, state_hash
from atoll.protocol.log_length import LogLength
from atoll.protocol.outer import same_rates
from atoll.protocol.sample_order import GLOBAL_LINE
from atoll.protocol.settings import RunSettings
from atoll.protocol.v1 import session_pb2
from tests.harness.chunks import cut_out, elements_of
from tests.harness.phases import local_steps, mean_momentum
from tests.harness.site_questions import of_node
from tests.simulation.listed import Listed
from tests.simulation.processes import COORDINATORS, Averaging, SimNode, SimStore
from tests.simulation.reference import AttemptName, Average, Errors, ErrorsOfAverages, Records, replay, trained
from tests.simulation.sites import Sealed, Step, learned_in, rates_at, rates_over

MOST = 1e6
"""What training makes of a value here is a few units."""
DECISIONS = {"open", "plan", "weights", "influences", "commit", "finished", "sources"}
"""What the coordinator may only say once it is kept."""
MOST_ROUNDING = {False: 1e-5, True: 1 / 128}
"""Of one operation, relative to the values, with fp32 and with bf16 parameters."""


class Unsound(AssertionError):
    """Something that must never happen did."""


class _Kept:
    """What the store keeps, by kind. It only grows: what was found in it once stays in it, and is read once."""

    def __init__(self, store: SimStore) -> None:
        self._store = store
        self._num_read = 0
        self._said: dict[type[Any], list[Any]] = {m.Open: [], m.Plan: [], m.Commit: []}
        self._found: dict[int, Any] = {}  # by identity, with what keeps it alive: sites share what they are sent
        self._fragments: dict[int, int] = {}  # by sync
        self._weighed: set[tuple[int, int, tuple[int, ...]]] = set()  # sync, attempt, weights
        self._influences: set[tuple[int, int, tuple[int, ...]]] = set()  # sync, attempt, of contributors
        self._attested: set[tuple[int, bytes]] = set()
        self._log: list[m.Commit] = []
        self._rollbacks: list[RollbackRecord] = []
        self._finished: FinishedRecord | None = None
        self._audit: list[AuditRecord] = []

    def _read(self) -> None:
        records = self._store.kept
        while self._num_read < len(records):
            record = records[self._num_read]
            self._num_read += 1
            match record:
                case OpenRecord():
                    self._said[m.Open].append(record.open)
                    self._fragments[record.open.sync] = record.open.fragment
                case PlanRecord():
                    self._said[m.Plan].append(record.plan)
                case WeightsRecord():
                    self._weighed.add((record.sync, record.attempt, record.tokens))
                case InfluencesRecord():
                    self._influences.add((record.sync, record.attempt, record.influences))
                case CommitRecord():
                    self._said[m.Commit].append(record.commit)
                    self._log.append(record.commit)
                case AttestationRecord():
                    self._attested.add((record.commit, record.state_hash))
                case RollbackRecord():
                    self._rollbacks.append(record)
                    self._log = [c for c in self._log if c.commit <= record.commit]
                case AuditRecord():
                    if self._store.num_restored:
                        del self._audit[record.number - 1 :]  # nobody keeps what was entered since the copy
                    self._audit.append(record)
                case FinishedRecord():
                    self._finished = self._finished or record

    def has(self, message: m.Open | m.Plan | m.Commit, same: differences.Same = differences.WHOLE) -> bool:
        """`same`: what the message leaves out."""
        if id(message) in self._found:
            return True
        self._read()
        left_out: dict[str, Any] = {name: () for name in ("contributors", "trees") if getattr(same, name)}
        there = any(message == replace(said, **left_out) for said in reversed(self._said[type(message)]))
        if there:
            self._found[id(message)] = message
        return there

    def fragment_of(self, sync: int) -> int:
        """One, or the number of all."""
        self._read()
        return self._fragments[sync]

    @property
    def weighed(self) -> set[tuple[int, int, tuple[int, ...]]]:
        self._read()
        return self._weighed

    @property
    def influences(self) -> set[tuple[int, int, tuple[int, ...]]]:
        self._read()
        return self._influences

    @property
    def attested(self) -> set[tuple[int, bytes]]:
        self._read()
        return self._attested

    @property
    def log(self) -> Sequence[m.Commit]:
        """Of commits, without those that are void."""
        self._read()
        return self._log

    @property
    def with_void(self) -> Sequence[m.Commit]:
        """All commits that ever were."""
        self._read()
        return self._said[m.Commit]

    @property
    def rollbacks(self) -> list[RollbackRecord]:
        self._read()
        return self._rollbacks

    @property
    def audit(self) -> list[AuditRecord]:
        self._read()
        return self._audit

    @property
    def finished(self) -> FinishedRecord | None:
        self._read()
        return self._finished


class Checks:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: RunSettings,
        manifest: Manifest,
        store: SimStore,
        tell: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._kept = _Kept(store)
        self._tell = tell
        self._layout = Layout(manifest, settings.sync.chunk_elements, settings.sync.fragments)
        self._states: dict[int, tuple[str, bytes]] = {}  # commit -> who said it first, state hash
        self._starts: dict[bytes, dict[int, bytes]] = {}  # state hash -> chunk records of commit 0, attested or not
        self._contributions: dict[tuple[int, int, int], Sealed] = {}  # (sync, site, incarnation)
        self._sealed: list[Sealed] = []  # every snapshot
        self._listed: dict[int, Listed] = {}  # by the number of the start of a node
        self._written: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        """By the start of a node and the generation of its workers: fragment, step, where the window begins."""
        self._learned_in: dict[tuple[int, int, int, int], dict[str, npt.NDArray[Any]]] = {}  # by site and step
        self._models: dict[int, tuple[str, bytes]] = {}  # commit -> who saved it last, state hash
        self._problem: Unsound | None = None
        self.first_problem = loop.create_future()
        self._num_rollbacks = 0
        self.may_lose_the_end = False
        """A power cut may, without fsync."""
        self.may_end_early = False
        """Somebody asked it to stop."""
        self.changes: set[str] = set()
        """All that was changed at once, each time that an operator set something."""
        self.liars: list[SimNode] = []
        """Of state hashes: where nobody knows at the end who is right, sites keep the state and save no model."""
        self.bad_hosts: list[SimNode] = []
        """They compute something wrong: what they hold is looked at again once they have fetched it."""
        self._applied_by_others: set[int] = set()  # commits of which a liar is not the only one who can tell
        self._averaged: dict[tuple[int, int, int, int], Average] = {}  # by sync, term, attempt and chunk
        self.num_errors_of_earlier_starts = 0
        """Of chunks, that were added to a contribution of a later start of the site."""
        self.has_false_averages = False
        """Some reducer lied, or a bit flipped there."""
        self.num_errors_of_averages = 0
        """Of chunks in commits, that were added to the next average."""
        self.num_events = 0
        self.num_commits = 0
        self.num_steps_in_commits = 0
        self.num_merges: Counter[e.MergeMode] = Counter()
        """That workers were told to do."""

    # --- what fails

    def failed(self, text: str, cause: BaseException | None = None) -> NoReturn:
        self._tell("CHECK", text)
        problem = Unsound(text)
        problem.__cause__ = cause
        self._note(problem)
        raise problem

    def _note(self, problem: Unsound) -> None:
        """The first one is told, and ends the schedule."""
        if self._problem is None:
            self._problem = problem
            self.first_problem.set_result(None)

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.failed(text)

    def loop_error(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Unsound):
            self._note(error)
        elif error is not None and not isinstance(error, asyncio.CancelledError):
            problem = Unsound(f"{context.get('message')}: {error!r}")
            problem.__cause__ = error
            self._note(problem)

    # --- what the store keeps

    @property
    def commits(self) -> Sequence[m.Commit]:
        """Without those that are void."""
        return self._kept.log

    @property
    def attested(self) -> dict[int, bytes]:
        """The hash of each commit, as it was said last; none of void commits, whose numbers are given again."""
        said: dict[int, bytes] = {}
        for record in self._store.kept:
            if isinstance(record, AttestationRecord):
                said[record.commit] = record.state_hash
            elif isinstance(record, RollbackRecord):
                said = {n: value for n, value in said.items() if n <= record.commit}
        return said

    @property
    def finished(self) -> FinishedRecord | None:
        return self._kept.finished

    # --- messages

    def on_message(self, source: str, target: str, item: Any) -> None:
        """Nothing leaves the coordinator that its store would not bring back."""
        if source not in COORDINATORS or not isinstance(item, bytes):
            return
        envelope = session_pb2.SessionResponse.FromString(item)
        if envelope.WhichOneof("body") not in DECISIONS:
            return
        _, message = wire.unpack(envelope)
        match message:
            case m.Open() | m.Plan() | m.Commit():
                there = self._kept.has(message, wire.left_out(envelope))
            case m.Weights(sync=sync, attempt=attempt, tokens=tokens):
                there = (sync, attempt, tokens) in self._kept.weighed
            case m.Influences(sync=sync, attempt=attempt, influences=influences):
                there = (sync, attempt, influences) in self._kept.influences
            case m.Finished():
                there = self.finished is not None
            case m.Sources(attested=attested):
                known = self._kept.attested
                there = all((a.commit, a.state_hash) in known for a in attested if a.commit > 0 or len(attested) > 1)
        if not there:  # as text it is long
            self.failed(f"5: {type(message).__name__} was sent to {target} and is not in the store: {message}")

    # --- events and outputs of nodes

    def before_event(self, node: SimNode, event: e.Event) -> None:
        """The node hears of it now."""
        if node.node is None:
            return
        asked, listed = of_node(node.node), self._look(node)
        if isinstance(event, e.SnapshotSealed) and event.generation == asked.generation:
            written = node.hands.sealed.pop((event.generation, event.step))
            sealed = listed.seal(written)
            self.require(
                (written.site_id, written.incarnation) == (asked.site_id, node.node.home.incarnation),
                f"11: {node.process} is given a snapshot of another start",
            )
            if node not in self.bad_hosts:
                self._sealed.append(sealed)

    @property
    def most_in_flight(self) -> int:
        """Snapshots of one site at once."""
        return max((listed.most_in_flight for listed in self._listed.values()), default=0)

    def _look(self, node: SimNode) -> Listed:
        """At the snapshots that it holds."""
        assert node.node is not None
        asked, listed = of_node(node.node), self.listed(node)
        listed.look(
            asked.sealed_snapshots(),
            asked.generation,
            is_in_a_commit=lambda sealed: self._is_in_a_commit(sealed, asked.holds() or 0),
            discards=self._settings.sync.strategy == "diloco" and asked.discards_local(),
            epoch=asked.data_epoch(),
        )
        return listed

    def listed(self, node: SimNode) -> Listed:
        """What its snapshots list."""
        return self._listed.setdefault(node.process.start, Listed())

    def _is_in_a_commit(self, sealed: Sealed, held: int) -> bool:
        """Or in one that is void, and that its site, which is at commit `held`, has not heard of yet."""
        syncs = [of for of, contribution in self._contributions.items() if contribution is sealed]
        commits = [*self.commits, *(c for c in self._kept.with_void if c.commit <= held)]
        return any((c.sync, member.site_id, member.incarnation) in syncs for c in commits for member in c.contributors)

    def on_event(self, node: SimNode, event: e.Event) -> None:
        self.num_events += 1
        match event:
            case e.StateSeeded(state_hash=value):
                self._holds(node, 0, value)
            case e.SessionOpened() if (plane := node.node.disk.plane if node.node else None) is not None:
                held = plane.held()
                if held is not None and held[0] == 0:  # of a start that was killed before it could say so
                    self._holds(node, 0, held[1])
            case e.StateFetched(commit=commit, state_hash=value) | e.CommitApplied(commit=commit, state_hash=value):
                if isinstance(event, e.StateFetched) or node not in self.bad_hosts:
                    self._holds(node, commit, value)
                if isinstance(event, e.CommitApplied) and node not in self.liars:
                    self._applied_by_others.add(commit)
            case e.Received(message=m.Commit() as commit):
                self.require(self._kept.has(commit), f"2: commit {commit.commit} is another one in the log")
            case e.ModelKept(commit=commit):
                self._model_in_place(node, commit)
            case e.NodeFailed(text, exit_code):
                self.require(exit_code != StateError.exit_code, f"34: {node.process} cannot go on: {text}")
            case e.Received(message=m.Plan() as plan):
                self.require(self._kept.has(plan), f"5: the plan of sync {plan.sync} is another one in the store")

    def _holds(self, node: SimNode, commit: int, value: bytes, branch: int | None = None) -> None:
        """`branch`: of what it says; the one of its disk if not given, which may be behind what the node has heard."""
        assert node.node is not None
        if commit == 0:  # a seeder may be lost before its state is attested; then another makes one
            self._starts.setdefault(value, self._records(node))
            return
        rollbacks = self._kept.rollbacks
        branch = node.node.home.branch if branch is None else branch
        if len(rollbacks) != self._num_rollbacks:
            last = min(r.commit for r in rollbacks[self._num_rollbacks :])
            self._num_rollbacks = len(rollbacks)
            self._states = {n: state for n, state in self._states.items() if n <= last}
        if any(r.branch > branch and r.commit < commit for r in rollbacks):
            return  # it is void
        who, first = self._states.setdefault(commit, (str(node.process), value))
        self.require(
            first == value,
            f"1: commit {commit} has state {value.hex()[:12]} on {node.process}, {first.hex()[:12]} on {who}",
        )

    def _model_in_place(self, node: SimNode, commit: int) -> None:
        """It is whole, and of its commit: later ones may have been applied while it was written."""
        slots = OuterOptimizer(self._settings).slots
        folder, saved = node.folder / "model", saved_model.load_manifest(node.folder / "model")
        self.require(saved.commit == commit, f"{node.process} saved commit {saved.commit} in place of {commit}")
        layout = Layout(self._layout.manifest, self._layout.chunk_elements)
        found = OuterState.create(node.folder / "as-saved", layout, slots, self._settings.run_id)
        saved_model.restore(folder, found)
        shutil.rmtree(node.folder / "as-saved")
        self._models[commit] = str(node.process), saved.state_hash

    def _records(self, node: SimNode) -> dict[int, bytes]:
        assert node.node is not None
        assert node.node.disk.plane is not None
        outer = node.node.disk.plane.outer
        assert outer is not None
        return {c.index: outer.read(c.index).data for c in self._layout.chunks}

    def on_output(self, node: SimNode, output: out.Output) -> None:
        match output:
            case out.AnswerWorkers(answer=answer, step=step):
                if answer.kind is e.AnswerKind.APPLY:
                    self.num_merges[answer.mode] += 1
                elif answer.kind is e.AnswerKind.SNAPSHOT:
                    self._look(node).write()
                    self._writes(node, answer.fragment, step)
                self._goes_not_too_far(node, answer, step)
            case out.Send(m.Applied(commit=commit, state_hash=value)) if node not in (*self.bad_hosts, *self.liars):
                assert node.node is not None
                self._holds(node, commit, value, of_node(node.node).branch())
            case out.Send(m.Ready() as ready):
                self._says_what_it_trained(node, ready)
            case out.BeginExchange(plan=plan, tokens=tokens) if tokens:
                self._contributes(node, plan, tokens)

    def _goes_not_too_far(self, node: SimNode, answer: e.Answer, step: int) -> None:
        """The ranks take a commit so many steps beyond the snapshot that it holds, or wait. Those for an older window
        do not count. With the coordinator away they go on from their boundary, which is the newest one."""
        assert node.node is not None
        asked, settings = of_node(node.node), self._settings
        sealed = asked.sealed_snapshots()
        in_flight = {fragment: at for fragment, (generation, at) in sealed.items() if generation == asked.generation}
        written = list(in_flight.values())
        if answer.kind is e.AnswerKind.SNAPSHOT or not written:
            return
        for_older = {fragment: self._steps_for_older(node, fragment) for fragment in in_flight}
        last = settings.sync.overlap_steps + min(at + for_older[fragment] for fragment, at in in_flight.items())
        if asked.is_away():
            last = max(last, max(written) + settings.most_overrun_steps)
        if answer.next_step > max(step, last):
            self.failed(
                f"5: {node.process} trains until step {answer.next_step}, with snapshots of steps {sorted(written)}: "
                f"at most until {last}"
            )

    def _writes(self, node: SimNode, fragment: int, step: int) -> None:
        assert node.node is not None
        asked = of_node(node.node)
        begins, _ = asked.open_windows().get(fragment, (0, 0))
        self._written.setdefault((node.process.start, asked.generation), []).append((fragment, step, begins))

    def _steps_for_older(self, node: SimNode, fragment: int) -> int:
        """At most so many did the ranks train for older windows since they wrote that snapshot, and for one now."""
        assert node.node is not None
        asked = of_node(node.node)
        written = self._written[node.process.start, asked.generation]
        index = max(i for i, (of, _, _) in enumerate(written) if of == fragment)
        _, step, begins = written[index]
        older = [at - step for _, at, begun in written[index + 1 :] if begun < begins]
        windows, sealed = asked.open_windows(), asked.sealed_snapshots()
        to_come = [num_steps for of, (at, num_steps) in windows.items() if at < begins and of not in sealed]
        return sum(older) + max(to_come, default=0)

    def _says_what_it_trained(self, node: SimNode, ready: m.Ready) -> None:
        """Each position that the snapshot lists, and no other."""
        sealed = self.listed(node).in_flight.get(self._kept.fragment_of(ready.sync))
        self.require(sealed is not None, f"{node.process} is ready for sync {ready.sync} without a snapshot")
        assert sealed is not None
        trained = sorted(p for step in sealed.steps for p in step.positions)
        said = [p for r in ready.ranges for p in range(r.first, r.end)]
        if trained != said or ready.tokens != sealed.tokens:
            self.failed(
                f"9: {node.process} says {ready.tokens} tokens of positions {said} for sync {ready.sync}; its snapshot "
                f"lists {sealed.tokens} tokens of {trained}"
            )

    def _contributes(self, node: SimNode, plan: m.Plan, tokens: int) -> None:
        assert node.node is not None
        sealed = self.listed(node).in_flight.get(plan.fragment)
        site_id, incarnation = of_node(node.node).site_id, node.node.home.incarnation
        self.require(sealed is not None, f"{node.process} contributes without a snapshot")
        assert sealed is not None
        first = self._contributions.setdefault((plan.sync, site_id, incarnation), sealed)
        self.require(first is sealed, f"11: the contribution of {node.process} to sync {plan.sync} has changed")
        fragments = self._fragments(plan.fragment)
        bases = {f: self._last_of(f, plan.base_commit) for f in fragments}
        found = {f: self._last_of(f, part.base) for f, part in sealed.parts.items()}
        self.require(
            found == bases,
            f"1: {node.process} contributes from {found} to a sync on commit {plan.base_commit}, which has {bases}",
        )
        true = sum(min(node.hands.true_tokens_a_step, step.tokens) for step in sealed.steps)
        self.require(
            tokens == sealed.tokens == true or (sealed.tokens > true and tokens <= sealed.tokens),
            f"12: {node.process} has weight {tokens} for {len(sealed.steps)} steps, and says {sealed.tokens}",
        )

    def _fragments(self, fragment: int) -> list[int]:
        """One, or all."""
        num = self._settings.sync.fragments
        return [fragment] if fragment < num else list(range(num))

    def _last_of(self, fragment: int, commit: int) -> int:
        """The last commit up to `commit` that touched the fragment. -1: none was taken."""
        log = self.commits[: max(commit, 0)]
        return max((c.commit for c in log if fragment in self._fragments(c.fragment)), default=min(commit, 0))

    def on_average(self, node: SimNode, made: Averaging) -> None:
        def name(key: AttemptKey) -> AttemptName:
            return key.sync, key.term, key.attempt

        added = None if made.added is None else name(made.added)
        self._averaged[*name(made.attempt), made.chunk] = Average(node.process.start, added)

    def site_ended(self, node: SimNode) -> None:
        if node.failure is not None and not isinstance(node.failure, OSError | InvalidMessage):
            self.failed(f"{node.process} ended with {node.failure!r}", node.failure)

    def raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    # --- the end

    def at_the_end(self, ended: Collection[SimNode]) -> None:
        commits = self.commits
        self.num_commits = len(commits)
        self.require([c.commit for c in commits] == list(range(1, len(commits) + 1)), "2: the log has a gap")
        self.require(
            self.finished is not None and self.finished.commit == len(commits), "the end is not the last commit"
        )
        broken = break_in(self._kept.audit)
        self.require(not broken, f"the audit log: {broken}")
        self._ends_at_its_length(commits)
        self._changes_are_asked_for()
        handed_in = {
            commit: [self._contributions[commit.sync, c.site_id, c.incarnation] for c in commit.contributors]
            for commit in commits
        }
        self._each_step_once(commits, handed_in)
        if self._settings.sync.strategy != "diloco":
            self._steps_and_rates(commits)
        self._cut_weights_are_recorded()
        if self.has_false_averages:
            return  # no reference has them; that sites hold the same after each commit is seen as they say it
        attested = {n: value for n, value in self.attested.items() if value}
        self.require(attested[0] in self._starts, "nobody ever held the commit 0 that is attested")
        went_back = bool(self._kept.rollbacks)
        errors = Errors(self._layout, self._settings)
        length = LogLength(self._layout.manifest, self._settings.sync)
        of_averages = ErrorsOfAverages(self._settings, length, self._averaged, went_back=went_back)
        start = self._starts[attested[0]]
        states = replay(self._layout, self._settings, start, commits, handed_in, errors=errors, of_averages=of_averages)
        self.num_errors_of_earlier_starts = errors.num_of_earlier_starts
        self.num_errors_of_averages = of_averages.num_added
        last_valid = min((r.commit for r in self._kept.rollbacks), default=len(commits))
        for sealed in self._sealed:
            for fragment, part in sealed.parts.items():
                if 0 <= part.base <= last_valid:  # the starting state has no base
                    self._base_and_steps_only(sealed, fragment, states)
        for number, state in enumerate(states):
            self.require(self._is_sane(state), f"commit {number} has an absurd contribution in it")
        slots = OuterOptimizer(self._settings).slots
        hashes = [
            state_hash(self._layout.manifest, slots, [chunk_hash(state[c.index]) for c in self._layout.chunks])
            for state in states
        ]
        codes = {0, NonFiniteError.exit_code} | ({StateError.exit_code} if self.liars else set())
        end_well = any(n.result is not None and not n.result[0] for n in ended)  # else all may have left for their loss
        if self.liars and not any(node.result == (0, "the run is complete") for node in ended):
            attested.pop(len(commits), None)  # the first report, of which nobody can say that it is right
        for number, value in sorted(attested.items()):
            if self.liars and number and number not in self._applied_by_others:
                continue
            self.require(hashes[number] == value, f"22: the hash attested for commit {number} is not the reference's")
        held = {n: state for n, state in self._states.items() if n <= len(commits)}  # later ones are void
        for number, (who, value) in sorted(held.items()):
            self.require(
                hashes[number] == value,
                f"1: {who} held {value.hex()[:12]} after commit {number}, the reference {hashes[number].hex()[:12]}",
            )
        for number, (who, value) in sorted(self._models.items()):
            if number <= last_valid or number == len(commits):
                self.require(hashes[number] == value, f"{who} saved another model of commit {number} than the run's")
        num_survivors, run_id = 0, self._settings.run_id
        history = History((0,) * self._settings.sync.fragments, (c.fragment for c in commits))
        for node in ended:
            code = node.result[0] if node.result is not None and OuterState.exists(node.folder / "state") else -1
            if code in codes or code == RefusedError.exit_code:  # by another run's coordinator: its state stays
                outer = OuterState.open(node.folder / "state", self._layout, slots, run_id, history=lambda: history)
                commit = outer.commit
                # A commit 0 that was never attested may still lie there; a run that went back may end with it.
                if commit is not None and (commit or not commits) and not self._is_void(node, commit):
                    is_right = outer.state_hash() == hashes[commit]
                    self.require(is_right or code not in codes, f"1: {node.process} has another state on disk")
                    is_last = is_right and commit == len(commits)
                    num_survivors += is_last and not (end_well and code == NonFiniteError.exit_code)
                    if node.result == (0, "the run is complete"):
                        saved = saved_model.load_manifest(node.folder / "model")
                        self.require(
                            saved.state_hash == hashes[-1], f"{node.process} saved another model than the last"
                        )
        self.require(num_survivors > 0 or self.may_lose_the_end, "nobody holds the last state")

    def _base_and_steps_only(self, sealed: Sealed, fragment: int, states: Sequence[Records]) -> None:
        """A snapshot is the base that the site was given, plus what its steps changed. The hashes of all sites agree on
        garbage, too."""
        part = sealed.parts[fragment]
        steps = {*part.steps, *(part.mixed.steps if part.mixed is not None else ())}
        learned = {s: self._learned(sealed, s) for s in steps}
        for chunk in self._layout.chunks:
            if chunk.role is not Role.TRAINABLE or self._layout.fragment_of[chunk.index] != fragment:
                continue
            name, elements = self._layout.name_of(chunk.index), elements_of(chunk)
            start = np.frombuffer(states[part.base][chunk.index][: chunk.num_bytes], "<f4")
            steps_here = {step: found[name].ravel()[elements] for step, found in learned.items()}
            if self._settings.sync.strategy != "diloco":
                num = sealed.num_local
                empty, own = part.steps[:-num], part.steps[-num:]
                said = {step.number: step.tokens for step in sealed.steps}
                self.require(
                    not any(said[step.number] for step in empty),
                    f"9: site {sealed.site_id} sealed the last {num} of {len(part.steps)} steps",
                )
                expected = steps_here[own[-1]]
                if local_steps(self._settings.sync, part.base + 1) > 1:
                    group = self._layout.manifest.tensors[chunk.tensor].group
                    momentum = np.frombuffer(states[part.base][chunk.index], "<f4")[len(start) : 2 * len(start)]
                    at = self.commits[part.base - 1].run_step
                    rates = [rates_at(step)[2 * group] for step in range(at, at + num)]
                    gradients = [steps_here[step] for step in own]
                    expected = mean_momentum(momentum, self._settings.outer.momentum, gradients, rates)
            else:
                expected = trained(part, chunk, states, steps_here, bf16=sealed.bf16)
            found = np.frombuffer(cut_out(sealed.values, chunk), "<f4")
            if not (np.abs(found) < MOST).all():
                continue  # the faults that make a NaN or an absurd value; no commit may hold it
            rounding = MOST_ROUNDING[sealed.bf16] * (2 + len(learned)) * (1 + np.abs(found) + np.abs(start))
            if not np.all(np.abs(found - expected) <= rounding):  # as text they are dear
                self.failed(
                    f"1: site {sealed.site_id} sealed {found} of {name!r} on commit {part.base}; its base and its "
                    f"{len(learned)} steps make {expected}"
                )

    def _ends_at_its_length(self, commits: Sequence[m.Commit]) -> None:
        """With the first commit that has it and may be the last one; a length in steps is reached to the step."""
        opened = {record.open.sync: record.open for record in self._store.kept if isinstance(record, OpenRecord)}
        for commit in commits:
            of, (steps, tokens) = opened[commit.sync], self._length_at(commit)
            reached = f"{commit.run_step} of {steps} steps" if steps else f"{commit.run_tokens} of {tokens} tokens"
            is_over = commit.run_step >= steps if steps else commit.run_tokens >= tokens
            not_last = f"of fragment {of.fragment} alone, " * (of.fragment != self._settings.sync.all_fragments)
            not_last += f"with {of.overlap_steps} steps beyond it, " * (of.overlap_steps > 0)
            not_last += f"without sites {of.resting}, " * bool(of.resting)
            self.require(not (commit.final and not_last), f"44: sync {of.sync}, {not_last}is the last one")
            self.require(commit.final or not is_over or bool(not_last), f"44: it goes on after {reached}")
            is_right = commit.run_step == steps if steps else is_over
            self.require(is_right or self.may_end_early or not commit.final, f"44: it ends at {reached}")
        is_final = bool(commits) and commits[-1].final  # else it went back, and was told to stop
        self.require(is_final or self.may_end_early, "44: its last commit does not say that it is the last")

    def _length_at(self, commit: m.Commit) -> tuple[int, int]:
        """Of the run, in steps or in tokens, as it was set by then."""
        changed, settings = json.loads(commit.changed_json or "{}"), self._settings
        return changed.get("run.steps", settings.steps), changed.get("run.tokens", settings.tokens)

    def _changes_are_asked_for(self) -> None:
        """What is changed in a commit is what was changed in the one before, or what an operator made of it."""
        was = ""
        for commit in self.commits:
            now = commit.changed_json
            self.require(now == was or now in self.changes, f"49: in commit {commit.commit} {now!r}, {was!r} before")
            was = now

    def _steps_and_rates(self, commits: Sequence[m.Commit]) -> None:
        """Of each commit, where the optimizer is the nodes': they follow from its number and the step before."""
        before = 0
        for commit in commits:
            steps, _ = self._length_at(commit)
            num_steps = min(local_steps(self._settings.sync, commit.commit), steps - before)
            self.require(
                commit.run_step - before == num_steps and same_rates(commit.rates, rates_over(before, num_steps)),
                f"48: commit {commit.commit}, from step {before} to {commit.run_step}, has the rates {commit.rates}; "
                f"{num_steps} steps have {rates_over(before, num_steps)}",
            )
            before = commit.run_step

    def _learned(self, sealed: Sealed, step: Step) -> dict[str, npt.NDArray[Any]]:
        """Several snapshots, each of a fragment of its own, have the same steps."""
        key = sealed.site_id, sealed.incarnation, step.generation, step.number
        if key not in self._learned_in:
            self._learned_in[key] = learned_in(self._layout.manifest, *key)
        return self._learned_in[key]

    def _cut_weights_are_recorded(self) -> None:
        """Whatever the coordinator went through between the plan and the commit."""
        for record in self._store.kept:
            if not isinstance(record, CommitRecord):
                continue
            commit = record.commit
            said = {c: self._contributions[commit.sync, c.site_id, c.incarnation].tokens for c in commit.contributors}
            cut = [(c.site_id, tokens, c.tokens) for c, tokens in said.items() if c.tokens < tokens]
            are_named = all(
                f"(site {site_id}) says {tokens} tokens, which count as {weight} (" in words
                for (site_id, tokens, weight), words in zip(cut, record.cut, strict=False)
            )
            self.require(
                are_named and len(cut) == len(record.cut),
                f"12: of commit {commit.commit} {record.cut} is recorded, what sites said is {cut}",
            )

    def _is_void(self, node: SimNode, commit: int) -> bool:
        """The site left before the run went back, or before its disk did."""
        branch = node.node.home.branch if node.node is not None else 0
        return any(r.branch > branch and r.commit < commit for r in self._kept.rollbacks)

    def _is_sane(self, state: dict[int, bytes]) -> bool:
        chunks = [c for c in self._layout.chunks if c.role is Role.TRAINABLE]
        return all(bool(np.all(np.abs(np.frombuffer(state[c.index], "<f4")) < MOST)) for c in chunks)

    def _each_step_once(self, commits: Sequence[m.Commit], handed_in: dict[m.Commit, list[Sealed]]) -> None:
        used: dict[tuple[int, int, int, int], int] = {}
        done: dict[tuple[int, int], int] = {}
        for commit in commits:
            trained = set()
            for sealed in handed_in[commit]:
                line = sealed.site_id if self._settings.data == "local" else GLOBAL_LINE
                for step in sealed.steps:
                    key = (sealed.site_id, sealed.incarnation, step.generation, step.number)
                    before = used.setdefault(key, commit.commit)
                    if before != commit.commit:
                        self.failed(f"9: step {step} of site {sealed.site_id} is in commits {before}, {commit.commit}")
                    for position in step.positions:
                        before = done.setdefault((line, position), commit.commit)
                        if (line, position) in trained or before != commit.commit:
                            counts = f"{before}, {commit.commit}"
                            self.failed(f"9: position {position} of line {line} counts twice: {counts}")
                        trained.add((line, position))
            listed = {(d.line, p) for d in commit.done for r in d.ranges for p in range(r.first, r.end)}
            self.require(
                listed == trained,
                f"9: commit {commit.commit} lists {sorted(listed - trained)}, which nobody trained on, and not "
                f"{sorted(trained - listed)}, on which somebody did",
            )
        if not self._store.num_restored:
            for skipped in (line for r in self._kept.rollbacks for line in r.skipped):
                again = {p for r in skipped.ranges for p in range(r.first, r.end) if (skipped.line, p) in done}
                self.require(not again, f"9: positions {sorted(again)} of line {skipped.line} were to be skipped")
        self.num_steps_in_commits = len(used)
        tokens = sum(member.tokens for commit in commits for member in commit.contributors)
        run_tokens = commits[-1].run_tokens if commits else 0
        self.require(run_tokens == tokens, "44: run_tokens is not the sum of what was trained")
