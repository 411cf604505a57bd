"""Who holds up an exchange is found from what several sites say that they wait for; those who only wait are kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atoll.coordinator.core.sync import standstill
from atoll.coordinator.core.sync.standstill import Waits, to_blame, waits_of
from atoll.protocol import messages as m
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_story import Story, some_settings

A, B, C, R, X = 1, 2, 3, 4, 5
LIMITS = time_limits("local")
FOUND_S = 2 * LIMITS.stall_s + LIMITS.reconnect_grace_s + LIMITS.heartbeat_s


def for_payloads(*peers: int) -> Waits:
    return Waits(payloads=frozenset(peers))


def for_contributions(*peers: int) -> Waits:
    return Waits(contributions=frozenset(peers))


@pytest.mark.parametrize(
    ("waits", "reports", "done", "found"),
    [
        pytest.param({A: for_payloads(R)}, [], [], {(A, R)}, id="a reducer that says nothing"),
        pytest.param({A: for_contributions(X)}, [], [], {(A, X)}, id="a contributor depends on nobody"),
        pytest.param(
            {A: for_payloads(R), R: for_contributions(X)}, [], [], {(R, X)}, id="a reducer that waits for another"
        ),
        pytest.param({A: for_payloads(R)}, [(R, X)], [], {(R, X)}, id="a reducer that has reported another"),
        pytest.param(
            {A: for_payloads(R), R: for_contributions(A)}, [], [], {(A, R)}, id="a reducer that waits for this site"
        ),
        pytest.param(
            {A: for_payloads(R), R: for_contributions(X)}, [], [X], {(A, R)}, id="a reducer that waits for who is done"
        ),
        pytest.param(
            {A: for_payloads(R), R: for_contributions(X)}, [], [R], {(A, R)}, id="a reducer that is done has no excuse"
        ),
        pytest.param(
            {A: for_payloads(R), R: for_contributions(X), X: for_payloads(R)},
            [],
            [],
            {(R, X)},
            id="one word stands against the other",
        ),
        pytest.param(
            {A: for_payloads(R), B: for_payloads(R), R: for_contributions(A, B, X), X: for_payloads(A)},
            [],
            [],
            {(A, R)},
            id="several have sent it everything",
        ),
        pytest.param(
            {A: for_payloads(B), B: for_payloads(C), C: for_payloads(A)}, [], [], {(A, B)}, id="a circle of payloads"
        ),
    ],
)
def test_7_a_chain_of_waiting_ends_at_its_reducer_or_at_whom_that_one_waits_for(
    waits: dict[int, Waits], reports: list[tuple[int, int]], done: list[int], found: set[tuple[int, int]]
) -> None:
    assert to_blame([A], waits, reports, done) == found


def test_of_several_that_wait_for_one_reducer_each_is_an_excuse_for_the_others() -> None:
    said = {A: for_payloads(R), B: for_payloads(R), R: for_contributions(A)}
    assert to_blame([A, B], said, [], []) == to_blame([A], said, [], []) | to_blame([B], said, [], [])
    assert to_blame([A, B], said, [], []) == {(A, R), (R, A)}


class Counting(dict[int, Waits]):
    num_read = 0

    def __getitem__(self, key: int) -> Waits:
        self.num_read += 1
        return super().__getitem__(key)


def test_what_a_thousand_wait_for_and_report_is_looked_at_once() -> None:
    """Reports are given as they come, once: a reducer's are not looked for among those of all others."""
    num_sites = 1000
    said = Counting({i: for_payloads(*range(1, m.MAX_WAITS + 1)) for i in range(1, num_sites + 1)})
    reports = ((i, i % num_sites + 1) for i in range(1, num_sites + 1))
    found = to_blame(said, said, reports, [])
    assert {(i, i + 1) for i in range(1, m.MAX_WAITS + 1)} <= found
    assert said.num_read <= 4 * num_sites


def test_what_a_site_says_of_itself_and_of_strangers_is_nothing() -> None:
    heartbeat = m.Heartbeat(phase="", waits_for_contributions=(A, B, 9, 0), waits_for_payloads=(A, 77, C))
    assert waits_of(A, heartbeat, frozenset((A, B, C))) == Waits(frozenset((B,)), frozenset((C,)))


# --- in a run


def exchanging(*names: str) -> Story:
    story = Story(some_settings(min_sites=len(names)))
    story.start(*names)
    story.commit_one(*names, state="s0", following="s1")
    for name in names:
        story.ready(name)
    return story


def beats(
    story: Story, name: str, moved: int = 0, contributions: Sequence[str] = (), payloads: Sequence[str] = ()
) -> None:
    ids = {name: site.site_id for name, site in story.sites.items()}
    story.sites[name].trains = False
    story.sites[name].heartbeat = m.Heartbeat(
        phase="exchanging",
        moved_bytes=moved,
        waits_for_contributions=tuple(ids[n] for n in contributions),
        waits_for_payloads=tuple(ids[n] for n in payloads),
    )
    story.says(name, story.sites[name].heartbeat)


@pytest.mark.parametrize("named", ["", "abc"], ids=["for nobody", "for all others"])
def test_7_of_a_reducer_that_only_waits_no_honest_site_is_evicted(named: str) -> None:
    story = exchanging("a", "b", "c", "r")
    assert story.reducer_ids() == {1, 2, 3, 4}
    until = story.now + FOUND_S
    num_beats = 0
    while story.now < until and story.plan().attempt == 1:
        num_beats += 1
        for name in "abc":
            beats(story, name, payloads="r")
        beats(story, "r", moved=num_beats, contributions=named)
        story.wait(LIMITS.heartbeat_s)
    if named:
        assert story.contributor_ids() == [1, 2, 3]
        assert "sites could not exchange: 1 with 4, 2 with 4, 3 with 4, 4 with 1" in "\n".join(story.log)
        assert story.view.num_evicted == 0
    else:
        assert story.contributor_ids() == [1, 2, 3]
        assert story.evicted_because("r")
        assert story.view.num_evicted == 1


def test_7_who_held_up_the_others_contributes_soon_and_reduces_much_later() -> None:
    story = Story(some_settings(min_sites=4, steps=1000))
    story.start("a", "b", "c", "r")
    story.commit_one("a", "b", "c", "r", state="s0", following="s1")
    for name in "abcr":
        story.ready(name)
    for name in "abc":
        story.failed(name, "r", lacks=True)
    story.wait(LIMITS.reconnect_grace_s)
    contributes, reduces = [], []
    for sync in range(2, 70):
        for name in "abcr":
            story.ready(name)
        plan, contributing = story.plan(), story.contributor_ids()
        assert plan.sync == sync
        contributes += [sync] if 4 in contributing else []
        reduces += [sync] if 4 in story.reducer_ids() else []
        for name in "abcr":
            if story.sites[name].site_id in contributing:
                story.done(name, f"s{sync - 1}", plan=plan)
        for name in "abcr":
            story.applied(name, sync, f"s{sync}")
    assert contributes == list(range(4, 70))
    assert reduces == [67, 68, 69]


def test_7_a_reducer_that_waits_for_a_site_that_gives_nothing_is_not_blamed_for_it() -> None:
    story = exchanging("a", "b", "r", "x")
    until = story.now + FOUND_S
    while story.now < until and story.plan().attempt == 1:
        for name in "ab":
            beats(story, name, payloads="r")
        beats(story, "r", contributions="x")
        beats(story, "x")
        story.wait(LIMITS.heartbeat_s)
    assert story.view.num_evicted == 1
    assert story.evicted_because("x")
    assert story.contributor_ids() == [1, 2, 3]
    assert 3 not in story.receives_only(2)


def test_7_who_waits_for_a_reducer_that_gets_on_is_waited_for() -> None:
    story = exchanging("a", "r", "x")
    for i in range(40):
        beats(story, "a", payloads="r")
        beats(story, "r", moved=i, contributions="x")
        beats(story, "x", moved=i)
        story.wait(1.0)
    assert story.plan().attempt == 1
    assert story.view.num_evicted == 0


def test_7_where_two_say_the_contrary_neither_reduces_and_neither_is_blamed() -> None:
    story = exchanging("a", "b", "r", "x")
    until = story.now + FOUND_S
    while story.now < until and story.plan().attempt == 1:
        for name in "ab":
            beats(story, name, payloads="r")
        beats(story, "r", contributions="x")
        beats(story, "x", payloads="r")
        story.wait(LIMITS.heartbeat_s)
    assert story.contributor_ids() == [1, 2, 3, 4]
    assert story.reducer_ids() == {1, 2}
    assert story.view.num_evicted == 0


def test_7_who_says_for_ever_that_it_waits_for_sites_that_are_done_is_left_behind() -> None:
    story = exchanging("a", "b", "x")
    for name in "ab":
        story.done(name, "s1")
    num_beats, until = 0, story.now + FOUND_S
    while story.now < until and story.last_commit() == 1:
        num_beats += 1
        beats(story, "x", moved=num_beats, contributions="a", payloads="ab")
        story.wait(LIMITS.heartbeat_s)
    assert [c.site_id for c in story.last("a", m.Commit).contributors] == [1, 2, 3]
    assert story.view.num_evicted == 0


def left_behind(story: Story, sync: int) -> None:
    """`a` and `b` are done, and `x` says for ever that it waits for them."""
    for name in "abx":
        story.ready(name)
    if len(story.plan().contributors) == 3:
        for name in "ab":
            story.done(name, f"s{sync - 1}")
        until = story.now + FOUND_S
        while story.now < until and story.last_commit() < sync:
            beats(story, "x", payloads="ab")
            story.wait(LIMITS.heartbeat_s)
    else:
        for name in "ab":
            story.done(name, f"s{sync - 1}")
    for name in "abx":
        if story.sites[name].stream is not None:
            story.applied(name, sync, f"s{sync}")


def test_7_who_is_left_behind_again_and_again_is_waited_for_less_each_time_and_evicted_in_the_end() -> None:
    story = Story(some_settings(min_sites=3, steps=1000))
    story.start("a", "b", "x")
    story.commit_one("a", "b", "x", state="s0", following="s1")
    with_x = []
    sync = 1
    while not story.evicted_because("x"):
        sync += 1
        left_behind(story, sync)
        if 3 in [c.site_id for c in story.last("a", m.Commit).contributors]:
            with_x.append(sync)
    assert with_x == [2, 4, 9, 26]
    assert story.strikes_of("x") == 1


def test_what_many_say_that_they_wait_for_is_looked_at_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"s{number}" for number in range(40)]
    story = exchanging(*names)
    looks, most = 0, 0

    def counted(site_id: int, heartbeat: m.Heartbeat, contributors: frozenset[int]) -> Waits:
        nonlocal looks, most
        looks += 1
        most = max(most, looks)
        return waits_of(site_id, heartbeat, contributors)

    monkeypatch.setattr(standstill, "waits_of", counted)
    until = story.now + FOUND_S
    while story.now < until and story.plan().attempt == 1:
        for name in names[1:]:
            looks = 0
            beats(story, name, payloads=["s0"])
        looks = 0
        beats(story, "s0", contributions=["s1"])
        for _ in range(8):
            looks = 0
            story.wait(LIMITS.heartbeat_s / 8)
    assert story.plan().attempt == 2
    assert len(names) < most <= 4 * len(names)


def test_7_the_deadline_is_for_those_too_who_say_that_they_wait() -> None:
    story = exchanging("a", "b", "x")
    deadline = story.now + story.plan().deadline_s + 2 * LIMITS.stall_s
    num_beats = 0
    while story.now < deadline + 1 and not story.view.num_evicted:
        num_beats += 1
        beats(story, "a", moved=num_beats)
        beats(story, "b", moved=num_beats)
        beats(story, "x", payloads="ab")
        story.wait(LIMITS.heartbeat_s)
    assert story.now > deadline - LIMITS.heartbeat_s
    assert "went beyond the deadline of sync 2" in story.evicted_because("x")
