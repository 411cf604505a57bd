"""Several syncs in flight, each of a fragment of its own (F = 3, windows of 10 steps, 20 steps of overlap: two at
once). The whole course is in tests/golden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.disk import Outer
from atoll.node.core.events import AnswerKind, Difference, MergeMode, Values
from atoll.protocol import messages as m
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, commit, exchanged, opened, plan

UNEVEN = replace(SETTINGS, sync=SyncSettings(every=11, fragments=3, overlap_steps=7))
"""Windows of 3, 4 and 4 steps."""
TWO_AT_ONCE = replace(SETTINGS, sync=SyncSettings(every=30, fragments=3, overlap_steps=20))
ALL = 3
PER_STEP = 2


def of(fragment: int, sync: int, base: int = 0, overlap_steps: int = 20) -> m.Open:
    return replace(opened(sync, base), fragment=fragment, overlap_steps=overlap_steps, run_step=10 * (sync - 1))


def ranges(*pairs: tuple[int, int]) -> tuple[m.DataRange, ...]:
    return tuple(m.DataRange(first=first, num_samples=end - first) for first, end in pairs)


def committed(
    number: int, sync: int, fragment: int, contributors: tuple[int, ...] = (1, 2), done: tuple[m.DataRange, ...] = ()
) -> m.Commit:
    """Another sync is open."""
    return replace(commit(number, sync, contributors=contributors, done=done), fragment=fragment, next=None)


class Story(Driver):
    """A member at commit 0 that trains for sync 1, of fragment 0."""

    def __init__(self, settings: RunSettings = TWO_AT_ONCE) -> None:
        super().__init__(Outer(commit=0, state_hash=HASH, run_step=0, run_tokens=0), settings=settings)
        self.up_to_admitted(m.AdmittedAs.MEMBER)
        self(e.DataAnnounced(generation=self.generation, num_samples=1000, round_samples=PER_STEP, rounds_ahead=0))
        self.receive(m.Leases(ranges=ranges((0, 400))))
        self.receive(of(0, 1))
        for fragment in range(3):
            self.ask(0, fragment)
            self.take(Values(0, fragment))
        self.seq = 10

    def asks(self, step: int) -> list[out.Output]:
        """Once more, half a second a step."""
        self.now = max(self.now, 100 + step / 2)
        self.seq += 1
        return self.ask(step, self.seq)

    def take(self, content: e.Content) -> e.Answer:
        assert self.wants(out.PublishState) == out.PublishState(content)
        self(e.Published(content))
        answer = self.answer()
        self.merged(content.version)
        if isinstance(content, Difference):
            self(e.Published(Values(content.version, content.fragment)))
        return answer

    def seal(self, step: int, fragment: int, used: int | None = None) -> m.Ready:
        """At this step they write the snapshot of the fragment; what is said of it."""
        self.asks(step)
        assert self.answer() == e.Answer(kind=AnswerKind.SNAPSHOT, fragment=fragment)
        return self.sealed_at(step, PER_STEP * step if used is None else used)

    def sealed_at(self, step: int, used: int) -> m.Ready:
        self(
            e.SnapshotSealed(
                generation=self.generation,
                step=step,
                tokens=100,
                num_steps=10,
                mean_loss=1.0,
                train_s=1.0,
                samples_used=used,
            )
        )
        (said,) = (s for s in self.sent() if isinstance(s, m.Ready))
        return said

    def exchanges(self, sync: int, fragment: int, base: int = 0) -> None:
        self.receive(replace(plan(sync, base=base), fragment=fragment))
        exchanged(self, sync)

    def applies(self, found: m.Commit) -> list[out.Output]:
        self.receive(found)
        return self(e.CommitApplied(commit=found.commit, state_hash=HASH))

    def fetches(self, *commits: m.Commit, touched: tuple[int, ...] = (), listed: bool = True) -> None:
        """The payloads of the first commit are gone, and the state that it made is fetched."""
        for found in commits:
            self.receive(found)
        self(e.ApplyFailed(1, "no payloads"))
        donor = m.Donor(site_id=2, incarnation=1, address="b:1", commit=1)
        attested = (m.Attestation(commit=1, state_hash=HASH),)
        self.receive(m.Sources(attested=attested, donors=(donor,), commits=commits if listed else ()))
        self(e.StateFetched(commit=1, state_hash=HASH, run_step=10, run_tokens=300, touched=touched))

    def is_held(self) -> bool:
        return not any(isinstance(o, out.AnswerWorkers) for o in self.out)


@pytest.fixture(name="story")
def _story() -> Story:
    return Story()


@pytest.fixture(name="two")
def _two(story: Story) -> Story:
    """Sync 1 and 2 are in flight, of steps 10 and 20."""
    story.seal(10, 0)
    story.receive(of(1, 2))
    story.seal(20, 1)
    return story


def test_a_snapshot_lists_what_no_other_one_in_flight_does(two: Story) -> None:
    two.receive(of(2, 3))
    assert two.seal(30, 2).ranges == ranges((40, 60))


def test_ranks_go_as_far_as_the_oldest_snapshot_in_flight_lets_them(two: Story) -> None:
    two.receive(of(2, 3))
    two.asks(29)
    assert two.answer().next_step == 30
    two.asks(31)
    assert two.answer().kind is AnswerKind.SNAPSHOT, "late, but due"


def test_the_windows_of_syncs_that_are_open_are_no_part_of_the_state_that_is_held(story: Story) -> None:
    """Workers that crash begin anew from commit 0, when a second sync is open."""
    story.seal(10, 0)
    story.receive(of(1, 2))
    story(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed", num_steps=12))
    assert story.generation == 2
    story.joined()
    story.ask(0)
    answer = story.take(Values(0, 0))
    assert (answer.version, answer.run_step) == (0, 0)


def test_no_further_than_a_window_while_the_next_sync_is_not_open(story: Story) -> None:
    story.seal(10, 0)
    story.asks(19)
    assert story.answer().next_step == 20
    story.asks(20)
    assert story.is_held()
    story.receive(of(1, 2))
    assert story.answer() == e.Answer(kind=AnswerKind.SNAPSHOT, fragment=1)


def test_no_further_than_the_oldest_lets_them_though_the_window_is_longer(story: Story) -> None:
    story.receive(of(0, 1, overlap_steps=15))
    story.seal(10, 0)
    story.receive(of(1, 2))
    story.seal(20, 1)
    story.receive(of(2, 3))
    story.asks(24)
    assert story.answer().next_step == 25
    story.asks(25)
    assert story.is_held()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_commits_in_any_order_take_each_sample_once(two: Story, order: tuple[int, int]) -> None:
    two.exchanges(1, 0)
    two.exchanges(2, 1)
    for number, sync in enumerate(order, 1):
        listed = ranges((0, 20)) if sync == 1 else ranges((20, 40))
        two.applies(committed(number, sync, sync - 1, done=listed))
    assert two.leased_samples() == ranges((40, 400))
    assert two.queue_places()[0] == 40


def test_what_a_commit_left_out_is_listed_with_the_next_snapshot(two: Story) -> None:
    two.exchanges(2, 1)
    two.applies(committed(1, 2, 1, done=ranges((20, 40))))
    two.applies(committed(2, 1, 0, contributors=(2, 3)))
    two.receive(of(2, 3, base=2))
    two.asks(21)
    assert two.take(Difference(0, 2, 0)).mode is MergeMode.SHIFT
    two.asks(21)
    two(e.Published(Values(2, 1)))
    two.asks(22)
    assert two.answer().mode is MergeMode.MERGE
    two.merged(2)
    two.asks(22)
    assert two.answer().next_step == 30, "the window began at step 20"
    assert two.seal(30, 2).ranges == ranges((0, 20), (40, 60))


def test_of_two_in_flight_the_newest_that_is_left_out_gives_the_window_back(two: Story) -> None:
    two.applies(committed(1, 2, 1, contributors=(2, 3)))
    two.receive(of(2, 3, base=1))
    two.asks(21)
    two.take(Difference(0, 1, 1))
    assert two.seal(21, 2, used=42).ranges == ranges((20, 42))


def test_a_snapshot_that_is_being_written_stays_when_another_fragment_moves(story: Story) -> None:
    story.seal(10, 0)
    story.receive(of(1, 2))
    story.asks(20)
    assert story.answer().kind is AnswerKind.SNAPSHOT
    story.applies(committed(1, 1, 0, contributors=(2, 3)))
    assert story.sealed_at(20, 40).ranges == ranges((20, 40)), "the samples of sync 1 come with the next one"


def test_of_workers_that_died_what_no_commit_lists_is_drawn_again(two: Story) -> None:
    two.exchanges(2, 1)
    two(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed", num_steps=25))
    assert two.queued_samples() == ranges((40, 400))
    two.applies(committed(1, 1, 0, contributors=(2, 3)))
    assert two.queued_samples() == ranges((40, 400)), "sync 2 may still be abandoned"
    two.applies(committed(2, 2, 1, done=ranges((20, 40))))
    assert two.queued_samples() == (*ranges((40, 400)), *ranges((0, 20)))


def test_a_fetched_state_ends_only_the_syncs_whose_fragment_it_touched(two: Story) -> None:
    two.receive(replace(plan(2), fragment=1))
    two.fetches(committed(1, 1, 0, contributors=(2, 3)), touched=(1, 0, 0))
    assert not any(isinstance(o, out.CancelExchange | out.DropSync) for o in two.out)
    exchanged(two, 2)
    assert [s.sync for s in two.sent() if isinstance(s, m.Done)] == [2]
    two.applies(committed(2, 2, 1, done=ranges((20, 40))))
    assert two.leased_samples() == ranges((0, 20), (40, 400))


def test_a_fetched_state_moves_only_the_copies_whose_fragment_it_touched(two: Story) -> None:
    """By a difference of its own fragment a rank gives a snapshot up, while the node has it in flight."""
    two.fetches(committed(1, 1, 0, contributors=(2, 3)), touched=(1, 0, 0))
    two.receive(of(2, 3, base=1))
    two.asks(20)
    assert two.take(Difference(0, 1, 0)).mode is MergeMode.SHIFT
    two.asks(20)
    assert two.answer().kind is AnswerKind.CONTINUE


def test_of_a_fetched_state_ranks_take_first_what_it_touched(two: Story) -> None:
    """The copy of fragment 0 has all of it: no commit has touched that."""
    two.fetches(committed(1, 2, 1, contributors=(2, 3)), touched=(0, 1, 0))
    two.asks(20)
    assert two.take(Difference(0, 1, 1)).mode is MergeMode.SHIFT


def test_what_a_commit_that_was_not_fetched_holds_is_not_taken(two: Story) -> None:
    """Nobody gave commit 2, and nothing is known of which fragments commit 1 had touched."""
    two.fetches(committed(1, 2, 1, contributors=(2, 3)), committed(2, 1, 0, done=ranges((0, 20))))
    assert two.sealed_snapshots() == {0: (1, 10)}
    assert two.leased_samples() == ranges((0, 400)), "commit 2 may be void"


def test_a_state_of_which_nothing_is_known_ends_all(two: Story) -> None:
    two.receive(replace(plan(2), fragment=1))
    two.fetches(committed(1, 1, 0, contributors=(2, 3)), listed=False)
    assert two.wants(out.DropSync) == out.DropSync(2)


def test_a_site_that_leaves_waits_for_all_that_are_in_flight(two: Story) -> None:
    two.exchanges(1, 0)
    two.exchanges(2, 1)
    two(e.LeaveAsked("enough"))
    two.asks(20)
    assert two.is_held()
    two.applies(committed(1, 1, 0, done=ranges((0, 20))))
    two.take(Values(1, 0))
    two.asks(20)
    assert two.is_held()
    two.applies(replace(committed(2, 2, 1, done=ranges((20, 40))), next=of(2, 3, base=2)))
    assert two.take(Values(2, 1)).mode is MergeMode.REPLACE
    two.asks(20)
    assert two.answer().kind is AnswerKind.STOP


def test_the_snapshot_of_a_sync_is_not_offered_to_the_next_one_of_its_fragment(two: Story) -> None:
    """The Open comes before the commit that it follows is applied."""
    two.exchanges(1, 0)
    two.receive(committed(1, 1, 0, done=ranges((0, 20))))
    two.receive(of(0, 4, base=1))
    assert not two.sent()
    two(e.CommitApplied(commit=1, state_hash=HASH))
    assert [type(s) for s in two.sent()] == [m.Applied]


def test_a_plan_on_an_older_commit_is_followed_while_its_fragment_is_untouched(two: Story) -> None:
    two.exchanges(1, 0)
    two.applies(committed(1, 1, 0, done=ranges((0, 20))))
    two.receive(replace(plan(2), fragment=1))
    two.wants(out.BeginExchange)


def test_a_plan_on_a_commit_that_its_fragment_has_left_is_not(two: Story) -> None:
    two.applies(committed(1, 2, 1, contributors=(2, 3)))
    two.receive(replace(plan(9), fragment=1))
    (said,) = two.sent()
    assert isinstance(said, m.ExchangeFailed)
    assert said.text == "planned on commit 0, which this site has not applied"


def test_weights_of_an_unknown_plan_are_told_whatever_later_sync_is_planned(two: Story) -> None:
    two.receive(replace(plan(2), fragment=1))
    two.receive(m.Weights(sync=1, attempt=1, term=1, tokens=(100, 100)))
    (said,) = two.sent()
    assert isinstance(said, m.ExchangeFailed)


def test_an_exchange_says_which_other_syncs_are_not_over(two: Story) -> None:
    two.receive(plan(1))
    first = two.wants(out.BeginExchange)
    assert isinstance(first, out.BeginExchange)
    assert first.in_flight == {1, 2}
    exchanged(two, 1)
    two.applies(committed(1, 1, 0, done=ranges((0, 20))))
    two.receive(replace(plan(2), fragment=1))
    second = two.wants(out.BeginExchange)
    assert isinstance(second, out.BeginExchange)
    assert second.in_flight == {2}


def test_ranks_that_wait_hurry_the_oldest_exchange_alone(two: Story) -> None:
    two.receive(plan(1))
    two.receive(replace(plan(2), fragment=1))
    two(e.LeaveAsked("enough"))
    two.asks(21)
    assert two.wants(out.HurryExchange) == out.HurryExchange(1)
    two(e.Tick())
    assert not any(isinstance(o, out.HurryExchange) for o in two.out)


def test_ranks_that_wait_while_a_commit_is_written_for_them_hurry_no_exchange(two: Story) -> None:
    two.exchanges(1, 0)
    two.receive(replace(plan(2), fragment=1))
    two.asks(30)
    assert two.is_held()
    two.applies(committed(1, 1, 0, done=ranges((0, 20))))
    assert two.wants(out.PublishState) == out.PublishState(Values(1, 0))
    assert two.is_held()
    assert not any(isinstance(o, out.HurryExchange) for o in two.out)


@pytest.mark.parametrize("fragment", [1, 2, ALL])
def test_what_is_in_flight_when_the_run_goes_back_is_discarded(two: Story, fragment: int) -> None:
    """This site holds the commit that the run goes back to. One sync is opened, whichever fragment's turn it was after
    that: a snapshot of another one would hold the ranks up, and workers count as listed what it lists."""
    two.receive(m.RolledBack(commit=0, branch=1, reason="a disk is lost"))
    two(e.DiskRolledBack(branch=1, held=(0, HASH)))
    two.receive(of(fragment, 3, overlap_steps=0))
    assert not two.sent()
    two.receive(m.Leases(ranges=ranges((0, 20), (40, 420))))
    for stale in range(3):
        two.asks(30)
        answer = two.take(Values(0, stale))
        assert (answer.mode, answer.data_epoch) == (MergeMode.REPLACE, 1)
    assert answer.next_step == 40
    assert two.seal(40, fragment, used=20).ranges == ranges((0, 20))


def test_an_abandoned_sync_is_followed_while_the_other_goes_on(two: Story) -> None:
    two.receive(m.Abandoned(sync=1, reason="8 attempts failed", next=of(0, 3)))
    assert [s.sync for s in two.sent() if isinstance(s, m.Ready)] == [3]
    two.exchanges(2, 1)
    assert [s.sync for s in two.sent() if isinstance(s, m.Done)] == [2]


def test_of_two_that_are_open_ranks_train_for_the_newest_window(story: Story) -> None:
    """The others were ready for sync 1, and this site was not; it was abandoned."""
    story.receive(of(1, 2))
    story.receive(m.Abandoned(sync=1, reason="8 attempts failed", next=replace(of(0, 3), run_step=0)))
    assert story.seal(10, 1).sync == 2
    story.asks(20)
    assert story.answer().fragment == 0


def test_a_site_that_sits_out_the_newest_window_comes_to_its_turn_in_an_older_one(story: Story) -> None:
    story.receive(replace(of(1, 2), resting=(1,)))
    assert story.seal(10, fragment=0).sync == 1


def test_a_site_at_rest_waits_beyond_three_windows_and_lists_all_of_them_at_its_turn(story: Story) -> None:
    """Whatever is open beside: in a snapshot for the sync that it sits out they would miss that of its turn."""
    story.receive(replace(of(0, 1), resting=(1,)))
    story.asks(30)
    assert story.is_held()
    story.receive(of(1, 2))
    assert story.answer() == e.Answer(kind=AnswerKind.SNAPSHOT, fragment=1)
    assert story.sealed_at(30, used=60).ranges == ranges((0, 60))


def test_a_site_at_rest_writes_nothing_for_a_sync_that_is_over(story: Story) -> None:
    """Its commit is heard, and its payloads still come: in a snapshot for it the steps would miss the site's turn."""
    story.receive(replace(plan(1, contributors=(2, 3), receivers=(1,)), fragment=0))
    story.receive(replace(of(1, 2), resting=(1,)))
    story.receive(committed(1, 1, 0, contributors=(2, 3)))
    story.asks(10)
    assert story.answer().kind is AnswerKind.CONTINUE
    story.receive(of(2, 3))
    assert story.seal(30, fragment=2).ranges == ranges((0, 60))


def crashed(story: Story) -> None:
    """The next ranks have taken commit 0."""
    story(e.WorkersFailed(generation=1, kind=e.FailureKind.CRASHED, text="killed", num_steps=12))
    story.joined()
    story(e.DataAnnounced(generation=story.generation, num_samples=1000, round_samples=PER_STEP, rounds_ahead=0))
    for fragment in range(3):
        story.ask(0, fragment)
        story.take(Values(0, fragment))


def test_new_ranks_train_on_while_the_site_rests_and_its_turn_is_in_flight(story: Story) -> None:
    story.seal(10, fragment=0)
    story.receive(replace(of(1, 2), resting=(1,)))
    crashed(story)
    story.asks(10)
    assert story.answer().kind is AnswerKind.CONTINUE


def test_new_ranks_come_to_an_older_window_though_the_newest_is_sealed(story: Story) -> None:
    story.receive(of(2, 3))
    story.seal(10, fragment=2)
    crashed(story)
    story.asks(10)
    assert story.answer() == e.Answer(kind=AnswerKind.SNAPSHOT, fragment=0)


def test_a_sync_that_the_site_sits_out_lets_ranks_train_no_further_beyond_a_newer_snapshot(story: Story) -> None:
    story.receive(replace(of(0, 1), resting=(1,)))
    story.receive(of(1, 2, overlap_steps=5))
    story.seal(10, fragment=1)
    story.asks(15)
    assert story.is_held()


def test_at_the_end_of_a_run_ranks_come_to_an_older_window_that_is_open_too(story: Story) -> None:
    """Sync 2 is committed. This site was started again: it was not ready for sync 1, which has no quorum without it.
    The others are held by their snapshots of sync 1, and sync 3 has none without them."""
    story.receive(of(2, 3, overlap_steps=1))
    story.seal(10, 2)
    story.asks(10)
    assert story.answer().kind is AnswerKind.CONTINUE
    story.asks(19)
    assert story.answer().next_step == 20
    assert story.seal(20, 0).sync == 1
    story.asks(20)
    assert story.answer().next_step == 21
    story.asks(21)
    assert story.is_held(), "beyond the newest window no step is trained that would be thrown away"


def test_ranks_come_to_older_windows_that_are_longer_together_than_the_overlap() -> None:
    """Sync 4, of the window before the newest, is committed. This site was started again: sync 2 has no quorum without
    it. The others are held by their snapshots of that, and sync 5 has none without them."""
    story = Story(UNEVEN)
    for fragment, sync, run_step, num_steps in ((1, 2, 3, 4), (2, 3, 7, 4), (0, 5, 14, 3)):
        story.receive(replace(of(fragment, sync, overlap_steps=7), run_step=run_step, num_steps=num_steps))
    assert story.seal(3, 0).sync == 5
    assert story.seal(7, 2).sync == 3
    story.asks(10)
    assert story.answer().next_step == 11
    assert story.seal(11, 1).sync == 2


def test_steps_for_an_older_window_are_none_beyond_the_newest() -> None:
    """Sync 4 ends ten steps behind sync 3, which lets ranks train fifteen: the coordinator waits for this site."""
    story = Story()
    story.receive(of(2, 3, overlap_steps=15))
    story.seal(10, 2)
    story.seal(20, 0)
    story.receive(of(1, 4))
    story.asks(25)
    assert story.answer().next_step > 25
    assert story.seal(30, 1).sync == 4
    story.asks(34)
    assert story.answer().next_step == 35
    story.asks(35)
    assert story.is_held()


def test_steps_for_a_window_are_beyond_a_snapshot_that_a_commit_holds() -> None:
    """That commit is on its way to the disk. The next sync of its fragment is open, and of a newer window."""
    story = Story()
    story.receive(of(0, 1, overlap_steps=15))
    story.seal(10, 0)
    story.receive(of(1, 2))
    story.receive(replace(of(0, 4, base=1), run_step=30))
    story.seal(20, 1)
    story.receive(of(2, 3))
    story.asks(25)
    assert story.is_held()


def test_after_a_commit_that_leaves_others_open_the_site_waits_for_no_opening(two: Story) -> None:
    two.exchanges(1, 0)
    two.applies(committed(1, 1, 0, done=ranges((0, 20))))
    two.asks(21)
    two(e.Published(Values(1, 0)))
    two.asks(22)
    assert two.answer().mode is MergeMode.MERGE
    two.merged(1)
    two.asks(22)
    assert two.answer().kind is AnswerKind.CONTINUE


def test_what_another_fragments_commit_did_not_touch_is_not_taken_again(two: Story) -> None:
    """The commit of the other fragment is applied while the ranks take one."""
    two.exchanges(1, 0)
    two.exchanges(2, 1)
    two.applies(committed(1, 1, 0, done=ranges((0, 20))))
    two.asks(20)
    two(e.Published(Values(1, 0)))
    two.asks(21)
    assert two.answer().mode is MergeMode.MERGE
    two.applies(committed(2, 2, 1, done=ranges((20, 40))))
    two.merged(1)
    two.receive(of(2, 3, base=2))
    two.asks(21)
    assert two.wants(out.PublishState) == out.PublishState(Values(2, 1))
    two(e.Published(Values(2, 1)))
    two.asks(22)
    assert two.answer().mode is MergeMode.MERGE
    two.merged(2)
    two.asks(22)
    assert two.answer() == e.Answer(kind=AnswerKind.CONTINUE, next_step=30)
