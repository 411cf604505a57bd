"""Seeded random schedules against the core: sites that follow the protocol, and streams, nodes and the coordinator
that break at any moment. Whatever happens, commits are one history, and once nothing breaks any more the run ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import forgetting
from atoll.protocol import messages as m
from atoll.protocol.plans import with_weights
from atoll.protocol.ranges import Ranges, union
from tests.harness.coordinator_story import Story, a_hash, some_settings, three_layers

STEPS = 60
NUM_EVENTS = 250

SEEDS = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed % 7 not in (0, 3))) for seed in range(60)]
)
"""Two of seven in `make test`, as what is played follows from the seed by two, three, four and five."""


class Player:
    """A site that does what it is told, sooner or later. Its state after commit n is called s<n>."""

    def __init__(self, story: Story, name: str) -> None:
        self.story = story
        self.name = name
        self.held: int | None = None
        self.opened: dict[int, m.Open] = {}  # by fragment
        self.said_ready: set[int] = set()  # syncs
        self.plans: dict[int, m.Plan] = {}  # by sync; of which Done is not said
        self.told: dict[tuple[int, int, int], m.Plan] = {}
        self.inbox: list[m.CoordinatorMessage] = []
        self.commits: dict[int, m.Commit] = {}
        self.seeding = False
        self.finished = False
        self.leased: tuple[m.DataRange, ...] = ()
        self.used: tuple[m.DataRange, ...] = ()  # and is in no commit
        self.sealed: dict[int, tuple[int, tuple[m.DataRange, ...]]] = {}  # by fragment: for which sync, and of these

    @property
    def connected(self) -> bool:
        site = self.story.sites.get(self.name)
        return site is not None and site.stream is not None

    def connect(self, *, restart: bool) -> None:
        incarnation = self.story.sites[self.name].incarnation if self.name in self.story.sites else 1
        if restart:
            self.forget_work()
        state = (self.held, f"s{self.held}") if self.held is not None else None
        self.inbox.clear()
        self.story.connect(self.name, incarnation=incarnation + restart, state=state)

    def forget_work(self) -> None:
        self.seeding = False
        self.leased = self.used = ()
        self.said_ready.clear()
        known: dict[Any, Any]
        for known in (self.plans, self.told, self.opened, self.sealed, self.commits):
            known.clear()

    def read(self) -> None:
        """Handles the oldest message."""
        message = self.inbox.pop(0)
        story, name = self.story, self.name
        match message:
            case m.Welcome():
                if not message.site_id:
                    self.forget_work()  # it is forgotten: a node is to be started again
                story.offer(name)
            case m.Admitted():
                self.seeding = message.admitted_as is m.AdmittedAs.SEEDER and self.held is None
                if message.admitted_as is m.AdmittedAs.JOINER:
                    self.held = None
                if self.held is None and not self.seeding:
                    story.sources(name)
                elif self.held is not None:
                    story.applied(name, self.held, f"s{self.held}")
            case m.Sources():
                known = [a.commit for a in message.attested]
                if message.donors and known and (self.held is None or known[-1] > self.held):
                    self.held = known[-1]
                    self.plans.clear()
                    story.applied(name, self.held, f"s{self.held}")
                self.commits.update((c.commit, c) for c in message.commits)  # the payloads are in the sites' logs
                for commit in message.commits:
                    self.note_done(commit)
            case m.Open():
                self.opened[message.fragment] = message
            case m.Abandoned():
                self.plans.pop(message.sync, None)
                if message.next is not None:
                    self.opened[message.next.fragment] = message.next
            case m.Plan():
                self.told[message.sync, message.attempt, message.term] = message
                if message.ahead:
                    self.plans[message.sync] = message  # and may be done before all are ready
            case m.Weights():
                plan = self.told[message.sync, message.attempt, message.term]  # it was sent the rest before
                self.plans[message.sync] = with_weights(plan, message.tokens)
            case m.Leases():
                self.leased = message.ranges
            case m.Commit():
                self.commits[message.commit] = message
                self.note_done(message)
            case m.Evicted():
                self.forget_work()
                state = (self.held, f"s{self.held}") if self.held is not None else None
                story.connect(name, state=state, again=True)
            case m.Finished() | m.Refused():
                self.finished = isinstance(message, m.Finished)

    def note_done(self, commit: m.Commit) -> None:
        for line in commit.done:
            self.leased = Ranges(self.leased).minus(line.ranges).as_tuple()
            self.used = Ranges(self.used).minus(line.ranges).as_tuple()
        sealed_for, _ = self.sealed.get(commit.fragment, (commit.sync + 1, ()))
        if sealed_for <= commit.sync:  # what it does not list is listed by the next one
            del self.sealed[commit.fragment]

    def seal(self, opened: m.Open, generator: random.Random) -> tuple[m.DataRange, ...]:
        """All that it used, but for what other snapshots hold."""
        self.use(generator)
        others = union(*(ranges for fragment, (_, ranges) in self.sealed.items() if fragment != opened.fragment))
        ranges = Ranges(self.used).minus(others).as_tuple()
        self.sealed[opened.fragment] = opened.sync, ranges
        return ranges

    def use(self, generator: random.Random) -> None:
        """Trains on some more of what it leases."""
        ahead = Ranges(self.leased).minus(self.used)
        self.used = union(self.used, ahead.take(generator.randrange(0, 30), 1 << 10))

    def act(self, generator: random.Random) -> None:
        """Something that is due."""
        story, name, site = self.story, self.name, self.story.sites[self.name]
        if self.seeding:
            self.seeding, self.held = False, 0
            story.applied(name, 0, "s0")
            return
        if self.held is None or not site.site_id:
            return
        following = self.commits.pop(self.held + 1, None)
        plan = next((plan for plan in self.plans.values() if plan.base_commit <= self.held), None)
        due = (o for o in self.opened.values() if o.base_commit <= self.held and o.sync not in self.said_ready)
        opened = next(due, None)
        if following is not None:
            self.held += 1
            self.plans.pop(following.sync, None)
            if following.next is not None:
                self.opened[following.next.fragment] = following.next
            story.applied(name, self.held, f"s{self.held}")
        elif plan is not None:
            mine = [c for c in plan.contributors if (c.site_id, c.incarnation) == (site.site_id, site.incarnation)]
            if mine and generator.random() < 0.1:
                others = [c.site_id for c in plan.contributors if c is not mine[0]] or [0]
                story.says(
                    name,
                    m.ExchangeFailed(
                        sync=plan.sync,
                        attempt=plan.attempt,
                        term=plan.term,
                        peer_site_id=generator.choice([0, site.site_id, *others]),
                        direction=m.Direction.SENDING,
                        phase="upload",
                        text="cut",
                    ),
                )
            elif mine:
                story.done(name, f"s{self.held}", plan=plan, commit=self.held)
            del self.plans[plan.sync]
        elif opened is not None:
            self.said_ready.add(opened.sync)
            story.says(name, m.LeaseRequest(num_samples=100, wanted=generator.randrange(0, 100)))
            message = m.Ready(
                sync=opened.sync,
                tokens=generator.randrange(0, 50),
                num_steps=opened.num_steps,
                ranges=self.seal(opened, generator),
            )
            story.says(name, message)
        elif self.held < story.last_commit():
            story.sources(name, after=self.held)


class World:
    def __init__(self, seed: int, **settings: int) -> None:
        self.generator = random.Random(seed)
        settings = {"steps": STEPS} | settings
        drawn = some_settings(min_sites=self.generator.randrange(1, 4), quorum=1, **settings)
        self.story = Story(drawn, manifest=three_layers() if drawn.sync.fragments > 1 else None)
        self.players = [Player(self.story, name) for name in "abcd"]
        self._seen = 0

    def deliver(self) -> None:
        check_what_is_open(self.story)
        for name, message in self.story.sent[self._seen :]:
            player = next(p for p in self.players if p.name == name)
            if not isinstance(message, m.Pulse):
                player.inbox.append(message)
        self._seen = len(self.story.sent)

    def work(self) -> None:
        """One player does one thing."""
        self.deliver()
        player = self.generator.choice(self.players)
        if not player.connected:
            return
        if player.inbox:
            player.read()
        else:
            player.act(self.generator)

    def work_together(self) -> None:
        """Several things reach the coordinator at once."""
        self.deliver()
        with self.story.together():
            for player in self.generator.sample(self.players, 3):
                if player.connected and player.inbox:
                    player.read()
                elif player.connected:
                    player.act(self.generator)

    def fault(self) -> None:
        player = self.generator.choice(self.players)
        choice = self.generator.random()
        if choice < 0.35:
            if not player.connected:
                player.connect(restart=self.generator.random() < 0.5)
        elif choice < 0.5:
            if player.connected:
                self.story.drop(player.name)
        elif choice < 0.55:
            self.story.restart()
            for other in self.players:
                other.inbox.clear()
        elif choice < 0.6:
            if player.connected:
                self.story.leave(player.name)
                player.forget_work()  # a node that leaves ends
        else:
            self.story.wait(self.generator.choice([0.1, 0.5, 2.0]))
        status = self.story.view  # which may be asked for at any time
        assert status.finished or len(status.syncs) == len(self.story.open_syncs())
        self.deliver()

    def play(self, num_events: int) -> None:
        """Anything may happen."""
        for _ in range(num_events):
            choice = self.generator.random()
            if choice < 0.2:
                self.fault()
            elif choice < 0.4:
                self.work_together()
            else:
                self.work()

    def settle(self) -> None:
        """Nothing breaks any more: everybody comes back and the run ends."""
        for _ in range(4000):
            if self.story.view.finished:
                return
            for player in self.players:
                if not player.connected:
                    player.connect(restart=True)
            for _ in range(10):
                self.work()
            self.story.wait(0.2)
        raise AssertionError(self.story.view.state + "\n" + "\n".join(self.story.log[-60:]))


def check_what_is_open(story: Story) -> None:
    """At most so many syncs as may be in flight, each of a fragment of its own, one of all alone, and no window beside
    another one is left out."""
    opened, sync = story.open_syncs(), story.settings.sync
    fragments = {o.fragment for o in opened}
    assert len(fragments) == len(opened) <= (1 if sync.all_fragments in fragments else sync.most_in_flight)
    assert all(o.base_commit <= story.last_commit() for o in opened)
    if opened and sync.most_in_flight > 1:
        assert opened[-1].run_step + opened[-1].num_steps <= story.run_step() + sum(o.num_steps for o in opened)
    if opened and sync.most_in_flight == 1:
        assert (opened[0].run_step, opened[0].base_commit) == (story.run_step(), story.last_commit())


def all_opened(story: Story) -> dict[int, m.Open]:
    """By number."""
    opened = {x.sync: x for _, x in story.sent if isinstance(x, m.Open)}
    said = (x.next for _, x in story.sent if isinstance(x, m.Commit | m.Abandoned))
    return opened | {x.sync: x for x in said if x is not None}


def check_turns(story: Story, history: dict[int, m.Commit], steps: int) -> None:
    """Fragments take turns, each in a window of its own, and the last sync is of all. What sites are told of fragments
    before the commits that they are listed is so. Several in flight are committed in any order, and one that takes long
    is passed over."""
    sync = story.settings.sync
    num, every = sync.fragments, sync.every
    touched = {0: [0] * num}
    turn = 0
    for number, commit in sorted(history.items()):
        num_steps = commit.run_step - history[number - 1].run_step if number > 1 else commit.run_step
        if commit.fragment == num:
            assert num > 1
            touched[number], turn = [number] * num, 0
        else:
            assert sync.most_in_flight > 1 or commit.fragment == turn
            turn = commit.fragment
            assert not commit.final or num == 1, "the other fragments have what they had"
            if not steps or commit.run_step < steps:
                assert num == 1 or num_steps == (turn + 1) * every // num - turn * every // num
            touched[number], turn = [*touched[number - 1]], (turn + 1) % num
            touched[number][commit.fragment] = number
    for _, message in story.sent:
        if isinstance(message, m.Sources) and num > 1:
            before = message.commits[0].commit - 1 if message.commits else max(message.touched, default=0)
            assert list(message.touched) == touched[before] or not message.attested
        elif isinstance(message, m.Sources):
            assert not message.touched


@pytest.mark.parametrize(("num_fragments", "overlap"), [(1, 0), (2, 0), (3, 0), (2, 10), (3, 5), (3, 10)])
@SEEDS
def test_any_schedule_is_one_history_and_comes_to_an_end(
    seed: int, num_fragments: int, overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # as where many come and go
        monkeypatch.setattr(forgetting, "KEPT_GONE", 0)
        monkeypatch.setattr(forgetting, "KEPT_STRUCK", 0)
    world = World(seed, fragments=num_fragments, overlap=overlap)
    world.play(NUM_EVENTS)
    world.settle()
    story = world.story
    history: dict[int, m.Commit] = {}
    for _, message in story.sent:
        if isinstance(message, m.Commit):
            assert history.setdefault(message.commit, message) == message, "one commit, two contents"
    assert story.view.run_step == STEPS
    check_turns(story, history, STEPS)
    for number, state_hash in story.attestations().items():
        assert state_hash == a_hash(f"s{number}")
    plans = story.plans()
    for commit in history.values():
        plan = plans[commit.sync, commit.attempt]
        assert commit.contributors == plan.contributors
        assert sum(c.tokens for c in commit.contributors) > 0
    assert not [text for text in story.log if "payloads differ" in text or "its state of commit" in text]
    assert not [text for text in story.log if "does not lease" in text]
    done = [p for c in history.values() for line in c.done for r in line.ranges for p in range(r.first, r.end)]
    assert len(done) == len(set(done)), "a sample is done twice"
    assert sorted(done) == [p for r in story.done_samples() for p in range(r.first, r.end)]
    (line,) = story.view.data
    assert (line.num_done, line.num_leased) == (len(done), 0), "nothing is in flight after the end"
    assert line.num_done + line.num_open == line.num_passes_begun * 100


LENGTHS = ({"steps": STEPS}, {"steps": 57}, {"steps": 3}, {"steps": 0, "tokens": 700}, {"steps": 0, "tokens": 61})


@pytest.mark.parametrize("num_fragments", [1, 2, 3])
@SEEDS
def test_44_whatever_its_length_and_whenever_it_is_stopped_a_run_ends_with_all_that_was_trained(
    seed: int, num_fragments: int
) -> None:
    """The tokens of a sync differ much from those of the one before, so estimates are wrong either way."""
    length = LENGTHS[seed % len(LENGTHS)]
    overlap = (0, 1, 4, 10)[seed % 4]
    world = World(seed, overlap=overlap, fragments=num_fragments, **length)
    story = world.story
    world.play(NUM_EVENTS)
    stopped = seed % 3 == 0 and not story.view.finished
    if stopped:
        story.happens(e.StopAsked("enough"))
        world.play(world.generator.choice([0, 20]))
        story.happens(e.StopAsked("enough, again"))
    world.settle()
    opened = all_opened(story)
    commits = {x.commit: x for _, x in story.sent if isinstance(x, m.Commit)}
    several = story.settings.sync.most_in_flight > 1
    run_step = end = 0
    for window in sorted((opened[c.sync] for c in commits.values()), key=lambda o: o.run_step):
        assert window.run_step == end, "each window is committed once"
        end += window.num_steps
    for number, commit in sorted(commits.items()):
        sync = opened[commit.sync]
        assert several or (sync.run_step, sync.base_commit) == (run_step, number - 1)
        run_step += sync.num_steps
        assert commit.run_step == run_step
        assert not commit.final or not sync.overlap_steps, "what sites trained beyond it would be lost"
        assert commit.next is None or not commit.final
        assert several or commit.final == (commit.next is None)
        if commit.next is not None:
            assert not (length.get("steps") and commit.next.run_step + commit.next.num_steps > length["steps"])
            has_all = 0 < length.get("tokens", 0) <= commit.run_tokens
            trained = sync.run_step + sync.num_steps + sync.overlap_steps
            beyond = max(trained - commit.run_step, num_fragments > 1)  # else it were the last, with one fragment
            assert not has_all or (beyond, 0) == (commit.next.num_steps, commit.next.overlap_steps)
    check_turns(story, commits, length["steps"])
    if not stopped and length["steps"]:
        assert story.view.run_step == length["steps"]
    elif not stopped:
        assert story.view.run_tokens >= length["tokens"]
