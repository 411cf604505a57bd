"""Who was invited, who has used the invite, and whose key is whose."""

from __future__ import annotations

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import invites
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

    def _asked(self, event: e.InviteAsked | e.JoinAsked) -> e.Answer:
        (answer,) = [output for output in self.story.happens(event) if isinstance(output, e.Answer)]
        return answer

    def invite(self, name: str, invite_id: str = "", *, role: str = "site", life_s: float = DAY_S) -> str:
        self._num += 1
        asked = e.InviteAsked(
            role=role, name=name, invite_id=invite_id or name, life_s=life_s, now_s=NOW_S, request=1000 + self._num
        )
        return self._asked(asked).problem

    def use(self, invite_id: str, key: str, *, after_s: float = 60.0) -> tuple[str, str]:
        self._num += 1
        digest = a_hash(key)
        answer = self._asked(
            e.JoinAsked(invite_id=invite_id, key_digest=digest, now_s=NOW_S + after_s, request=1000 + self._num)
        )
        return answer.problem, answer.found

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
    assert "the invite for site berlin was used at 2025-11-24 16:01:00 UTC by another key" in problem
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
def test_who_is_kept_out_is_refused_with_the_same_key_a_new_key_and_an_old_invite(restarted: bool) -> None:
    run = Invited()
    run.invite("a", "i1")
    run.invite("a", "i2")
    run.use("i1", "key")
    assert run.says_hello("a", "key") is None
    run.story.evict("a", "it lies")
    if restarted:
        run.story.restart()
    refused = run.says_hello("a", "key", incarnation=2)
    assert refused is not None
    assert refused.kind is RefusedKind.KEPT_OUT
    for invite_id, key in (("i1", "key"), ("i2", "new")):
        assert "a is kept out of run 'run': it lies" in run.use(invite_id, key)[0]
    assert "a is kept out (it lies)" in run.invite("a", "i3")
    assert run.invite("b", "i4") == ""
    assert "kept out" in run.use("i4", "key")[0], "the key under another name"
    run.story.let_in("a")
    assert run.says_hello("a", "key", incarnation=3) is None


def test_a_viewer_is_no_site() -> None:
    run = Invited()
    run.invite("anna", "i1", role="viewer")
    assert run.use("i1", "key") == ("", "viewer/anna")
    refused = run.says_hello("anna", "key")
    assert refused is not None
    assert "has invited no site anna" in refused.text
    assert run.story.core.refusal("viewer", "anna", a_hash("key")) == ""


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
