"""What the coordinator must never do, and what it must do in the less ordinary cases. The ordinary ones are stories
in tests/golden. Numbers in names are those of the design's invariants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.suspend_clock import OwnTime
from atoll.coordinator.core.sync.syncs import MAX_ATTEMPTS
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol import messages as m
from atoll.protocol.messages import AdmittedAs, Deposit, RefusedKind
from atoll.protocol.plans import top_of, with_weights
from atoll.protocol.time_limits import time_limits
from tests.harness.coordinator_story import Story, a_hash, some_settings

LIMITS = time_limits("local")


def a_story(**settings: object) -> Story:
    return Story(some_settings(**settings))


def planned(story: Story, *names: str) -> m.Plan:
    for name in names:
        story.ready(name)
    return story.plan()


# --- commits


def test_2_a_commit_has_the_plans_contributors_and_weights() -> None:
    story = a_story()
    story.start("a", "b")
    story.ready("a", tokens=300)
    story.ready("b", tokens=100)
    plan = story.plan()
    story.done("a", "s0")
    assert story.num("a", m.Commit) == 0, "one Done is not enough"
    story.done("b", "s0")
    commit = story.last("a", m.Commit)
    assert commit.contributors == plan.contributors
    assert [c.tokens for c in commit.contributors] == [300, 100]
    assert (commit.run_step, commit.run_tokens) == (10, 400)
    assert commit == story.last("b", m.Commit)


def transactions_of(story: Story) -> list[tuple[e.Record, ...]]:
    """From now on."""
    found: list[tuple[e.Record, ...]] = []
    keep = story.store.persist

    def persist(term: int, records: Sequence[e.Record], wall_time_s: float) -> tuple[Deposit, ...]:
        found.append(tuple(records))
        return keep(term, records, wall_time_s)

    story.store.persist = persist  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("steps", "follow"), [(0, [e.OpenRecord, e.PlanRecord]), (10, [e.FinishedRecord, e.CurveRecord, e.CurveRecord])]
)
def test_5_a_commit_and_what_it_opens_are_one_transaction(steps: int, follow: list[type[e.Record]]) -> None:
    story = a_story(steps=steps) if steps else a_story()
    transactions = transactions_of(story)
    story.start("a", "b")
    planned(story, "a", "b")
    story.done("a", "s0")
    story.done("b", "s0")
    (found,) = [t for t in transactions if any(isinstance(r, e.CommitRecord) for r in t)]
    assert [type(r) for r in found] == [e.CommitRecord, e.SiteRecord, e.SiteRecord, *follow], "each site's first"


def test_sites_that_come_together_are_kept_in_one_transaction() -> None:
    """A transaction each, on a slow disk, takes longer than the lease of the last of a thousand."""
    story = a_story()
    names = [f"s{i}" for i in range(30)]
    for name in names:
        story.connect(name)
    transactions = transactions_of(story)
    with story.together():
        for name in names:
            story.offer(name)
    assert all(story.num(name, m.Admitted) == 1 for name in names)
    assert len(transactions) == 1
    assert sum(isinstance(r, e.SiteRecord) for r in transactions[0]) == len(names)


def test_3_a_done_of_a_lower_attempt_counts_no_longer() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    first = planned(story, "a", "b", "c")
    story.drop("c")
    story.wait(1.1)
    assert story.plan().attempt == 2
    story.done("a", "s0", plan=first)
    story.done("b", "s0", plan=first)
    assert story.num("a", m.Commit) == 0
    story.done("a", "s0")
    story.done("b", "s0")
    assert story.last("a", m.Commit).attempt == 2


def test_3_sites_that_fall_silent_one_after_the_other_cost_one_attempt() -> None:
    names = ("a", "b", "c", "d", "e")
    story = a_story(min_sites=5)
    story.start(*names)
    planned(story, *names)
    for name in ("c", "d", "e"):
        story.sites[name].heartbeats = False
        story.wait(LIMITS.heartbeat_s / 4)
        story.says(name, story.sites[name].heartbeat)
    story.wait(LIMITS.lease_s + 0.1)
    assert [story.view.num_evicted, story.plan().attempt] == [3, 2]
    assert story.contributor_ids() == [1, 2]


def test_3_who_only_seems_lost_is_in_the_next_attempt() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.sites["b"].heartbeats = story.sites["c"].heartbeats = False
    story.wait(LIMITS.heartbeat_s / 2)
    story.says("c", story.sites["c"].heartbeat)
    story.wait(LIMITS.lease_s - LIMITS.heartbeat_s / 2 + 0.1)
    assert story.plan().attempt == 1, "b is lost, and c may be"
    story.says("c", story.sites["c"].heartbeat)
    story.sites["c"].heartbeats = True
    story.wait(LIMITS.heartbeat_s)
    assert story.plan().attempt == 2
    assert story.contributor_ids() == [1, 3]


@pytest.mark.parametrize("names", ["abcd", "abcdefgh"])
def test_plans_are_never_issued_twice_and_attempts_end(names: str) -> None:
    """In each attempt a site cannot exchange with one that reduces."""
    story = a_story(min_sites=len(names), quorum=4)
    story.start(*names)
    planned(story, *names)
    plans = []
    while story.num("a", m.Abandoned) == 0:
        plan = story.plan()
        plans.append(plan)
        ids = [c.site_id for c in plan.contributors]
        reducer = min(ids[top_of(tree)] for tree in plan.trees)
        reporter = next(i for i in ids if i != reducer)
        story.failed(names[reporter - 1], names[reducer - 1], lacks=len(plans) % 2 == 1)
        story.wait(LIMITS.reconnect_grace_s + 0.1)
    assert len(plans) == MAX_ATTEMPTS
    assert len({(tuple(c.site_id for c in p.contributors), p.trees) for p in plans}) == len(plans)
    abandoned = story.last("a", m.Abandoned)
    assert abandoned.next.base_commit == 0
    assert abandoned.next.sync == abandoned.sync + 1
    assert abandoned.next.num_steps == 10, "the contributions carry over"


def test_who_is_ready_for_a_sync_that_is_over_hears_which_one_is_open() -> None:
    """Its node had heard of both while it applied the commit before. Without an answer the run would wait for ever."""
    story = a_story()
    story.start("a", "b")
    story.ready("a", tokens=0)
    story.ready("b", tokens=0)
    abandoned = story.last("b", m.Abandoned)
    assert (abandoned.next.sync, abandoned.without_tokens) == (2, True)
    assert "a (site 1), b (site 2) trained no tokens" in abandoned.reason
    before = story.num("b", m.Open)
    story.says("b", m.Ready(sync=1, tokens=100, num_steps=10, mean_loss=1.0, train_s=1.0))
    assert story.num("b", m.Open) == before + 1
    assert story.last("b", m.Open).sync == 2


def test_a_quorum_that_is_missing_for_want_of_tokens_is_not_waited_for() -> None:
    story = a_story(quorum=2)
    story.start("a", "b")
    story.ready("a", tokens=5)
    story.ready("b", tokens=0)
    assert story.last("a", m.Abandoned).without_tokens
    story.ready("a", tokens=5)
    story.ready("b", tokens=7)
    story.wait(LIMITS.heartbeat_s)
    assert [c.tokens for c in story.plan().contributors] == [5, 7]


def plan_after_pause(story: Story) -> None:
    story.ready("a", tokens=5)
    story.ready("b", tokens=0)
    for _ in range(int(LIMITS.sync_wait_s) + 1):
        if story.num("a", m.Plan):
            return
        story.wait(1.0)


def test_abandoning_again_and_again_is_paced() -> None:
    story = a_story()
    story.start("a", "b")
    for _ in range(20):
        story.ready("a", tokens=0)
        story.ready("b", tokens=0)
        story.wait(1.0)
    assert 1 < story.num("a", m.Abandoned) < 8
    story.wait(2 * LIMITS.sync_wait_s)
    plan_after_pause(story)
    plan = story.plan()
    assert [c.site_id for c in plan.contributors] == [1], "weight 0 receives"
    assert [r.site_id for r in plan.receivers] == [2]


def test_a_state_that_differs_at_done_spoils_the_attempt() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.done("a", "s0")
    story.done("b", "s0")
    story.done("c", "other")
    assert story.num("a", m.Commit) == 0
    assert story.num("c", m.Evicted) == 1
    assert story.contributor_ids() == [1, 2]
    story.done("a", "s0")
    story.done("b", "s0")
    assert story.last("a", m.Commit).attempt == 2


def test_a_leave_after_done_does_not_cost_an_attempt() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.done("c", "s0")
    story.leave("c")
    assert story.plan().attempt == 1
    story.done("a", "s0")
    story.done("b", "s0")
    assert [c.site_id for c in story.last("a", m.Commit).contributors] == [1, 2, 3]


def test_a_leave_before_done_costs_one() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.leave("c")
    assert story.contributor_ids() == [1, 2]


# --- waiting


def test_6_the_deadline_goes_on_with_a_quorum() -> None:
    story = a_story(min_sites=3, quorum=2)
    story.start("a", "b", "c")
    story.ready("a")
    story.wait(LIMITS.sync_wait_s / 2)
    story.ready("b")
    story.wait(LIMITS.sync_wait_s / 2 + 0.1)
    plan = story.plan()
    assert [c.site_id for c in plan.contributors] == [1, 2]
    assert [r.site_id for r in plan.receivers] == [3]


def test_7_a_contributor_that_beats_but_does_nothing_is_evicted() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.done("a", "s0")
    for i in range(15):
        story.says("a", m.Heartbeat(phase="waiting for commit", moved_bytes=i))  # payloads go to b
        story.says("b", m.Heartbeat(phase="exchanging", moved_bytes=i))
        story.wait(1.0)
    assert story.contributor_ids() == [1, 2]
    assert "evicted c (site 3): it is connected, but has made no progress in sync 1" in "\n".join(story.log)


def test_7_if_all_others_are_done_it_is_not_even_an_attempt() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.done("a", "s0")
    story.done("b", "s0")
    story.wait(2 * LIMITS.stall_s + 2 * LIMITS.heartbeat_s)
    assert story.last("a", m.Commit).attempt == 1


def test_a_contributor_whose_bytes_move_is_not() -> None:
    story = a_story()
    story.start("a", "b")
    planned(story, "a", "b")
    for i in range(40):
        for name in "ab":
            story.says(name, m.Heartbeat(phase="exchanging", moved_bytes=i, sent_bytes=i))
        story.wait(1.0)
    assert story.plan().attempt == 1


def test_a_site_that_sends_but_does_not_hear_is_lost() -> None:
    story = a_story()
    story.start("a", "b")
    story.sites["b"].hears = False
    story.wait(LIMITS.lease_s + LIMITS.heartbeat_s + 0.1)
    assert story.num("b", m.Evicted) == 1
    assert story.sites["b"].stream is None
    assert "has heard nothing" in "\n".join(story.log)
    assert story.sites["a"].stream is not None


def test_a_stream_without_hello_is_closed() -> None:
    story = a_story()
    story.happens(e.StreamOpened(77))
    end, outputs = story.now + LIMITS.lease_s, []
    while story.now < end:
        story.now = story.core.next_deadline() or end
        outputs += story.core.handle([e.Tick()], story.now, story.wall_s)
    assert [o for o in outputs if isinstance(o, e.CloseStream)]


def test_time_stands_still_while_the_coordinator_does() -> None:
    time = OwnTime(tolerance_s=2)
    assert time.advance(10, due=9) == (10, 0)
    assert time.advance(11, due=9) == (11, 0), "a little late is not stopped"
    assert time.advance(111, due=12) == (12, 99)
    assert time.at(112) == 13
    assert time.outer(13) == 112
    assert time.advance(500, due=None) == (401, 0), "nothing was due"


def test_a_short_delay_of_the_coordinator_is_no_pause() -> None:
    story = a_story()
    story.start("a", "b")
    story.hang("b")
    while story.num("b", m.Evicted) == 0:
        story.now = (story.core.next_deadline() or 0) + LIMITS.lease_s / 3
        story.happens(e.Tick())
        story.says("a", m.Heartbeat(phase="training"))
    assert "stood still" not in "\n".join(story.log)
    assert story.num("a", m.Evicted) == 0


# --- who is who


def test_a_reconnect_within_the_grace_costs_nothing() -> None:
    story = a_story()
    story.start("a", "b")
    plan = planned(story, "a", "b")
    story.drop("b")
    story.wait(0.5)
    story.connect("b", state=(0, "s0"))
    assert with_weights(story.last("b", m.Plan), story.last("b", m.Weights).tokens) == plan
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.MEMBER
    story.done("a", "s0")
    story.done("b", "s0")
    assert story.last("b", m.Commit).attempt == 1


def test_a_new_stream_of_the_same_start_replaces_the_old_one_without_a_word_on_it() -> None:
    story = a_story()
    story.start("a", "b")
    old = story.sites["b"].stream
    story.connect("b", state=(0, "s0"))
    assert story.num("b", m.Refused) == 0, "Refused on the old stream would end the node"
    assert story.sites["b"].stream != old
    story.wait(5)
    assert story.num("b", m.Evicted) == 0


def test_a_new_start_supersedes_at_once() -> None:
    story = a_story()
    story.start("a", "b")
    planned(story, "a", "b")
    story.done("b", "s0")
    story.connect("b", incarnation=2, state=(0, "s0"))
    assert story.last("b", m.Refused).kind is RefusedKind.SUPERSEDED
    assert story.last("b", m.Welcome).site_id == 2, "the id stays"
    assert story.contributor_ids() == [1]
    assert story.plan().attempt == 2, "its Done is void"


def test_an_evicted_site_hears_it_when_it_comes_back_on_another_stream() -> None:
    story = a_story()
    story.start("a", "b")
    story.drop("b")
    story.wait(1.5)
    story.connect("b", state=(0, "s0"))
    assert story.num("b", m.Evicted) == 1
    story.offer("b")
    assert story.num("b", m.Admitted) == 1, "not before it has said Hello again"
    story.connect("b", state=(0, "s0"), again=True)
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.MEMBER
    assert isinstance(story.last("b", m.Open), m.Open)


def test_eviction_outlives_a_restart() -> None:
    story = a_story()
    story.start("a", "b")
    story.drop("b")
    story.wait(1.5)
    story.restart()
    story.connect("b", state=(0, "s0"))
    assert story.num("b", m.Evicted) == 1


def test_6_ids_are_never_used_again() -> None:
    story = a_story()
    story.start("a", "b")
    story.leave("b")
    story.join("c")
    story.restart()
    story.join("d")
    assert [story.sites[n].site_id for n in "abcd"] == [1, 2, 3, 4]


def test_a_site_that_never_offers_leaves_no_trace() -> None:
    story = a_story()
    story.connect("a")
    story.drop("a")
    assert not story.known_sites()
    story.connect("a", key="another")
    assert story.num("a", m.Refused) == 0


@pytest.mark.parametrize("kind", ["run", "incarnation", "site", "term", "version"])
def test_4_a_foreign_header_ends_the_stream_with_both_values(kind: str) -> None:
    story = a_story()
    story.start("a", "b")
    header = m.Header(
        protocol_version=PROTOCOL_VERSION + (kind == "version"),
        run_id="other" if kind == "run" else "run",
        site_id=2 if kind == "site" else 1,
        incarnation=9 if kind == "incarnation" else 1,
        term=9 if kind == "term" else 1,
    )
    stream = story.sites["a"].stream
    assert stream is not None
    story.happens(e.Received(stream, header, m.Heartbeat(phase="x")))
    refused = story.last("a", m.Refused)
    assert refused.kind is RefusedKind.INVALID
    assert story.sites["b"].stream is not None


def test_a_message_before_hello_is_refused() -> None:
    story = a_story()
    outputs = [*story.core.handle([e.StreamOpened(5)], 100.0, story.wall_s)]
    header = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run", incarnation=1)
    outputs = story.core.handle([e.Received(5, header, m.Leave(reason="x"))], 100.0, story.wall_s)
    assert [type(o) for o in outputs if not isinstance(o, e.Report)] == [e.Send, e.CloseStream]


def test_what_comes_together_is_decided_once() -> None:
    story = a_story()
    story.start("a", "b")
    with story.together():
        story.ready("a", tokens=1)
        story.ready("b", tokens=3)
    plan = story.plan()
    assert [c.tokens for c in plan.contributors] == [1, 3]
    with story.together():
        story.done("a", "s0")
        story.done("b", "s0")
    assert story.num("a", m.Commit) == story.num("b", m.Commit) == 1
    assert story.view.num_attempts == 1


def test_heartbeats_of_one_site_do_not_put_off_what_is_due_for_another() -> None:
    story = a_story()
    story.start("a", "b")
    stream = story.sites["a"].stream
    assert stream is not None
    header = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run", site_id=1, incarnation=1)
    before = story.core.next_deadline()
    for tenths in range(1, 40):
        beat = e.Received(stream, header, m.Heartbeat(phase="training"))
        outputs = story.core.handle([beat], story.now + tenths / 10, story.wall_s)
        if tenths == 1:
            assert outputs == [], "nothing follows"
            assert story.core.next_deadline() == before
    gone = [site for site in story.core.view(story.now + 4).sites if site.state.startswith("gone: silent")]
    assert [(site.name, site.state_kind) for site in gone] == [("b", "gone")], (
        "though nothing but heartbeats woke the core"
    )


@pytest.mark.parametrize("kind", [e.Malformed, e.Garbled])
def test_malformed_bytes_cost_one_stream(kind: type[e.Malformed] | type[e.Garbled]) -> None:
    story = a_story()
    story.start("a", "b")
    stream = story.sites["a"].stream
    assert stream is not None
    story.happens(kind(stream, "truncated"))
    assert story.num("a", m.Refused) == (1 if kind is e.Malformed else 0), "a spoiled link is no reason to go"
    assert story.sites["a"].stream is None
    assert story.sites["b"].stream is not None
    assert story.view.num_malformed == 1
    story.connect("a", state=(0, "s0"))
    assert story.num("a", m.Evicted) == 0, "it may come back within the grace"


# --- states and sources


def test_one_holder_attests_where_one_site_is_enough() -> None:
    story = a_story(min_sites=1)
    story.start("a")
    assert story.attested(0) == a_hash("s0")
    assert story.num("a", m.Open) == 1


def test_a_claim_of_another_commit_0_loses() -> None:
    story = a_story()
    story.join("a")
    story.join("b")
    story.applied("a", 0, "s0")
    story.applied("b", 0, "different")
    assert story.num("b", m.Evicted) == 1
    assert story.attested(0) is None


def test_only_a_saved_model_seeds_a_resumed_run() -> None:
    parent = json.dumps({"run_id": "p", "commit": 3, "run_step": 20, "run_tokens": 7})
    story = Story(some_settings(steps=40), parent)
    story.join("a")
    assert story.last("a", m.Admitted).admitted_as is AdmittedAs.JOINER
    assert "a site has to bring the saved model" in story.view.state
    story.join("b", saved=True)
    assert story.view.state == "waiting for state"
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.SEEDER
    story.applied("b", 0, "s0")
    story.applied("a", 0, "s0")
    opened = story.last("a", m.Open)
    assert (opened.run_step, opened.run_tokens) == (20, 7)
    assert story.last("a", m.Welcome).parent_json == parent


def test_a_resumed_run_that_is_at_its_end_says_so() -> None:
    parent = json.dumps({"run_id": "p", "commit": 3, "run_step": 40, "run_tokens": 7})
    story = Story(some_settings(steps=40, min_sites=1), parent)
    story.join("a", saved=True)
    story.applied("a", 0, "s0")
    assert story.view.finished
    assert "already at step 40" in story.view.state


def test_a_state_beyond_the_log_is_refused() -> None:
    story = a_story(min_sites=1)
    story.start("a")
    story.connect("b", state=(5, "s5"))
    assert story.last("b", m.Refused).kind is RefusedKind.STATE
    story.applied("a", 3, "s3")
    assert story.last("a", m.Refused).kind is RefusedKind.STATE


def test_a_state_older_than_the_log_is_fetched_anew() -> None:
    story = a_story(min_sites=1, steps=1000)
    story.start("a")
    for n in range(12):
        story.commit_one("a", state=f"s{n}", following=f"s{n + 1}")
    story.join("b", state=(2, "s2"))
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.JOINER
    story.join("c", state=(9, "s9"))
    assert story.last("c", m.Admitted).admitted_as is AdmittedAs.MEMBER
    story.sources("c", after=9)
    sources = story.last("c", m.Sources)
    assert [c.commit for c in sources.commits] == [10, 11, 12]
    assert [(d.site_id, d.commit) for d in sources.donors] == [(1, 12)]
    assert sources.attested[-1] == m.Attestation(commit=12, state_hash=a_hash("s12"))


def test_a_long_run_restarts_without_naming_a_seeder() -> None:
    story = a_story(min_sites=1, steps=1000)
    story.start("a")
    for n in range(12):
        story.commit_one("a", state=f"s{n}", following=f"s{n + 1}")
    story.restart()
    story.join("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.JOINER
    story.connect("a", state=(12, "s12"))
    story.offer("a")
    assert story.last("a", m.Admitted).admitted_as is AdmittedAs.MEMBER
    story.commit_one("a", state="s12", following="s13")
    assert story.last_commit() == 13


def test_commits_reach_the_store_once() -> None:
    story = a_story(min_sites=1, steps=50)
    story.start("a")
    for n in range(5):
        story.commit_one("a", state=f"s{n}", following=f"s{n + 1}")
    assert story.view.finished
    assert [point[:2] for point in story.view.losses] == [(n, 10 * n) for n in range(1, 6)]


# --- length and end


def test_44_the_last_sync_is_shortened_to_the_length() -> None:
    story = a_story(min_sites=1, steps=25)
    story.start("a")
    for n in range(3):
        story.commit_one("a", state=f"s{n}", following=f"s{n + 1}")
    commits = [c for who, c in story.sent if who == "a" and isinstance(c, m.Commit)]
    assert [c.run_step for c in commits] == [10, 20, 25]
    assert commits[-1].final
    assert commits[-1].next is None


def test_44_a_length_in_tokens_is_estimated_from_the_last_commit() -> None:
    story = a_story(min_sites=1, steps=0, tokens=250)
    story.start("a")
    assert story.last("a", m.Open).num_steps == 10
    story.commit_one("a", state="s0", following="s1")  # 100 tokens
    story.commit_one("a", state="s1", following="s2")
    assert story.last("a", m.Commit).next.num_steps == 5
    story.commit_one("a", state="s2", following="s3")
    assert story.view.finished


def test_stopping_without_sites_ends_at_once() -> None:
    story = a_story()
    story.happens(e.StopAsked("enough"))
    assert story.view.state == "finished: enough"
    story.restart()
    assert story.view.finished


def test_a_stop_outlives_a_restart() -> None:
    story = a_story()
    story.start("a", "b")
    story.happens(e.StopAsked("enough"))
    story.restart()
    for name in "ab":
        story.connect(name, state=(0, "s0"))
        story.offer(name)
    planned(story, "a", "b")
    story.done("a", "s0")
    story.done("b", "s0")
    assert story.last("a", m.Commit).final


def test_a_joiner_at_the_end_is_told_that_the_run_is_over() -> None:
    story = a_story(min_sites=1, steps=10)
    story.start("a")
    story.join("b")
    story.ready("a")
    story.done("a", "s0")
    assert story.num("b", m.Commit) == 0
    assert story.last("b", m.Finished).commit == 1
    story.sources("b")
    assert story.num("b", m.Sources) == 1, "a still holds the state"


def test_when_all_are_gone_the_run_pauses_and_goes_on() -> None:
    story = a_story()
    story.start("a", "b")
    story.leave("a")
    story.leave("b")
    assert story.view.state == "paused: no site is here"
    story.join("a", incarnation=2, state=(0, "s0"))
    assert story.view.state == "training"
    assert story.last("a", m.Open).sync == 1


@pytest.mark.parametrize("strangers", ["x", "xyz"])
def test_8_who_brings_no_room_to_reduce_does_not_pause_the_run(strangers: str) -> None:
    story = a_story(min_sites=3, quorum=1, steps=1000)
    for name in "abc":
        story.connect(name)
        story.offer(name, retain=200)
        story.applied(name, 0, "s0")
    story.commit_one("a", "b", "c", state="s0", following="s1")
    for name in strangers:
        story.connect(name, state=(1, "s1"))
        story.offer(name, retain=0)
    for number in (1, 2, 3):
        for name in (*"abc", *strangers):
            story.ready(name)
        assert story.contributor_ids() == [1, 2, 3]
        for name in "abc":
            story.done(name, f"s{number}")
        for name in (*"abc", *strangers):
            story.applied(name, number + 1, f"s{number + 1}")
    assert story.view.last_commit == 4
    assert "there is no room to reduce what they contribute" in "\n".join(story.log)


def test_contributions_that_fit_nowhere_pause_with_the_reason() -> None:
    story = a_story(min_sites=1)
    story.connect("a")
    story.offer("a", retain=10)
    story.applied("a", 0, "s0")
    story.ready("a")
    assert story.view.state.startswith("paused: the reducers may retain 10 bytes")
    story.wait(5)
    story.happens(e.StopAsked("enough"))
    assert story.view.state.startswith("finished: enough (the reducers may retain 10 bytes"), (
        "as where none can be dialled"
    )


# --- the view


def test_the_view_is_json_and_says_what_people_ask() -> None:
    story = a_story()
    story.start("a", "b")
    story.says("a", m.Heartbeat(phase="training", inner_step=7, steps_per_s=2.5, train_s=9.0, wait_s=1.0))
    story.commit_one("a", "b", state="s0", following="s1")
    document = json.loads(json.dumps(asdict(story.view)))
    assert document["state"] == "training"
    (a, b) = document["sites"]
    assert (a["name"], a["state"], a["state_kind"], a["inner_step"]) == ("a", "member", "member", 7)
    assert a["last_commit"] == 1
    assert a["utilization"] == 0.9
    assert b["utilization"] is None
    assert document["commits"][0]["contributors"] == ["a", "b"]
    assert document["commits"][0]["state_hash"] == a_hash("s1").hex()
    assert document["losses"] == [[1, 10, 200, 2.0]]
    assert document["syncs"][0]["wait"] == "not ready yet: a (site 1), b (site 2)"


def test_a_commit_has_the_digest_of_those_that_are_still_there() -> None:
    story = a_story(min_sites=3)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.done("a", "s0", payloads="wrong")
    story.leave("a")
    story.done("b", "s0")
    story.done("c", "s0")
    assert story.last("b", m.Commit).payload_digest == a_hash("p")


def test_a_contributor_that_fetches_its_own_commit_hears_of_the_next_sync() -> None:
    story = a_story(quorum=2)
    story.start("a", "b")
    planned(story, "a", "b")
    story.done("a", "s0")
    story.drop("a")  # its node is killed before the commit comes
    story.done("b", "s0")
    story.applied("b", 1, "s1")
    story.connect("a", incarnation=2, state=(0, "s0"))
    story.offer("a")
    before = story.num("a", m.Open)
    story.sources("a", after=0)
    story.applied("a", 1, "s1")
    assert story.num("a", m.Open) == before + 1
    story.ready("a")
    story.ready("b")
    assert story.plan().sync == 2


def test_a_contributor_that_failed_by_itself_and_fetched_the_commit_hears_of_the_next_sync() -> None:
    story = a_story()
    story.start("a", "b")
    planned(story, "a", "b")
    story.done("b", "s0")
    story.failed("a", text="EIO")
    assert story.num("a", m.Commit) == 1
    before = story.num("a", m.Open)
    story.sources("a", after=0)
    story.applied("a", 1, "s1")
    assert story.num("a", m.Open) == before + 1


def test_a_failure_of_one_site_in_one_sync_does_not_pause_the_run_for_ever() -> None:
    story = a_story(quorum=2)
    story.start("a", "b")
    planned(story, "a", "b")
    story.failed("a", text="disk full for a moment")
    assert story.num("a", m.Abandoned) == 1
    story.ready("a")
    story.ready("b")
    story.wait(story.limits.heartbeat_s)
    assert (story.plan().sync, story.plan().attempt) == (2, 1)


def test_progress_that_was_discarded_never_meets_the_old_contribution_in_one_sync() -> None:
    """Peers hold what the site sent, keyed by sync, site, incarnation and chunk."""
    story = a_story(quorum=2)
    story.start("a", "b")
    planned(story, "a", "b")
    story.drop("a")
    story.wait(10)
    assert story.view.num_evicted == 1
    story.connect("a", state=(0, "s0"))
    story.connect("a", state=(0, "s0"), again=True)
    story.offer("a")
    story.ready("a", tokens=250)
    assert story.num("b", m.Abandoned) == 1
    story.ready("a", tokens=250)
    story.ready("b")
    story.wait(story.limits.heartbeat_s)
    plan = story.plan()
    assert (plan.sync, plan.attempt) == (2, 1)
    assert [(c.incarnation, c.tokens) for c in plan.contributors] == [(1, 250), (1, 100)]


def test_a_restarted_coordinator_knows_whose_contribution_was_discarded() -> None:
    story = a_story(min_sites=3, quorum=2)
    story.start("a", "b", "c")
    planned(story, "a", "b", "c")
    story.drop("c")
    story.wait(1.1)
    assert story.contributor_ids() == [1, 2]
    story.restart()
    for name in "ab":
        story.connect(name, state=(0, "s0"))
        story.offer(name)
        story.ready(name)
    story.connect("c", state=(0, "s0"))
    story.connect("c", state=(0, "s0"), again=True)
    story.offer("c")
    story.ready("c", tokens=250)
    story.leave("b")
    assert story.num("a", m.Abandoned) == 1
    story.ready("a")
    story.ready("c", tokens=250)
    story.wait(story.limits.heartbeat_s)
    assert {c.site_id: c.tokens for c in story.plan().contributors} == {1: 100, 3: 250}


def test_when_nobody_holds_the_state_any_more_the_status_says_so() -> None:
    story = a_story(min_sites=1)
    story.start("a")
    story.leave("a")
    story.connect("b")
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.JOINER
    assert story.view.state == "paused: no site that is here holds the state of commit 0; start one that did"
    story.connect("a", incarnation=2, state=(0, "s0"))
    story.offer("a")
    assert story.view.state == "training"


def test_a_word_that_is_repeated_does_not_undo_the_question_for_sources() -> None:
    """Both lost the commit with the coordinator. A node asks for sources, and says once more what it holds."""
    story = a_story()
    story.start("a", "b")
    planned(story, "a", "b")
    story.done("a", "s0")
    story.done("b", "s0")
    story.restart()
    story.connect("a", incarnation=2, state=(0, "s0"))
    story.offer("a")
    story.sources("a", after=0)
    story.applied("a", 0, "s0")
    assert not story.last("a", m.Sources).donors
    story.connect("b", incarnation=2, state=(0, "s0"))
    story.offer("b")
    for name in "ba":
        before = story.num(name, m.Open)
        story.sources(name, after=0)
        story.applied(name, 0, "s0")
        story.applied(name, 1, "s1")
        assert story.num(name, m.Open) == before + 1
        assert story.last(name, m.Open).sync == 2
        assert [d.site_id for d in story.last("a", m.Sources).donors] == [2], "asked once, told as soon as there is one"


def test_a_site_alone_whose_contribution_was_discarded_contributes_to_the_next_sync() -> None:
    story = a_story(min_sites=1)
    story.start("a")
    planned(story, "a")
    story.drop("a")
    story.wait(10)
    assert story.view.num_evicted == 1
    story.connect("a", state=(0, "s0"))
    story.connect("a", state=(0, "s0"), again=True)
    story.offer("a")
    assert story.num("a", m.Abandoned) == 1
    story.ready("a")
    story.wait(story.limits.heartbeat_s)
    assert (story.plan().sync, story.plan().attempt) == (2, 1)


def test_who_lost_the_last_word_hears_the_last_commit_and_can_apply_it_from_its_own_log() -> None:
    """The only contributor is killed before it hears of the last commit: its disk is the only place with the result."""
    story = a_story(min_sites=1, steps=10)
    story.start("a")
    planned(story, "a")
    story.says("a", m.Heartbeat(phase="exchanging"))
    done = story.plan()
    story.done("a", "s0", plan=done)
    assert story.view.finished
    story.drop("a")
    story.wait(10)
    before = story.num("a", m.Commit)
    story.connect("a", incarnation=2, state=(0, "s0"))
    assert story.num("a", m.Commit) == before + 1
    assert story.last("a", m.Commit).final
    assert story.last("a", m.Finished).commit == 1
    story.sources("a", after=0)  # it has not: nobody serves it any more
    assert story.num("a", m.Finished) == 2
    story.connect("b", state=(0, "another"))
    assert story.num("b", m.Commit) == 0
    assert story.last("b", m.Finished).commit == 1


def test_who_asks_for_sources_as_the_run_ends_goes_by_its_own_log_until_that_ends() -> None:
    """It may be the only one that has the last commit."""
    story = Story(some_settings(min_sites=1, steps=10))
    story.start("a")
    story.ready("a")
    story.done("a", "s0")
    story.sources("a", after=0)  # said before it has heard of the commit
    assert [c.commit for c in story.last("a", m.Sources).commits] == [1]
    assert not story.num("a", m.Refused)
    story.sources("a", after=0, lacks=1)
    assert story.num("a", m.Refused) == 1
