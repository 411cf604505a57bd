"""A run with several fragments, whose syncs take turns. docs/decisions/0039."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.plans import reducers
from tests.harness.coordinator_story import Story, some_settings, three_layers


def a_story(fragments: int = 2, *names: str, manifest: Manifest | None = None, **settings: object) -> Story:
    """H is 10."""
    names = names or ("a",)
    values = {"min_sites": len(names), "fragments": fragments} | settings
    story = Story(some_settings(**values), manifest=manifest or three_layers())
    for name in names:
        story.join(name)
        story.applied(name, 0, "s0")
    return story


def commit_one(story: Story, *names: str) -> None:
    number = story.last_commit()
    story.commit_one(*(names or ("a",)), state=f"s{number}", following=f"s{number + 1}")


def commit_all(story: Story) -> list[m.Commit]:
    for _ in range(30):
        if not story.view.finished:
            commit_one(story)
    return [x for name, x in story.sent if name == "a" and isinstance(x, m.Commit)]


def opened(story: Story) -> list[tuple[int, int, int]]:
    """Of each sync: its fragment, its steps, and those beyond it."""
    said = [x for _, x in story.sent if isinstance(x, m.Open)]
    said += [x.next for _, x in story.sent if isinstance(x, m.Commit) and x.next is not None]
    by_number = {o.sync: o for o in said}
    return [(o.fragment, o.num_steps, o.overlap_steps) for _, o in sorted(by_number.items())]


def is_open(story: Story) -> tuple[int, int, int]:
    """The same of the one that is open."""
    found = story.open_sync()
    assert found is not None
    return found.fragment, found.num_steps, found.overlap_steps


# --- turns and windows


PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
TURNS: list[dict[str, Any]] = json.loads(re.findall(r"```json turn-vector\n(.*?)```", PAGE.read_text(), re.S)[0])


@pytest.mark.parametrize("turns", TURNS, ids=lambda t: f"{t['fragments']}-{t['steps']}-{t['overlap_steps']}")
def test_fragments_take_turns_and_the_window_that_reaches_the_end_is_of_all(turns: dict[str, Any]) -> None:
    steps, expected = turns["steps"], [tuple(sync) for sync in turns["syncs"]]
    story = a_story(turns["fragments"], steps=steps, overlap=turns["overlap_steps"])
    assert story.settings.sync.every == turns["every"]
    commits = commit_all(story)
    assert opened(story) == expected
    assert [c.fragment for c in commits] == [fragment for fragment, _, _ in expected]
    assert [c.final for c in commits] == [False] * (len(expected) - 1) + [True]
    assert commits[-1].run_step == steps
    bases = {plan.sync: plan.base_commit for plan in story.plans().values()}
    if story.settings.sync.most_in_flight == 1:
        assert [bases[c.sync] for c in commits] == [c.commit - 1 for c in commits], "the last, of whichever fragment"


@pytest.mark.parametrize(("overlap", "steps"), [(0, 1), (3, 3)])
def test_a_run_that_is_stopped_in_a_sync_of_one_fragment_ends_with_a_short_one_of_all(overlap: int, steps: int) -> None:
    story = a_story(2, steps=1000, overlap=overlap)
    commit_one(story)
    assert is_open(story)[0] == 1
    story.happens(e.StopAsked("enough"))
    assert story.view.state == "training (the last sync but one)"
    assert "the one after the sync that is open is the last" in story.log[-2]
    commit_one(story)
    assert is_open(story) == (2, steps, 0)
    assert story.view.state == "training (the last sync)"
    assert [c.final for c in commit_all(story)] == [False, False, True]
    assert story.view.run_step == 10 + steps


def test_a_run_that_is_stopped_in_a_sync_of_all_ends_with_that_one() -> None:
    story = a_story(2, steps=5)
    story.happens(e.StopAsked("enough"))
    assert story.view.state == "training (the last sync)"
    assert [c.final for c in commit_all(story)] == [True]


def test_the_sync_of_all_fragments_may_take_as_many_times_longer_as_it_is_larger() -> None:
    """Of 16 fragments of 32 MiB each; exchanges of one took 30 s."""
    layers = [TensorSpec(name=f"layers.{i}.w", shape=(1 << 23,), dtype="F32", role=Role.TRAINABLE) for i in range(16)]
    settings = some_settings(fragments=16, every=32, steps=1000)
    settings = replace(settings, sync=replace(settings.sync, chunk_elements=1 << 20))
    story = Story(settings, manifest=Manifest.canonical(layers))
    story.start("a", "b")
    for number in range(2):
        for name in "ab":
            story.ready(name)
        for moved in range(1, 7):
            for name in "ab":
                story.sites[name].heartbeat = m.Heartbeat(phase="exchanging", moved_bytes=moved)
            story.wait(5.0)
        for name in "ab":
            story.done(name, f"s{number}")
        for name in "ab":
            story.applied(name, number + 1, f"s{number + 1}")
        if not number:
            story.happens(e.StopAsked("enough"))
    for name in "ab":
        story.ready(name)
    first, _, of_all = story.plans().values()
    assert (first.fragment, of_all.fragment) == (0, 16)
    assert of_all.deadline_s >= 8 * 16 * 30.0


def test_of_a_length_in_tokens_each_sync_that_may_be_the_last_is_of_all_and_fragment_0_follows() -> None:
    """20 tokens a step at first. Sync 4 may be the last, but its site has hardly any tokens."""
    story = a_story(2, steps=0, tokens=350, overlap=2)
    assert is_open(story) == (2, 5, 0), "nobody knows yet"
    commit_one(story)
    assert is_open(story) == (0, 5, 2)
    commit_one(story)
    assert is_open(story) == (1, 5, 2)
    commit_one(story)
    assert is_open(story) == (2, 3, 0), "50 tokens are left"
    story.ready("a", tokens=3)
    story.done("a", "s3")
    story.applied("a", 4, "s4")
    assert is_open(story) == (0, 5, 2)
    assert [c.final for c in commit_all(story)][-1]


def test_a_sync_that_follows_an_abandoned_one_is_of_the_same_fragment() -> None:
    story = a_story(3, steps=1000)
    commit_one(story)
    before = is_open(story)
    story.ready("a", tokens=0)
    abandoned = story.last("a", m.Abandoned)
    assert (abandoned.sync, abandoned.next.sync) == (2, 3)
    assert is_open(story) == before
    assert before[0] == 1


@pytest.mark.parametrize(("commit", "turn"), [(0, 0), (1, 1), (2, 2), (3, 0)])
def test_after_going_back_it_is_the_turn_of_the_fragment_that_follows(commit: int, turn: int) -> None:
    story = a_story(3, steps=1000)
    for _ in range(5):
        commit_one(story)
    story.ask_to_go_back(commit)
    story.rebuilt("a", f"s{commit}")
    assert story.last_commit() == commit
    assert is_open(story)[0] == turn
    story.restart()
    assert is_open(story)[0] == turn


def test_a_stopped_run_that_goes_back_ends_with_a_sync_of_all() -> None:
    story = a_story(3, steps=1000, overlap=3)
    for _ in range(2):
        commit_one(story)
    story.happens(e.StopAsked("enough"))
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    assert is_open(story) == (3, 4, 0)


def test_what_is_open_outlives_a_restart() -> None:
    story = a_story(2, "a", "b", steps=1000)
    commit_one(story, "a", "b")
    before = is_open(story)
    story.restart()
    assert is_open(story) == before
    for name in "ab":
        story.join(name, state=(1, "s1"))
    commit_one(story, "a", "b")
    assert is_open(story)[0] == 0


# --- chunks


def shares(story: Story, plan: m.Plan) -> list[int]:
    """Bytes that each contributor reduces."""
    layout = story.layout()
    tops = reducers(plan, layout.num_sync_chunks)
    travel = layout.chunks_of(plan.fragment)
    return [
        sum(layout.chunks[c].num_bytes for c in travel if tops[c].site_id == site.site_id) for site in plan.contributors
    ]


@pytest.mark.parametrize("fragments", [2, 3])
def test_each_fragment_is_shared_out_among_its_reducers(fragments: int) -> None:
    story = a_story(fragments, "a", "b", steps=30)
    while not story.view.finished:
        commit_one(story, "a", "b")
    plans = list(story.plans().values())
    assert {plan.fragment for plan in plans} == set(range(fragments + 1))
    layout = story.layout()
    for plan in plans:
        one, other = shares(story, plan)
        travel = layout.chunks_of(plan.fragment)
        assert one + other == sum(layout.chunks[c].num_bytes for c in travel)
        assert abs(one - other) <= 2 * max(layout.chunks[c].num_bytes for c in travel)
    ahead = [plan for plan in plans if plan.ahead]
    assert [plan.fragment for plan in ahead] == [plan.fragment for plan in plans[1:]]
    assert len({plan.trees for plan in plans}) == fragments + 1


def test_what_contributors_hold_for_each_other_is_of_one_fragment() -> None:
    """Together they offer room for contributions to one fragment of both; for those to all, of a alone."""
    story = Story(some_settings(fragments=2, steps=1000, quorum=1), manifest=three_layers())
    layout = Layout(three_layers(), 4, 2)
    all_bytes = sum(layout.chunks[c].num_bytes + 16 for c in layout.sync_chunks)
    for name, part in {"a": 1.2, "b": 0.2}.items():
        story.connect(name)
        story.offer(name, retain=int(part * all_bytes))
        story.applied(name, 0, "s0")
    for name in "ab":
        story.ready(name)
    assert story.plan().fragment == 0
    assert story.contributor_ids() == [1, 2]


def test_a_model_that_cannot_be_cut_so_is_refused_with_what_to_choose() -> None:
    story = Story(some_settings(fragments=6, steps=1000), manifest=three_layers())
    story.connect("a")
    story.offer("a")
    refused = story.last("a", m.Refused)
    assert refused.kind is m.RefusedKind.MANIFEST
    assert "sync.fragments = 6 does not fit this model" in refused.text
    assert refused.text.endswith("choose sync.fragments = 5")


# --- which commit touched which fragment


def touched(story: Story, name: str, after: int | None = None) -> tuple[list[int], tuple[int, ...]]:
    """Commits that are listed for a site that asks for sources, and what was touched before."""
    story.sources(name, after)
    sources = story.last(name, m.Sources)
    return [c.commit for c in sources.commits], sources.touched


def test_sources_say_what_was_touched_before_the_commits_that_they_list() -> None:
    """The log keeps 8."""
    story = a_story(3, "a", "b", steps=1000)
    for _ in range(12):
        commit_one(story, "a", "b")
    assert touched(story, "b", after=9) == ([10, 11, 12], (7, 8, 9))
    assert touched(story, "b", after=10) == ([11, 12], (10, 8, 9))
    assert touched(story, "b", after=12) == ([], (10, 11, 12))
    listed, before = touched(story, "b")
    assert listed[-1] == 12
    assert before == tuple(max(n for n in range(listed[0]) if n % 3 == (f + 1) % 3) for f in range(3))
    story.restart()
    for name in "ab":
        story.join(name, state=(12, "s12"))
    assert touched(story, "b", after=10) == ([11, 12], (10, 8, 9))
    assert touched(story, "b", after=4) == ([5, 6, 7, 8, 9, 10, 11, 12], (4, 2, 3))


def test_at_first_no_fragment_was_touched_and_a_commit_of_all_touches_each() -> None:
    story = a_story(2, "a", "b", steps=0, tokens=10_000)
    assert touched(story, "b", after=0) == ([], (0, 0))
    commit_one(story, "a", "b")  # nobody knows whether it is the last
    commit_one(story, "a", "b")
    assert touched(story, "b", after=1) == ([2], (1, 1))
    assert touched(story, "b", after=2) == ([], (2, 1))


def test_what_was_touched_is_that_of_commits_that_are_not_void() -> None:
    story = a_story(2, "a", "b", steps=1000)
    for _ in range(4):
        commit_one(story, "a", "b")
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    for name in "ab":
        story.applied(name, 1, "s1")
    assert touched(story, "b", after=1) == ([], (1, 0))
    commit_one(story, "a", "b")
    assert touched(story, "b", after=2) == ([], (1, 2))


def test_a_run_with_one_fragment_says_nothing_of_it() -> None:
    story = a_story(1, "a", "b", steps=1000)
    commit_one(story, "a", "b")
    assert touched(story, "b", after=0) == ([1], ())
    assert story.store.read_commits(1, 1)[0][0].touched == ()


# --- disputes


@pytest.mark.parametrize(
    ("settings", "commit", "chunk", "num_shown"),
    [
        ({"steps": 1000}, 1, 3, 4),
        ({"steps": 1000}, 1, 0, 1),
        ({"steps": 1000}, 2, 0, 4),
        ({"steps": 1000}, 2, 3, 1),
        ({"steps": 0, "tokens": 10_000}, 1, 3, 4),
        ({"steps": 0, "tokens": 10_000}, 1, 0, 4),
    ],
)
def test_a_chunk_of_another_fragment_is_what_it_was_before_the_commit(
    settings: dict[str, int], commit: int, chunk: int, num_shown: int
) -> None:
    """Chunks 0 and 1 are of fragment 1, the others of 0. A first sync that may be the last is of all. `num_shown`: what
    is asked for beside the hashes of both."""
    story = Story(some_settings(fragments=2, **settings), real=True)
    story.start("a", "b")
    assert (story.layout().fragments, story.model is not None) == (((2, 3, 4), (0, 1)), True)
    assert story.model is not None
    for number in range(1, commit):
        story.commit_one("a", "b", state=f"s{number - 1}", following=f"s{number}")
    story.model.damaged = chunk
    for name in "ab":
        story.ready(name)
    for name in "ab":
        story.done(name, f"s{commit - 1}")
    story.applied("b", commit, "wrong")
    story.applied("a", commit, f"s{commit}")
    assert f"chunk {chunk} of commit {commit}," in story.last("b", m.Evicted).reason
    assert not story.num("a", m.Evicted)
    assert sum(isinstance(message, m.Show) for _, message in story.sent) == 2 + num_shown


# --- what is remembered of the syncs before


def left_out(story: Story, by: str) -> None:
    """c, by that reducer; the sync is committed without it."""
    number = story.last_commit()
    for name in "abc":
        story.ready(name)
    story.failed(by, tensor="weight", outliers="c")
    if story.num("c", m.Evicted):
        return
    for name in "ab":
        story.done(name, f"s{number}")
    for name in "abc":
        story.applied(name, number + 1, f"s{number + 1}")


@pytest.mark.parametrize("restart", [False, True])
def test_who_is_left_out_of_two_syncs_of_a_fragment_begins_anew(restart: bool) -> None:
    """That nobody found its part of the other fragment absurd says nothing of this one."""
    story = a_story(2, "a", "b", "c", steps=1000, quorum=1)
    left_out(story, "b")
    commit_one(story, "a", "b", "c")
    if restart:
        story.restart()
        for name in "abc":
            story.join(name, state=(2, "s2"))
    for name in "abc":
        story.ready(name)
    assert story.plan().fragment == 0
    reducing = story.reducer_ids()
    story.failed("a", tensor="weight", outliers="c")
    assert story.num("c", m.Evicted) == 1
    assert restart or reducing == {1}, "who left it out has no word on that fragment's next sync"


@pytest.mark.parametrize(
    ("settings", "num_between"), [({"steps": 1000}, 2), ({"steps": 0, "tokens": 1000, "every": 4}, 1)]
)
def test_a_commit_of_the_fragment_that_it_contributed_to_clears_it(settings: dict[str, Any], num_between: int) -> None:
    """A commit of all is one of each; the first sync of a run with a length in tokens may be the last."""
    story = a_story(2, "a", "b", "c", quorum=1, **settings)
    left_out(story, "b")
    for _ in range(num_between):
        commit_one(story, "a", "b", "c")
    for name in "abc":
        story.ready(name)
    story.failed("a", tensor="weight", outliers="c")
    assert not story.num("c", m.Evicted)
    assert len(story.view.excluded) == 2


def test_sites_that_misled_each_other_once_are_planned_after_ready_whichever_fragment_it_is() -> None:
    story = a_story(2, "a", "b", steps=1000)
    commit_one(story, "a", "b")
    for name in "ab":
        story.ready(name)
    plan = story.plan()
    assert plan.ahead
    for name in "ab":
        story.done(name, "s1", plan=replace(plan, contributors=tuple(replace(c, tokens=7) for c in plan.contributors)))
    assert story.attempt() == 2
    for name in "ab":
        story.done(name, "s1")
    for name in "ab":
        story.applied(name, 2, "s2")
    for _ in range(3):
        assert not story.attempt(), "nothing is planned ahead"
        commit_one(story, "a", "b")


def test_12_of_windows_that_a_site_was_away_count_as_many_as_with_one_fragment() -> None:
    """Sixteen, of 5 steps each, at sixteen times the pace of the others."""
    story = a_story(2, "a", "b", "c", steps=10_000, quorum=2)
    commit_one(story, "a", "b", "c")
    for _ in range(40):
        number = story.last_commit()
        for name in "ab":
            story.ready(name)
        story.wait(story.limits.sync_wait_s + 0.1)
        for name in "ab":
            story.done(name, f"s{number}")
        for name in "abc":
            story.applied(name, number + 1, f"s{number + 1}")
    story.ready("c", tokens=1 << 30)
    for name in "ab":
        story.ready(name)
    assert [c.tokens for c in story.plan().contributors] == [100, 100, 16 * 16 * 100]


def test_the_status_says_of_which_fragment_the_sync_is() -> None:
    words = []
    story = a_story(2, steps=15)
    while not story.view.finished:
        assert story.view.syncs
        words.append(story.view.syncs[0].fragment)
        commit_one(story)
    assert words == ["0 of 2", "1 of 2", "all"]
    (view,) = a_story(1).view.syncs
    assert view.fragment == ""
