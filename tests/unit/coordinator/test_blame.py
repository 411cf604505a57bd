"""Rule 16: whom failed exchanges are blamed on. Sites are numbers; `a` tells of `b` in (a, b)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.coordinator.core.sync.blame import Blame, Pair, in_words
from atoll.protocol import messages as m
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_story import Story, some_settings

LIMITS = time_limits("local")
Reports = Callable[[int, list[int]], dict[Pair, bool]]
"""Of each attempt with these contributors: the pairs that fail, and whether the reporter lacks something."""


def demoted(ids: list[int], reports: Reports, attempts: int = 6, quorum: int = 1) -> tuple[list[int], list[int]]:
    """Who receives only after so many attempts, in order; and who is left to contribute."""
    blame, left, found = Blame(), list(ids), []
    for attempt in range(attempts):
        failing = reports(attempt, left)
        if not failing:
            break
        blame.note(failing)
        for demotion in blame.to_demote(left, quorum):
            left.remove(demotion.site_id)
            found.append(demotion.site_id)
    return found, left


def silent(*sites: int, lacking_seen: bool = True) -> Reports:
    """These stop sending. Each site reports the first peer that it finds: the others lack something of a silent one,
    and the silent ones say that nobody takes their bytes."""

    def reports(attempt: int, left: list[int]) -> dict[Pair, bool]:
        gone = [i for i in left if i in sites]
        if not gone or len(left) < 2:
            return {}
        honest = [i for i in left if i not in sites]
        found: dict[Pair, bool] = {(i, gone[(i + attempt) % len(gone)]): lacking_seen for i in honest}
        for i in gone:
            others = [j for j in left if j != i]
            found[i, others[attempt % len(others)]] = False
        return found

    return reports


@pytest.mark.parametrize("lacking_seen", [True, False])
@pytest.mark.parametrize("gone", [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)])
def test_16_two_of_four_that_stop_sending_are_found_and_the_healthy_ones_are_not(
    gone: tuple[int, int], lacking_seen: bool
) -> None:
    found, left = demoted([1, 2, 3, 4], silent(*gone, lacking_seen=lacking_seen))
    assert not set(left) & set(gone), f"left: {left}, demoted: {found}"
    assert len(left) == 2


def test_16_whom_most_of_the_others_lack_something_of_is_found_at_once() -> None:
    assert demoted([1, 2, 3], lambda n, left: {(1, 3): True, (2, 3): True}, attempts=1) == ([3], [1, 2])
    assert demoted([1, 2, 3], lambda n, left: {(1, 3): False, (2, 3): False}, attempts=1) == ([], [1, 2, 3])
    assert demoted([1, 2, 3, 4, 5], lambda n, left: {(1, 3): True, (2, 3): True}, attempts=1)[0] == []


def test_16_two_that_accuse_an_honest_one_do_not_outvote_three() -> None:
    def reports(attempt: int, left: list[int]) -> dict[Pair, bool]:
        found: dict[Pair, bool] = {(liar, 1): True for liar in (4, 5) if liar in left}
        found.update({(i, next(j for j in (4, 5) if j in left)): True for i in (1, 2, 3)} if len(left) > 3 else {})
        return found

    assert demoted([1, 2, 3, 4, 5], reports) == ([4, 5], [1, 2, 3])


def test_16_a_site_that_alone_fails_with_several_is_found_before_each_of_them() -> None:
    def reports(attempt: int, left: list[int]) -> dict[Pair, bool]:
        return {(2, (1, 3)[attempt % 2]): True} if 2 in left else {}

    assert demoted([1, 2, 3], reports) == ([2], [1, 3])


def test_16_what_was_said_of_a_receiver_does_not_count_against_who_said_it() -> None:
    """Sites 3 and 4 are silent; site 1 tells of 4, and of 3 once 4 is a receiver."""

    def reports(attempt: int, left: list[int]) -> dict[Pair, bool]:
        gone = max(i for i in left if i > 2) if set(left) & {3, 4} else 0
        found = {(1, gone): False, (3, 1): False} if gone else {}
        return found | ({(2, 4): False} if gone == 4 else {})

    assert demoted([1, 2, 3, 4], reports) == ([4, 3], [1, 2])


def test_16_a_quorum_is_left() -> None:
    assert demoted([1, 2, 3], silent(3), quorum=3) == ([], [1, 2, 3])


def test_16_two_of_four_stop_sending_and_the_run_goes_on_with_the_others() -> None:
    story = Story(some_settings(min_sites=4))
    story.start("a", "b", "c", "d")
    for name in "abcd":
        story.ready(name)
    rounds = [("a", "c", True), ("b", "d", True), ("c", "a", False), ("d", "b", False)]
    for _ in range(4):
        names = {c.site_id for c in story.plan().contributors}
        left = [name for name in "abcd" if story.sites[name].site_id in names]
        if not set(left) & {"c", "d"}:
            break
        for who, peer, lacks in rounds:
            other = peer if peer in left else next(n for n in ("c", "d", "a") if n in left and n != who)
            if who in left:
                story.failed(who, other, lacks=lacks)
        story.wait(LIMITS.reconnect_grace_s + 0.1)
    assert story.contributor_ids() == [1, 2]
    for name in "ab":
        story.done(name, "s0")
    assert [c.site_id for c in story.last("a", m.Commit).contributors] == [1, 2]


@pytest.mark.parametrize(("names", "accusers", "strikes"), [("ad", "d", 0), ("abcd", "d", 0), ("abcd", "cd", 1)])
def test_what_one_site_alone_says_of_another_is_not_held_against_it(names: str, accusers: str, strikes: int) -> None:
    """It may be the culprit. In the first syncs, when no site had contributed yet, it had honest ones evicted."""
    story = Story(some_settings(min_sites=len(names), quorum=1))
    story.start(*names)
    for name in names:
        story.ready(name)
    for _ in range(2):
        for name in accusers:
            story.failed(name, "a")
        story.wait(LIMITS.reconnect_grace_s + 0.1)
    assert len(story.plan().contributors) < len(names), "one of those that failed receives"
    assert story.strikes_of("a") == strikes
    assert all(story.strikes_of(name) == 0 for name in names if name != "a")


def test_16_who_fails_with_another_one_in_each_sync_is_found_by_the_second() -> None:
    """Site 4 keeps something back from one reducer at a time: of one link nobody knows which end is at fault."""
    first = Blame()
    first.note({(1, 4): True, (4, 1): True})
    assert first.to_demote([1, 2, 3, 4], 1) == []
    second = Blame(first.pairs)
    second.note({(2, 4): True, (4, 2): True})
    assert [d.site_id for d in second.to_demote([1, 2, 3, 4], 1)] == [4]
    same = Blame(first.pairs)
    same.note({(1, 4): True, (4, 1): True})
    assert same.to_demote([1, 2, 3, 4], 1) == [], "it may be that link"


def test_25_what_a_receiver_said_is_not_held_against_a_site() -> None:
    """The first one that is demoted had accused the second one, as one other does."""
    blame = Blame()
    blame.note({(1, 4): True, (2, 4): True, (3, 4): True, (4, 1): True, (2, 1): True})
    blame.note({(2, 1): True, (4, 1): True})
    found = blame.to_demote([1, 2, 3, 4], 1)
    assert (found[0].site_id, found[0].num_accusers) == (4, 3)
    blame.note({(2, 1): True})
    (then,) = blame.to_demote([1, 2, 3], 1)
    assert then.num_accusers <= 1


def test_a_report_of_a_site_that_does_not_contribute_is_of_the_reporter_alone() -> None:
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    plan = story.plan()
    for peer in range(50, 60):
        failed = m.ExchangeFailed(
            sync=plan.sync,
            attempt=plan.attempt,
            term=plan.term,
            peer_site_id=peer,
            direction=m.Direction.SENDING,
            phase="upload",
            text="no progress",
        )
        story.says("c", failed)
    assert story.contributor_ids() == [1, 2]


def test_16_a_report_over_a_link_that_the_plan_does_not_have_is_of_the_reporter_alone() -> None:
    """In the second attempt neither of two that failed reduces: what one says of the other then is made up, and had
    the other one receive only, for longer each time."""
    story = Story(some_settings(min_sites=4, quorum=1))
    story.start("a", "b", "c", "d")
    for name in "abcd":
        story.ready(name)
    for _ in range(2):
        story.failed("d", "a", lacks=True)
        story.wait(LIMITS.reconnect_grace_s + 0.1)
    assert story.contributor_ids() == [1, 2, 3]
    for name in "abc":
        story.done(name, "s0")
    assert [c.site_id for c in story.last("a", m.Commit).contributors] == [1, 2, 3]


def test_16_who_gets_nothing_of_a_reducer_while_most_are_done_does_not_depend_on_it_for_long() -> None:
    """Nobody knows which end is at fault; whoever says so of one after the other is."""
    story = Story(some_settings(min_sites=4, steps=1000))
    story.start("a", "b", "c", "d")
    story.commit_one("a", "b", "c", "d", state="s0", following="s1")
    held: list[frozenset[int]] = []
    for number, peer in enumerate("ab", 1):
        for name in "abcd":
            story.ready(name)
        story.failed("d", peer, lacks=True)
        for name in "abc":
            story.done(name, f"s{number}")
        for name in "abcd":
            story.applied(name, number + 1, f"s{number + 1}")
        held.append(story.held_up_others(story.newest_sync()))
    assert held == [{1, 4}, {1, 4}]
    assert {1, 4} <= story.held_up_others(story.newest_sync() + 60)
    assert not story.spared(story.newest_sync()), "all of them contribute"


@pytest.mark.parametrize("crashes", [False, True])
def test_16_who_waited_for_a_reducer_that_was_done_and_went_is_not_at_fault(crashes: bool) -> None:
    story = Story(some_settings(min_sites=4, steps=1000))
    story.start("a", "b", "c", "d")
    for name in "abcd":
        story.ready(name)
    for name in "abd":
        story.done(name, "s0")
    if crashes:
        story.drop("d")
    else:
        story.leave("d")
    story.failed("c", "d", lacks=True)
    story.wait(LIMITS.reconnect_grace_s + 0.1)
    assert story.view.last_commit == 1
    assert story.held_up_others(story.newest_sync()) == {4}


def test_16_the_ends_of_a_link_that_failed_reduce_nothing_next_beside_a_newcomer_too() -> None:
    """d has contributed to nothing yet, and reduces nothing either: it is not in the place of a and b."""
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name in "abc":
        story.done(name, "s0")
    for name in "abc":
        story.applied(name, 1, "s1")
    story.join("d")
    story.applied("d", 1, "s1")
    for name in "dabc":
        story.ready(name)
    story.failed("a", "b")
    story.wait(2)
    assert (story.contributor_ids(), story.reducer_ids()) == ([1, 2, 3, 4], {3})
    for name in "abcd":
        story.done(name, "s1")
    for name in "abcd":
        story.applied(name, 2, "s2")
        story.ready(name)
    assert story.plan().sync == 3
    assert story.reducer_ids() == {3, 4}


def test_a_reason_names_some_of_many_links() -> None:
    pairs = [(i, i + 1) for i in range(1, 1001)]
    assert len(in_words(pairs)) < 300
    assert in_words(pairs).endswith("16 with 17, and 984 more")
    assert in_words([(2, 1), (1, 2)]) == "1 with 2, 2 with 1"
