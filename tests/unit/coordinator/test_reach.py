"""Reducers are sites that all other contributors can dial; who cannot be dialled contributes."""

from __future__ import annotations

import random

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.assignments import MIN_TRIES
from atoll.coordinator.core.sync.reach import choose
from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, a_hash, some_settings


def sites(*unreachable: tuple[int, ...]) -> list[Site]:
    """Ids from 1 on; of each, whom it cannot dial."""
    return [
        Site(name=f"s{i}", key_digest=b"", site_id=i, address=f"s{i}:1", unreachable_site_ids=peers)
        for i, peers in enumerate(unreachable, start=1)
    ]


def ids(found: list[Site]) -> list[int]:
    return [s.site_id for s in found]


def test_who_cannot_be_dialled_contributes_and_does_not_reduce() -> None:
    choice = choose(sites((3,), (3,), ()), quorum=1)
    assert (ids(choice.contributors), choice.not_reducing, choice.problem) == ([1, 2, 3], frozenset({3}), "")


def test_one_contributor_that_cannot_dial_a_site_is_enough() -> None:
    assert choose(sites((), (1,), ()), quorum=1).not_reducing == {1}


def test_reports_of_others_do_not_count() -> None:
    choice = choose(sites((9, 1), (2, 9)), quorum=1)
    assert (choice.not_reducing, choice.problem) == (frozenset(), ""), "of sites that do not contribute, of itself"


def test_a_lone_contributor_dials_nobody() -> None:
    choice = choose(sites((2, 3)), quorum=1)
    assert (ids(choice.contributors), choice.not_reducing, choice.problem) == ([1], frozenset(), "")


def test_who_is_held_back_does_not_become_the_one_who_reduces_by_its_own_word() -> None:
    contributors = sites((), (), (1, 2))
    assert choose(contributors, quorum=1).not_reducing == {1, 2}
    choice = choose(contributors, quorum=1, held_back=frozenset({3}))
    assert (ids(choice.contributors), choice.not_reducing) == ([1, 2], frozenset())
    assert choice.left_out == "; without s3 (site 3), who cannot dial those who reduce"


@pytest.mark.parametrize("contributors", [sites((2, 3), (1, 3), ()), sites((2,), (1,), (1, 2)), sites((), (1,))])
def test_who_is_held_back_reduces_where_the_others_cannot_do_so_without_it(contributors: list[Site]) -> None:
    held_back = frozenset({len(contributors)})
    assert choose(contributors, quorum=1, held_back=held_back) == choose(contributors, quorum=1)


def test_with_nobody_to_dial_there_is_no_sync_and_the_reason_names_all() -> None:
    problem = choose(sites((2,), (1,)), quorum=1).problem
    assert "s1 at s1:1 not by s2; s2 at s2:1 not by s1" in problem


def test_the_fewest_receive_where_no_site_can_be_dialled_by_all() -> None:
    choice = choose(sites((2, 3, 4), (1,), (2,), (2,)), quorum=2)
    assert ids(choice.contributors) == [1, 3, 4]
    assert choice.not_reducing == {3, 4}
    assert "without s2" in choice.left_out
    assert choose(sites((2, 3, 4), (1,), (2,), (2,)), quorum=4).problem, "not at the price of the quorum"


def test_who_dials_nobody_does_not_make_the_one_that_is_left_reduce_beyond_its_memory() -> None:
    """c says that it can dial neither a nor b, and may retain little."""
    story = Story(some_settings(min_sites=3, quorum=1))
    for name in "abc":
        story.connect(name)
        story.offer(name, retain=10 if name == "c" else 1 << 30)
        story.applied(name, 0, "s0")
    story.ready("a")
    story.ready("b")
    story.ready("c", unreachable="a,b")
    assert ids_of(story.plan()) == [1, 2]
    assert "without c (site 3), who cannot dial a (site 1)" in "\n".join(story.log)


def ids_of(plan: m.Plan) -> list[int]:
    return [c.site_id for c in plan.contributors]


def test_where_no_choice_has_the_memory_the_run_pauses_and_says_how_much() -> None:
    story = Story(some_settings(min_sites=2, quorum=1))
    for name in "ab":
        story.connect(name)
        story.offer(name, retain=10 if name == "b" else 1 << 30)
        story.applied(name, 0, "s0")
    story.ready("a")
    story.ready("b", unreachable="a")
    assert "--max-retained-mib" in story.view.state
    story.happens(e.StopAsked("atoll stop"))
    assert story.view.finished, "there is no last sync to wait for"


def test_reducers_can_be_dialled_by_all_others_whatever_the_reports() -> None:
    generator = random.Random(5)
    for _ in range(500):
        count = generator.randrange(2, 7)
        contributors = sites(
            *(
                tuple(i for i in range(1, count + 1) if generator.random() < generator.choice([0.1, 0.5, 0.9]))
                for _ in range(count)
            )
        )
        quorum = generator.randrange(1, count + 1)
        choice = choose(contributors, quorum)
        if choice.problem:
            continue
        assert len(choice.contributors) >= max(2, quorum)
        reducers = {s.site_id for s in choice.contributors} - choice.not_reducing
        assert reducers
        for site in choice.contributors:
            assert not (set(site.unreachable_site_ids) - {site.site_id}) & reducers


def test_every_site_probes_few_others_and_is_probed_by_as_many() -> None:
    story = Story(some_settings())
    names = [f"s{i}" for i in range(40)]
    story.start(*names)
    probed = [member.site_id for name in names for member in story.last(name, m.Peers).members]
    for name in names:
        peers = story.last(name, m.Peers).members
        assert len({p.site_id for p in peers}) == m.MAX_PROBED
        assert story.sites[name].site_id not in [p.site_id for p in peers]
    assert all(probed.count(site.site_id) == m.MAX_PROBED for site in story.sites.values())
    before = {name: story.num(name, m.Peers) for name in names}
    story.leave("s20")
    news = [name for name in names if story.num(name, m.Peers) > before[name]]
    assert len(news) == m.MAX_PROBED, "those that probed it"


def test_peers_are_told_again_on_a_new_stream_and_when_one_is_started_again() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    assert [p.site_id for p in story.last("a", m.Peers).members] == [2]
    count = story.num("a", m.Peers)
    story.drop("a")
    story.connect("a", state=(0, "s0"))
    assert story.num("a", m.Peers) == count + 1
    story.join("b", incarnation=2)
    assert [p.incarnation for p in story.last("a", m.Peers).members] == [2]


def test_who_cannot_be_dialled_is_shown() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.ready("a", unreachable="b")
    assert [s.not_dialled_by for s in story.view.sites] == [(), ("a",)]


def test_a_site_that_exchanges_badly_reduces_where_nobody_else_can() -> None:
    """It is spared for some syncs after failures; not if that left no reducer."""
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    story.put_on_probation("receive_only", "a", sync=1)
    story.ready("a", unreachable="b,c")
    story.ready("b", unreachable="c")
    story.ready("c", unreachable="b")
    assert story.contributor_ids() == [1, 2, 3]
    assert {tree.top for tree in story.plan().trees} == {0}


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_3_a_link_to_the_only_site_that_can_be_dialled_fails_once_and_costs_an_attempt(names: str) -> None:
    story = Story(some_settings(min_sites=len(names), quorum=len(names)))
    story.start(*names)
    for name in names:
        story.ready(name, unreachable=",".join(x for x in names[1:] if x != name))
    first = story.plan()
    story.failed("b", "a")
    story.wait(3)
    assert story.view.num_abandoned == 0
    assert (story.plan().attempt, story.plan().trees) == (2, first.trees)


def test_16_a_link_to_the_only_site_that_can_be_dialled_stays_bad_and_who_has_it_receives() -> None:
    """c answers probes and dials, but nothing of it gets through."""
    story = Story(some_settings(min_sites=3, quorum=1))
    story.start("a", "b", "c")
    for name, unreachable in {"a": "b,c", "b": "c", "c": "b"}.items():
        story.ready(name, unreachable=unreachable)
    for _ in range(2):
        assert story.contributor_ids() == [1, 2, 3]
        story.failed("c", "a")
        story.failed("a", "c")
        story.wait(3)
    assert story.contributor_ids() == [1, 2]
    assert [r.site_id for r in story.plan().receivers] == [3]
    for name in "ab":
        story.done(name, "s0")
    assert story.last_commit() == 1


def test_16_where_nobody_can_be_spared_the_attempts_are_bounded() -> None:
    story = Story(some_settings(min_sites=2, quorum=2))
    story.start("a", "b")
    story.ready("a", unreachable="b")
    story.ready("b")
    for attempt in range(1, MIN_TRIES + 1):
        assert (story.view.num_abandoned, story.plan().attempt) == (0, attempt)
        story.failed("b", "a")
        story.wait(3)
    assert story.view.num_abandoned == 1


@pytest.mark.parametrize("address", ["", "nowhere", "host:port", "::1:7700", "host:70000"])
def test_an_address_that_is_none_is_refused_at_the_door(address: str) -> None:
    """What dials it would fail at the others, as an error of their own."""
    story = Story(some_settings())
    story.connect("a")
    story.says("a", m.Hello(name="a", key=a_hash("key a"), address=address))
    assert "--advertise" in story.last("a", m.Refused).text


def test_the_only_site_that_can_be_dialled_trains_on_where_it_had_no_tokens() -> None:
    """It was a receiver for ever, and the others had nobody to exchange with."""
    story = Story(some_settings())
    story.start("a", "b", "c")
    story.ready("a", unreachable="b")
    story.ready("b", unreachable="a")
    assert story.num("a", m.Abandoned) == 0, "another site may come that can be dialled"
    story.ready("c", tokens=0)
    abandoned = story.last("c", m.Abandoned)
    assert abandoned.without_tokens
    assert "c (site 3) trained no tokens, so no site can be dialled by the others" in abandoned.reason
    story.ready("a", unreachable="b")
    story.ready("b", unreachable="a")
    story.ready("c")
    story.wait(story.limits.heartbeat_s)
    plan = story.plan()
    assert {plan.contributors[tree.top].site_id for tree in plan.trees} == {3}


def test_without_tokens_and_undialled_as_well_a_site_is_no_way_out() -> None:
    story = Story(some_settings())
    story.start("a", "b", "c")
    story.ready("a", unreachable="b,c")
    story.ready("b", unreachable="a,c")
    story.ready("c", tokens=0, unreachable="a,b")
    assert story.num("c", m.Abandoned) == 0
    assert "no site can be dialled" in story.view.state
