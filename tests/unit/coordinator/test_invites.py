"""Who was invited, who has used the invite, and whose key is whose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import invites
from atoll.coordinator.core.sites.known_invites import KnownInvites
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from tests.harness.coordinator_story import Story, a_hash, some_settings

NOW_S = 1_764_000_000.0
DAY_S = 86_400.0


class Invited:
    """A run, and what its shell asks of it when people come."""

    def __init__(self) -> None:
        self.story = Story(some_settings(min_sites=2))
        self._num = 0

    def _asked(self, event: e.InviteAsked | e.JoinAsked | e.TakeBackAsked) -> e.Answer:
        (answer,) = [output for output in self.story.happens(event) if isinstance(output, e.Answer)]
        return answer

    def invite(self, name: str, invite_id: str = "", *, role: str = "site", life_s: float = DAY_S) -> str:
        self._num += 1
        asked = e.InviteAsked(
            role=role, name=name, invite_id=invite_id or name, life_s=life_s, request=1000 + self._num
        )
        return self._asked(asked).problem

    def use(self, invite_id: str, key: str, *, after_s: float = 60.0) -> tuple[str, str]:
        self._num += 1
        self.story.wall_from_s += after_s
        answer = self._asked(e.JoinAsked(invite_id=invite_id, key_digest=a_hash(key), request=1000 + self._num))
        self.story.wall_from_s -= after_s
        return answer.problem, answer.found

    def take_back(self, name: str) -> str:
        self._num += 1
        return self._asked(e.TakeBackAsked(role="site", name=name, request=1000 + self._num)).problem

    def says_hello(self, name: str, key: str, *, certified_name: str = "", incarnation: int = 1) -> m.Refused | None:
        """As what the certificate is of."""
        if name in self.story.sites and self.story.sites[name].stream is not None:
            self.story.drop(name)
        before = self.story.num(name, m.Refused)
        certified = e.Certified(certified_name or name, a_hash(key))
        self.story.connect(name, certified=certified, incarnation=incarnation)
        if self.story.num(name, m.Refused) == before:
            return None
        refused: m.Refused = self.story.last(name, m.Refused)
        return refused


@pytest.mark.parametrize("restarted", [False, True])
def test_an_invite_is_used_once_and_by_the_same_key_again(restarted: bool) -> None:
    run = Invited()
    assert run.invite("berlin", "i1") == ""
    assert run.use("i1", "key") == ("", "site/berlin")
    if restarted:
        run.story.restart()
    assert run.use("i1", "key", after_s=2 * DAY_S) == ("", "site/berlin"), "an answer that was lost"
    problem, found = run.use("i1", "another")
    which = f"by another key ({a_hash('key').hex()[:16]}, in the run's audit log)"
    assert f"the invite for site berlin was used at 2025-11-24 16:01:00 UTC {which}" in problem
    assert not found


def test_an_invite_that_is_too_late_or_that_nobody_knows_is_refused() -> None:
    run = Invited()
    run.invite("berlin", "i1")
    assert "has expired at 2025-11-25 16:00:00 UTC" in run.use("i1", "key", after_s=DAY_S + 1)[0]
    assert "knows no invite i2" in run.use("i2", "key")[0]


@pytest.mark.parametrize(
    ("role", "name", "life_s", "text"),
    [
        ("king", "a", DAY_S, "there is no role 'king'"),
        ("site", "a/b", DAY_S, "'a/b' is no name"),
        ("site", "", DAY_S, "'' is no name"),
        ("site", "a", 0.0, "at most 90 days, not 0"),
        ("site", "a", 91 * DAY_S, "at most 90 days, not 91"),
        ("site", "a", float("nan"), "at most 90 days"),
    ],
)
def test_what_no_invite_is_for_is_refused(role: str, name: str, life_s: float, text: str) -> None:
    assert text in Invited().invite(name, "i1", role=role, life_s=life_s)


def test_a_certificate_says_hello_as_itself_alone_and_its_name_is_what_peers_expect() -> None:
    run = Invited()
    for name in ("a", "b"):
        run.invite(name)
        run.use(name, name)
    refused = run.says_hello("a", "b", certified_name="b")
    assert refused is not None
    assert "the certificate of b says Hello as a" in refused.text
    for name in ("a", "b"):
        assert run.says_hello(name, name) is None
        run.story.offer(name)
        run.story.applied(name, 0, "s0")
    for name in ("a", "b"):
        run.story.ready(name)
    assert [member.name for member in run.story.plan().contributors] == ["a", "b"]


def test_a_newer_invite_replaces_the_key_once_it_is_used() -> None:
    run = Invited()
    run.invite("a", "i1")
    run.use("i1", "old")
    assert run.says_hello("a", "old") is None
    run.invite("a", "i2")
    assert run.says_hello("a", "old", incarnation=2) is None, "it is not used yet"
    run.use("i2", "new")
    refused = run.says_hello("a", "old", incarnation=3)
    assert refused is not None
    assert refused.kind is RefusedKind.NAME_TAKEN
    assert "another key has been site a since" in refused.text
    assert run.says_hello("a", "new", incarnation=3) is None
    assert "older than one that was used" in run.use("i1", "old")[0]
    run.story.restart()
    assert run.says_hello("a", "new", incarnation=4) is None


def test_a_key_that_nobody_invited_is_refused() -> None:
    refused = Invited().says_hello("a", "key")
    assert refused is not None
    assert "has invited no site a" in refused.text


@pytest.mark.parametrize("restarted", [False, True])
def test_who_is_banned_is_refused_with_the_same_key_a_new_key_and_an_old_invite(restarted: bool) -> None:
    run = Invited()
    run.invite("a", "i1")
    run.invite("a", "i2")
    run.use("i1", "key")
    assert run.says_hello("a", "key") is None
    run.story.ban("a", "it lies")
    if restarted:
        run.story.restart()
    refused = run.says_hello("a", "key", incarnation=2)
    assert refused is not None
    assert refused.kind is RefusedKind.BANNED
    for invite_id, key in (("i1", "key"), ("i2", "new")):
        assert "a is banned from run 'run': it lies" in run.use(invite_id, key)[0]
    assert "a is banned (it lies)" in run.invite("a", "i3")
    assert run.invite("b", "i4") == ""
    assert "banned" in run.use("i4", "key")[0], "the key under another name"
    run.story.lift_ban("a")
    assert run.says_hello("a", "key", incarnation=3) is None


@pytest.mark.parametrize("restarted", [False, True])
def test_certified_sites_hear_who_is_banned_as_they_come_and_when_it_changes(restarted: bool) -> None:
    run = Invited()
    for name in ("a", "b", "c"):
        run.invite(name)
        run.use(name, name)
    assert run.says_hello("a", "a") is None
    run.story.offer("a")
    assert run.story.last("a", m.Banned).names == ()
    run.story.ban("c", "it lies")
    assert run.story.last("a", m.Banned).names == ("c",)
    if restarted:
        run.story.restart()
    assert run.says_hello("b", "b") is None
    assert run.story.last("b", m.Banned).names == ("c",)
    run.says_hello("a", "a", incarnation=2)
    run.story.offer("a")
    run.story.lift_ban("c")
    assert run.story.last("a", m.Banned).names == ()


def test_others_hear_of_a_ban_as_it_is_kept_though_the_site_does_as_if_it_had_not() -> None:
    """All that are in the run, before the coordinator says anything else: no heartbeat goes by."""
    run = Invited()
    for name in ("a", "b", "c"):
        run.invite(name)
        run.use(name, name)
        run.says_hello(name, name)
        run.story.offer(name)
    streams = {name: run.story.sites[name].stream for name in ("a", "b", "c")}
    outputs = run.story.happens(e.BanAsked(name="c", reason="it lies", request=99))
    kept = next(n for n, output in enumerate(outputs) if isinstance(output, e.Persist))
    said = {
        output.stream: n
        for n, output in enumerate(outputs)
        if isinstance(output, e.Send) and isinstance(output.message, m.Banned)
    }
    for name in ("a", "b"):
        number = streams[name]
        assert number is not None
        first = next(n for n, output in enumerate(outputs) if isinstance(output, e.Send) and output.stream == number)
        assert kept < first == said[number]
    assert any(isinstance(output, e.CloseStream) and output.stream == streams["c"] for output in outputs)
    assert run.story.sites["c"].stream is None
    assert run.says_hello("c", "c") is not None, "it tries again"
    assert run.story.last("a", m.Banned).names == ("c",)


def test_in_plain_text_nobody_hears_of_it() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    story.ban("b")
    assert not story.num("a", m.Banned)


def test_a_site_at_the_door_hears_of_it_too_and_who_was_away_of_who_is_let_in() -> None:
    run = Invited()
    for name in ("a", "c"):
        run.invite(name)
        run.use(name, name)
    run.says_hello("a", "a")  # its workers start
    run.story.ban("c", "it lies")
    assert run.story.last("a", m.Banned).names == ("c",)
    run.story.drop("a")
    run.story.lift_ban("c")
    run.says_hello("a", "a", incarnation=2)
    assert run.story.last("a", m.Banned).names == ()


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_key_that_is_replaced_is_cut_off_at_once(is_admitted: bool) -> None:
    run = Invited()
    run.invite("a", "i1")
    run.use("i1", "old")
    run.says_hello("a", "old")
    if is_admitted:
        run.story.offer("a")
    run.invite("a", "i2")
    run.use("i2", "new")
    refused = run.story.last("a", m.Refused)
    assert refused.kind is RefusedKind.NAME_TAKEN
    assert "another key has used a newer invite for its name" in refused.text
    assert run.story.sites["a"].stream is None
    run.use("i2", "new")  # once more, as the answer was lost
    assert run.says_hello("a", "new", incarnation=2) is None
    run.use("i2", "new")
    assert run.story.sites["a"].stream is not None, "its own key cuts nobody off"


def test_what_is_taken_back_is_of_no_use_and_a_stolen_name_comes_back_to_its_owner() -> None:
    run = Invited()
    run.invite("a", "i1")
    run.invite("a", "i2")
    run.use("i1", "thief")
    run.says_hello("a", "thief")
    run.story.ban("a", "stolen")
    assert run.take_back("a") == ""
    assert run.story.lift_ban("a") == ""
    refused = run.says_hello("a", "thief", incarnation=2)
    assert refused is not None
    assert "has invited no site a" in refused.text
    assert "knows no invite i2" in run.use("i2", "thief")[0]
    run.invite("a", "i3")
    assert run.use("i3", "owner") == ("", "site/a")
    assert run.says_hello("a", "owner", incarnation=2) is None
    assert run.take_back("a") == ""
    assert run.story.last("a", m.Refused).kind is RefusedKind.NAME_TAKEN
    assert "has invited no site a" in run.take_back("a")


def test_others_hear_of_a_site_from_which_all_was_taken_back_until_it_is_invited_anew() -> None:
    run = Invited()
    for name in ("a", "b"):
        run.invite(name)
        run.use(name, name)
        run.says_hello(name, name)
        run.story.offer(name)
    run.take_back("b")
    assert run.story.last("a", m.Banned).names == ("b",)
    assert run.story.shut_out() == ("b",)
    run.story.drop("a")
    assert run.says_hello("a", "a", incarnation=2) is None
    assert run.story.last("a", m.Banned).names == ("b",), "who was away hears of it, too"
    run.invite("b", "i3")
    run.use("i3", "owner")
    assert run.story.last("a", m.Banned).names == ()


def test_hosts_of_a_site_are_a_part_of_it() -> None:
    run = Invited()
    assert "is no host of a site: write NAME/K" in run.invite("a", "i0", role="host")
    run.invite("a", "i1")
    run.invite("a/1", "i2", role="host")
    assert run.use("i2", "key") == ("", "host/a/1")
    assert run.story.core.refusal("host", "a/1", a_hash("key"), NOW_S) == ""
    assert "another key has been host a/1" in run.story.core.refusal("host", "a/1", a_hash("other"), NOW_S)
    run.story.ban("a", "it lies")
    assert "banned" in run.story.core.refusal("host", "a/1", a_hash("key"), NOW_S)
    assert "a is banned (it lies)" in run.invite("a/2", "i3", role="host")
    run.story.lift_ban("a")
    assert run.story.core.refusal("host", "a/1", a_hash("key"), NOW_S) == ""
    run.take_back("a")
    assert "has invited no host a/1" in run.story.core.refusal("host", "a/1", a_hash("key"), NOW_S)


@pytest.mark.parametrize("restarted", [False, True])
def test_who_renews_is_known_and_who_is_banned_or_replaced_does_not(restarted: bool) -> None:
    run = Invited()
    for name in ("a", "b"):
        run.invite(name)
        run.use(name, name)

    def renew(name: str, key: str) -> str:
        asked = e.RenewAsked(role="site", name=name, key_digest=a_hash(key), request=77)
        return next(output for output in run.story.happens(asked) if isinstance(output, e.Answer)).problem

    run.story.wall_from_s += 100 * DAY_S
    since_s = run.story.wall_from_s
    assert renew("a", "a") == ""
    assert "another key has been site a" in renew("a", "thief")
    run.story.ban("b", "it lies")
    assert "b is banned from run 'run': it lies" in renew("b", "b")
    if restarted:
        run.story.restart()
    (answer,) = [
        output
        for output in run.story.happens(e.RotateAsked(step="retire", since_s=since_s, request=78))
        if isinstance(output, e.Answer)
    ]
    assert (answer.problem, answer.found) == ("", "site b")


def test_nobody_takes_all_the_starts_that_there_are() -> None:
    run = Invited()
    run.invite("a", "i1")
    run.use("i1", "key")
    refused = run.says_hello("a", "key", incarnation=(1 << 63) - 1)
    assert refused is not None
    assert refused.kind is RefusedKind.INVALID
    assert "counts the node's starts from 1, and was 0 last" in refused.text
    assert run.says_hello("a", "key", incarnation=1 << 20) is None
    run.story.offer("a")
    refused = run.says_hello("a", "key", incarnation=(1 << 21) + 1)
    assert refused is not None
    assert run.says_hello("a", "key", incarnation=1 << 21) is None


def test_that_a_used_invite_is_shown_again_is_said_once() -> None:
    run = Invited()
    run.invite("a", "i1")
    run.use("i1", "key")
    for _ in range(3):
        run.use("i1", "another")
    assert sum("was shown by somebody with another key" in line for line in run.story.log) == 1


def test_a_viewer_is_no_site() -> None:
    run = Invited()
    run.invite("anna", "i1", role="viewer")
    assert run.use("i1", "key") == ("", "viewer/anna")
    refused = run.says_hello("anna", "key")
    assert refused is not None
    assert "has invited no site anna" in refused.text
    assert run.story.core.refusal("viewer", "anna", a_hash("key"), NOW_S) == ""


def test_a_run_keeps_so_many_invites_and_forgets_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invites, "MAX_INVITES", 3)
    run = Invited()
    for invite_id, key in (("i1", "old"), ("i2", "new")):
        run.invite("a", invite_id)
        run.use(invite_id, key)
    run.invite("b", "i3")
    assert run.invite("c", "i4") == ""
    assert "knows no invite i1" in run.use("i1", "old")[0], "it was replaced"
    assert "3 invites are open or in use" in run.invite("d", "i5")
    run.story.restart()
    assert run.use("i4", "c") == ("", "site/c")


def test_a_home_that_is_new_to_a_site_counts_on() -> None:
    run = Invited()
    run.invite("a", "i1")
    run.use("i1", "key")
    assert run.story.core.last_start("a") == 0
    run.says_hello("a", "key", incarnation=7)
    assert run.story.core.last_start("a") == 7


def test_the_newest_invite_that_was_used_is_known_whatever_comes_and_goes() -> None:
    draw = random.Random(7)
    names = [(role, name) for role in ("site", "viewer") for name in "ab"]
    made = e.InviteRecord(invite_id="", number=0, role="", name="", expires_s=0.0)
    known = KnownInvites([])
    for number in range(500):
        if known and draw.random() < 0.5:
            del known[draw.choice(sorted(known))]
        role, name = draw.choice(names)
        found = replace(made, invite_id=f"{number}", number=number, role=role, name=name)
        known[found.invite_id] = found
        used = known[draw.choice(sorted(known))]
        known[used.invite_id] = replace(used, key_digest=a_hash(used.invite_id), used_s=1.0)
        for of in names:
            those = [i for i in known.values() if (i.role, i.name) == of and i.key_digest]
            newest = max(those, key=lambda i: i.number, default=None)
            assert known.newest(*of) == KnownInvites(known.values()).newest(*of) == newest


def test_whether_somebody_may_call_is_known_without_a_look_at_all_invites(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ban asks that of all who watch: with thousands of invites the coordinator stood still for seconds."""
    run = Invited()
    run.invite("berlin", "i1")
    run.use("i1", "key")

    def looked(known: KnownInvites) -> None:
        raise AssertionError("it looked at all")

    for name in ("values", "items", "__iter__"):
        monkeypatch.setattr(KnownInvites, name, looked, raising=False)
    of_key, of_another = (
        run.story.core.refusal("site", "berlin", a_hash(key), run.story.wall_s) for key in ("key", "x")
    )
    assert of_key == ""
    assert "another key has been site berlin" in of_another
