"""Reducers that are audited: what is drawn, who is asked, and who is judged."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.auditing.drawing import COMMITTED, REVEALED, check_draws, draw, is_drawn, odds_of_finding
from atoll.coordinator.core.persisted import changes, key_of
from atoll.coordinator.core.sites.conduct import FAULT_COMMITS, Conduct
from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.plans import with_weights
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import AUDITED_STEPS
from atoll.protocol.trust.words import of_contributions, of_payloads
from tests.harness.audited_story import FALSE, NAMES, RIGHT, TRUTH, UNKNOWN, WRONG, Audited
from tests.harness.coordinator_story import a_hash
from tests.harness.site_keys import SiteKeys


class Signing(Audited):
    """The same, of sites with certificates, which sign."""

    def __init__(self) -> None:
        self.keys = SiteKeys("run")
        self.signer = ""
        super().__init__()

    def connect(self, name: str, **options: Any) -> None:
        certified = self.keys.certified(name)
        if name not in self.sites:
            self.happens(e.InviteAsked(role="site", name=name, invite_id=name, life_s=9999, request=1))
            self.happens(e.JoinAsked(invite_id=name, key_digest=certified.key_digest, request=2))
        super().connect(name, certified=certified, **options)

    def says(self, name: str, message: m.SiteMessage) -> None:
        site = self.sites[name]
        start = site.site_id, site.incarnation
        words = self.keys.words(self.signer or name)
        if isinstance(message, m.Ready):
            word = of_contributions("run", message.sync, start, message.contributions_root)
            message = replace(message, signature=words.signed(word))
        elif isinstance(message, m.Done):
            plan = with_weights(self.plan(), message.tokens)
            way = spec_of(self.settings.sync, plan.base_commit, plan.fragment).trainable
            word = of_payloads("run", plan, way, start, message.payloads_root)
            message = replace(message, signature=words.signed(word))
        super().says(name, message)


def test_an_audit_says_what_all_have_signed_also_after_a_restart() -> None:
    story = Signing()
    question = story.question()
    assert question is not None
    asked, reader = question[1], story.keys.words("a")
    for member, root, signature in zip(asked.contributors, asked.roots, asked.signatures, strict=True):
        word = of_contributions("run", asked.sync, (member.site_id, member.incarnation), root)
        reader.check(member, word, signature)
    made = asked.made
    assert made is not None
    assert made.root == a_hash(f"made by {story.reducer_of(asked)}")
    assert any(f <= asked.chunk < f + n for f, n in zip(made.first_chunks, made.nums_chunks, strict=True))
    reducer = next(c for c in asked.contributors if c.site_id == made.site_id)
    way = spec_of(story.settings.sync, asked.base_commit, asked.fragment).trainable
    word = of_payloads("run", asked, way, (reducer.site_id, reducer.incarnation), made.root)
    reader.check(reducer, word, made.signature)
    for name in NAMES:
        story.ready(name)
    story.restart()
    for name in NAMES:
        story.connect(name, state=(1, "s1"), incarnation=story.sites[name].incarnation)
        story.ready(name)
    for name in [story._name(member.site_id) for member in story.plan().contributors]:
        story.done(name, "s1", payloads="p1", commit=1)
    again = story.question()
    assert again is not None
    assert len(again[1].signatures) == len(again[1].contributors)


def test_what_is_not_signed_by_the_key_of_its_stream_is_refused() -> None:
    story = Signing()
    story.signer = "b"
    story.ready("a")
    assert "not signed by the key of its identity" in story.last("a", m.Refused).text
    story = Signing()
    for name in NAMES:
        story.ready(name)
    story.signer = "c"
    story.done("b", "s1", commit=1)
    assert "Done of b" in story.last("b", m.Refused).text
    assert "not signed by the key of its identity" in story.last("b", m.Refused).text


def test_in_plain_text_nothing_is_signed_and_a_signature_is_refused() -> None:
    story = Audited()
    question = story.question()
    assert question is not None
    assert (question[1].signatures, question[1].made.signature if question[1].made else 0) == ((), None)
    opened = story.open_sync()
    assert opened is not None
    forged = m.Signature(value=b"v", certificate=b"c")
    story.says("a", m.Ready(sync=opened.sync, tokens=9, num_steps=9, contributions_root=TRUTH, signature=forged))
    assert "a signature, in a run in plain text" in story.last("a", m.Refused).text


def test_a_reducer_that_says_no_root_over_what_it_made_is_refused() -> None:
    story = Audited()
    for name in NAMES:
        story.ready(name)
    plan = story.plan()
    done = m.Done(
        sync=plan.sync, attempt=plan.attempt, term=plan.term, payload_digest=TRUTH, last_commit=1, state_hash=TRUTH,
        tokens=tuple(c.tokens for c in plan.contributors),
    )  # fmt: skip
    story.says("a", done)
    assert "no root over the payloads that it made" in story.last("a", m.Refused).text


def test_a_reducer_that_signed_another_root_is_judged_when_two_sites_say_so() -> None:
    story = Audited()
    for _ in range(2):
        assert not story.evicted()
        question = story.question()
        assert question is not None
        reducer = story.sites[story.reducer_of(question[1])]
        refuted = (reducer.site_id,)
        story.says(question[0], m.ChunkAudited(number=question[1].number, outcome=UNKNOWN, refuted_site_ids=refuted))
    assert story.evicted() == [reducer.name]


def test_two_audits_a_sync_find_one_liar_of_sixteen_in_31_syncs_at_98_percent() -> None:
    """As computed, and as it is drawn with many secrets."""
    assert odds_of_finding(num_reducers=16, num_audits=2, num_syncs=31) == pytest.approx(0.98, abs=0.005)
    num_chunks, liar, num_secrets = 16 * 5, 7, 3000
    generator = random.Random(7)
    num_found = 0
    for _ in range(num_secrets):
        secret = generator.randbytes(32)
        num_found += any(
            draw(secret, sync.to_bytes(32, "little"), "chunk", number, num_chunks) // 5 == liar
            for sync in range(31)
            for number in range(2)
        )
    assert num_found / num_secrets == pytest.approx(0.982, abs=0.012)


def test_where_sites_exchange_at_every_step_one_commit_in_sixteen_is_audited_by_draw() -> None:
    """Also while audits are open, which nobody answers: a liar that kept them open would know when to lie."""
    outer = OuterSettings(optimizer="adamw", momentum=0.9)
    story = Audited(strategy="gradient", every=1, outer=outer)
    secret, sync = a_hash(f"secret of term {story.term}"), story.settings.sync
    drawn = []
    for number in range(60):
        if number:
            story.next_commit()
        question = story.question()
        drawn.append(question is not None)
        assert drawn[-1] == is_drawn(secret, a_hash(f"p{number}"), sync)
        assert question is None or question[1].commit == number + 1
    assert 1 < sum(drawn) < 20
    others = replace(sync, strategy="diloco")
    digests = [number.to_bytes(32, "little") for number in range(4000)]
    assert all(is_drawn(secret, digest, others) for digest in digests)
    share = sum(is_drawn(secret, digest, sync) for digest in digests) / len(digests)
    assert share == pytest.approx(1 / AUDITED_STEPS, abs=0.012)
    assert sum(is_drawn(secret[::-1], digest, sync) and is_drawn(secret, digest, sync) for digest in digests) < 50


def test_sites_that_answer_nothing_do_not_end_the_audits_of_commits_at_every_step() -> None:
    """Questions are answered in time that grows with the audits that are open; commits are made meanwhile."""
    outer = OuterSettings(optimizer="adamw", momentum=0.9)
    story = Audited(audits=64, strategy="gradient", every=1, outer=outer)
    secret, sync = a_hash(f"secret of term {story.term}"), story.settings.sync
    num_drawn, asked = 0, list[int]()
    for number in range(200):
        if number:
            story.next_commit()
        question = story.question()
        num_drawn += is_drawn(secret, a_hash(f"p{number}"), sync)
        if question is not None:
            asked.append(number)
    assert max(asked) > 150
    most_open = 4 * 64
    assert story.view.num_audits_unknown == 64 * num_drawn - most_open, "also those that found no room"
    silent = sum(int(text.split()[-2]) for text in story.view.audit_silence)
    assert silent == 64 * len(asked) - most_open
    assert not story.evicted()


def test_a_draw_depends_on_the_secret_and_on_the_payloads_and_favours_nobody() -> None:
    drawn = Counter(draw(b"s", bytes([i, j]), "chunk", 0, 5) for i in range(100) for j in range(100))
    assert set(drawn) == set(range(5))
    assert min(drawn.values()) > 1850
    assert len({draw(bytes([i]), b"p", "chunk", 0, 1 << 60) for i in range(50)}) == 50
    assert len({draw(b"s", b"p", "chunk", i, 1 << 60) for i in range(50)}) == 50


def test_weights_say_all_roots_and_an_audit_says_them_to_a_contributor_that_did_not_reduce() -> None:
    story = Audited()
    roots = tuple(a_hash(f"root of {name}") for name in NAMES)
    assert story.last("a", m.Weights).roots == roots
    question = story.question()
    assert question is not None
    name, asked = question
    assert asked.roots == roots
    assert [c.tokens for c in asked.contributors] == [100] * 5
    assert name != story.reducer_of(asked)
    story.says(name, m.ChunkAudited(number=asked.number, outcome=RIGHT, payload_hash=TRUTH))
    assert story.question() is None
    assert not story.evicted()
    assert story.view.num_audits_right == 1


def test_without_audits_nobody_says_a_root_or_is_asked() -> None:
    story = Audited(audits=0)
    assert story.question() is None
    assert story.last("a", m.Weights).roots == ()


def test_a_ready_without_a_root_is_refused() -> None:
    story = Audited()
    opened = story.open_sync()
    assert opened is not None
    story.says("a", m.Ready(sync=opened.sync, tokens=10, num_steps=10))
    assert story.last("a", m.Refused).kind is RefusedKind.INVALID
    assert "no root over what it contributes" in story.last("a", m.Refused).text


@pytest.mark.parametrize("restarted", [False, True])
def test_a_reducer_that_two_sites_refute_is_evicted_and_the_second_time_banned(restarted: bool) -> None:
    story = Audited()
    reducer, asked = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    assert len({reducer, *asked}) == 3
    assert not story.evicted(), "before it was asked itself"
    assert not any("atoll rollback" in text for _, text in story.reports), "who goes back now asks it no more"
    story.asked_itself(reducer)
    assert story.evicted() == [reducer]
    assert any("atoll rollback --to 0" in text for _, text in story.reports)
    assert "is not the average of what was contributed" in story.last(reducer, m.Evicted).reason
    assert not story.view.banned
    if restarted:
        story.restart()
        for name in NAMES:
            if name != reducer:
                story.connect(name, state=(1, "s1"), incarnation=story.sites[name].incarnation)
    story.wrong_once_more(reducer)
    story.asked_itself(reducer, UNKNOWN)
    assert story.banned() == [reducer]
    assert story.view.num_audits_wrong == (1 if restarted else 2)
    assert story.by_cause() == {"audit": 1 if restarted else 2}


def test_who_is_banned_for_what_it_does_takes_along_the_other_names_of_its_key() -> None:
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    story.asked_itself(reducer)
    story.join("twin", key=reducer)
    story.wrong_once_more(reducer)
    assert not story.num("twin", m.Evicted)
    story.connect("third", key=reducer)
    story.asked_itself(reducer, UNKNOWN)
    assert story.banned() == [reducer]
    story.offer("third")
    assert story.last("third", m.Refused).kind is RefusedKind.BANNED, "which was at the door"
    assert story.last("twin", m.Evicted).reason == f"{reducer}, whose key it has, is banned"
    story.connect("twin", key=reducer)
    assert story.last("twin", m.Refused).kind is RefusedKind.BANNED
    assert story.evicted() == [reducer]


def test_who_waits_at_the_door_for_what_it_did_is_not_let_in_once_it_is_banned() -> None:
    """It was sent away, has said Hello since, and is found out for what it reduced before."""
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    story.asked_itself(reducer)
    story.wrong_once_more(reducer, num_found=1)
    assert story.evict(reducer) == ""
    story.connect(reducer, incarnation=story.sites[reducer].incarnation + 1)
    story.audit((WRONG, TRUTH))
    assert story.banned() == [reducer]
    story.offer(reducer)
    assert story.last(reducer, m.Refused).kind is RefusedKind.BANNED
    assert not story.is_live(reducer)


def test_a_ban_that_is_lifted_is_not_followed_by_what_was_found_before() -> None:
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    story.asked_itself(reducer)
    story.wrong_once_more(reducer, num_found=1)
    assert story.ban(reducer, "a person has seen it") == ""
    assert story.lift_ban(reducer) == ""
    story.audit((WRONG, TRUTH))
    assert story.view.num_audits_wrong == 2
    assert "is not banned" in story.lift_ban(reducer), "nor is anything held against it"


def test_a_second_offence_bans_for_good_also_who_is_banned_for_an_hour() -> None:
    """By a person, while what was found is not judged yet."""
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    story.asked_itself(reducer)
    story.wrong_once_more(reducer)
    assert story.ban(reducer, "let us see", until_s=story.wall_s + 3600) == ""
    story.wait(7200)
    assert story.banned() == [reducer]
    story.connect(reducer)
    assert story.last(reducer, m.Refused).kind is RefusedKind.BANNED


def test_a_site_that_owns_up_has_bad_memory_which_bans_it_the_third_time() -> None:
    """Its own computation gives what the others found, so it was no lie, or it is a liar that has three."""
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    story.asked_itself(reducer, WRONG, TRUTH)
    assert "test that machine's memory" in story.last(reducer, m.Evicted).reason
    story.wrong_once_more(reducer)
    story.asked_itself(reducer, WRONG, TRUTH)
    assert not story.view.banned
    assert story.by_cause() == {"memory": 2}
    story.restart()
    for name in NAMES:
        if name != reducer:
            commit = story.last_commit()
            story.connect(name, state=(commit, f"s{commit}"), incarnation=story.sites[name].incarnation)
    story.wrong_once_more(reducer)
    story.asked_itself(reducer, WRONG, TRUTH)
    assert story.banned() == [reducer]


def test_flipped_bits_are_forgotten_after_many_commits_and_offences_are_not() -> None:
    conduct = Conduct()
    for turn in range(9):
        assert conduct.own_up(turn * FAULT_COMMITS // 2, turn * FAULT_COMMITS // 2 + 1)
        assert not conduct.has_too_many_faults
    assert not conduct.offences
    newest = 9 * FAULT_COMMITS
    assert conduct.own_up(newest, newest)
    assert conduct.own_up(newest + 1, newest + 1)
    assert not conduct.has_too_many_faults
    assert not conduct.own_up(newest + 1, newest + 9), "found out since that was made"
    assert conduct.own_up(newest + 2, newest + 2)
    assert conduct.has_too_many_faults
    assert conduct.offend(newest + 3, newest + 3)
    assert not conduct.is_second_offence
    assert conduct.offend(newest + 9 * FAULT_COMMITS, newest + 9 * FAULT_COMMITS)
    assert conduct.is_second_offence


@pytest.mark.parametrize("way", ["another hash", "no answer", "its stream ends"])
def test_who_says_nothing_of_use_when_it_is_asked_itself_does_not_own_up(way: str) -> None:
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    if way == "another hash":
        story.asked_itself(reducer, WRONG, FALSE)
    elif way == "no answer":
        story.wait(25)
    else:
        story.drop(reducer)
    assert story.by_cause() == {"audit": 1}
    assert story.view.num_audits_wrong == 1


@pytest.mark.parametrize(("num_commits", "cause"), [(0, "audit"), (6, "audit"), (9, "memory")])
def test_who_is_asked_itself_when_nothing_is_kept_any_more_has_bad_memory_in_doubt(
    num_commits: int, cause: str
) -> None:
    """Where commits are made fast an honest site cannot own up. One that could compute it, and does not, denies."""
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    question = story.question()
    assert question is not None
    assert question[0] == reducer
    for _ in range(num_commits):
        story.next_commit()
    story.says(reducer, m.ChunkAudited(number=question[1].number, outcome=UNKNOWN))
    assert story.by_cause() == {cause: 1}
    assert ("what it takes was kept no more" in story.last(reducer, m.Evicted).reason) == (cause == "memory")


def test_who_keeps_silent_when_it_is_asked_itself_is_judged_once_nothing_is_kept_any_more() -> None:
    """And not when its time to answer is over, which may be after many more commits."""
    story = Audited()
    reducer, _ = story.audit((WRONG, TRUTH), (WRONG, TRUTH))
    for _ in range(7):
        story.next_commit()
    assert not story.evicted()
    for _ in range(2):
        story.next_commit()
    assert story.evicted() == [reducer]
    assert story.by_cause() == {"memory": 1}


def test_an_auditor_that_accuses_an_honest_reducer_is_judged_by_the_third_site() -> None:
    story = Audited()
    reducer, (liar, third) = story.audit((WRONG, a_hash("a lie")), (RIGHT, TRUTH))
    story.asked_itself(liar, WRONG, a_hash("a lie"))
    assert story.evicted() == [liar]
    assert third != reducer
    assert "it comes out as it is at" in story.last(liar, m.Evicted).reason


def test_an_auditor_that_finds_the_payload_right_in_the_end_had_a_flipped_bit() -> None:
    story = Audited()
    _, (auditor, _) = story.audit((WRONG, FALSE), (RIGHT, TRUTH))
    story.asked_itself(auditor, RIGHT, TRUTH)
    assert story.by_cause() == {"memory": 1}


def test_an_accusation_alone_judges_nobody() -> None:
    """Each finds something else: nobody has two for it."""
    story = Audited()
    story.audit((WRONG, b"1" * 32), (WRONG, b"2" * 32), (WRONG, b"3" * 32), (WRONG, b"4" * 32))
    assert story.question() is None
    assert not story.evicted()
    assert story.view.num_audits_unknown == 1
    assert any("one of them lies, or has bad memory" in text for _, text in story.reports)


def test_of_two_sites_neither_is_judged() -> None:
    story = Audited(("a", "b"))
    story.audit((WRONG, TRUTH))
    assert not story.evicted()
    assert story.view.num_audits_unknown == 1


def test_who_gives_something_else_than_its_root_says_is_judged_when_two_sites_say_so() -> None:
    story = Audited()
    question = story.question()
    assert question is not None
    others = [n for n in NAMES if n not in (question[0], story.reducer_of(question[1]))]
    site_id = story.sites[others[0]].site_id
    story.says(question[0], m.ChunkAudited(number=question[1].number, outcome=UNKNOWN, refuted_site_ids=(site_id,)))
    assert not story.evicted()
    second = story.question()
    assert second is not None
    if second[0] == others[0]:  # asked itself, it answers for itself alone
        story.says(second[0], m.ChunkAudited(number=second[1].number, outcome=UNKNOWN, refuted_site_ids=(site_id,)))
        assert not story.evicted()
        second = story.question()
        assert second is not None
    story.says(second[0], m.ChunkAudited(number=second[1].number, outcome=UNKNOWN, refuted_site_ids=(site_id,)))
    assert story.evicted() == [others[0]]


def test_a_contributor_that_the_auditor_cannot_dial_is_asked_to_dial_it() -> None:
    story = Audited()
    story.num_read = len([1 for _, message in story.sent if isinstance(message, m.AuditChunk)])
    number = story.last_commit()
    for name in NAMES:
        story.ready(name, unreachable="" if name == "c" else "c")
    for name in NAMES:
        story.done(name, f"s{number}", commit=number)
    question = story.question()
    assert question is not None
    if question[0] == "c":  # whom nobody can dial, and which dials all
        assert not story.num("c", m.DialBack)
    else:
        assert story.last("c", m.DialBack).member.site_id == story.sites[question[0]].site_id


def test_who_gives_nothing_is_counted_and_not_judged() -> None:
    story = Audited()
    site_id = story.sites["c"].site_id
    for _ in NAMES[1:]:
        question = story.question()
        if question is None:
            break
        word = m.ChunkAudited(number=question[1].number, outcome=UNKNOWN, silent_site_ids=(site_id, 77), text="away")
        story.says(question[0], word)
    assert story.question() is None
    assert not story.evicted()
    assert story.view.num_audits_unknown == 1
    assert story.view.audit_silence == (f"c (site {site_id}) did not give what audits asked it for 4 times",)


def test_a_site_that_does_not_answer_is_passed_over_in_time_and_when_its_stream_ends() -> None:
    story = Audited()
    first = story.question()
    assert first is not None
    story.wait(25)
    second = story.question()
    assert second is not None
    assert second[0] != first[0]
    story.drop(second[0])
    third = story.question()
    assert third is not None
    assert third[0] not in (first[0], second[0])
    story.says(first[0], m.ChunkAudited(number=first[1].number, outcome=WRONG, payload_hash=TRUTH))
    assert story.question() is None, "too late"


def test_what_was_wrong_in_several_chunks_of_a_commit_is_one_offence() -> None:
    story = Audited(audits=64)
    asked = [(who, message) for who, message in story.sent if isinstance(message, m.AuditChunk)]
    reducer = story.reducer_of(asked[0][1])
    wrong_at(story, reducer)
    assert story.view.num_audits_wrong > 1
    assert story.num(reducer, m.Evicted) == 1
    assert not story.view.banned


def wrong_at(story: Audited, reducer: str, *, until_evicted: bool = False) -> None:
    """Whoever is asked of one of its chunks finds another payload, and it denies."""
    answered: set[int] = set()
    while not (until_evicted and story.num(reducer, m.Evicted)):
        left = [
            (who, message)
            for who, message in story.sent
            if isinstance(message, m.AuditChunk)
            and message.number not in answered
            and story.reducer_of(message) == reducer
            and story.is_connected(who)
        ]
        if not left:
            break
        who, message = left[0]
        answered.add(message.number)
        outcome = RIGHT if who == reducer else WRONG
        story.says(who, m.ChunkAudited(number=message.number, outcome=outcome, payload_hash=TRUTH))


def test_what_was_wrong_in_several_chunks_of_a_commit_is_one_offence_also_if_the_coordinator_restarts() -> None:
    """The audits that were open begin anew; what was found in those that had ended is known."""
    story = Audited(audits=64)
    question = story.question()
    assert question is not None
    reducer = story.reducer_of(question[1])
    wrong_at(story, reducer, until_evicted=True)
    assert story.num(reducer, m.Evicted) == 1
    story.restart()
    for name in NAMES:
        if name != reducer:
            story.connect(name, state=(1, "s1"), incarnation=story.sites[name].incarnation)
    story.next_commit()
    wrong_at(story, reducer)
    assert story.view.num_audits_wrong > 0, "in this start"
    assert not story.view.banned


def back_after_restart(story: Audited) -> None:
    story.restart()
    for name in NAMES:
        commit = story.last_commit()
        story.connect(name, state=(commit, f"s{commit}"), incarnation=story.sites[name].incarnation)


def test_audits_that_are_open_begin_anew_when_the_coordinator_is_back_and_sites_are_here() -> None:
    story = Audited()
    before = story.question()
    assert before is not None
    back_after_restart(story)
    assert story.question() is None, "sites come back one by one"
    story.next_commit()
    asked = [message for _, message in story.sent if isinstance(message, m.AuditChunk)][story.num_read :]
    assert sorted(message.commit for message in asked) == [1, 2]
    again = next(message for message in asked if message.commit == 1)
    assert replace(again, number=0) == replace(before[1], number=0)
    for who, message in [(who, message) for who, message in story.sent if isinstance(message, m.AuditChunk)]:
        story.says(who, m.ChunkAudited(number=message.number, outcome=RIGHT, payload_hash=TRUTH))
    story.num_read += 2
    assert story.view.num_audits_right == 2
    back_after_restart(story)
    story.next_commit()
    found = [message.commit for _, message in story.sent if isinstance(message, m.AuditChunk)][story.num_read :]
    assert found == [3], "what has ended is not open any more"


def test_an_answer_to_the_coordinator_before_answers_no_question_of_this_one() -> None:
    """A site that was averaging when the coordinator ended says what it found to the next one, which has asked it for
    another chunk by then."""
    story = Audited(audits=4)
    before = [(who, message.number) for who, message in story.sent if isinstance(message, m.AuditChunk)]
    assert len(before) == 4
    back_after_restart(story)
    story.next_commit()
    for who, number in before:
        story.says(who, m.ChunkAudited(number=number, outcome=RIGHT, payload_hash=TRUTH))
    assert story.view.num_audits_right == 0


def test_open_audits_of_commits_that_are_void_do_not_begin_anew() -> None:
    story = Audited()
    asked = e.OpenAuditsRecord(commit=2, payload_digest=TRUTH, asked=(), reducers=())
    kept = changes(e.RollbackRecord(branch=1, commit=1, voided=(2,), reason=""), lambda kind: [key_of(asked)])
    assert kept[key_of(asked)] is None
    assert changes(e.AuditsEndedRecord(2), lambda kind: [])[key_of(asked)] is None
    assert story.question() is not None


def test_whoever_looks_later_knows_that_no_draw_was_chosen() -> None:
    """The secret's digest is in the audit log before the first draw, the secret after the last."""
    story = Audited(audits=3)
    back_after_restart(story)
    story.next_commit()
    lines = [text for _, text in story.reports]
    entries = [entry.what for entry in story.audit_log()]
    assert check_draws(entries, lines) == (3, 3), "those of the start before, and those that are not to be known yet"
    with pytest.raises(ValueError, match="was chosen"):
        check_draws(entries, [line.replace(": place ", ": place 9") for line in lines])
    with pytest.raises(ValueError, match="was not said before"):
        check_draws(entries, [re.sub("secret [0-9a-f]{64}", f"secret {TRUTH.hex()}", line) for line in lines])
    with pytest.raises(ValueError, match="was not said before"):
        check_draws([*entries, f"{REVEALED}{b'chosen'.hex()}"], lines)
    with pytest.raises(ValueError, match="was not said before"):
        check_draws([entry for entry in entries if not entry.startswith(COMMITTED)], lines)
    story.happens(e.StopAsked("atoll stop"))
    story.next_commit()
    entries = [entry.what for entry in story.audit_log()]
    assert check_draws(entries, [text for _, text in story.reports]) == (6, 0)
