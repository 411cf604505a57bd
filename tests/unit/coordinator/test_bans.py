"""Sites that a person does not want in the run, and a start that is taken back."""

from __future__ import annotations

import logging

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import bans
from atoll.protocol import messages as m
from atoll.protocol.messages import AdmittedAs, RefusedKind
from tests.harness.coordinator_story import Story, a_hash, some_settings
from tests.unit.coordinator.test_disputes import differing, show


def training(*names: str) -> Story:
    story = Story(some_settings(min_sites=2))
    story.start(*names)
    return story


@pytest.fixture
def a_short_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bans, "OVER_S", 2000.0)  # sites beat every second of the story


@pytest.mark.parametrize("restarted", [False, True])
def test_a_site_that_is_banned_is_refused_by_name_and_by_key_until_it_is_let_in(restarted: bool) -> None:
    story = training("a", "b", "c")
    assert story.ban("c", "sends garbage") == ""
    refused = story.last("c", m.Refused)
    assert refused.kind is RefusedKind.BANNED
    assert "banned from run 'run': sends garbage" in refused.text
    assert story.sites["c"].stream is None
    if restarted:
        story.restart()
    assert story.view.banned == ("c: sends garbage",)
    assert [s.state for s in story.view.sites if s.name == "c"] == ["gone: banned: sends garbage"]
    for name, key in (("c", "c"), ("c", "another"), ("d", "c")):
        before = story.num(name, m.Refused)
        story.connect(name, incarnation=2, key=key)
        assert story.num(name, m.Refused) == before + 1, (name, key)
        assert story.last(name, m.Refused).kind is RefusedKind.BANNED
    story.connect("e")
    assert not story.num("e", m.Refused)
    assert story.lift_ban("c") == ""
    story.connect("c", incarnation=3)
    story.offer("c")
    assert story.last("c", m.Admitted).site_id == 3
    story.restart()
    assert not story.view.banned


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("done", ["", "a", "ab", "ac"])
def test_what_a_banned_site_contributed_is_not_in_the_open_syncs_commit(done: str, restarted: bool) -> None:
    """Also where all others have averaged with it, and were it lost nothing would be missing."""
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name in done:
        story.done(name, "s0")
    story.ban("c", "sends garbage")
    assert story.view.last_commit == 0
    if restarted:
        story.restart()
        for name in "ab":
            story.connect(name)
    assert [member.site_id for member in story.plan().contributors] == [1, 2]
    for name in "ab":
        story.done(name, "s0")
    assert [(c.commit, c.contributors) for c in story.view.commits] == [(1, ("a", "b"))]


def test_a_ban_that_is_over_before_anything_is_decided_leaves_nothing_of_its_site_in_the_commit() -> None:
    """As in a dispute, or where much comes together."""
    story = Story(some_settings(min_sites=3))
    story.start("a", "b", "c")
    for name in "abc":
        story.ready(name)
    for name in "ac":
        story.done(name, "s0")
    with story.together():
        story.done("b", "s0")
        story.happens(e.BanAsked(name="c", reason="sends garbage", request=7))
        story.happens(e.LiftBanAsked(name="c", request=8))
    assert story.view.last_commit == 0
    assert [member.site_id for member in story.plan().contributors] == [1, 2]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_ban_is_lifted_by_itself_when_its_time_is_over(restarted: bool) -> None:
    story = training("a", "b", "c")
    assert story.ban("c", "sends garbage", until_s=story.wall_s + 100) == ""
    assert "banned from run 'run': sends garbage until 20" in story.last("c", m.Refused).text
    if restarted:
        story.restart()
    story.wait(99)
    assert story.view.banned == ("c: sends garbage",)
    story.connect("c", incarnation=2)
    assert story.last("c", m.Refused).kind is RefusedKind.BANNED
    story.wait(2)
    assert not story.view.banned
    assert not story.bans_due(), "nothing is left of a ban that is over"
    story.connect("c", incarnation=3)
    story.offer("c")
    assert story.last("c", m.Admitted).site_id == 3
    story.restart()
    assert not story.view.banned


def test_a_ban_that_was_over_while_there_was_no_coordinator_is_lifted_as_it_starts() -> None:
    story = training("a", "b", "c")
    story.ban("c", until_s=story.wall_s + 100)
    story.wall_from_s += 1000
    story.restart()
    story.happens(e.Tick())
    assert not story.view.banned


@pytest.mark.usefixtures("a_short_day")
@pytest.mark.parametrize("restarted", [False, True])
def test_a_ban_that_ended_by_a_clock_that_was_ahead_holds_again_when_that_is_set_right(restarted: bool) -> None:
    """The coordinator had started meanwhile, and the site had come in. Others hear of it."""
    story = Story(some_settings(min_sites=2))
    for number, name in enumerate("abc"):
        story.happens(e.InviteAsked(role="site", name=name, invite_id=name, life_s=9999, request=10 + number))
        story.happens(e.JoinAsked(invite_id=name, key_digest=a_hash(name), request=20 + number))
        story.connect(name, certified=e.Certified(name, a_hash(name)))
        story.offer(name)
    story.ban("c", "lies", until_s=story.wall_s + 1000)
    story.wall_from_s += 5000
    story.restart()
    for name in "ab":
        story.connect(name, incarnation=2, certified=e.Certified(name, a_hash(name)))
    story.happens(e.Tick())
    assert not story.view.banned
    assert story.last("a", m.Banned).names == ()
    story.connect("c", incarnation=2, certified=e.Certified("c", a_hash("c")))
    assert story.sites["c"].stream is not None
    story.wall_from_s -= 5000
    if restarted:
        story.restart()
        for name in "ac":
            story.connect(name, incarnation=3, certified=e.Certified(name, a_hash(name)))
    story.happens(e.Tick())
    assert story.view.banned == ("c: lies",)
    assert story.last("c", m.Refused).kind is RefusedKind.BANNED
    assert story.sites["c"].stream is None
    assert story.last("a", m.Banned).names == ("c",)
    assert any(entry.outcome.startswith("holds again until") for entry in story.audit_log())
    story.wait(1001)
    assert not story.view.banned
    story.wait(bans.OVER_S)
    story.wall_from_s -= 2 * bans.OVER_S
    story.happens(e.Tick())
    assert not story.view.banned, "after a day it is forgotten"
    story.restart()
    assert not story.view.banned


@pytest.mark.usefixtures("a_short_day")
@pytest.mark.parametrize("days", [0.5, 2])
def test_what_is_held_against_a_site_is_forgotten_by_a_person_also_when_its_ban_is_over(days: float) -> None:
    story = training("a", "b", "c")
    story.set_strikes("c", 2)
    story.ban("c", "lies", until_s=story.wall_s + 100)
    key = a_hash("c")
    story.wait(101)
    story.wait(days * bans.OVER_S)
    assert (story.view.banned, story.strikes_of("c")) == ((), 2)
    assert story.lift_ban("c") == ""
    assert story.strikes_of("c") == 0
    story.wall_from_s -= 2 * days * bans.OVER_S
    story.happens(e.Tick())
    assert not story.view.banned, "a clock that is set back brings nothing again"
    assert story.lift_ban("c").startswith("'c' is not banned")
    assert key


def test_a_ban_within_a_day_of_one_that_is_over_has_its_key_too() -> None:
    story = training("a", "b")
    story.happens(e.InviteAsked(role="site", name="c", invite_id="c", life_s=9999, request=10))
    story.happens(e.JoinAsked(invite_id="c", key_digest=a_hash("c"), request=20))
    story.ban("c", "lies", until_s=story.wall_s + 100)
    story.wait(101)
    story.ban("c", "lies again")
    story.connect("d", certified=e.Certified("d", a_hash("c")))
    assert story.last("d", m.Refused).kind is RefusedKind.BANNED


def test_all_names_of_a_key_are_sent_away_and_named_to_others() -> None:
    story = Story(some_settings(min_sites=2))
    for number, (name, key) in enumerate((("a", "a"), ("berlin", "k"), ("munich", "k"), ("bonn", "k"))):
        story.happens(e.InviteAsked(role="site", name=name, invite_id=f"i{number}", request=10))
        story.happens(e.JoinAsked(invite_id=f"i{number}", key_digest=a_hash(key), request=11))
        if name != "bonn":  # it has certificates, and never came
            story.connect(name, certified=e.Certified(name, a_hash(key)))
            story.offer(name)
    story.ban("berlin", "stolen")
    for name in ("berlin", "munich"):
        assert story.last(name, m.Refused).kind is RefusedKind.BANNED
    assert {cause: num for cause, num in story.view.evictions if num} == {"operator": 2}
    assert story.sites["a"].stream is not None
    assert story.last("a", m.Banned).names == ("berlin", "bonn", "munich")


def test_a_ban_of_a_site_that_joined_and_never_came_knows_its_key() -> None:
    story = Story(some_settings(min_sites=2))
    for number, key in ((1, "old"), (2, "k")):
        story.happens(e.InviteAsked(role="site", name="berlin", invite_id=f"i{number}", request=number))
        story.happens(e.JoinAsked(invite_id=f"i{number}", key_digest=a_hash(key), request=10 + number))
    story.ban("berlin")
    story.connect("munich", certified=e.Certified("munich", a_hash("k")))
    assert story.last("munich", m.Refused).kind is RefusedKind.BANNED


def test_a_duration_counts_by_the_coordinators_clock_and_a_ban_that_is_over_refuses_nobody() -> None:
    story = training("a", "b", "c")
    story.happens(e.BanAsked(name="c", reason="?", for_s=100.0, request=5))
    assert "until 2025-11-24 16:01:40 UTC" in story.last("c", m.Refused).text
    banned = "c is banned from run 'run': ?"
    assert banned in story.certified_refusal("c", a_hash("c"), story.wall_s)
    assert banned in story.certified_refusal("c", a_hash("c"), story.wall_s + 101), "a clock alone lifts nothing"
    story.wait(99)
    assert banned in story.certified_refusal("c", a_hash("c"), story.wall_s)
    assert banned not in story.certified_refusal("c", a_hash("c"), story.wall_s + 2), "though nothing has lifted it"


def test_a_clock_that_is_set_forward_ends_no_ban_and_that_is_said() -> None:
    story = training("a", "b", "c")
    story.ban("c", "lies", until_s=story.wall_s + 1000)
    story.wall_from_s += bans.STEP_S
    story.happens(e.Tick())
    assert not [text for _, text in story.reports if "clock was set forward" in text]
    story.wall_from_s += 5000
    story.happens(e.Tick())
    said = [text for level, text in story.reports if level == logging.WARNING and "clock was set forward" in text]
    assert len(said) == 1
    assert "by 5000 s, or the machine slept; that shortens no ban (of c)" in said[0]
    assert any(entry.what == "clock" for entry in story.audit_log())
    story.wait(1000 - bans.STEP_S - 1)
    assert story.view.banned == ("c: lies",)
    story.connect("c", incarnation=2)
    assert story.last("c", m.Refused).kind is RefusedKind.BANNED
    deadline = story.core.next_deadline()
    assert deadline is not None
    assert deadline > story.now, "it does not look again and again"
    story.wait(2)
    assert not story.view.banned, "as much time as it was to hold has gone by"
    story.connect("c", incarnation=3)
    story.offer("c")
    assert story.last("c", m.Admitted).site_id == 3


def test_a_clock_that_was_behind_and_is_set_right_shortens_no_ban_either_and_later_ones_end_when_they_say() -> None:
    story = training("a", "b", "c", "d")
    story.ban("c", "lies", until_s=story.wall_s + 1000)
    story.wall_from_s += 5000
    story.ban("d", "lies", until_s=story.wall_s + 500)
    story.wait(499)
    assert list(story.view.banned) == ["c: lies", "d: lies"]
    story.wait(2)
    assert list(story.view.banned) == ["c: lies"]
    assert story.lift_ban("c") == ""
    assert not story.view.banned


def test_the_coordinator_wakes_up_when_a_ban_is_over() -> None:
    story = Story(some_settings(min_sites=2))
    story.happens(e.Tick())
    assert story.core.next_deadline() is None, "nothing is waited for"
    story.ban("c", until_s=story.wall_s + 100)
    assert story.core.next_deadline() == story.now + 100


def test_a_ban_of_a_name_that_is_forgotten_keeps_the_key() -> None:
    story = training("a", "b")
    story.connect("c")
    story.ban("c")
    story.restart()
    assert all(site.name != "c" for site in story.view.sites), "it was never admitted"
    story.ban("c", "again")
    story.connect("d", key="c")
    assert story.last("d", m.Refused).kind is RefusedKind.BANNED


def test_a_later_ban_takes_the_place_of_the_one_before_and_knows_the_key() -> None:
    story = training("a", "b", "c")
    story.ban("c", until_s=story.wall_s + 100)
    story.restart()
    story.ban("c")
    story.wait(200)
    story.connect("d", key="c")
    assert story.last("d", m.Refused).kind is RefusedKind.BANNED
    for until_s in (story.wall_s, 1.0, -1e300, 1e300):
        assert "the end of the ban is" in story.ban("c", until_s=until_s)


def test_what_it_contributed_is_left_out() -> None:
    story = training("a", "b", "c")
    for name in "abc":
        story.ready(name)
    story.done("a", "s0")
    story.ban("c")
    story.wait(story.limits.heartbeat_s)
    assert story.contributor_ids() == [1, 2]
    for name in "ab":
        story.done(name, "s0")
    assert story.view.last_commit == 1


def test_a_site_that_is_only_evicted_may_come_back() -> None:
    story = training("a", "b")
    assert story.evict("b") == ""
    assert story.num("b", m.Evicted) == 1
    assert not story.num("b", m.Refused)
    story.connect("b", again=True)
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.JOINER


def test_names_that_are_not_known_are_said_and_may_be_banned_before_they_come() -> None:
    story = training("a", "b")
    assert "no site of run 'run' is called 'x'" in story.evict("x")
    assert "'x' is not banned" in story.lift_ban("x")
    story.leave("b")
    assert "b (site 2) is not in the run" in story.evict("b")
    assert story.ban("x") == ""
    story.connect("x")
    assert story.last("x", m.Refused).kind is RefusedKind.BANNED
    story.connect("y")
    assert not story.num("y", m.Refused), "no key is banned"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "atoll-invite:" + "A" * 900])
def test_what_is_no_name_of_a_site_is_not_banned(name: str) -> None:
    """All sites are to keep it, by messages that have bounds."""
    story = training("a", "b")
    assert "is no name of a site" in story.ban(name)
    assert not story.view.banned


def test_who_bans_a_name_that_was_never_here_is_told_which_were() -> None:
    story = training("a", "b")
    story.leave("b")
    found = "banned, though no site of that name is known here; known are a, b"
    assert story.ban("x", by="operator ann") == ""
    assert story.found == found
    assert story.audit_log()[-1].outcome == found
    story.ban("b")
    assert story.found == "", "it was here"
    story.restart()
    story.ban("b")
    assert story.found == "", "also if the store alone knows it"
    story.ban("x")
    assert story.found == found


def test_of_many_names_some_are_said() -> None:
    story = training(*(f"site{i:02}" for i in range(25)))
    story.ban("site99")
    names = ", ".join(f"site{i:02}" for i in range(bans.MOST_NAMES))
    assert story.found == f"banned, though no site of that name is known here; known are {names} and 5 more"


def test_a_dispute_that_nobody_can_settle_ends_when_one_side_is_banned() -> None:
    story = differing(hides="ab")
    assert "a (site 1)" in story.view.state
    assert "b (site 2)" in story.view.state
    assert "ban those that you do not trust (atoll ban NAME)" in story.view.state
    story.ban("b", "its disk is bad")
    assert story.view.state == "training"
    assert story.attested(1) == story.state("s1", 1)


def test_a_run_that_is_told_to_stop_ends_in_a_dispute_that_nobody_can_settle() -> None:
    story = differing(silent="ab")
    story.happens(e.StopAsked("atoll stop"))
    assert not story.view.finished, "their states are being checked"
    for name in "ba":
        assert not story.view.finished
        story.sites[name].shows = False
        story.says(name, story.shown(story.sites[name], story.last(name, m.Show)))
    assert story.view.finished
    assert story.view.state.startswith("finished: atoll stop (sites hold different states of commit 1")
    assert [story.num(name, m.Finished) for name in "ab"] == [1, 1]


def test_a_dispute_in_which_a_site_never_answers_does_not_keep_a_run_from_stopping() -> None:
    story = differing(silent="b")
    story.happens(e.StopAsked("atoll stop"))
    story.wait(story.idle_limit_s() + 0.1)
    story.ready("a")
    assert "has not answered" in story.last("b", m.Evicted).reason
    story.done("a", "s1")
    assert story.view.finished


def test_a_stop_in_a_dispute_that_is_settled_has_its_last_sync() -> None:
    story = differing(silent="a")
    story.happens(e.StopAsked("atoll stop"))
    assert not story.view.finished
    show(story, "a")
    story.sites["a"].shows = True
    show(story, "a")
    assert not story.view.finished
    story.ready("a")
    story.done("a", "s1")
    assert story.view.commits[-1].final


# --- before training


def test_two_strangers_whose_start_nobody_has_can_be_sent_away_and_the_run_begins() -> None:
    story = Story(some_settings(min_sites=3))
    for name in ("x", "y"):
        story.join(name)
        story.applied(name, 0, "strange")
    story.join("a")
    story.sources("a")
    assert "waiting for sites 2 of 3" in story.view.state
    for name in ("x", "y"):
        story.ban(name, "nobody knows it")
    assert story.reset() == ""
    assert "start this node again" in story.last("a", m.Refused).text
    for restarted in (False, True):
        if restarted:
            story.restart()
        assert (story.agreed_manifest(), story.attestations(), story.claimed_start()) == (None, {}, None)
        assert not story.view.sites
        assert story.view.banned == ("x: nobody knows it", "y: nobody knows it")
    story.connect("x", incarnation=2, state=(0, "strange"))
    assert story.last("x", m.Refused).kind is RefusedKind.BANNED
    for name in "abc":
        story.connect(name, incarnation=2)
        story.sites[name].site_id = 0
        story.offer(name, width=8)
    assert story.last("a", m.Admitted).admitted_as is AdmittedAs.SEEDER
    assert [story.sites[name].site_id for name in "abc"] == [4, 5, 6], "ids of before are not given again"
    for name in "abc":
        story.applied(name, 0, "s0")
    story.commit_one("a", "b", "c", state="s0", following="s1")
    assert story.view.last_commit == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_6_a_reset_gives_no_id_again(restarted: bool) -> None:
    story = Story(some_settings())
    story.join("x")
    story.join("y")
    assert story.reset() == ""
    if restarted:
        story.restart()
    story.connect("x", incarnation=2)
    story.sites["x"].site_id = 0
    story.offer("x")
    assert story.last("x", m.Admitted).site_id == 3


def test_a_start_that_was_taken_back_does_not_come_in_again_with_a_site_that_holds_it() -> None:
    story = Story(some_settings(min_sites=3))
    for name in "ab":
        story.join(name)
        story.applied(name, 0, "wrong")
    story.reset()
    for incarnation in (2, 3):
        story.connect("a", incarnation=incarnation, state=(0, "wrong"))
        assert "which was taken back: give the node another --home" in story.last("a", m.Refused).text
        story.restart()
    story.connect("b", incarnation=2)
    story.sites["b"].site_id = 0
    story.offer("b")
    assert story.last("b", m.Admitted).admitted_as is AdmittedAs.SEEDER


def test_once_training_has_started_nothing_is_taken_back() -> None:
    story = training("a", "b")
    assert "training has started, and the run is at commit 0" in story.reset()
    assert story.view.state == "training"
    assert not story.num("a", m.Refused)
    story.happens(e.StopAsked("stop"))
    story.leave("a")
    story.leave("b")
    assert "the run is over" in story.reset()
