"""Sites of several hosts: the endpoints that they offer are kept, told to whoever dials them, and bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.coordinator.store import Store
from atoll.protocol import messages as m
from atoll.protocol.messages import Endpoint, Member, RefusedKind
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.memory_store import MemoryStore

NUM_CHUNKS = 5
"""Of the story's model, two of them of its first tensor."""
SECOND_HOST = (Endpoint(address="a.second:1", first_chunk=2),)
TWO_MORE = (Endpoint(address="b.second:1", first_chunk=1), Endpoint(address="b.third:1", first_chunk=4))

Reopen = Callable[[], Store]


def a_story(store: Store | None = None, **changes: int) -> Story:
    return Story(some_settings(**changes), store=store or MemoryStore())


def start(story: Story, name: str, *endpoints: Endpoint) -> None:
    """It joins and holds commit 0."""
    story.connect(name)
    story.offer(name, endpoints=endpoints)
    story.applied(name, 0, "s0")


def endpoints_in(members: tuple[Member, ...]) -> dict[int, tuple[Endpoint, ...]]:
    return {member.site_id: member.endpoints for member in members}


def test_the_endpoints_of_an_offer_are_in_plans_and_commits_and_told_to_those_who_probe() -> None:
    story = a_story(min_sites=3)
    start(story, "a", *SECOND_HOST)
    start(story, "b")
    start(story, "c", *TWO_MORE)
    everybody = {1: SECOND_HOST, 2: (), 3: TWO_MORE}
    for name, own in (("a", 1), ("b", 2), ("c", 3)):
        found = endpoints_in(story.last(name, m.Peers).members)
        assert found == {site_id: places for site_id, places in everybody.items() if site_id != own}
    for name in "abc":
        story.ready(name)
    assert endpoints_in(story.plan().contributors) == everybody
    for name in "abc":
        story.done(name, "s0")
    assert endpoints_in(story.last("a", m.Commit).contributors) == everybody


def test_receivers_have_their_endpoints_too() -> None:
    story = a_story(min_sites=3, quorum=2)
    start(story, "a")
    start(story, "b")
    start(story, "c", *SECOND_HOST)
    story.ready("a")
    story.ready("b")
    story.wait(story.limits.sync_wait_s + 0.1)
    plan = story.plan()
    assert (endpoints_in(plan.contributors), endpoints_in(plan.receivers)) == ({1: (), 2: ()}, {3: SECOND_HOST})


def test_endpoints_outlive_a_coordinator(reopen: Reopen) -> None:
    story = a_story(reopen())
    start(story, "a", *SECOND_HOST)
    start(story, "b", *TWO_MORE)
    story.store = reopen()
    story.restart()
    assert story.endpoints_of("a") == SECOND_HOST
    assert story.endpoints_of("b") == TWO_MORE, "as the store has them, before they come back"
    for name in "ab":
        story.connect(name, state=(0, "s0"))
    assert endpoints_in(story.last("a", m.Peers).members) == {2: TWO_MORE}
    for name in "ab":
        story.ready(name)
    assert endpoints_in(story.plan().contributors) == {1: SECOND_HOST, 2: TWO_MORE}


def test_a_plan_with_endpoints_outlives_a_coordinator(reopen: Reopen) -> None:
    story = a_story(reopen())
    start(story, "a", *SECOND_HOST)
    start(story, "b")
    for name in "ab":
        story.ready(name)
    before = story.plan()
    story.store = reopen()
    story.restart()
    assert (story.plan().contributors, story.plan().trees) == (before.contributors, before.trees)


def test_a_site_in_the_run_that_offers_other_endpoints_has_those() -> None:
    """Its workers were started again, on other hosts."""
    story = a_story()
    start(story, "a", *SECOND_HOST)
    start(story, "b")
    moved = (Endpoint(address="elsewhere:1", first_chunk=3),)
    story.offer("a", endpoints=moved)
    assert story.num("a", m.Refused) == 0
    for name in "ab":
        story.ready(name)
    assert endpoints_in(story.plan().contributors) == {1: moved, 2: ()}


def test_those_who_probe_a_site_hear_of_its_other_endpoints() -> None:
    story = a_story()
    start(story, "a", *SECOND_HOST)
    start(story, "b")
    story.offer("a")
    assert endpoints_in(story.last("b", m.Peers).members) == {1: ()}
    story.offer("a", endpoints=TWO_MORE)
    assert endpoints_in(story.last("b", m.Peers).members) == {1: TWO_MORE}
    before = story.num("b", m.Peers)
    story.offer("a", endpoints=TWO_MORE)
    assert story.num("b", m.Peers) == before, "nothing has changed"


@pytest.mark.parametrize(
    ("endpoints", "text"),
    [
        ((Endpoint(address="h:1", first_chunk=0),), "begin at chunks 0: they must ascend, from 1 to 4"),
        ((Endpoint(address="h:1", first_chunk=NUM_CHUNKS),), "begin at chunks 5: they must ascend, from 1 to 4"),
        ((*SECOND_HOST, *SECOND_HOST), "begin at chunks 2, 2: they must ascend, from 1 to 4"),
        ((Endpoint(address="nowhere", first_chunk=1),), "an endpoint: 'nowhere' is not an address"),
        ((Endpoint(address="<h>:1", first_chunk=1),), "an endpoint: '<h>:1' has characters that no address has"),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_endpoints_that_cannot_be_are_refused_with_the_reason(
    endpoints: tuple[Endpoint, ...], text: str, is_known: bool
) -> None:
    """From a site that comes, and from one that was in the run before."""
    story = a_story()
    start(story, "b")
    story.connect("a")
    if is_known:
        story.offer("a", endpoints=SECOND_HOST)
    story.offer("a", endpoints=endpoints)
    refused = story.last("a", m.Refused)
    assert refused.kind is RefusedKind.INVALID
    assert refused.text.startswith("a (site 2): " if is_known else "a: ")
    assert text in refused.text
    assert story.num("a", m.Admitted) == is_known
    story.join("c")
    others = endpoints_in(story.last("c", m.Peers).members)
    assert others == ({1: (), 2: SECOND_HOST} if is_known else {1: ()}), "what it had stays"


def test_the_first_site_is_held_to_the_model_that_it_brought() -> None:
    """How many chunks there are is known once its manifest is here."""
    story = a_story()
    story.connect("a")
    story.offer("a", endpoints=(Endpoint(address="h:1", first_chunk=NUM_CHUNKS),))
    assert story.num("a", m.SendManifest) == 1
    assert "from 1 to 4" in story.last("a", m.Refused).text


def test_all_sites_together_have_so_many_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a site are counted once, however often it offers them; who has left takes no place."""
    monkeypatch.setattr(m, "MAX_MEMBERS", 3)
    story = a_story()
    start(story, "a", *SECOND_HOST)
    start(story, "b", *TWO_MORE)
    story.offer("a", endpoints=SECOND_HOST)
    assert story.num("a", m.Refused) == 0
    story.connect("c")
    story.offer("c", endpoints=SECOND_HOST)
    refused = story.last("c", m.Refused)
    assert refused.kind is RefusedKind.INVALID
    assert "c: the sites of a run have at most 3 hosts beside their first ones" in refused.text
    start(story, "d")
    assert story.num("d", m.Refused) == 0, "one host takes no such place"
    story.leave("b")
    start(story, "c", *SECOND_HOST)
    assert story.standing_of("c") != "out"
    assert story.endpoints_of("c") == SECOND_HOST


def test_each_part_of_a_plan_that_is_of_one_host_everywhere_has_every_reducer() -> None:
    story = a_story()
    start(story, "a", *SECOND_HOST)
    start(story, "b")
    for name in "ab":
        story.ready(name)
    trees = [(tree.first_chunk, tree.num_chunks, tree.top) for tree in story.plan().trees]
    assert trees == [(0, 1, 0), (1, 1, 1), (2, 2, 0), (4, 1, 1)]
