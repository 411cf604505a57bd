"""Invariant 7: a member that is connected and gets no further is evicted; one that others hold up is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core.sites import liveness
from atoll.protocol import messages as m
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_story import Story, some_settings

LIMITS = time_limits("local")
IDLE_S = liveness.IDLE_STALLS * LIMITS.stall_s
BEAT_S = LIMITS.heartbeat_s


def a_run(*names: str, **settings: object) -> Story:
    story = Story(some_settings(min_sites=len(names), **settings))
    story.start(*names)
    return story


def stands_still(story: Story, name: str, phase: str = "training", **beat: object) -> None:
    """Its heartbeats go on and say the same for ever."""
    site = story.sites[name]
    site.trains = False
    site.heartbeat = replace(m.Heartbeat(phase=phase), **beat)  # type: ignore[arg-type]
    story.says(name, site.heartbeat)


def test_7_a_member_whose_node_hangs_is_evicted_whatever_its_heartbeats_say() -> None:
    story = a_run("a", "b")
    stands_still(story, "b")
    story.ready("a")
    story.wait(IDLE_S - BEAT_S)
    assert story.view.num_evicted == 0
    story.wait(2 * BEAT_S)
    assert (story.live_sites(), story.id_of("a")) == (["a"], 1)
    assert "evicted b (site 2): it is connected, but for 24 s it has neither trained nor been ready" in "\n".join(
        story.log
    )
    assert story.contributor_ids() == [1]


def test_7_other_words_in_each_heartbeat_are_no_progress_and_a_larger_number_is() -> None:
    story = a_run("a", "b", "c")
    story.ready("a")
    for name in "bc":
        story.sites[name].trains = False
        story.sites[name].heartbeats = False
    until, count = story.now + IDLE_S + 3 * BEAT_S, 100
    while story.now < until:
        count += 1
        if story.is_live("b"):
            story.says("b", m.Heartbeat(phase=f"fetching {count} %", doing=f"{count} %", progress=100))
        story.says("c", m.Heartbeat(phase="training", progress=count))
        story.wait(BEAT_S)
    assert "it has neither trained nor been ready" in story.evicted_because("b")
    assert story.is_live("c")


def test_7_a_member_whose_node_hangs_is_evicted_though_the_others_commit_again_and_again() -> None:
    story = a_run("a", "b", "c", steps=10_000)
    story.commit_one("a", "b", "c", state="s0", following="s1")
    stands_still(story, "c")
    story.put_on_probation("receive_only", "c", sync=1, times=4)  # so that nobody waits for it
    until, num_commits = story.now + IDLE_S + 2, story.last_commit()
    while story.now < until and story.is_live("c"):
        for name in "ab":
            story.ready(name)
        for name in "ab":
            story.done(name, f"s{story.last_commit()}", plan=story.plan())
        for name in "ab":
            story.applied(name, story.last_commit(), f"s{story.last_commit()}")
        story.wait(1.0)
    assert story.last_commit() > num_commits + 10
    assert "it has neither trained nor been ready" in story.evicted_because("c")


def test_7_a_member_that_never_applies_the_commit_is_evicted() -> None:
    story = a_run("a", "b")
    for name in "ab":
        story.ready(name)
    for name in "ab":
        story.done(name, "s0")
    story.applied("a", 1, "s1")
    stands_still(story, "b", "applying")
    story.wait(IDLE_S + BEAT_S)
    assert story.view.num_evicted == 1


def test_7_a_joiner_whose_node_hangs_is_evicted() -> None:
    story = a_run("a", "b")
    story.join("c")
    stands_still(story, "c", "fetching state", moved_bytes=7)
    for name in "ab":
        story.ready(name, tokens=0)
    story.wait(IDLE_S + BEAT_S)
    assert story.evicted_because("c").endswith(
        "it has neither fetched nor made a state (phase 'fetching state', step 0)"
    )


def test_7_a_site_that_had_to_wait_for_its_admission_is_not_judged_for_that_time() -> None:
    story = a_run("a", "b")
    story.set_strikes("b", 2)
    stands_still(story, "b")
    story.wait(IDLE_S + BEAT_S)
    assert not story.is_live("b")
    wait_s = story.admitted_again_at("b") - story.now
    assert wait_s > IDLE_S - BEAT_S
    story.connect("b", state=(0, "s0"), again=True)
    story.offer("b")
    story.wait(wait_s + BEAT_S)
    assert story.is_live("b"), "it could do nothing until it was admitted"
    story.wait(IDLE_S)
    assert not story.is_live("b")


def test_7_an_announced_limit_counts_up_to_the_runs() -> None:
    story = a_run("a", "b", max_busy_s=100)
    stands_still(story, "b", doing="busy: evaluation", limit_s=1e9)
    said = "b (site 2) announces 1000000000 s without progress (busy: evaluation); run.max_busy_s allows 100"
    assert f"# {said}" in story.log
    story.wait(100 + 2 * LIMITS.stall_s - BEAT_S)
    assert story.view.num_evicted == 0
    story.wait(2 * BEAT_S)
    assert story.view.num_evicted == 1
    assert "100 s are its limit, of 1000000000 s that it announced" in "\n".join(story.log)


def test_7_a_limit_that_is_shortened_to_what_has_passed_counts_at_once() -> None:
    story = a_run("a", "b")
    stands_still(story, "b", doing="busy: evaluation", limit_s=1000)
    story.wait(2 * LIMITS.stall_s + 5)
    story.says("b", replace(story.sites["b"].heartbeat, limit_s=1))
    assert "1 s are its limit" in story.evicted_because("b")


def test_7_who_is_ready_and_waits_for_a_quorum_is_left_alone() -> None:
    story = a_run("a", "b", quorum=2)
    for name in "ab":
        stands_still(story, name, "ready")
    story.ready("a")
    story.says("b", replace(story.sites["b"].heartbeat, doing="step", limit_s=1000))
    story.sites["b"].heartbeat = m.Heartbeat(phase="training", doing="step", limit_s=1000)
    story.wait(20 * IDLE_S)
    assert story.view.num_evicted == 0


def test_7_who_waits_for_the_start_of_the_run_is_left_alone() -> None:
    story = Story(some_settings(min_sites=3))
    story.start("a", "b")
    for name in "ab":
        stands_still(story, name, "waiting for start")
    story.wait(20 * IDLE_S)
    assert story.view.num_evicted == 0


def test_7_who_waits_for_a_donor_is_left_alone() -> None:
    story = a_run("a", "b", quorum=1)
    story.commit_one("a", "b", state="s0", following="s1")
    story.drop("b")
    story.wait(2.0)
    story.leave("a")
    story.join("b", incarnation=2, state=(0, "s0"))
    story.sources("b", after=0)
    stands_still(story, "b", "catching up")
    story.wait(20 * IDLE_S)
    assert story.view.num_evicted == 1, "once, for the stream that it lost"


def test_7_whose_contribution_is_void_waits_for_the_next_sync() -> None:
    story = a_run("a", "b", "c", quorum=2)
    for name in "abc":
        story.ready(name)
    story.drop("c")
    story.wait(2.0)
    story.connect("c", state=(0, "s0"))
    story.connect("c", state=(0, "s0"), again=True)
    story.offer("c")
    story.ready("c")
    stands_still(story, "c", "ready")
    evicted = story.view.num_evicted
    for _ in range(int(IDLE_S) + 4):  # the exchange of the others gets on all the while
        for name in "ab":
            story.says(name, m.Heartbeat(phase="exchanging", moved_bytes=int(story.now), sent_bytes=int(story.now)))
        story.wait(1.0)
    assert story.view.num_evicted == evicted


def test_7_a_node_that_writes_a_large_model_has_the_time_for_it() -> None:
    story = a_run("a", "b")
    assert story.agreed_manifest() is not None
    small_s = story.idle_limit_s()
    large = Manifest.canonical([TensorSpec(name="w", shape=(1 << 20, 1 << 10), dtype="F32", role=Role.TRAINABLE)])
    story = Story(replace(some_settings(), sync=replace(some_settings().sync, chunk_elements=1 << 20)))
    story.connect("a")
    story.sites["a"].manifest = large
    story.says("a", m.Offer(manifest_digest=large.digest, data_fingerprint=bytes(32), max_retained_bytes=1 << 40))
    assert story.idle_limit_s() - small_s == pytest.approx(2 * (4 << 30) / (32 << 20), abs=1)


def test_7_who_waited_for_a_donor_has_its_whole_time_from_when_there_is_one() -> None:
    story = a_run("a", "b", quorum=1)
    story.commit_one("a", "b", state="s0", following="s1")
    story.leave("a")
    story.leave("b")
    story.join("b", incarnation=2)
    story.sources("b")
    stands_still(story, "b", "fetching state")
    story.wait(20 * IDLE_S)
    story.join("a", incarnation=2, state=(1, "s1"))
    assert story.last("b", m.Sources).donors
    story.wait(IDLE_S - 2 * BEAT_S)
    assert story.view.num_evicted == 0
    story.wait(3 * BEAT_S)
    assert story.evicted_because("b")


def test_7_who_waited_while_others_put_an_older_commit_together_has_its_time_to_go_back() -> None:
    story = a_run("a", "b", quorum=1, steps=1000)
    for number in range(2):
        story.commit_one("a", "b", state=f"s{number}", following=f"s{number + 1}")
    story.forget_hash(1)  # so that all have to agree
    for name in "ab":
        story.ready(name)
        stands_still(story, name, "ready")
    story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    story.wait(3 * IDLE_S)
    story.rebuilt("b", "s1")
    assert story.view.branch == 1
    story.wait(IDLE_S - 2 * BEAT_S)
    assert story.view.num_evicted == 0


@pytest.mark.parametrize("says", ["applied", "lease", "void ready"])
def test_7_a_member_that_says_the_same_again_and_again_is_evicted(says: str) -> None:
    story = a_run("a", "b", max_busy_s=100)
    story.commit_one("a", "b", state="s0", following="s1")
    stands_still(story, "b")
    story.ready("a")
    until = story.now + IDLE_S + 2 * BEAT_S
    while story.now < until:
        if says == "applied":
            story.applied("b", 1, "s1")
        elif says == "lease":
            story.says("b", m.LeaseRequest(num_samples=1000, wanted=int(story.now)))
        else:
            story.says("b", m.Ready(sync=1, tokens=int(story.now), num_steps=1, mean_loss=1.0))
        story.wait(BEAT_S)
        if story.view.num_evicted:
            break
    assert "it has neither trained nor been ready" in story.evicted_because("b")


def test_7_a_member_that_seems_to_train_for_ever_costs_the_others_one_wait() -> None:
    """It looks like one that is slow. Who was waited for in vain is not waited for again."""
    story = a_run("a", "b", "c", steps=10_000)
    story.commit_one("a", "b", "c", state="s0", following="s1")
    waited_s = []
    for _ in range(6):
        number = story.last_commit()
        for name in "ab":
            story.ready(name, train=1.0)
        begun = story.now
        while story.weighed_plan() is None:
            story.wait(BEAT_S)  # in which c does a step
        waited_s.append(story.now - begun)
        for name in "ab":
            story.done(name, f"s{number}", plan=story.plan())
        for name in "abc":
            story.applied(name, number + 1, f"s{number + 1}")
    assert story.view.num_evicted == 0
    assert waited_s[0] <= LIMITS.sync_wait_s + BEAT_S
    assert max(waited_s[1:]) < LIMITS.lease_s, "as long as for any other, of which the median site is one"


@pytest.mark.parametrize("holds", [None, 0])
def test_25_a_site_that_fetches_a_state_is_not_found_out_for_donors_that_it_cannot_reach(holds: int | None) -> None:
    """They serve others, or a link is cut, for an hour: its node tries, fails, waits and asks who has the state. It
    was banned for good after 20 minutes."""
    story = a_run("a", "b", steps=10_000)
    story.commit_one("a", "b", state="s0", following="s1")
    story.join("c", state=None if holds is None else (0, "s0"))
    stands_still(story, "c", "fetching state", moved_bytes=7)
    for _ in range(250):
        story.sources("c", after=holds)
        story.wait(14.0)
        assert story.view.num_evicted == 0
    story.wait(IDLE_S + BEAT_S)
    assert story.evicted_because("c"), "it asks no more"


def test_7_a_member_that_asks_for_donors_of_what_it_holds_is_evicted() -> None:
    story = a_run("a", "b")
    stands_still(story, "b")
    story.ready("a")
    for _ in range(round((IDLE_S + 2 * BEAT_S) / BEAT_S)):
        story.sources("b", after=0)
        story.wait(BEAT_S)
    assert story.strikes_of("b") == 1


def test_a_limit_that_passed_while_the_site_was_out_is_acted_on_at_its_hello() -> None:
    story = Story(some_settings(min_sites=1))
    for name in "ab":
        story.join(name)
    story.applied("a", 0, "s0")
    story.sites["b"].hears = False
    story.wait(2.5)
    assert story.evict("b") == ""
    story.wait(1.5)
    story.connect("b", again=True)
    assert not story.is_live("b")
