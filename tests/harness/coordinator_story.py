"""The coordinator's core in tests: sites by name, a simulated clock, and a log that reads as prose.

A story is a text file: a command in column 0, what it led to indented below it. `play` executes the commands and
returns the whole text with what really happened. After every event it checks that decisions were kept before they
were sent.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.coordinator.core import events as e
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.log import evidence
from atoll.coordinator.core.sites import manifests
from atoll.coordinator.store import Store
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.digest import Digest
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import Evidence
from atoll.protocol.plans import reducers, top_of, weights, with_weights
from atoll.protocol.ranges import Ranges
from atoll.protocol.sample_order import GLOBAL_LINE
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_questions import CoordinatorQuestions
from tests.harness.memory_store import MemoryStore
from tests.harness.tiny_model import TinyModel, rates_of

CHUNK_ELEMENTS = 4


def a_hash(text: str) -> bytes:
    """32 bytes that stand for `text`."""
    return Digest("story").text(text).finish()


def a_manifest(width: int = 6) -> Manifest:
    return Manifest.canonical(
        [
            TensorSpec(name="bias", shape=(width,), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="weight", shape=(width, 2), dtype="F32", role=Role.TRAINABLE),
        ]
    )


def three_layers() -> Manifest:
    """For up to three fragments."""
    tensors = [TensorSpec(name=f"layers.{i}.w", shape=(5 + i, 2), dtype="F32", role=Role.TRAINABLE) for i in range(3)]
    return Manifest.canonical([*a_manifest().tensors, *tensors])


def some_settings(**changes: Any) -> RunSettings:
    values: dict[str, Any] = {"run_id": "run", "steps": 40, "min_sites": 2, "time_limits": "local"} | changes
    sync = SyncSettings(
        strategy=values.pop("strategy", "diloco"),
        every=values.pop("every", 10),
        codec=values.pop("codec", "fp32"),
        error_feedback_down=values.pop("errors_down", 0.0),
        chunk_elements=CHUNK_ELEMENTS,
        overlap_steps=values.pop("overlap", 0),
        fragments=values.pop("fragments", 1),
        max_chunks=values.pop("max_chunks", 10_000),
        log_commits=8,
        max_weight_ratio=values.pop("ratio", 16),
        audits=values.pop("audits", 0),
        robust=values.pop("robust", "warn"),
    )
    return RunSettings(sync=sync, **values)


@dataclass(slots=True)
class FakeSite:
    name: str
    incarnation: int = 1
    stream: int | None = None
    site_id: int = 0
    manifest: Manifest = field(default_factory=a_manifest)
    sends_manifest: bool = True
    received: dict[int, int] = field(default_factory=dict)  # messages by stream
    hears: bool = True
    heartbeats: bool = True
    heartbeat: m.Heartbeat = field(default_factory=lambda: m.Heartbeat(phase="training"))
    trains: bool = True  # until it is ready, each heartbeat is a step further
    held: tuple[int, str] = (0, "")  # commit and state, as it says
    was_at: dict[int, str] = field(default_factory=dict)  # the states that it said it holds, by commit
    shows: bool | None = True  # what it is asked for in a dispute; None: it is silent
    part_bytes: int = 1 << 18  # that it shows at once
    work: object = None
    progress: int = 0

    def counted(self, beat: m.Heartbeat) -> m.Heartbeat:
        """With the progress that a node counts."""
        work = (self.incarnation, beat.phase, beat.doing, beat.inner_step, beat.moved_bytes)
        self.progress += work != self.work
        self.work = work
        return replace(beat, progress=self.progress)


class Story(CoordinatorQuestions):
    """One run: sites that do what they are told, and everything the core answered."""

    def __init__(
        self,
        settings: RunSettings,
        parent_json: str = "",
        store: Store | None = None,
        *,
        real: bool = False,
        takes_changes: bool = True,
        manifest: Manifest | None = None,
    ) -> None:
        """`real`: states and payloads are those of a model, so that sites can show what their hashes are made of."""
        self.settings = settings
        self.manifest = manifest
        self.takes_changes = takes_changes
        self.model = TinyModel(settings, manifest or a_manifest()) if real else None
        self.now = 100.0
        self.wall_from_s = 1_764_000_000.0 - self.now
        self.store = store or MemoryStore()
        self.sites: dict[str, FakeSite] = {}
        self.log: list[str] = []
        self.reports: list[tuple[int, str]] = []  # lines for a person, with their levels
        self.sent: list[tuple[str, m.CoordinatorMessage]] = []
        self.kept: set[tuple[str, int, int]] = set()
        self.kept_weights: dict[tuple[int, int], tuple[int, ...]] = {}
        self.kept_ranges: dict[tuple[str, int, int, int], tuple[m.DataRange, ...]] = {}
        self.rollbacks: list[e.RollbackRecord] = []
        self.answers: dict[int, str] = {}  # to what people asked for
        self.found = ""  # as the last answer says it
        self.expects_a_fault = False  # of the coordinator
        self._layout: Layout | None = None
        self._num_asked = 0
        self._owners: dict[int, FakeSite] = {}
        self._num_streams = 0
        self._waiting: list[e.Event] | None = None
        self._parent_json = parent_json
        self._begin()

    def _begin(self) -> None:
        persisted = self.store.begin(self.settings, self._parent_json)
        self.term = persisted.term
        self.core = Core(self.settings, persisted, self.now, self.wall_s, a_hash(f"secret of term {self.term}"))
        self.core.view(self.now)  # as the server does before anything else

    # --- the world

    def restart(self) -> None:
        """The coordinator is killed and started again on its store; all streams break."""
        self._owners.clear()
        for site in self.sites.values():
            site.stream = None
        self._begin()
        self.happens(e.Tick())

    def wait(self, seconds: float) -> None:
        """Time passes; sites with a stream send heartbeats, deadlines are met."""
        end = self.now + seconds
        pace_s = self.limits.heartbeat_s
        beat_at = self.now + pace_s
        while True:
            deadline = self.core.next_deadline()
            self.now = min(t for t in (end, beat_at, deadline) if t is not None)
            if self.now >= beat_at:
                beat_at += pace_s
                for site in list(self.sites.values()):
                    if site.stream is not None and site.heartbeats:
                        if site.trains and not self.is_ready(site.name):
                            site.heartbeat = replace(site.heartbeat, inner_step=site.heartbeat.inner_step + 1)
                        self.says(site.name, site.heartbeat)
            if deadline is not None and self.now >= deadline:
                self.happens(e.Tick())
            if self.now >= end:
                return

    @property
    def wall_s(self) -> float:
        """Seconds since 1970, by the coordinator's clock."""
        return self.wall_from_s + self.now

    def pause(self, seconds: float) -> None:
        """The coordinator is stopped for so long, and goes on; what sites did meanwhile is not read yet."""
        self.now += seconds
        self.happens(e.Tick())

    @contextmanager
    def together(self) -> Iterator[None]:
        """What happens within is handed to the core at once, as a busy coordinator does."""
        self._waiting = []
        try:
            yield
        finally:
            events, self._waiting = self._waiting, None
            self._execute(self.core.handle(events, self.now, self.wall_s))

    def happens(self, event: e.Event) -> list[e.Output]:
        if self._waiting is not None:
            self._waiting.append(event)
            return []
        return self._execute(self.core.handle([event], self.now, self.wall_s))

    def _execute(self, outputs: list[e.Output]) -> list[e.Output]:
        read: list[e.Event] = []
        asked: list[str] = []
        to_show: list[tuple[FakeSite, int, m.Show]] = []
        for output in outputs:
            match output:
                case e.Persist(records):
                    self.store.persist(self.term, records, self.now)
                    self.note_kept(records)
                    said = (r for r in records if not isinstance(r, e.SiteRecord | e.CurveRecord))
                    self.log.extend(f"keeps {_record_in_words(r)}" for r in said)
                case e.Send(stream, message):
                    if isinstance(message, m.SendManifest):
                        asked.append(self._owners[stream].name)
                    if isinstance(message, m.Show):
                        to_show.append((self._owners[stream], stream, message))
                    self._deliver(stream, message)
                case e.CloseStream(stream, reason):
                    site = self._owners.pop(stream, None)
                    if site is not None and site.stream == stream:
                        site.stream = None
                    self.log.append(f"closes a stream of {site.name if site else '?'}: {reason}")
                case e.Report(level, text):
                    self.reports.append((level, text))
                    assert self.expects_a_fault or "a fault of the coordinator" not in text, text
                    self.log.append(f"# {text}")
                case e.Answer(request, problem, found):
                    self.answers[request], self.found = problem, found
                    self.log.append(f"answers: {problem or 'done'}")
                case e.ReadCommits(first=first, last=last):
                    commits, attestations = self.store.read_commits(first, last)
                    read.append(e.CommitsRead(commits=commits, attestations=attestations))
                case e.ReadManifest():
                    read.append(manifests.read(output))
                case e.Recompute():
                    read.append(evidence.recompute(output))
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now, f"a deadline that has passed is still waited for: {deadline}"
        for event in read:
            self.happens(event)
        for site, stream, show in to_show:
            if site.stream == stream and site.shows is not None:
                self.says(site.name, self.shown(site, show))
        for name in asked:
            if self.sites[name].sends_manifest:
                for part in wire.manifest_parts(wire.encode(self.sites[name].manifest)):
                    if self.sites[name].stream is not None:  # else it was refused
                        self.says(name, part)
        return outputs

    def note_kept(self, records: Iterable[e.Record]) -> None:
        """By this coordinator, or before it."""
        for r in records:
            self.kept.add(_identity(r))
            if isinstance(r, e.LeaseRecord):
                self.kept_ranges["lease", r.line, r.site_id, r.incarnation] = r.ranges
            elif isinstance(r, e.DoneRecord):
                self.kept_ranges["done", r.line, 0, 0] = r.ranges
            elif isinstance(r, e.WeightsRecord):
                self.kept_weights[r.sync, r.attempt] = r.tokens
            elif isinstance(r, e.RollbackRecord):
                self.rollbacks.append(r)

    def shown(self, site: FakeSite, asked: m.Show) -> m.Shown:
        held = site.was_at.get(asked.commit, f"s{asked.commit}")
        data = self.model.show(asked, held) if self.model is not None and site.shows else b""
        return m.Shown(
            commit=asked.commit,
            evidence=asked.evidence,
            chunk=asked.chunk,
            first_byte=asked.first_byte,
            total_bytes=len(data),
            data=data[asked.first_byte :][: site.part_bytes],
            text="" if data else "not here any more",
        )

    def layout(self) -> Layout:
        """Of the model that sites agreed on."""
        found = self.agreed_manifest()
        assert found is not None, "no site has offered one"
        sync = self.settings.sync
        if self._layout is None or self._layout.manifest != found:
            self._layout = Layout(found, sync.chunk_elements, sync.fragments)
        return self._layout

    def state(self, name: str, commit: int) -> bytes:
        """The state hash that a story calls so."""
        return a_hash(name) if self.model is None else self.model.state(name, commit)

    def _deliver(self, stream: int, message: m.CoordinatorMessage) -> None:
        site = self._owners[stream]
        self.sent.append((site.name, message))
        if site.hears:
            site.received[stream] = site.received.get(stream, 0) + 1
        if isinstance(message, m.Welcome) or (isinstance(message, m.Admitted) and message.site_id):
            site.site_id = message.site_id  # 0: it is forgotten, or was never in the run
        self._check_kept(site, message)
        if not isinstance(message, m.Pulse | m.Peers):
            self.log.append(f"-> {site.name}: {self._in_words(message)}")

    def _check_kept(self, site: FakeSite, message: m.CoordinatorMessage) -> None:
        """Invariant 5: a decision is in the store before it is sent. And a plan is one that sites can execute."""
        match message:
            case m.Plan():
                assert ("plan", message.sync, message.attempt) in self.kept, message
                assert not any(weights(message)), "they are said apart"
                tops = reducers(message, self.num_chunks())
                here = {tops[chunk].site_id for chunk in self.layout().chunks_of(message.fragment)}
                assert here == {top.site_id for top in tops}, "a reducer of nothing"
            case m.Weights():
                assert self.kept_weights.get((message.sync, message.attempt)) == message.tokens, message
            case m.Influences():
                assert ("influences", message.sync, message.attempt) in self.kept, message
            case m.Commit():
                assert ("commit", message.commit, message.sync) in self.kept, message
                assert not message.final or message.next is None
                if message.next is not None:
                    assert ("open", message.next.sync, message.next.base_commit) in self.kept, message
                for line in message.done:
                    assert Ranges(self.kept_ranges["done", line.line, 0, 0]).holds_all(line.ranges), message
            case m.Leases():
                drawn_from = site.site_id if self.settings.data == "local" else GLOBAL_LINE
                key = ("lease", drawn_from, site.site_id, site.incarnation)
                assert message.ranges == self.kept_ranges.get(key, ()), message
            case m.Open():
                assert ("open", message.sync, message.base_commit) in self.kept, message
            case m.Abandoned():
                assert ("abandoned", message.sync, 0) in self.kept, message
            case m.RolledBack():
                assert any(("rollback", message.branch, n) in self.kept for n in range(message.commit, 1000)), message
            case m.Finished():
                assert ("finished", message.commit, 0) in self.kept, message
            case m.Sources():
                for attestation in message.attested:
                    if attestation.commit > 0:
                        assert ("attested", attestation.commit, 0) in self.kept, message

    # --- what sites do

    def open_stream(self, name: str, certified: e.Certified | None = None) -> int:
        site = self.sites.setdefault(name, FakeSite(name))
        self._num_streams += 1
        site.stream = self._num_streams
        self._owners[self._num_streams] = site
        self.happens(e.StreamOpened(self._num_streams, certified))
        return self._num_streams

    def connect(
        self,
        name: str,
        *,
        incarnation: int = 0,
        state: tuple[int, str] | None = None,
        key: str = "",
        run_id: str = "",
        version: int = PROTOCOL_VERSION,
        term: int = 0,
        saved: bool = False,
        again: bool = False,
        branch: int = 0,
        process: str = "",
        certified: e.Certified | None = None,
    ) -> None:
        """Opens a stream (unless `again`, on the one there is) and says Hello."""
        site = self.sites.setdefault(name, FakeSite(name))
        if incarnation:
            site.incarnation = incarnation
        if not again:
            self.open_stream(name, certified)
        site.held = state or (0, "")
        if state is not None:
            site.was_at[state[0]] = state[1]
        hello = m.Hello(
            name=name,
            key=a_hash(f"key {key or name}"),
            address=f"{name}:1",
            has_state=state is not None,
            last_commit=state[0] if state else 0,
            state_hash=self.state(state[1], state[0]) if state else b"",
            from_saved_model=saved,
            branch=branch,
            process_id=process.encode(),
            takes_changes=self.takes_changes,
        )
        header = m.Header(protocol_version=version, run_id=run_id or "run", term=term, incarnation=site.incarnation)
        assert site.stream is not None
        self.happens(e.Received(site.stream, header, hello, site.received.get(site.stream, 0)))

    def offer(
        self,
        name: str,
        *,
        width: int = 6,
        data: str = "data",
        retain: int = 1 << 30,
        speed: int = 0,
        endpoints: Iterable[m.Endpoint] = (),
    ) -> None:
        self.sites[name].manifest = self.manifest or a_manifest(width)
        message = m.Offer(
            manifest_digest=self.sites[name].manifest.digest,
            data_fingerprint=a_hash(data),
            max_retained_bytes=retain,
            bandwidth_bytes_per_s=speed,
            endpoints=tuple(endpoints),
        )
        self.says(name, message)

    def join(self, name: str, *, width: int = 6, **hello: Any) -> None:
        self.connect(name, **hello)
        self.offer(name, width=width)

    def says(self, name: str, message: m.SiteMessage) -> None:
        site = self.sites[name]
        assert site.stream is not None, f"{name} has no stream"
        if isinstance(message, m.Heartbeat) and not message.progress:
            message = site.counted(message)
        header = m.Header(
            protocol_version=PROTOCOL_VERSION, run_id="run", site_id=site.site_id, incarnation=site.incarnation
        )
        self.happens(e.Received(site.stream, header, message, site.received.get(site.stream, 0)))

    def applied(self, name: str, commit: int, state: str) -> None:
        site = self.sites[name]
        site.held, site.was_at[commit] = (commit, state), state
        self.says(name, m.Applied(commit=commit, state_hash=self.state(state, commit)))

    def ready(
        self,
        name: str,
        tokens: int = 100,
        loss: float = 2.0,
        *,
        data: Iterable[m.DataRange] = (),
        train: float = 0.0,
        steps: int = 0,
        unreachable: str = "",
        fragment: int | None = None,
        errors: tuple[int, ...] = (),
        rates: tuple[float, ...] | None = None,
        of_shards: bool = False,
    ) -> None:
        """`train`: the seconds that its `steps` took, by default those of the sync. `unreachable`: names, by commas.
        `rates`: of its optimizer, by default those of all sites.
        `fragment`: of the sync, where several are open."""
        opened = self.open_sync(fragment)
        assert opened is not None
        message = m.Ready(
            sync=opened.sync,
            tokens=tokens,
            num_steps=steps or opened.num_steps,
            mean_loss=loss,
            train_s=train,
            ranges=tuple(data),
            unreachable_site_ids=tuple(sorted(self.sites[who].site_id for who in unreachable.split(",") if who)),
            error_commits=errors,
            rates=rates_of(self.settings, self.sites[name].manifest) if rates is None else rates,
            of_shards=of_shards,
            contributions_root=a_hash(f"root of {name}") if self.settings.sync.audits else b"",
        )
        self.says(name, message)

    def wants(self, name: str, wanted: int, of: int = 1000) -> tuple[m.DataRange, ...]:
        """Asks for leases; what it holds then."""
        self.says(name, m.LeaseRequest(num_samples=of, wanted=wanted))
        leases: m.Leases = self.last(name, m.Leases)
        return leases.ranges

    def done(
        self,
        name: str,
        state: str,
        payloads: str = "p",
        plan: m.Plan | None = None,
        *,
        links: tuple[m.LinkUse, ...] = (),
        averaged: m.Averaged | None = None,
        commit: int | None = None,
    ) -> None:
        """`commit`: that it holds, by default the plan's base."""
        plan = plan or self.plan()
        commit = plan.base_commit if commit is None else commit
        self.says(
            name,
            m.Done(
                sync=plan.sync,
                attempt=plan.attempt,
                term=plan.term,
                payload_digest=a_hash(payloads)
                if self.model is None or payloads != "p"
                else self.model.payloads_digest(plan),
                last_commit=commit,
                state_hash=self.state(state, commit),
                tokens=weights(plan),
                links=links,
                averaged=averaged,
                payloads_root=a_hash(f"made by {name}") if self.settings.sync.audits else b"",
                errors=m.SignedErrors(before=a_hash(f"added by {name}"), after=a_hash(f"left by {name}"))
                if self.settings.sync.audits and self.settings.sync.error_feedback_down
                else None,
            ),
        )

    def multiplies(self, name: str, contributions: str) -> None:
        """The reducer says inner products: `contributions` are of two numbers each, `3:4,0:1`."""
        plan, vectors = self.plan(), [[float(x) for x in text.split(":")] for text in contributions.split(",")]
        products = tuple(
            sum(a * b for a, b in zip(one, other, strict=True))
            for place, one in enumerate(vectors)
            for other in vectors[: place + 1]
        )
        self.says(name, m.Products(sync=plan.sync, attempt=plan.attempt, term=plan.term, products=products))

    def lists(self, name: str, payloads: str) -> None:
        """One letter for the payload of each chunk."""
        plan = self.plan()
        hashes = b"".join(a_hash(letter) for letter in payloads)
        self.says(name, m.PayloadList(sync=plan.sync, attempt=plan.attempt, term=plan.term, hashes=hashes))

    def failed(
        self,
        name: str,
        peer: str = "",
        text: str = "no progress",
        *,
        tensor: str = "",
        lacks: bool = False,
        outliers: str = "",
    ) -> None:
        """`lacks`: it waits for what the peer owes; else it could not send. `outliers`: names, by commas, whose
        contribution to `tensor` has norm 1e30."""
        plan = self.plan()
        self.says(
            name,
            m.ExchangeFailed(
                sync=plan.sync,
                attempt=plan.attempt,
                term=plan.term,
                peer_site_id=self.sites[peer].site_id if peer else 0,
                direction=m.Direction.RECEIVING if lacks else m.Direction.SENDING,
                phase="averaging" if tensor else "upload",
                text=text,
                tensor=tensor,
                outliers=tuple(
                    m.Outlier(site_id=self.sites[who].site_id, norm=1e30, limit=2.5)
                    for who in outliers.split(",")
                    if who
                ),
            ),
        )

    def ask_to_go_back(self, commit: int, reason: str = "atoll rollback --to", *, skip_samples: bool = False) -> int:
        """The number of the request."""
        self._num_asked += 1
        self.happens(e.RollbackAsked(reason, to=commit, skip_samples=skip_samples, request=self._num_asked))
        return self._num_asked

    def evict(self, name: str, reason: str = "atoll evict") -> str:
        """What the person is told; empty if it is done."""
        self._num_asked += 1
        self.happens(e.EvictAsked(name=name, reason=reason, request=self._num_asked))
        return self.answers[self._num_asked]

    def ban(self, name: str, reason: str = "atoll ban", *, until_s: float = 0.0, by: str = "") -> str:
        self._num_asked += 1
        self.happens(e.BanAsked(name=name, reason=reason, until_s=until_s, by=by, request=self._num_asked))
        return self.answers[self._num_asked]

    def lift_ban(self, name: str) -> str:
        self._num_asked += 1
        self.happens(e.LiftBanAsked(name=name, request=self._num_asked))
        return self.answers[self._num_asked]

    def reset(self) -> str:
        self._num_asked += 1
        self.happens(e.ResetAsked(reason="atoll reset", request=self._num_asked))
        return self.answers[self._num_asked]

    def rebuilt(self, name: str, state: str = "", oldest: int | None = None) -> None:
        """What it was asked for; no `state`: it cannot."""
        commit = self.goes_back_to()
        assert commit is not None, "nothing is to be rebuilt"
        self.says(
            name,
            m.CommitRebuilt(
                commit=commit,
                state_hash=a_hash(state) if state else b"",
                has_oldest=oldest is not None,
                oldest_commit=oldest or 0,
                text="" if state else f"no snapshot here is as old as commit {commit}",
            ),
        )

    def sources(self, name: str, after: int | None = None, lacks: int = 0, undialled: str = "") -> None:
        """`undialled`: names, by commas."""
        message = m.FindSources(
            has_state=after is not None,
            after_commit=after or 0,
            lacks_commit=lacks,
            undialled_site_ids=tuple(self.sites[who].site_id for who in undialled.split(",") if who),
        )
        self.says(name, message)

    def leave(self, name: str, reason: str = "asked to") -> None:
        self.says(name, m.Leave(reason=reason))
        self.drop(name)

    def drop(self, name: str) -> None:
        """Its stream breaks."""
        site = self.sites[name]
        if site.stream is not None:
            stream, site.stream = site.stream, None
            self._owners.pop(stream, None)
            self.happens(e.StreamClosed(stream, "connection reset"))

    def beats(
        self, name: str, *, phase: str, doing: str, step: int, limit: float = 0.0, lacks: str = "", waits: str = ""
    ) -> None:
        """What its heartbeats say from now on. `lacks`: names of one letter whose contributions it waits for as a
        reducer; `waits`: whose payloads it waits for."""
        beat = m.Heartbeat(
            phase=phase,
            doing=doing,
            inner_step=step,
            limit_s=limit,
            waits_for_contributions=tuple(self.sites[n].site_id for n in lacks),
            waits_for_payloads=tuple(self.sites[n].site_id for n in waits),
        )
        self.sites[name].heartbeat = beat
        self.sites[name].trains = False
        self.says(name, beat)

    def hang(self, name: str) -> None:
        """Its stream stays, but nothing comes any more."""
        self.sites[name].heartbeats = False
        self.sites[name].hears = False

    # --- shortcuts of tests

    def start(self, *names: str) -> None:
        """Sites join and hold commit 0, state s0."""
        for name in names:
            self.join(name)
            self.applied(name, 0, "s0")

    def commit_one(self, *names: str, state: str, following: str) -> None:
        """One sync of these sites on `state`, which leads to `following`."""
        number = self.last_commit()
        for name in names:
            self.ready(name)
        for name in names:
            self.done(name, state, commit=number)
        for name in names:
            self.applied(name, self.last_commit(), following)

    def plan_named(self, name: str) -> m.Plan:
        """`1.2`: the plan of attempt 2 at sync 1, with the weights that were said of it; empty: the one that runs."""
        if not name:
            return self.plan()
        return next(p for (sync, attempt), p in self.plans().items() if f"{sync}.{attempt}" == name)

    def plans(self) -> dict[tuple[int, int], m.Plan]:
        """By sync and attempt, with the weights that were said of them, if they were."""
        found: dict[tuple[int, int], m.Plan] = {}
        for _, message in self.sent:
            if isinstance(message, m.Plan):
                found[message.sync, message.attempt] = message
            elif isinstance(message, m.Weights):
                key = message.sync, message.attempt
                found[key] = with_weights(found[key], message.tokens)
        return found

    def last(self, name: str, kind: type[Any]) -> Any:
        """The last message of this kind that the site was sent."""
        return next(message for who, message in reversed(self.sent) if who == name and isinstance(message, kind))

    def num(self, name: str, kind: type[Any]) -> int:
        return sum(1 for who, message in self.sent if who == name and isinstance(message, kind))

    # --- words

    def _name(self, site_id: int) -> str:
        return next((s.name for s in self.sites.values() if s.site_id == site_id), str(site_id))

    def _in_words(self, message: m.CoordinatorMessage) -> str:
        match message:
            case m.Welcome():
                return f"Welcome, site {message.site_id or '?'}, the run is at commit {message.last_commit}"
            case m.Admitted():
                return f"Admitted as {message.admitted_as.name.lower()}"
            case m.SendManifest():
                return "SendManifest"
            case m.Refused():
                return f"Refused ({message.kind.name.lower()})"
            case m.Open():
                return f"Open, {self._open_in_words(message)}"
            case m.Plan():
                names = " ".join(self._name(c.site_id) for c in message.contributors)
                receivers = " ".join(self._name(r.site_id) for r in message.receivers)
                work = ", ".join(
                    f"{self._name(message.contributors[top_of(t)].site_id)} reduces "
                    f"{t.first_chunk}-{t.first_chunk + t.num_chunks - 1}"
                    for t in message.trees
                )
                to = f", to {receivers}" if receivers else ""
                ahead = ", ahead" if message.ahead else ""
                of = f"{self._fragment_in_words(message.fragment)}{ahead}"
                return f"Plan {message.sync}.{message.attempt} of term {message.term}{of}: {names}{to}; {work}"
            case m.Weights():
                key = message.sync, message.attempt
                plans = (p for _, p in reversed(self.sent) if isinstance(p, m.Plan))
                members = next(p.contributors for p in plans if (p.sync, p.attempt) == key)
                tokens = " ".join(f"{self._name(c.site_id)}:{t}" for c, t in zip(members, message.tokens, strict=True))
                return f"Weights of plan {message.sync}.{message.attempt}: {tokens}"
            case m.Influences(influences=influences):
                shares = " ".join(f"{influence / sum(influences):.3f}" for influence in influences)
                return f"Influences of plan {message.sync}.{message.attempt}: {shares}"
            case m.Commit():
                following = f"; then {self._open_in_words(message.next)}" if message.next else "; the last"
                following = following if message.next or message.final else "; others are open"
                done = self._fragment_in_words(message.fragment)
                done += "".join(f", done {ranges_in_words(line.ranges)}" for line in message.done)
                return f"Commit {message.commit} of sync {message.sync}.{message.attempt}{done}{following}"
            case m.Abandoned():
                following = f"; then {self._open_in_words(message.next)}" if message.next else ""
                return f"Abandoned sync {message.sync}{following}"
            case m.Sources():
                attested = " ".join(str(a.commit) for a in message.attested) or "none"
                donors = " ".join(f"{self._name(d.site_id)}@{d.commit}" for d in message.donors) or "none"
                commits = " ".join(str(c.commit) for c in message.commits) or "none"
                touched = f"; touched {' '.join(map(str, message.touched))}" if message.touched else ""
                return f"Sources: attested {attested}; donors {donors}; commits {commits}{touched}"
            case m.Evicted():
                return "Evicted"
            case m.ListPayloads():
                return f"ListPayloads of {message.sync}.{message.attempt}"
            case m.Disputed():
                how = "and nobody can find out whose is right" if message.is_over else "it is being found out"
                return f"Disputed: commit {message.commit}, {how}"
            case m.Show():
                what = message.evidence.name.lower().replace("_", " ")
                of = f" of chunk {message.chunk}" if message.evidence in (Evidence.RECORD, Evidence.PAYLOAD) else ""
                return f"Show the {what}{of}, commit {message.commit}"
            case m.AuditChunk():
                return f"AuditChunk {message.chunk} of commit {message.commit}"
            case m.RebuildCommit():
                return f"RebuildCommit {message.commit}"
            case m.RolledBack():
                return f"RolledBack to commit {message.commit}, branch {message.branch}"
            case m.Finished():
                state = f", its state is {message.state_hash.hex()[:12]}" if message.state_hash else ""
                return f"Finished at commit {message.commit}{state}"
            case m.Pulse():
                return "Pulse"
            case m.Drain():
                return "Drain"
            case m.Banned():
                return f"that {', '.join(message.names) or 'nobody'} is banned"
            case m.Peers():
                return f"Peers: {' '.join(self._name(p.site_id) for p in message.members)}"
            case m.DialBack(member=member):
                return f"DialBack {self._name(member.site_id)} at {member.address}"
            case m.Leases():
                return f"Leases {ranges_in_words(message.ranges)}"
            case _:
                raise AssertionError(f"a {type(message).__name__} has no words here")

    def _open_in_words(self, message: m.Open) -> str:
        of = self._fragment_in_words(message.fragment)
        beyond = f", and up to {message.overlap_steps} beyond" if message.overlap_steps else ""
        steps = f"{message.num_steps} steps from step {message.run_step}{beyond}"
        rest = "s" * (len(message.resting) == 1)
        resting = f"; {' '.join(map(str, message.resting))} rest{rest}" if message.resting else ""
        return f"sync {message.sync}{of} on commit {message.base_commit}, {steps}{resting}"

    def _fragment_in_words(self, fragment: int) -> str:
        num = self.settings.sync.fragments
        if num == 1:
            return ""
        return f" of fragment {fragment}" if fragment < num else " of all fragments"


def ranges_in_words(ranges: Iterable[m.DataRange]) -> str:
    return " ".join(f"{r.first}-{r.first + r.num_samples - 1}" for r in ranges) or "nothing"


def ranges_of(text: str) -> tuple[m.DataRange, ...]:
    """`0-99,200-249`"""
    pairs = [part.split("-") for part in text.split(",") if part]
    return tuple(m.DataRange(first=int(a), num_samples=int(b) - int(a) + 1) for a, b in pairs)


def _identity(record: e.Record) -> tuple[str, int, int]:
    match record:
        case e.PlanRecord(plan):
            return "plan", plan.sync, plan.attempt
        case e.WeightsRecord():
            return "weights", record.sync, record.attempt
        case e.InfluencesRecord():
            return "influences", record.sync, record.attempt
        case e.CommitRecord():
            return "commit", record.commit.commit, record.commit.sync
        case e.OpenRecord():
            return "open", record.open.sync, record.open.base_commit
        case e.AbandonRecord(sync):
            return "abandoned", sync, 0
        case e.AttestationRecord(commit):
            return "attested", commit, 0
        case e.FinishedRecord(commit):
            return "finished", commit, 0
        case e.SiteRecord():
            return "site", record.site_id, record.incarnation
        case e.ForgetRecord():
            return f"that sites {', '.join(map(str, record.site_ids))} are forgotten", 0, 0
        case e.ManifestRecord():
            return "manifest", 0, 0
        case e.RollbackRecord():
            return "rollback", record.branch, record.commit
        case e.ExclusionRecord():
            return "exclusion", record.site_id, record.sync
        case e.StopRecord():
            return "stop", 0, 0
        case e.PausedRecord():
            return "pause", 0, 0
        case e.ChangedRecord():
            return f"that {record.changed_json} is changed", 0, 0
        case e.ResumedRecord():
            return "end of the pause", 0, 0
        case e.BanRecord():
            return f"that {record.name} is banned{' no more' if record.is_over else ''}", 0, 0
        case e.BanLiftedRecord():
            return f"that {record.name} may come in", 0, 0
        case e.InviteRecord():
            used = "invited" if not record.key_digest else "in by its invite"
            return f"that {record.role} {record.name} is {used}", 0, 0
        case e.AuditRecord():
            return f"that {record.by} asked for {record.what}", 0, 0
        case e.DrawingRecord():
            return "the secret of its draws", 0, 0
        case e.OpenAuditsRecord():
            return f"{len(record.asked)} audits", record.commit, 0
        case e.AuditsEndedRecord():
            return "end of audits", record.commit, 0
        case e.InviteForgottenRecord():
            return f"that invite {record.invite_id} is forgotten", 0, 0
        case e.ResetRecord():
            return "taking back of model and starting state", 0, 0
        case e.LineRecord():
            return "line", record.line, record.frontier
        case e.DoneRecord():
            return "done", record.line, 0
        case e.LeaseRecord():
            return "lease", record.site_id, record.incarnation
        case e.CurveRecord():
            return f"curve of {record.name}", record.site_id, 0


def _record_in_words(record: e.Record) -> str:
    kind, first, second = _identity(record)
    match record:
        case e.PlanRecord():
            return f"plan {first}.{second}"
        case e.WeightsRecord():
            return f"the weights of plan {first}.{second}"
        case e.InfluencesRecord():
            return f"the influences of plan {first}.{second}"
        case e.OpenRecord():
            return f"the opening of sync {first}, expecting {' '.join(map(str, record.expected)) or 'nobody'}"
        case e.CommitRecord():
            return f"commit {first}"
        case e.AbandonRecord():
            return f"that sync {first} is abandoned"
        case e.AttestationRecord(_, state_hash):
            disputed = f"that the state of commit {first} is disputed"
            return f"the state hash of commit {first}" if state_hash else disputed
        case e.FinishedRecord():
            return f"that the run is over at commit {first}"
        case e.LineRecord():
            open_again = f", open again {ranges_in_words(record.returned)}" if record.returned else ""
            return f"that positions below {record.frontier} were leased{open_again}"
        case e.DoneRecord():
            return f"that {ranges_in_words(record.ranges)} are done"
        case e.LeaseRecord():
            whose = f"site {first}, start {second}" if second else f"the contribution of site {first}, which is gone"
            return f"the lease of {whose}: {ranges_in_words(record.ranges)}"
        case e.BanRecord() | e.BanLiftedRecord() | e.AuditRecord() | e.InviteRecord() | e.InviteForgottenRecord():
            return kind
        case e.RollbackRecord():
            return f"that commits {', '.join(map(str, record.voided))} are void, branch {first}"
        case e.ExclusionRecord():
            return f"that site {first} is left out of sync {second}"
        case _:
            return f"the {kind}"


# --- stories as text


def play(text: str) -> str:
    """The story with what really happened below each command. The first command is `run key=value ...`."""
    story: Story | None = None
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        out.append(line)
        if not line or line.startswith("#"):
            continue
        words = shlex.split(line)
        arguments = dict(w.split("=", 1) for w in words if "=" in w)
        plain = [w for w in words if "=" not in w]
        if story is None:
            assert plain == ["run"], f"the first command must be `run`, not {line!r}"
            values = {k: _value(v) for k, v in arguments.items()}
            real = bool(values.pop("real", False))
            manifest = three_layers() if values.get("fragments", 1) > 2 else None
            story = Story(some_settings(**values), real=real, manifest=manifest)
            continue
        _command(story, plain, arguments)
        out += [f"  {entry}" for entry in story.log]
        story.log.clear()
    return "\n".join(out) + "\n"


def _links(story: Story, text: str) -> tuple[m.LinkUse, ...]:
    """`a:1000,b:10`: bytes a second that came from each."""
    pairs = [part.split(":") for part in text.split(",") if part]
    return tuple(
        m.LinkUse(site_id=story.id_of(name), received_bytes=1000, seconds=1000 / float(rate)) for name, rate in pairs
    )


def _none(_: object) -> None:
    """A command's result is in the log."""


def _value(text: str) -> Any:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


def _command(story: Story, words: list[str], arguments: dict[str, str]) -> None:
    values: dict[str, Any] = {k: _value(v) for k, v in arguments.items()}
    if "state" in values and words[1] in ("joins", "connects"):
        commit, _, name = str(values["state"]).partition(":")
        values["state"] = (int(commit), name)
    if words[0] == "start":  # not told: it is in other stories
        story.start(*words[1:])
        story.log.clear()
    elif words[0] == "wait":
        story.wait(float(words[1]))
    elif words[0] == "pause":
        story.pause(float(words[1]))
    elif words[0] == "restart":
        story.restart()
    elif words[0] == "rollback" and len(words) > 1:
        story.ask_to_go_back(int(words[1]))
    elif words[0] == "rollback":
        story.happens(e.RollbackAsked("atoll rollback"))
    elif words[0] == "evict":
        story.evict(words[1])
    elif words[0] == "ban":
        story.ban(words[1])
    elif words[0] == "reset":
        story.reset()
    elif words[0] == "stop":
        story.happens(e.StopAsked("atoll stop"))
    else:
        name, verb, *rest = words
        verbs: dict[str, Callable[[], None]] = {
            "joins": lambda: story.join(name, **values),
            "connects": lambda: story.connect(name, **values),
            "offers": lambda: story.offer(name, **values),
            "applied": lambda: story.applied(name, int(rest[0]), rest[1]),
            "ready": lambda: story.ready(name, **values | {"data": ranges_of(arguments.get("data", ""))}),
            "wants": lambda: _none(story.wants(name, int(rest[0]), **values)),
            "done": lambda: story.done(
                name,
                rest[0],
                payloads=arguments.get("payloads", "p"),
                plan=story.plan_named(arguments.get("of", "")),
                commit=values.get("commit"),
                links=_links(story, arguments.get("links", "")),
            ),
            "failed": lambda: story.failed(name, *rest, **values),
            "asks": lambda: story.sources(name, **values),
            "rebuilt": lambda: story.rebuilt(name, rest[0] if rest else "", **values),
            "lists": lambda: story.lists(name, rest[0]),
            "multiplies": lambda: story.multiplies(name, rest[0]),
            "hides": lambda: setattr(story.sites[name], "shows", False),
            "leaves": lambda: story.leave(name),
            "drops": lambda: story.drop(name),
            "hangs": lambda: story.hang(name),
            "beats": lambda: story.beats(name, **values),
        }
        verbs[verb]()
