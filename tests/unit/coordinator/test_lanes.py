"""Two fragments, each with a sync in flight: what is about one of them leaves the other as it is."""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.core.events import StopAsked
from atoll.protocol import messages as m
from atoll.protocol.plans import weights
from tests.harness.coordinator_story import Story, a_hash, some_settings

FRAGMENTS = (0, 1)


def of(*names: str, quorum: int = 1) -> Story:
    """Training has begun: sync 1 is of fragment 0."""
    settings = some_settings(min_sites=len(names), quorum=quorum, fragments=2, every=20, overlap=20, steps=400)
    story = Story(settings)
    story.start(*names)
    return story


def come_back(story: Story) -> None:
    """The coordinator is started again, and all sites come back to it with the state that they have."""
    story.restart()
    for site in list(story.sites.values()):
        story.join(site.name, state=site.held if site.held[1] else (0, "s0"))


def opened(story: Story, fragment: int) -> m.Open:
    found = story.open_sync(fragment)
    assert found is not None
    return found


def ready(story: Story, names: str, fragment: int) -> None:
    sync = opened(story, fragment)
    for name in names:
        story.says(name, m.Ready(sync=sync.sync, tokens=100, num_steps=sync.num_steps, mean_loss=2.0))


def done(story: Story, name: str, sync: int, commit: int = 0, *, attempt: int = 1, payloads: str = "p") -> None:
    """It exchanged from the state of that commit."""
    said = m.Done(
        sync=sync,
        attempt=attempt,
        term=story.plans()[sync, attempt].term,
        payload_digest=a_hash(payloads),
        last_commit=commit,
        state_hash=a_hash(f"s{commit}"),
        tokens=weights(story.plans()[sync, attempt]),
    )
    story.says(name, said)


def in_flight() -> Story:
    """Both syncs of a, b and c are exchanged: the second one is opened when all are ready for the first."""
    story = of("a", "b", "c")
    for fragment in FRAGMENTS:
        ready(story, "abc", fragment)
    return story


def bases(story: Story) -> list[tuple[int, int]]:
    """Sync and base, by fragment."""
    return [(opened(story, f).sync, opened(story, f).base_commit) for f in FRAGMENTS]


def numbers(story: Story) -> list[tuple[int, int, int]]:
    """Commit, sync and fragment of each commit that a heard of."""
    sent = [message for name, message in story.sent if name == "a" and isinstance(message, m.Commit)]
    return [(c.commit, c.sync, c.fragment) for c in sent]


def test_commits_are_numbered_as_they_come_and_a_base_is_the_last_commit_of_its_fragment() -> None:
    story = in_flight()
    for name in "abc":
        done(story, name, 2)
    assert numbers(story) == [(1, 2, 1)]
    assert bases(story) == [(1, 0), (3, 1)]
    for name in "abc":
        story.applied(name, 1, "s1")
    done(story, "a", 1, 1)
    done(story, "b", 1, 1)
    done(story, "c", 1, 0)  # it was done before it applied that
    assert numbers(story) == [(1, 2, 1), (2, 1, 0)]
    assert story.open_sync(0) is None, "nobody is ready for sync 3"
    ready(story, "abc", 1)
    assert bases(story) == [(4, 2), (3, 1)]
    plan = story.plans()[3, 1]
    assert (plan.fragment, plan.base_commit) == (1, 1)
    assert story.live_sites() == ["a", "b", "c"]
    assert story.holds("c") == 1, "its Done says where it was, not that it went back"


def test_states_that_differ_are_those_of_one_commit() -> None:
    story = in_flight()
    for name in "abc":
        done(story, name, 2)
    story.applied("a", 1, "s1")
    done(story, "a", 1, 1)
    done(story, "b", 1, 0)
    done(story, "c", 1, 0)
    assert story.live_sites() == ["a", "b", "c"]
    assert story.last_commit() == 2


def test_a_done_from_a_commit_that_nobody_made_is_not_believed() -> None:
    story = in_flight()
    done(story, "a", 1, 1)
    assert "it exchanged from commit 1, and the plan is based on 0" in story.evicted_because("a")


def test_a_site_that_is_ready_for_one_sync_still_owes_the_others() -> None:
    story = of("a", "b", quorum=2)
    ready(story, "ab", 0)
    story.abandon_sync("a test")
    ready(story, "a", 0)
    assert [story.is_ready("a", f) for f in FRAGMENTS] == [True, False]
    story.sites["a"].trains = False
    story.wait(story.idle_limit_s() + 2 * story.limits.heartbeat_s)
    assert "trained nor been ready for sync 2 (" in story.evicted_because("a")


def test_a_site_that_leaves_costs_each_sync_an_attempt() -> None:
    story = in_flight()
    story.leave("c")
    assert (story.attempt(0), story.attempt(1)) == (2, 2)
    for sync in (2, 1):
        for name in "ab":
            done(story, name, sync, attempt=2)
    assert numbers(story) == [(1, 2, 1), (2, 1, 0)]


def test_a_sync_that_is_abandoned_leaves_the_other_as_it_is() -> None:
    story = in_flight()
    done(story, "a", 2)
    story.abandon_sync("a test")
    assert bases(story) == [(3, 0), (2, 0)]
    done(story, "b", 2)
    done(story, "c", 2)
    assert numbers(story) == [(1, 2, 1)]
    assert story.open_sync(1) is None, "nobody is ready for sync 3"
    story.wait(1.0)
    ready(story, "abc", 0)
    assert bases(story) == [(3, 0), (4, 1)]


def test_ready_for_a_sync_that_is_over_is_answered_with_those_that_are_open() -> None:
    story = in_flight()
    for name in "abc":
        done(story, name, 2)
    before = len(story.sent)
    story.says("a", m.Ready(sync=2, tokens=100, num_steps=10, mean_loss=2.0))
    assert [message for _, message in story.sent[before:]] == [opened(story, 0)], "it has not applied the other's base"


def test_both_go_on_after_a_restart_of_the_coordinator() -> None:
    story = in_flight()
    done(story, "a", 2)
    before = len(story.sent)
    come_back(story)
    assert bases(story) == [(1, 0), (2, 0)]
    to_a = [message for name, message in story.sent[before:] if name == "a"]
    told = [message for message in to_a if isinstance(message, m.Open | m.Plan | m.Weights)]
    assert [(type(message), message.sync) for message in told] == [
        (kind, sync) for sync in (1, 2) for kind in (m.Open, m.Plan, m.Weights)
    ]
    for sync in (2, 1):
        for name in "abc":
            done(story, name, sync)
    assert numbers(story) == [(1, 2, 1), (2, 1, 0)]


def test_what_a_site_discarded_counts_in_no_sync_after_a_restart_of_the_coordinator() -> None:
    story = in_flight()
    story.drop("a")  # so that another attempt waits for what becomes of it
    story.evict("c")
    story.connect("c", again=True, state=(0, "s0"))
    story.offer("c")
    assert story.is_live("c")
    assert (story.attempt(0), story.attempt(1)) == (1, 1)
    come_back(story)
    for fragment in FRAGMENTS:
        ready(story, "c", fragment)
        assert not story.is_ready("c", fragment)


def test_going_back_ends_all_syncs() -> None:
    story = in_flight()
    for name in "abc":
        done(story, name, 2)
    for name in "abc":
        story.applied(name, 1, "s1")
    for name in "abc":
        done(story, name, 1, 1)
    for name in "abc":
        story.applied(name, 2, "s2")
    ready(story, "abc", 1)
    assert bases(story) == [(4, 2), (3, 1)]
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    ended = [opened(story, 0), story.open_sync(1)]
    assert ended == [replace(opened(story, 0), sync=5, base_commit=1), None]
    assert story.view.num_abandoned == 2
    story.restart()
    assert [story.open_sync(f) for f in FRAGMENTS] == ended


def test_the_end_of_the_run_ends_all_syncs() -> None:
    story = in_flight()
    story.happens(StopAsked("enough"))
    for name in "abc":
        done(story, name, 2)
    for name in "abc":
        story.applied(name, 1, "s1")
    for name in "abc":
        done(story, name, 1, 1)
    for name in "abc":
        story.applied(name, 2, "s2")
    of_all = len(FRAGMENTS)
    ready(story, "abc", of_all)
    for name in "abc":
        done(story, name, opened(story, of_all).sync, 2)
    assert story.view.finished
    assert [story.open_sync(f) for f in FRAGMENTS] == [None, None]
    story.restart()
    assert [story.open_sync(f) for f in FRAGMENTS] == [None, None]
