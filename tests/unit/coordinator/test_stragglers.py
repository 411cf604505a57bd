"""Who is waited for, and how long."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from atoll.coordinator.core.sync.stragglers import Patience, Stragglers, Window
from atoll.protocol import messages as m
from atoll.protocol.outer_settings import OuterSettings
from tests.harness.coordinator_story import Story, some_settings

STEPS = 100


def sites(*, is_late_void: bool = False, **window_s: float) -> Stragglers:
    """a, b, ... are sites 1, 2, ...; each has had some windows of that length."""
    stragglers = Stragglers(is_late_void=is_late_void)
    for i, seconds in enumerate(window_s.values()):
        for _ in range(3):
            stragglers.note_ready(i + 1, STEPS, seconds)
    return stragglers


def patience(
    stragglers: Stragglers, waiting: Collection[int], members: Collection[int], first_ready_at: float = 1010.0
) -> Patience:
    return stragglers.patience(
        waiting,
        members,
        Window(num_steps=STEPS, opened_at=1000.0, least_slack_s=0.75),
        first_ready_at=first_ready_at,
        most_s=30.0,
    )


def test_without_a_history_the_fallback_holds() -> None:
    assert patience(Stragglers(), [2, 3], [1, 2, 3]) == Patience(1040.0, frozenset())
    assert patience(sites(a=10), [2, 3], [1, 2, 3]) == Patience(1040.0, frozenset()), "one of three is not most"
    assert patience(sites(a=10, b=10), [2, 3], [1, 2, 3]) == Patience(1040.0, frozenset()), "nothing is known of 3"


def test_who_is_half_as_fast_is_not_waited_for() -> None:
    stragglers = sites(a=10, b=10, c=20)
    assert patience(stragglers, [3], [1, 2, 3]) == Patience(1010.0, frozenset({3}))
    assert patience(stragglers, [2, 3], [1, 2, 3]) == Patience(1011.0, frozenset({3}))
    assert patience(sites(a=10, b=20), [2], [1, 2]).late == {2}, "of two as well"


def test_who_is_a_little_slower_is_waited_for_a_little() -> None:
    assert patience(sites(a=10, b=10, c=10.5), [3], [1, 2, 3]) == Patience(1011.0, frozenset())
    assert patience(sites(a=1, b=1, c=1.7), [3], [1, 2, 3], 1001.0) == Patience(1001.75, frozenset()), "the least slack"


def test_a_single_fast_site_waits_for_the_many() -> None:
    stragglers = sites(a=5, b=10, c=10, d=10)
    assert patience(stragglers, [2, 3, 4], [1, 2, 3, 4], 1005.0) == Patience(1011.0, frozenset())


def test_a_spread_that_is_known_is_allowed_for() -> None:
    stragglers = sites(a=10, b=10)
    for seconds in (9.0, 10.0, 11.0, 12.0, 8.0):
        stragglers.note_ready(3, STEPS, seconds)
    window_s = stragglers.window_s(3, STEPS)
    assert window_s is not None
    assert abs(window_s - 12.0) < 1e-9, "the median and twice the median distance"


def test_who_missed_a_sync_is_expected_when_its_own_window_is_over() -> None:
    for window_s, late in ((19.0, False), (20.9, False), (21.1, True), (26.0, True)):
        stragglers = sites(a=10, b=10, c=window_s)
        stragglers.note_opening((1, 2, 3), 990.0)
        assert (3 in patience(stragglers, [3], [1, 2, 3]).late) == late, window_s


def test_who_was_waited_for_in_vain_is_not_waited_for_again_until_it_contributes() -> None:
    stragglers = sites(a=10, b=10, c=10)
    assert patience(stragglers, [3], [1, 2, 3]) == Patience(1011.0, frozenset())
    stragglers.note_commit((1, 2), {3}, 1.0, 0.0)
    assert patience(stragglers, [3], [1, 2, 3]).late == {3}, "it may hang"
    stragglers.note_commit((1, 2, 3), (), 1.0, 0.0)
    assert patience(stragglers, [3], [1, 2, 3]).late == frozenset()


def test_where_what_comes_late_is_void_it_is_waited_for_again_ever_more_seldom() -> None:
    stragglers = sites(is_late_void=True, a=10, b=10, c=10)
    opened_at = 1000.0
    for without_s in (16.0, 32.0, 64.0):
        stragglers.note_commit((1, 2), {3}, 1.0, opened_at - without_s + 0.5)
        assert patience(stragglers, [3], [1, 2, 3]).late == {3}
        stragglers.note_commit((1, 2), (), 1.0, opened_at)
        assert patience(stragglers, [3], [1, 2, 3]).late == {3}, "a commit without a wait changes nothing"
        stragglers.note_opening((1, 2), opened_at)
    stragglers.note_commit((1, 2), {3}, 1.0, opened_at - 128.0)
    assert patience(stragglers, [3], [1, 2, 3]) == Patience(1011.0, frozenset()), "as long as for any other"
    stragglers.note_commit((1, 2, 3), (), 0.0, opened_at)
    stragglers.note_commit((1, 2), {3}, 1.0, opened_at - 16.0)
    assert patience(stragglers, [3], [1, 2, 3]).late == frozenset(), "after a contribution it is a first time again"


def test_a_site_that_is_left_out_of_thousands_of_commits_ends_nothing() -> None:
    """The others went on at once each time, so none of these waits is a reason to wait for it less."""
    stragglers = sites(is_late_void=True, a=10, b=10, c=10)
    for number in range(2000):
        stragglers.note_commit((1, 2), {3}, 0.0, 500.0 + number / 4)
    assert patience(stragglers, [3], [1, 2, 3]).late == frozenset(), "none of them was a wait"
    stragglers.note_commit((1, 2), {3}, 1.0, 1000.0)
    assert patience(stragglers, [3], [1, 2, 3]).late == {3}


def test_of_whom_nothing_is_known_is_not_waited_for_longer_the_second_time() -> None:
    stragglers = sites(is_late_void=True, a=10, b=10)
    assert patience(stragglers, [3], [1, 2, 3]).until == 1040.0
    stragglers.note_commit((1, 2), {3}, 1.0, 0.0)
    assert patience(stragglers, [3], [1, 2, 3]) == Patience(1011.0, frozenset())


def test_who_becomes_faster_is_waited_for_again() -> None:
    stragglers = sites(a=10, b=10, c=20)
    stragglers.note_opening((1, 2, 3), 1000.0)
    assert patience(stragglers, [3], [1, 2, 3]).late == {3}
    for _ in range(5):
        stragglers.note_ready(3, STEPS, 10)
    assert patience(stragglers, [3], [1, 2, 3]).late == frozenset()


def test_what_says_nothing_about_the_speed_is_not_counted() -> None:
    stragglers = Stragglers()
    stragglers.note_ready(1, 0, 0.0)
    stragglers.note_ready(1, 10, 0.0)
    assert stragglers.window_s(1, STEPS) is None
    stragglers.note_ready(1, 10, 1.0)
    assert stragglers.window_s(1, STEPS) == 10.0
    stragglers.forget(1)
    assert stragglers.window_s(1, STEPS) is None


def ready_without_a_stream() -> Story:
    """Windows of 10 s are known of a, b and c. b is ready and loses its stream, then all others are ready: d, who
    joined, so that a plan is made anew, and c is the last."""
    story = Story(some_settings(min_sites=3, quorum=2))
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name, train=10.0)
    for name in "abc":
        story.done(name, "s0")
    for name in "abc":
        story.applied(name, 1, "s1")
    story.join("d")
    story.applied("d", 1, "s1")
    story.wait(10)
    story.ready("b", train=10.0)
    story.drop("b")
    for name in "adc":
        story.ready(name, train=10.0)
    return story


def test_who_is_ready_and_renews_its_stream_is_waited_for() -> None:
    story = ready_without_a_stream()
    assert (2, 2) not in story.plans()
    story.connect("b", state=(1, "s1"))
    assert story.contributor_ids() == [1, 2, 3, 4]


def test_who_is_ready_and_does_not_come_back_is_not_waited_for_longer_than_the_grace() -> None:
    story = ready_without_a_stream()
    story.wait(story.limits.reconnect_grace_s)
    plan: m.Plan = story.last("a", m.Plan)
    assert plan.attempt == 2
    assert [c.site_id for c in plan.contributors] == [1, 3, 4]


class AtEveryStep(Story):
    """Sites that exchange gradients, each step of which takes a quarter of a second."""

    def __init__(self, *names: str) -> None:
        optimizer = OuterSettings(optimizer="adamw", momentum=0.9)
        settings = some_settings(steps=100_000, quorum=1, min_sites=len(names), outer=optimizer)
        super().__init__(replace(settings, sync=replace(settings.sync, strategy="gradient", every=1)))
        self.start(*names)

    def train(self, *names: str) -> None:
        self.wait(0.25)
        for name in names:
            self.ready(name, train=0.25)

    def commit(self, makers: str, holders: str) -> None:
        """`makers` are through with the open sync, and `holders` apply what it came to."""
        number = self.last_commit()
        for name in makers:
            self.done(name, f"s{number}", commit=number)
        for name in holders:
            self.applied(name, number + 1, f"s{number + 1}")


def test_one_late_step_does_not_keep_a_site_out_of_an_exchange_at_every_step() -> None:
    """Its gradients are as fast as those of the other one, but for the time that it hears of commits later."""
    story = AtEveryStep("a", "b")
    for _ in range(3):
        story.train("a", "b")
        story.commit("ab", "ab")
    story.train("a")
    story.wait(story.limits.lease_s)
    waited_s, began = story.limits.lease_s / 2, story.now
    assert story.contributor_ids() == [1], "b was waited for"
    while story.weighed_plan() is not None and story.now < began + 20 * waited_s:
        story.commit("a", "ab")
        story.train("a")
    assert story.now - began > 16 * waited_s - 1
    story.ready("b", train=0.25)
    assert story.weighed_plan() is not None, "it was waited for again"
    assert story.contributor_ids() == [1, 2]


def test_who_is_to_receive_for_some_syncs_has_not_been_waited_for_in_vain() -> None:
    """The others exchange badly with it. Then it is waited for at once: how long its steps take is known."""
    story = AtEveryStep("a", "b", "c")
    for _ in range(3):
        story.train("a", "b", "c")
        story.commit("abc", "abc")
    story.put_on_probation("receive_only", "c", sync=story.newest_sync(), times=3)
    num_without = 0
    while story.spared(story.newest_sync()):
        story.train("a")
        story.wait(0.05)
        story.ready("b", train=0.3)
        assert story.contributor_ids() == [1, 2]
        story.commit("ab", "abc")
        num_without += 1
    assert num_without, "it received"
    story.train("a", "b")
    assert story.weighed_plan() is None, "c is waited for"
    story.ready("c", train=0.25)
    assert story.contributor_ids() == [1, 2, 3]
