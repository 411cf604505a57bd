"""What a site says that it trained is bounded: by its leases, and by the pace of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.coordinator.core.events import CommitRecord
from atoll.coordinator.core.sync.weighing import within_ratio
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from atoll.protocol.plans import weights
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_story import Story, ranges_of, some_settings

LIMITS = time_limits("local")
HUGE = 1 << 44


def a_run(*names: str, sync: dict[str, Any] | None = None, **settings: Any) -> Story:
    base = some_settings(**{"min_sites": len(names)} | settings)
    story = Story(replace(base, sync=replace(base.sync, **sync or {})))
    story.start(*names)
    return story


def commit(story: Story, tokens: dict[str, int], state: str, following: str) -> m.Commit:
    for name, count in tokens.items():
        story.ready(name, tokens=count)
    for name in tokens:
        story.done(name, state)
    for name in tokens:
        story.applied(name, story.last_commit(), following)
    made: m.Commit = story.last(next(iter(tokens)), m.Commit)
    return made


def without_c(story: Story, num_syncs: int) -> None:
    for number in range(1, num_syncs + 1):
        for name in "ab":
            story.ready(name, tokens=100)
        story.wait(LIMITS.sync_wait_s + 0.1)
        for name in "ab":
            story.done(name, f"s{number}")
        for name in "abc":
            story.applied(name, number + 1, f"s{number + 1}")


@pytest.mark.parametrize(
    ("said", "found"),  # tokens, steps of the run, and of these those in which it trained, if there are fewer
    [
        ([(100, 10)], [100]),
        ([(100, 10), (1600, 10)], [100, 1600]),
        ([(100, 10), (1601, 10)], [100, 1600]),
        ([(100, 10), (100, 10), (HUGE, 10)], [100, 100, 1600]),
        ([(100, 10), (100, 10), (HUGE, 10), (HUGE, 10)], [100, 100, 1600, 1600]),
        ([(100, 10), (100, 10), (5000, 40)], [100, 100, 5000]),
        ([(100, 10), (100, 10), (7000, 40)], [100, 100, 6400]),
        ([(1, 1000), (1000, 10)], [1, 1]),
        ([(0, 10), (5, 10)], [0, 1]),
        ([(100, 1000, 10), (1600, 10)], [100, 1600]),
        ([(100, 1000, 10), (1601, 10)], [100, 1600]),
        ([(100, 10, 1000), (1600, 10)], [100, 1600]),
        ([(100, 10, 0), (100, 10)], [100, 100]),
        ([(100, 10), (200_000, 1000, 1)], [100, 160_000]),
    ],
)
def test_12_a_weight_is_within_the_ratio_of_the_median_pace(said: list[tuple[int, ...]], found: list[int]) -> None:
    ready = [m.Ready(sync=1, tokens=t, num_steps=(*trained, n)[0]) for t, n, *trained in said]
    assert list(within_ratio(ready, [n for _, n, *_ in said], 16)) == found


def test_12_a_site_that_had_no_workers_for_many_windows_is_not_taken_for_a_slow_one() -> None:
    """Its workers crashed, and loaded for twenty windows. The weight of the other was cut when it was back."""
    story = a_run("a", "b", steps=1000)
    commit(story, {"a": 100, "b": 100}, "s0", "s1")
    for number in range(1, 21):
        story.ready("a", tokens=100)
        story.wait(LIMITS.sync_wait_s + 1)
        story.done("a", f"s{number}")
        story.applied("a", number + 1, f"s{number + 1}")
        story.applied("b", number + 1, f"s{number + 1}")
    made = commit(story, {"a": 100, "b": 100}, "s21", "s22")
    assert [c.tokens for c in made.contributors] == [100, 100]
    assert story.view.commits[-1].cut == ()


def test_12_a_huge_weight_is_cut_said_and_recorded_and_the_run_goes_on() -> None:
    story = a_run("a", "b", "c", steps=0, tokens=100_000)
    made = commit(story, {"a": 100, "b": 100, "c": HUGE}, "s0", "s1")
    assert [c.tokens for c in made.contributors] == [100, 100, 1600]
    assert not made.final, "a run whose length is in tokens does not end at once"
    assert story.view.run_tokens == 1800
    words = f"c (site 3) says {HUGE} tokens, which count as 1600 (sync.max_weight_ratio)"
    assert f"# sync 1: {words}" in story.log
    assert story.view.commits[-1].cut == (words,)
    assert story.store.begin(story.settings).all(CommitRecord)[-1].cut == (words,)


def test_12_eight_times_the_tokens_of_the_others_count() -> None:
    story = a_run("a", "b", "c")
    for state, following in (("s0", "s1"), ("s1", "s2")):
        made = commit(story, {"a": 100, "b": 100, "c": 800}, state, following)
        assert [c.tokens for c in made.contributors] == [100, 100, 800]
        assert made.attempt == 1, "and cost no attempt"
    assert story.view.commits[-1].cut == ()


def test_12_a_site_that_is_back_after_several_windows_contributes_all_of_them() -> None:
    story = a_run("a", "b", "c", quorum=2, steps=200)
    commit(story, {"a": 100, "b": 100, "c": 800}, "s0", "s1")
    without_c(story, 4)
    made = commit(story, {"c": 5 * 800, "a": 100, "b": 100}, "s5", "s6")
    assert [c.tokens for c in made.contributors] == [100, 100, 4000], "40 times the others', in five windows"


def test_12_a_site_that_was_started_again_with_its_state_counts_from_there() -> None:
    """What it may say covers the windows since then, and not all since the beginning of the run."""
    story = a_run("a", "b", steps=1000)
    for number in range(20):
        commit(story, {"a": 100, "b": 100}, f"s{number}", f"s{number + 1}")
    story.connect("b", incarnation=2, state=(20, "s20"))
    story.offer("b")
    commit(story, {"a": 100}, "s20", "s21")  # planned with the commit, and without what b has lost
    story.applied("b", 21, "s21")
    made = commit(story, {"a": 100, "b": HUGE}, "s21", "s22")
    assert [c.tokens for c in made.contributors] == [100, 2 * 1600]


def test_12_a_hello_long_before_the_admission_gives_no_room_for_more() -> None:
    """The workers of b start for many windows, in which it trains nothing."""
    story = a_run("a", "b", steps=10_000)
    story.connect("b", incarnation=2, state=(0, "s0"))
    for number in range(100):
        commit(story, {"a": 100}, f"s{number}", f"s{number + 1}")
    story.connect("b", state=(0, "s0"), again=True)
    story.offer("b")
    story.applied("b", 100, "s100")
    commit(story, {"a": 100}, "s100", "s101")  # b was not expected when it was opened
    story.applied("b", 101, "s101")
    made = commit(story, {"a": 100, "b": HUGE}, "s101", "s102")
    assert [c.tokens for c in made.contributors] == [100, 2 * 1600]


def test_12_a_joiner_that_fetches_its_state_for_long_counts_from_when_it_holds_one() -> None:
    story = a_run("a", min_sites=1, steps=10_000)
    commit(story, {"a": 100}, "s0", "s1")
    story.join("b")
    for number in range(1, 100):
        commit(story, {"a": 100}, f"s{number}", f"s{number + 1}")
    story.applied("b", 100, "s100")
    commit(story, {"a": 100}, "s100", "s101")  # b was not expected when it was opened
    story.applied("b", 101, "s101")
    made = commit(story, {"a": 100, "b": HUGE}, "s101", "s102")
    assert [c.tokens for c in made.contributors] == [100, 2 * 1600]


def test_12_a_site_that_was_evicted_counts_from_its_next_admission() -> None:
    story = a_run("a", "b", steps=1000)
    commit(story, {"a": 100, "b": 100}, "s0", "s1")
    story.evict("b")
    for number in range(1, 20):
        commit(story, {"a": 100}, f"s{number}", f"s{number + 1}")
    story.join("b", incarnation=2, state=(20, "s20"))
    commit(story, {"a": 100}, "s20", "s21")
    story.applied("b", 21, "s21")
    made = commit(story, {"a": 100, "b": HUGE}, "s21", "s22")
    assert [c.tokens for c in made.contributors] == [100, 2 * 1600]


def test_12_after_the_run_went_back_windows_count_from_there() -> None:
    """And not from the step at which the site was in a commit that is void."""
    story = a_run("a", "b", "c", quorum=2, steps=1000)
    for number in range(7):
        commit(story, dict.fromkeys("abc", 100), f"s{number}", f"s{number + 1}")
    story.ask_to_go_back(0)
    story.rebuilt("a", "s0")
    for name in "abc":
        story.connect(name, state=(0, "s0"), branch=1, again=True)
        story.offer(name)
    commit(story, dict.fromkeys("abc", 100), "s0", "s1")
    without_c(story, 4)
    made = commit(story, {"c": 5 * 800, "a": 100, "b": 100}, "s5", "s6")
    assert [c.tokens for c in made.contributors] == [100, 100, 4000]


def test_12_a_plan_that_came_with_the_commit_gives_way_to_one_that_says_the_cut_weight() -> None:
    """By that plan each site has said its whole weight to the others already."""
    story = a_run("a", "b", "c")
    commit(story, {"a": 100, "b": 100, "c": 100}, "s0", "s1")
    assert not story.plan().contributors[0].tokens, "it came with the commit"
    for name, tokens in (("a", 100), ("b", 100), ("c", HUGE)):
        story.ready(name, tokens=tokens)
    plan = story.plan()
    assert (plan.attempt, weights(plan)) == (2, (100, 100, 1600))
    assert not [w for _, w in story.sent if isinstance(w, m.Weights) and (w.sync, w.attempt) == (2, 1)]
    for name in "abc":
        story.done(name, "s1")
    made = story.last("a", m.Commit)
    assert [c.tokens for c in made.contributors] == [100, 100, 1600]
    for name in "abc":
        story.applied(name, 2, "s2")
    assert story.open_sync() is not None
    assert not story.attempt(), "no plan is made ahead after a weight that was cut"
    made = commit(story, {"a": 100, "b": 100, "c": HUGE}, "s2", "s3")
    assert (made.attempt, [c.tokens for c in made.contributors]) == (1, [100, 100, 1600])


def test_12_the_weights_are_the_same_when_the_coordinator_comes_back() -> None:
    story = a_run("a", "b", "c")
    for name, tokens in (("a", 100), ("b", 100), ("c", HUGE)):
        story.ready(name, tokens=tokens)
    before = weights(story.plan())
    story.restart()
    for name, tokens in (("a", 100), ("b", 100), ("c", HUGE)):
        story.connect(name, state=(0, "s0"))
        story.offer(name)
        story.ready(name, tokens=tokens)
    for name in "abc":
        story.done(name, "s0")
    assert tuple(c.tokens for c in story.last("a", m.Commit).contributors) == before == (100, 100, 1600)
    words = f"c (site 3) says {HUGE} tokens, which count as 1600 (sync.max_weight_ratio)"
    assert story.view.commits[-1].cut == story.store.begin(story.settings).all(CommitRecord)[-1].cut == (words,)


def test_12_what_sites_said_counts_in_the_next_attempt_after_the_coordinator_came_back() -> None:
    """Without a the pace of c is the median; by the cut weights it would be another one, and nothing would be said."""
    story = a_run("a", "b", "c", "d", quorum=2)
    said = {"a": 100, "b": 100, "c": 5000, "d": HUGE}
    for name, tokens in said.items():
        story.ready(name, tokens=tokens)
    assert weights(story.plan()) == (100, 100, 1600, 1600)
    story.restart()
    for name in "bcd":
        story.connect(name, state=(0, "s0"))
        story.offer(name)
        story.ready(name, tokens=said[name], loss=2.5)
    story.wait(LIMITS.lease_s + LIMITS.heartbeat_s)  # a is lost
    assert (story.plan().attempt, weights(story.plan())) == (2, (100, 5000, 80_000))
    for name in "bcd":
        story.done(name, "s0")
    cut = f"d (site 4) says {HUGE} tokens, which count as 80000 (sync.max_weight_ratio)"
    assert story.view.commits[-1].cut == (cut,)
    assert story.view.commits[-1].median_loss == 2.5, "a Ready that is said again is the one that is known"


def test_12_who_stays_away_for_long_is_not_the_whole_average_when_it_is_back() -> None:
    """Of a hundred windows that it was not here for sixteen count, at sixteen times the pace of the others."""
    story = a_run("a", "b", "c", quorum=2, steps=10_000)
    commit(story, {"a": 100, "b": 100, "c": 100}, "s0", "s1")
    without_c(story, 100)
    made = commit(story, {"c": HUGE, "a": 100, "b": 100}, "s101", "s102")
    assert [c.tokens for c in made.contributors] == [100, 100, 16 * 16 * 100]


def test_9_tokens_beyond_what_the_leased_samples_hold_are_refused_with_both_numbers() -> None:
    story = a_run("a", "b", sync={"max_tokens_per_sample": 128})
    for name in "ab":
        story.wants(name, 10)
    story.ready("a", tokens=10 * 128, data=ranges_of("0-9"))
    assert story.num("a", m.Refused) == 0
    story.ready("b", tokens=10 * 128 + 1, data=ranges_of("10-19"))
    refused = story.last("b", m.Refused)
    assert refused.kind is RefusedKind.INVALID
    assert "it says 1281 tokens of 10 samples, which hold at most 1280 (sync.max_tokens_per_sample = 128)" in (
        refused.text
    )


def test_9_tokens_of_shards_came_in_earlier_syncs_too() -> None:
    story = a_run("a", "b", sync={"max_tokens_per_sample": 128})
    story.wants("a", 2)
    story.ready("a", tokens=10_000, data=ranges_of("0-0"), of_shards=True)
    assert story.num("a", m.Refused) == 0


def test_9_a_lease_of_2_to_the_40_positions_is_refused() -> None:
    story = a_run("a", "b", every=1000)
    story.says("a", m.LeaseRequest(num_samples=1 << 44, wanted=1 << 40))
    assert "1099511627776 samples" in story.last("a", m.Refused).text
    assert not story.lines()


def test_the_runs_loss_is_the_median_over_sites_beside_the_weighted_mean() -> None:
    story = a_run("a", "b", "c")
    story.ready("a", loss=2.0)
    story.ready("b", loss=2.5)
    story.ready("c", tokens=1600, loss=-1e300)
    for name in "abc":
        story.done(name, "s0")
    made = story.view.commits[-1]
    assert made.median_loss == 2.0
    assert made.mean_loss is not None
    assert made.mean_loss < -1e299
    assert story.view.losses == ((1, 10, 1800, 2.0),)
    assert any("loss 2.0000" in line for line in story.log)
