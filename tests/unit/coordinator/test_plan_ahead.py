"""Rule 12: the plan that comes with the commit before. It is persisted with it, counts once all its contributors are
ready, commits only with the weights that they said, and gives way to an ordinary one otherwise."""

from __future__ import annotations

import pytest

from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, a_hash, some_settings


def steady(*names: str, **settings: object) -> Story:
    """These sites made commit 1 together."""
    story = Story(some_settings(min_sites=len(names), **settings))
    story.start(*names)
    for name in names:
        story.ready(name)
    for name in names:
        story.done(name, "s0")
    for name in names:
        story.applied(name, 1, "s1")
    return story


def told(name: str, story: Story) -> list[m.Plan | m.Weights]:
    return [message for who, message in story.sent if who == name and isinstance(message, m.Plan | m.Weights)]


def is_weighed(story: Story, sync: int, attempt: int) -> bool:
    return any(isinstance(w, m.Weights) and (w.sync, w.attempt) == (sync, attempt) for _, w in story.sent)


def says_done(story: Story, name: str, tokens: tuple[int, ...], sync: int = 2, attempt: int = 1) -> None:
    story.says(
        name,
        m.Done(
            sync=sync,
            attempt=attempt,
            term=1,
            payload_digest=a_hash("p"),
            last_commit=sync - 1,
            state_hash=a_hash(f"s{sync - 1}"),
            tokens=tokens,
        ),
    )


def test_5_the_plan_is_persisted_with_the_commit_and_sent_after_it() -> None:
    story = steady("a", "b")
    to_a = [message for name, message in story.sent if name == "a"]
    place = next(i for i, message in enumerate(to_a) if isinstance(message, m.Commit))
    plan = to_a[place + 1]
    assert isinstance(plan, m.Plan)
    assert (plan.sync, plan.attempt, plan.base_commit, plan.ahead) == (2, 1, 1, True)


def test_all_ready_only_the_weights_are_said_and_plan_and_weights_to_who_reconnects() -> None:
    story = steady("a", "b")
    story.ready("a", tokens=3)
    story.drop("b")
    story.connect("b", state=(1, "s1"))
    assert isinstance(told("b", story)[-1], m.Plan)
    story.ready("b", tokens=4)
    for name in "ab":
        assert story.last(name, m.Weights) == m.Weights(sync=2, attempt=1, term=1, tokens=(3, 4))
        assert isinstance(told(name, story)[-1], m.Weights)
    story.drop("a")
    story.connect("a", state=(1, "s1"))
    assert [type(message) for message in told("a", story)[-2:]] == [m.Plan, m.Weights]
    assert story.last("a", m.Weights) == m.Weights(sync=2, attempt=1, term=1, tokens=(3, 4))


def test_12_every_plan_has_its_weights_after_it() -> None:
    """Those of a plan that is made after Ready are said at once."""
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.join("c")  # receives
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    plan, weights = told("a", story)
    assert isinstance(plan, m.Plan)
    assert (plan.attempt, plan.ahead, [c.tokens for c in plan.contributors]) == (1, False, [0, 0])
    assert weights == m.Weights(sync=1, attempt=1, term=1, tokens=(3, 4))
    assert told("c", story) == [plan, weights]


@pytest.mark.parametrize("ahead", [True, False])
def test_12_a_restart_does_not_change_who_is_to_blame_for_other_weights(ahead: bool) -> None:
    """Under a plan that was made ahead peers may have told them; under any other one it was told the right ones."""
    story = steady("a", "b", "c", quorum=2)
    for name in "abc":
        story.ready(name, tokens=3)
    if not ahead:
        story.failed("a", "b")
        story.wait(2)
    attempt = story.plan().attempt
    assert (attempt == 1) == ahead
    story.restart()
    for name in "abc":
        story.connect(name, state=(1, "s1"))
        story.offer(name)
    plan = story.plan()
    for tokens, name in ((3, 3, 3), "a"), ((3, 3, 3), "b"), ((1, 1, 1), "c"):
        done = m.Done(
            sync=2,
            attempt=attempt,
            term=plan.term,
            payload_digest=a_hash("p"),
            last_commit=1,
            state_hash=a_hash("s1"),
            tokens=tokens,
        )
        story.says(name, done)
    assert story.num("c", m.Evicted) == (0 if ahead else 1)
    assert (story.plan().attempt == attempt + 1) if ahead else (story.last("a", m.Commit).commit == 2)


def test_12_nothing_is_committed_before_everybody_is_ready() -> None:
    story = steady("a", "b")
    story.ready("a", tokens=3)
    says_done(story, "a", (3, 4))
    says_done(story, "b", (3, 4))  # faster than its Ready
    assert story.num("a", m.Commit) == 1
    story.ready("b", tokens=4)
    commit = story.last("a", m.Commit)
    assert (commit.commit, commit.sync, commit.attempt) == (2, 2, 1)
    assert [c.tokens for c in commit.contributors] == [3, 4]


def test_12_weights_that_are_not_those_of_ready_are_not_committed() -> None:
    story = steady("a", "b")
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    says_done(story, "a", (3, 5))
    says_done(story, "b", (3, 5))
    assert story.num("a", m.Commit) == 1
    assert story.plan().attempt == 2
    assert [c.tokens for c in story.plan().contributors] == [3, 4]
    story.done("a", "s1")
    story.done("b", "s1")
    assert story.last("a", m.Commit).attempt == 2


def test_who_says_other_weights_than_the_plan_that_had_them_is_evicted() -> None:
    """c says none, whatever it is told. Where each site said its own, c may have been told them by a or b."""
    story = steady("a", "b", "c", quorum=2)
    for name in "abc":
        story.ready(name, tokens=3)
    for tokens, name in ((3, 3, 3), "a"), ((3, 3, 3), "b"), ((), "c"):
        says_done(story, name, tokens)
    assert story.plan().attempt == 2
    assert not story.num("c", m.Evicted)
    for tokens, name in ((3, 3, 3), "a"), ((3, 3, 3), "b"), ((), "c"):
        says_done(story, name, tokens, attempt=2)
    assert "weights [] are not the plan's [3, 3, 3]" in story.last("c", m.Evicted).reason
    commit = story.last("a", m.Commit)
    assert (commit.commit, commit.attempt, [c.tokens for c in commit.contributors]) == (2, 2, [3, 3, 3])


def test_nobody_is_evicted_where_all_say_other_weights_than_the_plan() -> None:
    story = Story(some_settings(min_sites=2, quorum=2))
    story.start("a", "b")
    for name in "ab":
        story.ready(name, tokens=3)
    for name in "ab":
        says_done(story, name, (1, 2), sync=1)
    assert story.plan().attempt == 2
    assert not [1 for _, message in story.sent if isinstance(message, m.Evicted)]


def test_a_site_that_was_lost_after_its_ready_is_in_the_commit_if_it_was_weighed() -> None:
    story = steady("a", "b")
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    says_done(story, "a", (3, 4))
    story.leave("b")
    assert [c.site_id for c in story.last("a", m.Commit).contributors] == [1, 2]


def test_a_site_that_is_lost_before_its_ready_is_not_in_the_next_attempt() -> None:
    story = steady("a", "b", quorum=1)
    story.ready("a", tokens=3)
    says_done(story, "a", (3, 4))  # it has all contributions, and the weight from their header
    story.leave("b")
    assert story.num("a", m.Commit) == 1
    plan = story.plan()
    assert (plan.attempt, [c.site_id for c in plan.contributors]) == (2, [1])


def test_a_site_that_discarded_its_progress_is_not_planned_again_in_that_sync() -> None:
    """Reducers may hold what it sent before, under the same key."""
    story = steady("a", "b", quorum=1)
    story.drop("b")
    story.wait(3.5)
    story.connect("b", state=(1, "s1"))
    story.offer("b")
    story.ready("b", tokens=9)
    story.ready("a", tokens=3)
    plan = story.plan()
    assert (plan.attempt, [c.site_id for c in plan.contributors]) == (2, [1])


def test_17_without_a_weight_of_everybody_it_gives_way() -> None:
    story = steady("a", "b", quorum=1)
    story.ready("a", tokens=0)
    story.ready("b", tokens=4)
    plan = story.plan()
    assert (plan.attempt, [(c.site_id, c.tokens) for c in plan.contributors]) == (2, [(2, 4)])


@pytest.mark.parametrize("was_done", [False, True])
def test_who_leaves_and_comes_back_is_not_weighed_as_if_it_had_stayed(was_done: bool) -> None:
    """Others may hold what it sent, and its new weight is of something else."""
    story = steady("a", "b", quorum=1)
    story.ready("b", tokens=4)
    if was_done:
        says_done(story, "b", (3, 4))  # a's Ready is on its way
    story.leave("b")
    story.connect("b", incarnation=2, state=(1, "s1"))
    story.offer("b")
    story.ready("b", tokens=9)
    story.ready("a", tokens=3)
    plan = story.plan()
    assert plan.attempt == 2
    assert [(c.site_id, c.incarnation, c.tokens) for c in plan.contributors] == [(1, 1, 3), (2, 2, 9)]


def test_17_it_gives_way_where_a_site_cannot_exchange_at_all() -> None:
    story = steady("a", "b", quorum=1)
    story.ready("b", tokens=4)
    story.failed("b")
    story.ready("a", tokens=3)
    plan = story.plan()
    assert (plan.attempt, [c.site_id for c in plan.contributors]) == (2, [1])
    assert not is_weighed(story, 2, 1)


def test_who_is_in_the_run_and_not_in_the_plan_does_not_hear_its_weights() -> None:
    story = steady("a", "b")
    story.join("c")  # fetches the state
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    assert is_weighed(story, 2, 1)
    assert not story.num("c", m.Weights)


def test_the_time_for_the_exchange_begins_when_all_are_ready() -> None:
    story = steady("a", "b")
    limits, deadline_s = story.limits, story.plan().deadline_s
    story.wait(deadline_s + 2 * limits.stall_s + 1)  # training
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    assert not story.num("a", m.Evicted)
    for name in "ab":
        story.done(name, "s1")
    assert story.last("a", m.Commit).commit == 2
    assert story.longest_exchange_s("a", "b") == 0


def test_those_who_do_not_come_are_planned_without() -> None:
    story = steady("a", "b", "c", quorum=2)
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    story.wait(story.limits.sync_wait_s + 1)
    plan = story.plan()
    assert plan.attempt == 2
    assert [(c.site_id, c.tokens) for c in plan.contributors] == [(1, 3), (2, 4)]
    assert [r.site_id for r in plan.receivers] == [3]


def test_a_site_that_joins_meanwhile_is_in_an_ordinary_plan() -> None:
    story = steady("a", "b")
    story.join("c")
    story.applied("c", 1, "s1")
    for name in "cab":
        story.ready(name, tokens=5)
    plan = story.plan()
    assert (plan.attempt, [c.tokens for c in plan.contributors]) == (2, [5, 5, 5])


def test_16_a_plan_that_gave_way_has_not_been_tried() -> None:
    """A site alone and a joiner: the only assignment of reducers there is comes again, with weights."""
    story = steady("a", quorum=1)
    story.join("c")
    story.applied("c", 1, "s1")
    story.ready("a", tokens=3)
    assert (story.plan().sync, story.plan().attempt) == (2, 2)
    story.done("a", "s1")
    assert story.last("a", m.Commit).commit == 2
    assert story.view.num_abandoned == 0


def test_11_after_a_plan_that_gave_way_contributions_are_where_they_are_needed() -> None:
    story = steady("a", "b", quorum=1)
    ahead = story.plan()
    story.join("c")
    story.applied("c", 1, "s1")
    for name in "ab":
        story.ready(name)
    assert (story.plan().attempt, story.plan().trees) == (2, ahead.trees)


def test_16_nor_after_a_restart_of_the_coordinator() -> None:
    story = steady("a", quorum=1)
    story.join("c")
    story.applied("c", 1, "s1")
    story.restart()
    story.connect("c", state=(1, "s1"))
    story.connect("a", state=(1, "s1"))
    story.offer("a")
    story.offer("c")
    story.ready("a", tokens=3)
    assert (story.plan().sync, story.plan().attempt) == (2, 2)
    assert story.view.num_abandoned == 0


def test_16_it_gives_way_where_no_site_can_be_dialled_by_all() -> None:
    story = steady("a", "b", quorum=1)
    with story.together():
        story.ready("a", tokens=3, unreachable="b")
        story.ready("b", tokens=4, unreachable="a")
    assert "no site can be dialled" in story.view.state
    assert not is_weighed(story, 2, 1)


def test_16_it_gives_way_where_the_fewest_must_receive() -> None:
    """a can be dialled by c alone, b by a alone, c by b alone."""
    story = steady("a", "b", "c", quorum=1)
    with story.together():
        story.ready("a", tokens=3, unreachable="c")
        story.ready("b", tokens=4, unreachable="a")
        story.ready("c", tokens=4, unreachable="b")
    assert story.plan().attempt == 2
    assert len(story.plan().contributors) == 2
    assert not is_weighed(story, 2, 1)


@pytest.mark.parametrize("state", [None, (0, "s0")], ids=["with nothing", "with an older state"])
def test_there_is_none_with_a_site_that_was_done_left_and_came_back(state: tuple[int, str] | None) -> None:
    story = steady("a", "b", quorum=1)
    for name in "ab":
        story.ready(name)
    story.done("b", "s1")
    story.leave("b")
    story.connect("b", state=state)
    story.offer("b")
    story.done("a", "s1")
    assert [c.site_id for c in story.last("a", m.Commit).contributors] == [1, 2]
    assert (3, 1) not in story.plans()


@pytest.mark.parametrize("kind", ["receive_only", "reduce_nothing"])
def test_16_there_is_none_after_exchanges_that_failed(kind: str) -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for name in "ab":
        story.ready(name)
    story.put_on_probation(kind, "a", sync=1)
    for name in "ab":
        story.done(name, "s0")
    assert story.last("a", m.Commit).commit == 1
    assert (2, 1) not in story.plans()


@pytest.mark.parametrize("circle", ["ab", "abc"], ids=["nobody", "not by all"])
def test_16_there_is_none_where_it_would_give_way_for_who_can_be_dialled(circle: str) -> None:
    """Known since the plan of this sync: each cannot dial the one before it."""
    story = Story(some_settings(min_sites=len(circle)))
    story.start(*circle)
    for name in circle:
        story.ready(name)
    for place, name in enumerate(circle):
        story.ready(name, unreachable=circle[place - 1])
    for name in circle:
        story.done(name, "s0")
    assert story.last("a", m.Commit).commit == 1
    assert (2, 1) not in story.plans()


def test_there_is_none_while_somebody_is_away_or_catching_up() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for name in "ab":
        story.ready(name)
    story.join("c")
    for name in "ab":
        story.done(name, "s0")
    assert story.open_sync() is not None
    assert not story.attempt()


def test_5_a_coordinator_that_dies_before_it_sends_sends_both_to_those_who_come_back() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for name in "ab":
        story.ready(name)
    plan = story.plan()
    story.done("a", "s0")
    story.sent.clear()
    story.done("b", "s0")
    story.sent.clear()
    story.restart()
    for name in "ab":
        story.connect(name, state=(0, "s0"))
        story.offer(name)
        story.done(name, "s0", plan=plan)
    for name in "ab":
        assert story.last(name, m.Commit).commit == 1
        assert story.last(name, m.Plan).sync == 2
        story.applied(name, 1, "s1")
    for name in "ab":
        story.ready(name, tokens=6)
    weighed = story.plan()
    assert (weighed.attempt, [c.tokens for c in weighed.contributors]) == (1, [6, 6])
    for name in "ab":
        story.done(name, "s1")
    assert story.last("a", m.Commit).commit == 2


def test_a_restart_keeps_weights_and_ranges_of_a_weighed_plan() -> None:
    story = steady("a", "b")
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    plan = story.plan()
    story.restart()
    assert story.plan() == plan
    for name in "ab":
        story.connect(name, state=(1, "s1"))
        story.offer(name)
        story.done(name, "s1", plan=plan)
    assert [c.tokens for c in story.last("a", m.Commit).contributors] == [3, 4]


def test_a_failed_link_waits_for_those_who_still_train() -> None:
    story = steady("a", "b", "c")
    story.ready("a", tokens=3)
    story.failed("a", "b")
    story.wait(2)
    assert story.plan().attempt == 1
    story.ready("b", tokens=4)
    story.ready("c", tokens=5)
    story.wait(2)
    assert story.plan().attempt == 2
    assert [c.tokens for c in story.plan().contributors] == [3, 4, 5]


def test_16_after_it_has_failed_another_assignment_is_tried() -> None:
    story = steady("a", "b")
    story.ready("a", tokens=3)
    story.ready("b", tokens=4)
    first = story.plan()
    story.failed("a", "b")
    story.wait(2)
    assert story.plan().attempt == 2
    assert story.plan().trees != first.trees


def test_a_done_of_the_plan_that_gave_way_counts_no_longer() -> None:
    story = steady("a", "b", quorum=1)
    story.ready("a", tokens=0)
    story.ready("b", tokens=4)
    says_done(story, "b", (0, 4))
    assert story.num("b", m.Commit) == 1
    story.done("b", "s1")
    assert story.last("b", m.Commit).attempt == 2


def test_16_a_reducer_that_another_site_cannot_dial_reduces_nothing() -> None:
    story = steady("a", "b")
    story.ready("b", tokens=4)
    blind = m.Ready(sync=2, tokens=3, num_steps=10, unreachable_site_ids=(2,))
    story.says("a", blind)
    plan = story.plan()
    assert plan.attempt == 2
    assert {tree.top for tree in plan.trees} == {0}
