"""The audit log: what people asked for, who they were, what came of it, in a chain of hashes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from atoll.coordinator.core import audit, persisted
from atoll.coordinator.core import events as e
from tests.harness.coordinator_story import Story, a_hash, some_settings
from tests.unit.coordinator.test_going_back import committed, on_new_branch

OPERATOR = "operator anna (key 0123)"


def told(story: Story) -> list[tuple[str, str, str]]:
    return [(entry.by, entry.what, entry.outcome) for entry in story.audit_log()]


def test_an_entry_says_who_wanted_what_and_what_came_of_it() -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b", "c")
    assert story.ban("c", "it lies", until_s=story.wall_s + 3600, by=OPERATOR) == ""
    assert story.ban("c", "again", until_s=1.0, by=OPERATOR)
    story.happens(e.StopAsked("enough", by="root on the coordinator's machine", request=900))
    assert told(story) == [
        (OPERATOR, f'ban name="c" until_s={story.wall_s + 3600} reason="it lies"', "done"),
        (
            OPERATOR,
            'ban name="c" until_s=1.0 reason="again"',
            "refused: the end of the ban is over; it is 2025-11-24 16:00:00 UTC at the coordinator",
        ),
        ("root on the coordinator's machine", 'stop reason="enough"', "done"),
    ]


def test_an_entry_is_kept_with_what_it_tells_before_anybody_is_answered() -> None:
    story = Story(some_settings(min_sites=2))
    outputs = story.happens(e.BanAsked(name="x", reason="?", by=OPERATOR, request=7))
    kept = next(output for output in outputs if isinstance(output, e.Persist))
    assert [type(record) for record in kept.records] == [e.BanRecord, e.AuditRecord]
    (answer,) = [output for output in outputs if isinstance(output, e.Answer)]
    assert (answer.request, answer.problem) == (7, "")
    assert outputs.index(kept) < outputs.index(answer)
    (said,) = [output.text for output in outputs if isinstance(output, e.Report) and output.text.startswith("audit ")]
    assert story.audit_log()[0].digest in said, "whoever keeps the log elsewhere has the hash"


def test_what_is_decided_later_is_told_then() -> None:
    story = committed("a", "b")
    story.happens(e.RollbackAsked("of no use", to=1, by=OPERATOR, request=7))
    assert told(story) == []
    story.rebuilt("b", "s1")
    assert told(story) == [(OPERATOR, 'rollback to=1 reason="of no use"', "done")]
    story.happens(e.RollbackAsked("of no use", to=0, by=OPERATOR, request=8))
    on_new_branch(story, "b", 1)
    on_new_branch(story, "a", 1)
    story.happens(e.RollbackAsked("of no use", to=0, by=OPERATOR, request=9))
    for name in "ab":
        story.rebuilt(name)
    refused = [outcome for by, what, outcome in told(story)[1:]]
    assert len(refused) == 2
    assert all(outcome.startswith("refused: ") for outcome in refused)


@pytest.mark.parametrize("restarted", [False, True])
def test_each_entry_has_the_hash_of_the_one_before(restarted: bool) -> None:
    story = Story(some_settings(min_sites=2))
    story.ban("x", by=OPERATOR)
    if restarted:
        story.restart()
    story.ban("y", by=OPERATOR)
    first, second = story.audit_log()
    assert (first.number, first.previous, second.number, second.previous) == (1, "", 2, first.digest)
    text = json.dumps(
        [first.number, first.at_s, first.by, first.what, first.outcome, first.previous], separators=(",", ":")
    )
    assert first.digest == hashlib.sha256(text.encode()).hexdigest()
    assert audit.break_in([first, second]) == ""


def test_what_was_changed_left_out_or_put_in_is_found() -> None:
    story = Story(some_settings(min_sites=2))
    for name in "wxyz":
        story.ban(name, by=OPERATOR)
    entries = story.audit_log()
    assert audit.break_in(entries[1:]) == "", "older ones may be gone"
    for i in range(4):
        for changed in ({"by": "nobody"}, {"what": "?"}, {"outcome": "?"}, {"at_s": 0.0}, {"previous": "?"}):
            wrong = [*entries[:i], replace(entries[i], **changed), *entries[i + 1 :]]
            assert f"entry {entries[i].number} " in audit.break_in(wrong)
    assert "entry 3 does not follow entry 1" in audit.break_in([entries[0], *entries[2:]])
    rewritten = replace(entries[1], by="nobody")
    rewritten = replace(rewritten, digest=audit.digest_of(rewritten))
    assert "entry 3 does not follow entry 2" in audit.break_in([entries[0], rewritten, *entries[2:]])


def test_looking_and_what_nobody_asked_for_by_name_is_not_in_it() -> None:
    story = Story(some_settings(min_sites=2))
    story.ban("x", by=OPERATOR)
    story.evict("x")
    (answer,) = [o for o in story.happens(e.AuditAsked(after=0, by="", request=8)) if isinstance(o, e.Answer)]
    (entry,) = json.loads(answer.found)
    assert e.AuditRecord(**entry) == story.audit_log()[0]
    story.happens(e.AuditAsked(after=1, by=OPERATOR, request=9))
    assert len(told(story)) == 1


def test_invites_that_are_used_are_in_it_and_misuse_once() -> None:
    story = Story(some_settings(min_sites=2))
    story.happens(e.InviteAsked(role="site", name="a", invite_id="i1", by=OPERATOR, request=1))
    for key in ("key", "key", "other", "third"):
        story.happens(e.JoinAsked(invite_id="i1", key_digest=a_hash(key), came_from=f"of {key}", request=2))
    holder = "whoever has invite i1"
    assert told(story)[1:] == [
        (holder, "join site a", f"key {a_hash('key').hex()} from of key"),
        (holder, "join site a", f"refused key {a_hash('other').hex()} from of other: it was used by another key"),
    ]


def test_a_ban_that_the_coordinator_lifts_is_in_it() -> None:
    story = Story(some_settings(min_sites=2))
    story.ban("x", until_s=story.wall_s + 5)
    story.wait(6)
    assert told(story) == [(audit.COORDINATOR, "lift-ban name='x'", "its time is over")]


def test_the_oldest_entries_go_where_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persisted, "KEPT_AUDIT", 3)
    monkeypatch.setattr(audit, "MOST_ASKED", 2)
    story = Story(some_settings(min_sites=2))
    for name in "vwxyz":
        story.ban(name, by=OPERATOR)
    story.restart()
    kept = [*story.audit_log(), *story.audit_log(4)]
    assert [entry.number for entry in kept] == [3, 4, 5], "in pages"
    assert audit.break_in(kept) == ""
    assert audit.Audit(kept).add(0.0, "?", "?", "x" * 5000).outcome == "x" * audit.MAX_TEXT


def test_memory_holds_as_many_as_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KEPT_AUDIT", 3)
    log = audit.Audit([])
    for _ in range(10):
        log.add(0.0, "?", "?", "done")
    assert [entry.number for entry in log.after(0)] == [8, 9, 10]


def test_what_is_said_is_there_whole_or_shortened_by_itself() -> None:
    assert audit.words_of(e.RollbackAsked("r")) == 'rollback reason="r"'
    assert audit.words_of(e.RollbackAsked("r", to=0)) == 'rollback to=0 reason="r"', "0 is another thing than nothing"
    ban = audit.words_of(e.BanAsked(name="c", reason="x" * 5000, until_s=5.0))
    assert ban.startswith('ban name="c" until_s=5.0 reason="xxx')
    assert len(ban) < 600
    invite = audit.words_of(e.InviteAsked(role="site", name="a", addresses=("h:1",), invite_id="01"))
    assert invite == 'invite role="site" name="a" addresses=["h:1"] invite_id="01"'


def test_nothing_that_is_said_looks_like_another_entry() -> None:
    story = Story(some_settings(min_sites=2))
    forged = 'x\noperator bob (key 99): stop reason="atoll stop": done'
    story.ban(forged, by=OPERATOR + "\n")
    story.happens(e.TakeBackAsked(role="site", name=forged, by=OPERATOR, request=8))
    for entry in story.audit_log():
        assert "\n" not in entry.by + entry.what + entry.outcome
        assert entry.by.startswith("operator anna")
    assert audit.in_one_line("a\nb\tc\x1b[2J") == "a\\nb\\tc\\x1b[2J"
