"""A site's core in tests, as stories: what it is told in column 0, what it wants done indented below.

The site is `a`, number 1; its peers are b, c and d, numbers 2 to 4. The coordinator, the workers and the data plane
say only what the story says; `play` returns the story with what really happened.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, MergeMode
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.protocol import messages as m
from atoll.protocol.digest import Digest
from atoll.protocol.errors import PeerError
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.sample_order import GLOBAL_LINE
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_story import ranges_in_words, ranges_of
from tests.harness.site_questions import SiteQuestions, a_core, wanted

NAMES = "abcd"
NUM_STEPS = 10
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(8,), dtype="F32", role=Role.TRAINABLE)])


def a_hash(text: str) -> bytes:
    return Digest("story").text(text).finish()


class SiteStory(SiteQuestions):
    """`state` is the commit that the site's disk holds; -1: none."""

    def __init__(self, state: int = -1, overrun: int = 0, overlap: int = 0, mix: str = "", fragments: int = 1) -> None:
        merge: dict[str, Any] = {"merge": "mix", "alpha": float(mix)} if mix else {}
        every = NUM_STEPS * fragments
        sync = SyncSettings(every=every, overlap_steps=overlap, fragments=fragments, **merge)
        self.settings = RunSettings(run_id="run", steps=40, sync=sync, time_limits="local", overrun_steps=overrun)
        self.now = 100.0
        self.log: list[str] = []
        self.term = 1
        self._hashes = {a_hash(f"s{n}"): f"s{n}" for n in range(10)}
        held = None
        if state >= 0:
            held = Outer(commit=state, state_hash=a_hash(f"s{state}"), run_step=0, run_tokens=0)
        self.core = a_core(self.settings, held, self.now)
        self.phase = self.core.phase
        self._questions: dict[int, int] = {}  # step -> questions asked there, of this generation
        self._publishing: out.PublishState | None = None
        self._exchange: out.BeginExchange | None = None
        self._begun: dict[str, out.BeginExchange] = {}  # by sync and attempt
        self._apply_offered = 0

    # --- the world

    def wait(self, seconds: float) -> None:
        """Time passes; deadlines are met."""
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.happens(e.Tick())
            if self.has_ended():
                return
            assert self.core.next_deadline() != deadline, "a deadline that has passed is still waited for"
        self.now = end

    def happens(self, event: e.Event) -> None:
        for output in wanted(self.core, event, self.now):
            match output:
                case out.StartWorkers():
                    self._questions.clear()
                case out.PublishState():
                    self._publishing = output
                case out.BeginExchange():
                    self._exchange = self._begun[f"{output.plan.sync}.{output.plan.attempt}"] = output
                case out.AnswerWorkers(answer=answer) if answer.kind is AnswerKind.APPLY:
                    self._apply_offered = answer.version
            self.log.append(self._in_words(output))
        if self.core.phase != self.phase:
            self.phase = self.core.phase
            self.log.append(f"= {self.phase}")

    def hears(self, message: m.CoordinatorMessage, term: int = 0) -> None:
        self.term = max(self.term, term)
        self.happens(e.Received(term or self.term, message))

    def join_and_train(self) -> None:
        """A member whose workers train from the commit on its disk. Not told: it is in other stories."""
        commit = self.holds()
        assert commit is not None, "only a site with a state goes on training: node state=0 trains"
        self.happens(e.SessionOpened())
        self.welcome(commit)
        self.happens(
            e.WorkersJoined(
                generation=self.generation, manifest=MANIFEST, data_fingerprint=b"", max_retained_bytes=1 << 20
            )
        )
        self.admitted("member")
        self.hears(self.open(commit + 1, commit))
        for _ in range(self.settings.sync.fragments):
            self.asks(0)
            self.published()
            self.happens(e.Merged(generation=self.generation, version=commit, wait_s=0.1))
        self.log.clear()

    # --- the coordinator

    def welcome(self, commit: int = 0) -> None:
        self.hears(m.Welcome(settings_json=settings_to_json(self.settings), last_commit=commit))

    def admitted(self, as_what: str) -> None:
        self.hears(m.Admitted(site_id=1, admitted_as=m.AdmittedAs[as_what.upper()], run_seed=7))

    def open(
        self,
        sync: int,
        base: int,
        *,
        steps: int = NUM_STEPS,
        overlap: int | None = None,
        resting: str = "",
        fragment: int = 0,
    ) -> m.Open:
        """As long as the run allows, the ranks train on beyond its snapshot. `resting`: names, by commas."""
        run_step = base * NUM_STEPS
        overlap_steps = self.settings.sync.overlap_steps if overlap is None else overlap
        return m.Open(
            sync=sync,
            fragment=fragment,
            base_commit=base,
            run_step=run_step,
            run_tokens=base * 200,
            num_steps=steps,
            overlap_steps=overlap_steps,
            resting=tuple(_id(name) for name in resting.split(",") if name),
        )

    def plan(
        self, name: str, *sites: str, base: int = 0, to: str = "", term: int = 0, ahead: bool = False, fragment: int = 0
    ) -> None:
        """`1.2 a:100 b:100`: attempt 2 at sync 1, and its weights."""
        sync, attempt = (int(n) for n in name.split("."))
        plan = m.Plan(
            sync=sync,
            attempt=attempt,
            term=term or self.term,
            fragment=fragment,
            base_commit=base,
            contributors=tuple(_member(site[0]) for site in sites),
            receivers=tuple(_member(site) for site in to.split(",") if site),
            trees=(),
            stall_limit_s=6.0,
            num_steps=NUM_STEPS,
            deadline_s=60.0,
            slowest_bytes_per_s=0,
            ahead=ahead,
        )
        self.hears(plan, term)
        if not ahead:
            tokens = tuple(int(site[2:]) for site in sites)
            self.hears(m.Weights(sync=sync, attempt=attempt, term=plan.term, tokens=tokens), term)

    def commit(
        self,
        number: int,
        of: str,
        by: str,
        *,
        final: bool = False,
        term: int = 0,
        fragment: int = 0,
        leaves: str = "",
        **following: Any,
    ) -> m.Commit:
        """`following`: of the sync that it opens, what is not as always; none if it `leaves` others open."""
        sync, attempt = (int(n) for n in of.split("."))
        return m.Commit(
            commit=number,
            sync=sync,
            attempt=attempt,
            term=term or self.term,
            fragment=fragment,
            contributors=tuple(_member(site, "100") for site in by.split(",")),
            payload_digest=a_hash("payloads"),
            run_step=number * NUM_STEPS,
            run_tokens=number * 200,
            done=self._done(by, fragment),
            final=final,
            next=None if final or leaves else self.open(sync + 1, number, **following),
        )

    def _done(self, by: str, fragment: int) -> tuple[m.LineRanges, ...]:
        """What the site was trained on, if it contributes."""
        ranges = self.snapshot_samples(fragment)
        return (m.LineRanges(line=GLOBAL_LINE, ranges=ranges),) if ranges and "a" in by.split(",") else ()

    def sources(self, attested: int, donors: str = "", commits: str = "", by: str = "b,c") -> None:
        """`donors` as b@3; `commits` as 2,3, of the syncs of the same numbers."""
        self.hears(
            m.Sources(
                attested=(m.Attestation(commit=attested, state_hash=a_hash(f"s{attested}")),),
                donors=tuple(
                    m.Donor(site_id=_id(d[0]), incarnation=1, address=f"{d[0]}:1", commit=int(d[2:]))
                    for d in donors.split(",")
                    if d
                ),
                commits=tuple(self.commit(int(n), f"{n}.1", by) for n in str(commits).split(",") if n),
            )
        )

    # --- workers and data plane

    def asks(self, step: int) -> None:
        seq = self._questions.get(step, 0)
        self._questions[step] = seq + 1
        self.happens(e.BoundaryAsked(generation=self.generation, step=step, seq=seq))

    def sealed(self, step: int, tokens: int = 100, used: int = 0) -> None:
        self.happens(
            e.SnapshotSealed(
                generation=self.generation,
                step=step,
                tokens=tokens,
                num_steps=NUM_STEPS,
                mean_loss=2.0,
                train_s=1.0,
                samples_used=used,
            )
        )

    def draw(self, num_samples: int, first: int) -> None:
        asked = e.DrawAsked(
            generation=self.generation, rank=0, epoch=self.data_epoch(), first=first, num_samples=num_samples
        )
        self.happens(asked)

    def exchange_ends(self, *, name: str = "", peer: str = "") -> None:
        """The last one that was begun, or that of this name."""
        begun = self._begun[name] if name else self._exchange
        assert begun is not None, "no exchange was begun"
        if peer:
            error = PeerError("no byte for 6.0 s", _id(peer), sending=True, phase="sending contributions")
            self.happens(e.ExchangeBroken(begun.plan, error))
        else:
            self.happens(ExchangeFinished(plan=begun.plan, payload_digest=a_hash("payloads"), tokens=begun.weights))

    def published(self) -> None:
        done, self._publishing = self._publishing, None
        assert done is not None, "nothing is being published"
        self.happens(e.Published(done.content))

    def fetched(self, commit: int) -> None:
        self.happens(
            e.StateFetched(
                commit=commit, state_hash=a_hash(f"s{commit}"), run_step=commit * NUM_STEPS, run_tokens=commit * 200
            )
        )

    # --- words

    def _in_words(self, output: out.Output) -> str:
        match output:
            case out.Send(message):
                return f"-> {self._message_in_words(message)}"
            case out.Beat():
                return "sends a heartbeat"
            case out.StartWorkers(generation, _):
                return f"starts workers, generation {generation}"
            case out.StopWorkers(generation):
                return f"ends the workers of generation {generation}"
            case out.DescribeCrash(text=text):
                return f"says what its workers printed last: {text}"
            case out.SendLayout():
                return "lets the workers map the buffers"
            case out.AnswerWorkers(step=step, answer=answer):
                of = self._of(answer.fragment) if answer.kind in (AnswerKind.SNAPSHOT, AnswerKind.APPLY) else ""
                return f"tells the workers at step {step}{of}: {_answer_in_words(answer)}"
            case out.ShareSnapshot(fragment=fragment, step=step):
                return f"gives its other hosts what they send of the snapshot of step {step}{self._of(fragment)}"
            case out.SeedState():
                return "makes the starting state from the snapshot"
            case out.FetchState(sources):
                donors = " ".join(f"{NAMES[d.site_id - 1]}@{d.commit}" for d in sources.donors)
                replay = " ".join(str(c.commit) for c in sources.commits)
                return f"fetches the state from {donors}{', or payloads of commits ' + replay if replay else ''}"
            case out.CancelFetch():
                return "stops fetching"
            case out.KeepContributions(sync):
                return f"keeps what it is to contribute to sync {sync}"
            case out.BeginExchange(plan, tokens):
                role = "a contributor" if tokens else "a receiver"
                return f"begins exchange {plan.sync}.{plan.attempt} as {role}"
            case out.WeighExchange(plan, weights):
                return f"tells exchange {plan.sync}.{plan.attempt} the weights {list(weights)}"
            case out.InfluenceExchange(plan, influences):
                return f"tells exchange {plan.sync}.{plan.attempt} the influences {list(influences)}"
            case out.HurryExchange():
                return "has its exchanges send as fast as they can"
            case out.CancelExchange(sync, attempt):
                return f"stops exchange {sync}.{attempt}, keeping the contributions that it holds"
            case out.AdvanceErrors(commit, fragment):
                return f"keeps what commit {commit} leaves over of its contribution{self._of(fragment)}"
            case out.ApplyCommit(commit):
                return f"applies commit {commit.commit} to the outer state"
            case out.PublishState(content):
                return f"writes {_content_in_words(content)}{self._of(content.fragment)} for the workers"
            case out.DropSync(sync):
                return f"forgets the contributions to sync {sync}"
            case out.SaveModel(commit=commit):
                return f"writes the model of commit {commit} beside its place"
            case out.KeepModel(commit):
                return f"puts the model of commit {commit} in place"
            case out.DropModel(commit):
                return f"removes the model of commit {commit}"
            case out.KeepBest(commit):
                return f"keeps the model of commit {commit} as the best so far"
            case out.DropBest(commit):
                return f"removes a best model that is of a commit after {commit}"
            case out.DistrustState(reason):
                return f"checks every chunk on its disk: {reason}"
            case out.Fulfil(asked):
                return _fulfils_in_words(asked)
            case out.ListPayloads(plan):
                return f"lists the hashes of the payloads of {plan.sync}.{plan.attempt}"
            case out.TellFetch(sources):
                return f"tells the fetch: {' '.join(f'{NAMES[d.site_id - 1]}@{d.commit}' for d in sources.donors)}"
            case out.RollBack(commit, branch):
                return f"removes what its disk has of commits after {commit}, branch {branch}"
            case out.AnswerDraw(first=first, ranges=ranges):
                return f"gives the workers, from place {first} on: samples {ranges_in_words(ranges)}"
            case out.MergePieces():
                return "puts together what its ranks hold"
            case out.RefuseRank(rank=rank, text=text):
                return f"refuses rank {rank}: {text}"
            case out.Report(_, text):
                return f"# {text}"
            case out.Exit(code, text):
                return f"ends with code {code}: {text}"

    def _of(self, fragment: int) -> str:
        """Said where there are several."""
        return f", fragment {fragment}" if self.settings.sync.fragments > 1 else ""

    def _message_in_words(self, message: m.SiteMessage) -> str:
        match message:
            case m.Hello():
                return f"Hello, {f'I hold commit {message.last_commit}' if message.has_state else 'I hold no state'}"
            case m.Offer():
                return "Offer of the model"
            case m.Applied():
                return f"Applied {message.commit}, the state is {self._state(message.state_hash)}"
            case m.Ready():
                data = f", trained on samples {ranges_in_words(message.ranges)}" if message.ranges else ""
                blind = " ".join(NAMES[i - 1] for i in message.unreachable_site_ids)
                blind = f", cannot dial {blind}" if blind else ""
                return f"Ready for sync {message.sync}, with {message.tokens} tokens{data}{blind}"
            case m.LeaseRequest():
                return f"LeaseRequest, to hold {message.wanted} samples of {message.num_samples}"
            case m.Done():
                on = f"{self._state(message.state_hash)} of commit {message.last_commit}"
                return f"Done with {message.sync}.{message.attempt} of term {message.term}, on state {on}"
            case m.ExchangeFailed():
                peer = f" with {NAMES[message.peer_site_id - 1]}" if message.peer_site_id else ""
                return f"ExchangeFailed {message.sync}.{message.attempt}{peer}: {message.text}"
            case m.FindSources():
                has = f", I hold commit {message.after_commit}" if message.has_state else ", I hold nothing"
                return f"FindSources{has}"
            case m.Leave():
                return f"Leave{', for good' if message.fatal else ''}: {message.reason}"
            case _:
                return type(message).__name__

    def _state(self, state_hash: bytes) -> str:
        return self._hashes.get(state_hash, "unknown")


def _fulfils_in_words(asked: m.CoordinatorMessage) -> str:
    match asked:
        case m.Peers(members=members):
            return f"probes {' '.join(NAMES[p.site_id - 1] for p in members) or 'nobody'}"
        case m.DialBack(member=member):
            return f"dials {NAMES[member.site_id - 1]}, and serves it"
        case m.Show():
            return f"shows {asked.evidence.name.lower().replace('_', ' ')} of commit {asked.commit}"
        case m.RebuildCommit():
            return f"puts the state of commit {asked.commit} together beside the one that it holds"
    return "sends the manifest"


def _content_in_words(content: e.Content) -> str:
    if isinstance(content, e.Values):
        return f"commit {content.version}"
    since = f" from that of commit {content.base}" if content.base != content.version - 1 else ""
    return f"how commit {content.version} moves the base{since}"


def _answer_in_words(answer: e.Answer) -> str:
    match answer.kind:
        case AnswerKind.CONTINUE:
            changes = f", PUBLISH changes to commit {answer.version}" if answer.version else ""
            return f"go on, ask again at step {answer.next_step}{changes}"
        case AnswerKind.SNAPSHOT:
            return "write the snapshot"
        case AnswerKind.STOP:
            return f"stop, {answer.reason}"
        case AnswerKind.APPLY:
            how = {
                MergeMode.REPLACE: "take commit {}",
                MergeMode.MERGE: "take commit {} and keep what was trained since the snapshot",
                MergeMode.SHIFT: "move to commit {} and keep all that was trained",
                MergeMode.MIX: "mix commit {} with what they have",
            }[answer.mode]
            return f"{how.format(answer.version)}, ask again at step {answer.next_step}"


def _id(name: str) -> int:
    return NAMES.index(name) + 1


def _member(name: str, tokens: str = "0") -> m.Member:
    return m.Member(site_id=_id(name), incarnation=1, address=f"{name}:1", tokens=int(tokens))


# --- stories as text

Told = Callable[..., None]


def _verbs(story: SiteStory) -> dict[str, Told]:
    """Pattern of a command -> what it does with the pattern's groups and the command's key=value words."""
    crash = e.FailureKind.CRASHED

    def crashed(text: str, num_steps: int = 0) -> None:
        story.happens(e.WorkersFailed(generation=story.generation, kind=crash, text=text, num_steps=num_steps))

    return {
        r"the coordinator is there": lambda: story.happens(e.SessionOpened()),
        r"the coordinator is gone": lambda: story.happens(e.SessionLost("connection reset")),
        r"welcome": story.welcome,
        r"admitted as (\w+)": story.admitted,
        r"refused (.+)": lambda text: story.hears(m.Refused(kind=m.RefusedKind.STATE, text=text)),
        r"open (\d+) on (\d+)": lambda n, base, **kw: story.hears(story.open(int(n), int(base), **kw)),
        r"plan (\d+\.\d+)((?: \w:\d+)*)": lambda n, sites, **kw: story.plan(n, *sites.split(), **kw),
        r"plan ahead (\d+\.\d+)((?: \w)*)": lambda n, sites, **kw: story.plan(n, *sites.split(), ahead=True, **kw),
        r"commit (\d+) of (\d+\.\d+) by (\S+)": lambda n, of, by, **kw: story.hears(story.commit(int(n), of, by, **kw)),
        r"last commit (\d+) of (\d+\.\d+) by (\S+)": lambda n, of, by: story.hears(
            story.commit(int(n), of, by, final=True)
        ),
        r"abandoned (\d+), then (\d+) on (\d+)": lambda n, following, base: story.hears(
            m.Abandoned(sync=int(n), reason="8 attempts failed", next=story.open(int(following), int(base)))
        ),
        r"abandoned (\d+) without tokens, then (\d+) on (\d+)": lambda n, following, base: story.hears(
            m.Abandoned(
                sync=int(n), reason="nobody had tokens", next=story.open(int(following), int(base)), without_tokens=True
            )
        ),
        r"sources": story.sources,
        r"evicted": lambda: story.hears(m.Evicted(reason="silent for 3 s")),
        r"finished at (\d+)": lambda n: story.hears(
            m.Finished(commit=int(n), reason="the run's length is reached", run_step=10 * int(n), run_tokens=0)
        ),
        r"finished at (\d+) with state (\w+)": lambda n, state: story.hears(
            m.Finished(commit=int(n), reason="complete", run_step=10 * int(n), run_tokens=0, state_hash=a_hash(state))
        ),
        r"workers join": lambda: story.happens(
            e.WorkersJoined(
                generation=story.generation, manifest=MANIFEST, data_fingerprint=b"", max_retained_bytes=1 << 20
            )
        ),
        r"workers ask at (\d+)": lambda step: story.asks(int(step)),
        r"workers sealed the snapshot of step (\d+)": lambda step, **kw: story.sealed(int(step), **kw),
        r"workers took it": lambda: story.happens(
            e.Merged(generation=story.generation, version=story._apply_offered, wait_s=0.1)
        ),
        r"workers crash": lambda: crashed("worker 0 was killed (SIGKILL)"),
        r"workers crash after (\d+) steps": lambda n: crashed("worker 0 was killed (SIGKILL)", int(n)),
        r"workers ended": lambda: story.happens(
            e.WorkersLeft(generation=story.generation, reason="the training loop ended")
        ),
        r"workers will draw (\d+) of (\d+) samples a step": lambda count, of: story.happens(
            e.DataAnnounced(generation=story.generation, num_samples=int(of), round_samples=int(count), rounds_ahead=0)
        ),
        r"workers draw (\d+) from (\d+)": lambda count, first: story.draw(int(count), int(first)),
        r"leases (\S+)": lambda ranges: story.hears(m.Leases(ranges=ranges_of(ranges))),
        r"the starting state is made": lambda: story.happens(e.StateSeeded(state_hash=a_hash("s0"))),
        r"the exchange is done": story.exchange_ends,
        r"exchange (\d+\.\d+) is done": lambda name: story.exchange_ends(name=name),
        r"the exchange breaks with (\w)": lambda peer: story.exchange_ends(peer=peer),
        r"commit (\d+) is applied": lambda n: story.happens(e.CommitApplied(commit=int(n), state_hash=a_hash(f"s{n}"))),
        r"commit (\d+) cannot be applied": lambda n: story.happens(
            e.ApplyFailed(int(n), "3 of 5 payloads are missing")
        ),
        r"it is written for them": story.published,
        r"the state of commit (\d+) is fetched": lambda n: story.fetched(int(n)),
        r"rolled back to (\d+)": lambda n: story.hears(m.RolledBack(branch=1, commit=int(n), reason="a disk is lost")),
        r"the disk is rolled back and holds (\d+)": lambda n: story.happens(
            e.DiskRolledBack(branch=1, held=(int(n), a_hash(f"s{n}")))
        ),
        r"the disk is checked": lambda: story.happens(e.StateVerified()),
        r"the fetch fails": lambda: story.happens(e.FetchFailed("no donor answers")),
        r"the model of commit (\d+) is written": lambda n: story.happens(e.ModelSaved(commit=int(n))),
        r"the model of commit (\d+) is in place": lambda n: story.happens(e.ModelKept(commit=int(n))),
        r"is to dial (.)": lambda name: story.hears(m.DialBack(member=_member(name))),
        r"peers (.+)": lambda names: story.hears(m.Peers(members=tuple(_member(n) for n in names.split()))),
        r"it can dial everybody": lambda: story.happens(e.PeersProbed(())),
        r"it cannot dial (.+)": lambda names: story.happens(e.PeersProbed(tuple(_id(n) for n in names.split()))),
        r"ctrl-c": lambda: story.happens(e.LeaveAsked("asked to leave")),
        r"wait (\S+)": lambda seconds: story.wait(float(seconds)),
    }


def play(text: str) -> str:
    """The story with what really happened below each command. The first command is `node key=value ...`, or
    `node trains key=value ...` for one that has joined already."""
    story: SiteStory | None = None
    told: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            continue
        told.append(line)
        if not line or line.startswith("#"):
            continue
        words = shlex.split(line)
        values: dict[str, Any] = {k: _value(v) for k, _, v in (w.partition("=") for w in words if "=" in w)}
        said = " ".join(w for w in words if "=" not in w)
        if story is None:
            assert said in ("node", "node trains"), f"the first command must be `node`, not {line!r}"
            story = SiteStory(**values)
            if said == "node trains":
                story.join_and_train()
            continue
        verb, groups = next(
            (do, found.groups()) for pattern, do in _verbs(story).items() if (found := re.fullmatch(pattern, said))
        )
        verb(*groups, **values)
        told += [f"  {entry}" for entry in story.log]
        story.log.clear()
    return "\n".join(told) + "\n"


def _value(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
