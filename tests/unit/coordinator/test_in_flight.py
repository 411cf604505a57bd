"""Several syncs in flight: when the next one is opened, of which fragment, and what becomes of those that are open.
docs/decisions/0039."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sync.pace import Pace
from atoll.protocol import messages as m
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from tests.harness.coordinator_story import Story, some_settings, three_layers

WINDOW = 3
"""Steps: three fragments, and each of them is synced every nine."""


def a_story(*names: str, overlap: int = 6, **settings: object) -> Story:
    """An overlap of 6 lets two syncs be in flight, of 9 three."""
    names = names or ("a", "b")
    values = {"min_sites": len(names), "fragments": 3, "every": 9, "steps": 900} | settings
    story = Story(some_settings(overlap=overlap, **values), manifest=three_layers())
    for name in names:
        story.join(name)
        story.applied(name, 0, "s0")
    return story


def ready(
    story: Story, fragment: int, names: str = "ab", *, tokens: int = 100, train: float = 0.0, steps: int = 0
) -> None:
    for name in names:
        story.ready(name, tokens, fragment=fragment, train=train, steps=steps)


def done(story: Story, fragment: int, names: str = "ab") -> None:
    """They are done, and the commit that follows is applied."""
    number, plan = story.last_commit(), story.plan(fragment)
    for name in names:
        story.done(name, f"s{plan.base_commit}", plan=plan)
    assert story.last_commit() == number + 1
    applied(story, number + 1, names)


def applied(story: Story, commit: int, names: str = "ab") -> None:
    for name in names:
        story.applied(name, commit, f"s{commit}")


def windows(story: Story) -> list[tuple[int, int, int, int]]:
    """Of each sync that is open: its number, fragment, base, and the step at which its window begins."""
    return [(o.sync, o.fragment, o.base_commit, o.run_step) for o in story.open_syncs()]


def commits(story: Story) -> list[m.Commit]:
    return [x for name, x in story.sent if name == "a" and isinstance(x, m.Commit)]


def told(story: Story, name: str, since: int = 0) -> list[tuple[object, int]]:
    """What a site was told of syncs, but for commits."""
    kinds = m.Open | m.Plan | m.Weights
    return [(type(x), x.sync) for who, x in story.sent[since:] if who == name and isinstance(x, kinds)]


# --- when a sync is opened


@pytest.mark.parametrize(("overlap", "most"), [(0, 1), (3, 1), (4, 2), (6, 2), (7, 3), (9, 3)])
def test_the_next_one_is_opened_when_all_are_ready_for_the_newest(overlap: int, most: int) -> None:
    story = a_story(overlap=overlap)
    for fragment in range(3):
        expected = [(f + 1, f, 0, f * WINDOW) for f in range(min(fragment + 1, most))]
        assert windows(story) == expected
        if fragment < most:
            ready(story, fragment, "a")
            assert windows(story) == expected, "b may yet stop before the boundary"
            ready(story, fragment, "b")
    assert len(windows(story)) == most


def test_an_opening_is_kept_and_said_before_its_plan_to_all_that_are_here() -> None:
    story = a_story()
    before = len(story.sent)
    ready(story, 0)
    for name in "ab":
        assert told(story, name, before) == [(m.Plan, 1), (m.Weights, 1), (m.Open, 2), (m.Plan, 2)]
    plan = story.plans()[2, 1]
    assert (plan.fragment, plan.base_commit, plan.ahead) == (1, 0, True)
    assert story.expected_ids(1) == {1, 2}


def test_a_sync_that_is_behind_the_commit_of_another_is_opened_on_it() -> None:
    """Two are in flight, so that the third waits for one of them."""
    story = a_story()
    ready(story, 0)
    ready(story, 1)
    assert windows(story) == [(1, 0, 0, 0), (2, 1, 0, 3)]
    plan = story.plan(0)
    for name in "ab":
        story.done(name, "s0", plan=plan)
    assert windows(story) == [(2, 1, 0, 3), (3, 2, 1, 6)]
    assert story.last("b", m.Open).sync == 3, "before b has applied its base"
    (commit,) = commits(story)
    assert (commit.next, commit.final, commit.run_step) == (None, False, 3)
    applied(story, 1)
    ready(story, 2)
    assert story.plan(2).base_commit == 1


def test_nothing_is_opened_while_the_newest_is_collected_again() -> None:
    story = a_story(overlap=9)
    ready(story, 0)
    story.drop("b")
    story.failed("a", "b")
    ready(story, 1, "a")
    assert [sync for sync, *_ in windows(story)] == [1, 2]


def test_with_one_in_flight_the_commit_opens_the_next() -> None:
    story = a_story(overlap=3)
    ready(story, 0)
    done(story, 0)
    assert commits(story)[0].next == story.open_sync(1)
    assert told(story, "a").count((m.Open, 2)) == 0


# --- turns


def test_commits_are_numbered_as_they_come_and_turns_go_on() -> None:
    story = a_story()
    ready(story, 0)
    ready(story, 1)
    done(story, 1)
    assert windows(story) == [(1, 0, 0, 0), (3, 2, 1, 6)], "fragment 2 follows 1, though 0 is the newest that is open"
    done(story, 0)
    assert [(c.commit, c.sync, c.fragment, c.run_step) for c in commits(story)] == [(1, 2, 1, 3), (2, 1, 0, 6)]
    assert windows(story) == [(3, 2, 1, 6)]
    ready(story, 2)
    assert windows(story) == [(3, 2, 1, 6), (4, 0, 2, 9)]


def test_the_turn_of_a_fragment_whose_sync_is_open_is_passed_over() -> None:
    story = a_story()
    ready(story, 0)
    for fragment in (1, 2):
        ready(story, fragment)
        done(story, fragment)
    assert windows(story) == [(1, 0, 0, 0), (4, 1, 2, 9)]


def test_a_sync_that_follows_an_abandoned_one_has_its_window_and_the_other_goes_on() -> None:
    story = a_story()
    ready(story, 0)
    ready(story, 1)
    story.abandon_sync("a test", 0)
    story.happens(e.Tick())
    assert windows(story) == [(3, 0, 0, 0), (2, 1, 0, 3)]
    assert story.last("a", m.Abandoned).next == story.open_sync(0)
    done(story, 1)
    assert windows(story)[0] == (3, 0, 0, 0)
    assert len(windows(story)) == 1, "nobody trains on before those who failed are ready again"
    ready(story, 0)
    story.wait(1.0)
    assert [fragment for _, fragment, *_ in windows(story)] == [0, 2]
    done(story, 0)
    assert [(c.commit, c.sync, c.fragment) for c in commits(story)] == [(1, 2, 1), (2, 3, 0)]
    assert story.view.num_abandoned == 1


# --- the end


def test_the_sync_of_all_fragments_is_alone_and_ends_the_run() -> None:
    story = a_story(overlap=9, steps=10)
    for fragment in range(3):
        ready(story, fragment)
    opened = story.open_syncs()
    assert [o.overlap_steps for o in opened] == [7, 4, 1], "not beyond the end of the run"
    for fragment in (2, 0, 1):
        assert len(story.open_syncs()) > 0
        assert story.open_sync(3) is None
        done(story, fragment)
    last = story.open_sync(3)
    assert last is not None
    assert (last.run_step, last.num_steps, last.overlap_steps, last.base_commit) == (9, 1, 0, 3)
    assert commits(story)[-1].next == last
    ready(story, 3)
    done(story, 3)
    assert [c.final for c in commits(story)] == [False, False, False, True]
    assert [c.next for c in commits(story)] == [None, None, last, None]
    assert story.view.run_step == 10


@pytest.mark.parametrize(("order", "steps"), [((0, 1), 6), ((1, 0), 3)])
def test_a_run_that_is_stopped_ends_with_what_may_have_been_trained_beyond_the_newest_window(
    order: tuple[int, int], steps: int
) -> None:
    """Up to 6 steps beyond the last snapshot; those of the first one are 3 beyond the window that follows it."""
    story = a_story()
    ready(story, 0)
    ready(story, 1)
    story.happens(e.StopAsked("enough"))
    for fragment in order:
        assert not [o for o in story.open_syncs() if o.sync > 2]
        done(story, fragment)
    (last,) = story.open_syncs()
    assert (last.fragment, last.num_steps, last.run_step) == (3, steps, 6)
    ready(story, 3)
    done(story, 3)
    assert story.view.state == "finished: enough"


def test_a_run_that_is_stopped_does_not_throw_away_what_others_exchange() -> None:
    story = a_story(quorum=2)
    ready(story, 0)
    ready(story, 1)
    story.happens(e.StopAsked("enough"))
    story.abandon_sync("a test", 0)
    assert not story.view.finished
    assert story.open_sync(0) is not None
    done(story, 1)
    story.abandon_sync("a test", 0)
    assert story.view.state.startswith("finished: enough (the last sync was abandoned")


def test_a_run_that_is_stopped_waits_for_the_others_where_one_has_no_quorum() -> None:
    """b is done in the first one when it leaves, and was to be in the second."""
    story = a_story(quorum=2)
    ready(story, 0)
    plan = story.plan(0)
    story.done("b", "s0", plan=plan)
    ready(story, 1, "a")
    story.happens(e.StopAsked("enough"))
    story.leave("b")
    assert "has 1 of the 2 contributors" in story.view.state
    assert not story.view.finished
    story.done("a", "s0", plan=plan)
    assert story.last_commit() == 1
    assert story.view.state.startswith("finished: enough (sync 2 has 1 of the 2 contributors")


def test_a_run_that_is_stopped_ends_where_none_that_is_open_has_a_quorum() -> None:
    story = a_story(quorum=2)
    ready(story, 0)
    ready(story, 1, "a")
    story.happens(e.StopAsked("enough"))
    story.leave("b")
    story.wait(2 * story.limits.sync_wait_s)
    assert story.view.state.startswith("finished: enough (sync 1 has 1 of the 2 contributors")


def test_a_run_that_is_stopped_does_not_wait_for_a_window_that_nobody_may_reach() -> None:
    """Sync 3 ends six steps behind sync 1, which has no quorum."""
    story = a_story(quorum=2, overlap=5)
    ready(story, 0)
    ready(story, 1)
    done(story, 1)
    story.leave("b")
    story.happens(e.StopAsked("enough"))
    story.wait(2 * story.limits.sync_wait_s)
    assert story.view.state.startswith("finished: enough (sync 1 has 1 of the 2 contributors")


def test_a_run_that_is_stopped_ends_where_all_that_are_open_are_abandoned() -> None:
    story = a_story(quorum=2)
    ready(story, 0)
    ready(story, 1)
    story.happens(e.StopAsked("enough"))
    story.abandon_sync("a test", 0)
    assert not story.view.finished
    story.abandon_sync("another one", 1)
    assert story.view.state.startswith("finished: enough (the last sync was abandoned: another one")


def test_of_a_length_in_tokens_the_first_sync_is_alone_and_others_are_estimated() -> None:
    """67 tokens a step: the windows of the syncs that are open count as well."""
    story = a_story(steps=0, tokens=1000)
    ready(story, 3)
    assert [o.fragment for o in story.open_syncs()] == [3], "nobody knows whether it is the last"
    done(story, 3)
    ready(story, 0)
    assert [(o.fragment, o.run_tokens) for o in story.open_syncs()] == [(0, 200), (1, 400)]
    ready(story, 1)
    done(story, 0)
    ready(story, 2)
    assert [(o.fragment, o.run_tokens) for o in story.open_syncs()] == [(1, 400), (2, 600)]
    done(story, 1)
    assert [o.fragment for o in story.open_syncs()] == [2], "the next one may be the last"
    done(story, 2)
    assert [o.fragment for o in story.open_syncs()] == [3]


# --- samples


def test_a_position_is_in_at_most_one_sync_that_is_open() -> None:
    story = a_story()
    story.wants("a", 20)
    story.ready("a", fragment=0, data=[m.DataRange(first=0, num_samples=10)])
    story.ready("b", fragment=0)
    story.ready("a", fragment=1, data=[m.DataRange(first=0, num_samples=20)])
    assert "it trained on data that it does not lease" in story.evicted_because("a")


def test_what_a_sync_committed_without_the_site_lists_is_listed_by_the_next_one() -> None:
    story = a_story("a", "b", "c", quorum=2)
    story.wants("c", 20)
    story.ready("c", fragment=0, data=[m.DataRange(first=0, num_samples=10)])
    ready(story, 0)
    story.failed("c", text="nothing goes through")  # it cannot go on
    done(story, 0, "ab")
    story.applied("c", 1, "s1")
    ready(story, 1)
    story.ready("c", fragment=1, data=[m.DataRange(first=0, num_samples=20)])
    done(story, 1, "abc")
    assert story.done_samples() == (m.DataRange(first=0, num_samples=20),)


def test_what_a_lost_site_contributed_is_open_again_with_the_sync_that_it_was_in() -> None:
    """c is done in both, and goes: each commit holds its part, or that part alone is drawn again."""
    story = a_story("a", "b", "c", quorum=2)
    first, second = (m.DataRange(first=n, num_samples=10) for n in (0, 10))
    story.wants("c", 20)
    for fragment, data in ((0, first), (1, second)):
        story.ready("c", fragment=fragment, data=[data])
        ready(story, fragment)
        story.done("c", "s0", plan=story.plan(fragment))
    story.leave("c")
    assert story.outlived_contributions() == [(0, 3)]
    story.abandon_sync("a test", 1)
    story.happens(e.Tick())
    assert story.outlived_contributions() == [(0, 3)]
    assert story.wants("b", 10) == (second,)
    done(story, 0)
    assert story.done_samples() == (first,)
    assert story.outlived_contributions() == []


# --- sites that come, go, and lag


def test_a_site_that_applies_one_commit_while_the_next_is_there_is_waited_for() -> None:
    story = a_story(overlap=9)
    for fragment in range(3):
        ready(story, fragment)
    for number, fragment in ((1, 0), (2, 1)):
        plan = story.plan(fragment)
        for name in "ab":
            story.done(name, "s0", plan=plan)
        assert story.last_commit() == number
    for commit in (1, 2):
        applied(story, commit, "a")
    ready(story, 0, "a")
    applied(story, 1, "b")
    (view,) = [view for view in story.view.syncs if view.fragment == "0 of 3"]
    assert view.wait == "not ready yet: b (site 2)"
    assert [site.state for site in story.view.sites] == ["member", "member"]


def test_a_site_that_is_behind_by_more_than_may_come_at_once_is_not() -> None:
    story = a_story("a", "b", "c", quorum=2)
    for fragment in range(2):
        ready(story, fragment)
        story.wait(story.limits.sync_wait_s)
        done(story, fragment)
    story.applied("c", 0, "s0")
    assert [site.state for site in story.view.sites] == ["member", "member", "catching up"]


def test_a_site_that_comes_back_between_two_commits_hears_of_all_syncs() -> None:
    """It holds commit 0: sync 3 is on commit 1, which says nothing of what follows."""
    story = a_story()
    ready(story, 0)
    ready(story, 1)
    story.drop("b")
    plan = story.plan(0)
    story.done("a", "s0", plan=plan)
    story.connect("b", state=(0, "s0"))
    story.done("b", "s0", plan=plan)
    story.drop("b")
    before = len(story.sent)
    story.connect("b", state=(0, "s0"))
    commit = [x for who, x in story.sent[before:] if who == "b" and isinstance(x, m.Commit)]
    assert [(c.commit, c.next) for c in commit] == [(1, None)]
    assert told(story, "b", before) == [(m.Open, 2), (m.Plan, 2), (m.Weights, 2), (m.Open, 3), (m.Plan, 3)]
    applied(story, 1)
    ready(story, 2)
    assert story.is_ready("b", 2)


def test_so_does_one_that_lacks_the_commit_which_opened_the_sync_before() -> None:
    """Commit 1 says that sync 2 follows, and not that sync 3 was opened beside that."""
    story = a_story()
    ready(story, 0)
    story.abandon_sync("a test", 1)
    plan = story.plan(0)
    for name in "ab":
        story.done(name, "s0", plan=plan)
    story.drop("b")
    story.applied("a", 1, "s1")
    before = len(story.sent)
    story.connect("b", state=(0, "s0"))
    assert (m.Open, 3) in told(story, "b", before)


def test_a_joiner_hears_of_all_syncs_whose_base_it_holds() -> None:
    story = a_story()
    ready(story, 0)
    ready(story, 1)
    story.join("c")
    story.sources("c")
    before = len(story.sent)
    story.applied("c", 0, "s0")
    assert [sync for kind, sync in told(story, "c", before) if kind is m.Open] == [1, 2]


def test_a_site_that_goes_is_void_in_all() -> None:
    story = a_story("a", "b", "c", quorum=2)
    ready(story, 0, "abc")
    ready(story, 1, "abc")
    story.evict("c")
    assert [story.contributor_ids(fragment) for fragment in (0, 1)] == [[1, 2], [1, 2]]
    story.connect("c", again=True, state=(0, "s0"))
    story.offer("c")
    for fragment in (0, 1):
        ready(story, fragment, "c")
        assert not story.is_ready("c", fragment)


@pytest.mark.parametrize(("overlap", "owes"), [(5, False), (6, True)])
def test_a_site_that_may_train_no_further_before_a_commit_owes_nothing(overlap: int, owes: bool) -> None:
    """Sync 3 ends six steps behind sync 1, which has lost its quorum."""
    story = a_story(quorum=2, overlap=overlap)
    ready(story, 0)
    ready(story, 1)
    done(story, 1)
    assert windows(story) == [(1, 0, 0, 0), (3, 2, 1, 6)]
    story.leave("b")
    story.beats("a", phase="waiting for the commit", doing="", step=8)
    story.wait(story.idle_limit_s() + 2 * story.limits.heartbeat_s)
    assert ("trained nor been ready for sync 3 (" in story.evicted_because("a")) == owes
    assert story.is_live("a") != owes


def test_a_site_that_rests_in_one_sync_may_wait_for_another_for_long() -> None:
    """c has done its part of sync 2, and trains no further before the commit; a and b still exchange."""
    story = a_story("a", "b", "c")
    story.let_rest("c", 2)
    ready(story, 0, "abc")
    ready(story, 1, "abc")
    done(story, 0, "abc")
    assert story.open_syncs()[-1].resting == (3,)
    story.done("c", "s0", plan=story.plan(1))
    story.beats("c", phase="waiting for commit", doing="", step=12)
    moved, until = 0, story.now + story.idle_limit_s() + 2 * story.limits.heartbeat_s
    while story.now < until:
        moved += 1
        for name in "ab":
            story.sites[name].heartbeat = m.Heartbeat(phase="exchanging", moved_bytes=moved)
        story.wait(story.limits.heartbeat_s)
    assert story.live_sites() == ["a", "b", "c"]


def test_a_reducer_that_only_waits_in_all_syncs_costs_no_honest_site() -> None:
    """Five are in flight, and in each of them the others are taken at their word, that they wait for d."""
    tensors = [TensorSpec(name=f"layers.{i}.w", shape=(5, 2), dtype="F32", role=Role.TRAINABLE) for i in range(5)]
    settings = some_settings(min_sites=4, fragments=5, every=10, overlap=10, steps=900)
    story = Story(settings, manifest=Manifest.canonical(tensors))
    story.start("a", "b", "c", "d")
    story.commit_one("a", "b", "c", "d", state="s0", following="s1")
    for fragment in (1, 2, 3, 4, 0):
        ready(story, fragment, "abcd")
    moved, until = 0, story.now + 8 * story.limits.stall_s
    while story.now < until and story.attempt(1) == 1:
        moved += 1
        for name in "abcd":
            others = tuple(story.id_of(other) for other in "abc")
            beat = m.Heartbeat(phase="exchanging", waits_for_payloads=(story.id_of("d"),))
            if name == "d":
                beat = m.Heartbeat(phase="exchanging", moved_bytes=moved, waits_for_contributions=others)
            story.sites[name].trains, story.sites[name].heartbeat = False, beat
            story.says(name, beat)
        story.wait(story.limits.heartbeat_s)
    assert [story.contributor_ids(fragment) for fragment in range(5)] == [[1, 2, 3]] * 5
    assert story.view.num_evicted == 0


def test_what_is_expected_of_sites_counts_from_the_sync_before() -> None:
    """The commit of the first one comes after the second was opened: nobody is late for that."""
    story = a_story("a", "b", "c", quorum=1)
    for fragment in (0, 1):
        ready(story, fragment, "abc", train=10.0, steps=WINDOW)
        story.wait(story.limits.lease_s)
        done(story, fragment, "abc")
    assert windows(story) == [(3, 2, 1, 6)]
    story.wait(10.0 - story.limits.lease_s)
    ready(story, 2, "ab", train=10.0, steps=WINDOW)
    (view,) = story.view.syncs
    assert (view.attempt, view.wait) == (1, "not ready yet: c (site 3)"), "planned ahead, when nobody was slow"


# --- the coordinator is started again


def test_what_is_open_goes_on_after_a_restart() -> None:
    story = a_story(overlap=9)
    ready(story, 0)
    ready(story, 1)
    ready(story, 2, "a")
    before = windows(story)
    story.restart()
    assert windows(story) == before
    for name in "ab":
        story.join(name, state=(0, "s0"))
    assert windows(story) == before
    done(story, 1)
    ready(story, 2)
    assert [fragment for _, fragment, *_ in windows(story)] == [0, 2, 1]
    done(story, 0)
    done(story, 2)
    assert [c.fragment for c in commits(story)] == [1, 0, 2]


def test_going_back_ends_all_that_are_open() -> None:
    story = a_story()
    ready(story, 0)
    ready(story, 1)
    done(story, 0)
    ready(story, 2)
    story.ask_to_go_back(0)
    story.rebuilt("a", "s0")
    assert windows(story) == [(4, 0, 0, 0)]
    assert story.view.num_abandoned == 2


# --- what is measured, and what is shared


def test_a_reducer_has_room_for_all_that_are_in_flight_and_for_one_of_all() -> None:
    layout = Layout(three_layers(), 4, 3)
    most = max(sum(layout.chunks[c].num_bytes + 16 for c in chunks) for chunks in layout.fragments)
    story = Story(some_settings(fragments=3, every=9, overlap=9, min_sites=1), manifest=three_layers())
    story.connect("a")
    story.offer("a", retain=3 * most - 100)
    story.applied("a", 0, "s0")
    fits = []
    for fragment in range(3):
        if story.open_sync(fragment) is not None:
            story.ready("a", fragment=fragment)
            fits.append(story.attempt(fragment))
    assert "3 are in flight at once" in story.view.state
    assert not all(fits)


def test_syncs_in_flight_share_a_link() -> None:
    one, three = a_story(overlap=3), a_story(overlap=9)
    for story in (one, three):
        ready(story, 0)
    alone, beside = one.plan(0), three.plan(0)
    assert alone.slowest_bytes_per_s == one.limits.slowest_bytes_per_s
    assert beside.slowest_bytes_per_s == alone.slowest_bytes_per_s // 3
    assert beside.deadline_s > alone.deadline_s


def test_a_period_is_the_mean_of_as_many_as_are_in_flight() -> None:
    for num_in_flight, at in ((1, (0, 10, 20, 30)), (2, (0, 1, 20, 21, 40, 41)), (3, (0, 0, 0, 30, 30, 30))):
        pace = Pace(num_in_flight)
        for now in at:
            pace.note_commit([1], 1, 1.0, float(now))
        assert pace.period_s == 10.0


def test_what_a_site_has_in_flight_is_no_part_of_its_next_window() -> None:
    """A site that says a thousand times its tokens weighs sixteen times the others, over one window."""
    story = a_story("a", "b", "c", ratio=16)
    for fragment in (0, 1):
        ready(story, fragment, tokens=30)
        story.ready("c", fragment=fragment, tokens=30_000)
    assert [c.tokens for c in story.plan(1).contributors] == [30, 30, 16 * 30]


def test_what_a_site_had_in_a_later_window_is_none_either_when_an_earlier_one_is_committed_last() -> None:
    story = a_story("a", "b", "c", ratio=2)
    for fragment in (0, 1):
        ready(story, fragment, "abc", tokens=30)
    for fragment in (1, 0):
        done(story, fragment, "abc")
    ready(story, 2, tokens=30)
    story.ready("c", fragment=2, tokens=30_000)
    assert [c.tokens for c in story.plan(2).contributors] == [30, 30, 2 * 30]


def test_sites_rest_in_a_sync_that_is_opened_beside_another() -> None:
    story = a_story("a", "b", "c")
    story.let_rest("c", 2)
    ready(story, 0, "abc")
    assert story.open_sync(1) == replace(story.open_syncs()[1], resting=())
    ready(story, 1, "abc")
    done(story, 0, "abc")
    assert story.open_syncs()[-1].resting == (3,)
    assert story.expected_ids(2) == {1, 2}


# --- losses that are not finite


def diverge(story: Story, names: str, commit: int) -> None:
    for name in names:
        story.says(name, m.Diverged(commit=commit, text="the loss became nan"))


def test_the_run_goes_back_to_before_the_newest_commit_that_most_can_mean() -> None:
    """Commit 2 came at once after the one that spoiled it, and b had applied it by the time it saw that."""
    story = a_story("a", "b", "c")
    ready(story, 0, "abc")
    ready(story, 1, "abc")
    done(story, 0, "abc")
    done(story, 1, "abc")
    diverge(story, "a", 1)
    assert story.goes_back_to() is None
    diverge(story, "b", 2)
    assert story.goes_back_to() == 0
    assert "since commit 1" in story.log[-1] or any("since commit 1, and was before" in text for text in story.log)


def test_an_old_word_counts_for_nothing() -> None:
    story = a_story("a", "b")
    ready(story, 0)
    ready(story, 1)
    done(story, 0)
    done(story, 1)
    ready(story, 2)
    done(story, 2)
    diverge(story, "ab", 1)
    assert story.goes_back_to() is None
    diverge(story, "ab", 2)
    assert story.goes_back_to() == 1


# --- for people


def test_the_status_says_which_syncs_are_open() -> None:
    story = a_story()
    ready(story, 0)
    ready(story, 1, "a")
    assert [(view.sync, view.fragment, view.wait) for view in story.view.syncs] == [
        (1, "0 of 3", "0 of 2 contributors are done"),
        (2, "1 of 3", "not ready yet: b (site 2)"),
    ]
    assert story.view.state == "syncing"


def test_a_site_that_a_later_sync_expects_is_said_to_bring_the_state_back() -> None:
    story = a_story("a", min_sites=1, quorum=1)
    story.join("b")
    story.sources("b")
    story.applied("b", 0, "s0")
    ready(story, 0, "a")
    assert [story.expected_ids(fragment) for fragment in (0, 1)] == [{1}, {1, 2}]
    story.restart()
    story.connect("a")
    story.leave("a")
    assert story.view.state == "paused: b (site 2) brings the state of commit 0 back"
