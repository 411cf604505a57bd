"""An old copy of the store, and what sites have kept of the time since."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import rows
from atoll.coordinator.backup import backup, place_of, remove_left_over
from atoll.coordinator.core import events as e
from atoll.coordinator.core import restored
from atoll.coordinator.core.persisted import DEPOSITED, LossRecord, Persisted, Row, RunRecord
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.coordinator.store import Store
from atoll.node.daemon.deposit_box import DepositBox
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, HostError, StateError
from atoll.protocol.messages import Deposit
from tests.harness.coordinator_story import Story, a_hash, a_manifest, ranges_of, some_settings
from tests.harness.memory_store import MemoryStore
from tests.unit.coordinator.test_store_contract import SETTINGS, random_records

LARGE = 1 << 30


def rows_of(deposits: Sequence[Deposit]) -> list[Row]:
    return [rows.decode(d.record, d.body) for d in deposits]


def nothing(_: Persisted) -> tuple[e.Record, ...]:
    return ()


def of_sites(kept: Persisted) -> list[Row]:
    """What a copy is to have as well. Syncs that are open count no longer, and of lines there is another account."""
    kinds = tuple(cls for cls in DEPOSITED if cls not in (e.OpenRecord, e.LineRecord))
    return [row for _, row in sorted(kept.records.items()) if isinstance(row, kinds)]


@pytest.mark.parametrize("seed", range(4))
def test_with_what_a_site_keeps_a_copy_is_as_the_store_was(reopen: Callable[[], Store], seed: int) -> None:
    """A site that was there all the time, and one that came later and heard then what it had not."""
    store, copies = reopen(), [MemoryStore(), MemoryStore()]
    all_the_time, later = DepositBox(None), DepositBox(None)
    term = store.begin(SETTINGS).term
    for copy in copies:
        copy.begin(SETTINGS)
    for number, records in enumerate(random_records(seed, 40)):
        if number < 10:
            for copy in copies:
                copy.persist(1, records, 1.0)
        all_the_time.add(store.persist(term, records, 1.0))
        if number == 20:
            store = reopen()
            term = store.begin(SETTINGS).term
    while found := store.deposits_after(later.last_seq, 2000):
        later.add(found)
    store = reopen()
    wanted = store.begin(SETTINGS)
    for box, copy in zip((all_the_time, later), copies, strict=True):
        deposits: list[Deposit] = []
        after = copy.last_seq()
        while part := box.after(after):
            deposits += part
            after = part[-1].seq
        copy.restore(1000, deposits, nothing)
        now = of_sites(copy.begin(SETTINGS))
        assert [row for row in now if row in of_sites(wanted)] == of_sites(wanted)
        assert all(isinstance(row, e.SiteRecord) for row in now if row not in of_sites(wanted)), (
            "of sites that were forgotten some are known again, which are gone"
        )
        assert copy.last_seq() <= store.last_seq() or not deposits
        (new,) = copy.persist(1001, [e.StopRecord("x")], 1.0)
        assert new.seq > store.last_seq(), "later than all that was ever kept"


# --- a run


def a_run() -> tuple[Story, MemoryStore]:
    """a and b have committed 0-9 and 50-59; then the copy was made."""
    store = MemoryStore()
    story = Story(some_settings(min_sites=2, quorum=2, steps=1000, data="the same"), store=store)
    story.start("a", "b")
    commit(story, "s0", "s1", a="0-9", b="50-59")
    return story, store.copied()


def commit(story: Story, state: str, following: str, **data: str) -> None:
    for name, ranges in data.items():
        story.wants(name, 50)
        story.ready(name, data=ranges_of(ranges))
    for name in data:
        story.done(name, state)
    for name in data:
        story.applied(name, story.view.last_commit, following)


def go_on(story: Story, copy: MemoryStore, deposits: Sequence[Deposit] | None = None) -> Story:
    """With the copy, and what sites have kept; all of it, if nothing else is said."""
    if deposits is None:
        assert isinstance(story.store, MemoryStore)
        deposits = story.store.deposits_after(copy.last_seq(), LARGE)
    given_up = restored.given_up(rows_of(deposits))
    deposits = [deposit for place, deposit in enumerate(deposits) if place not in given_up]
    records = rows_of(deposits)
    before = copy.begin(story.settings)
    commits = before.all(e.CommitRecord)
    left = restored.left_of_copy(commits[-1].commit.commit if commits else 0, records)
    voided = {r.commit.commit: r for r in commits if r.commit.commit > left}

    def settle(folded: Persisted) -> tuple[e.Record, ...]:
        return restored.settled(story.settings, folded, voided, records, 1.0)

    copy.restore(before.term + restored.PASSED_OVER, deposits, settle)
    again = Story(story.settings, store=copy)
    again.note_kept(record for record in copy.all_kept() if not isinstance(record, LossRecord | RunRecord))
    return again


def come_back(again: Story, state: tuple[int, str]) -> None:
    """a and b, to a run that went back or was restored, with the state of a commit."""
    for name in "ab":
        again.connect(name, state=state, branch=again.view.branch)
        again.connect(name, state=state, branch=again.view.branch, again=True)
        again.offer(name)


def kept_of(copy: MemoryStore, *stores: Store) -> Sequence[Deposit]:
    """What a site has kept since the copy, which heard all that these have."""
    box = DepositBox(None)
    for store in stores:
        box.add(store.deposits_after(copy.last_seq(), LARGE))
    return box.after(copy.last_seq())


def test_the_run_goes_on_from_its_newest_commit_and_each_sample_counts_once() -> None:
    story, copy = a_run()
    commit(story, "s1", "s2", a="10-19", b="60-79")
    story.wants("a", 90)  # what was leased when the disk was lost
    again = go_on(story, copy)
    assert (again.view.last_commit, again.view.run_tokens) == (2, story.view.run_tokens)
    assert again.done_samples() == ranges_of("0-19,50-79")
    assert again.term > story.term
    again.sites = {}
    for name in "ab":
        again.connect(name, state=(2, "s2"))
        assert again.last(name, m.RolledBack).commit == 2, "in a new branch"
        assert again.last(name, m.Evicted).reason == restored.REASON, "what it trained since is on samples of others"
        again.connect(name, state=(2, "s2"), branch=again.view.branch, again=True)
        again.offer(name)
    assert again.wants("a", 50) == ranges_of("20-49,80-99"), "what was leased is open again"
    commit(again, "s2", "s3", a="20-29", b="100-109")
    assert again.view.last_commit == 3
    assert again.view.commits[-1].sync > restored.PASSED_OVER, "no number of a sync is used twice"


def test_what_was_set_since_the_last_commit_holds_for_the_next_one() -> None:
    story, copy = a_run()
    story.happens(e.SetAsked(name="outer.momentum", value="0.25", request=900))
    commit(story, "s1", "s2", a="10-19", b="60-79")
    story.happens(e.SetAsked(name="outer.momentum", value="0.5", request=901))
    assert go_on(story, copy).view.changed == "outer.momentum = 0.5 (0.0 as the run began)"


def test_who_came_since_the_copy_is_known_and_ids_are_not_given_again() -> None:
    story, copy = a_run()
    story.join("c")
    story.ban("b")
    again = go_on(story, copy)
    sites = {site.name: site for site in again.view.sites}
    assert sites["c"].site_id == 3
    assert [text.partition(":")[0] for text in again.view.banned] == ["b"]
    again.join("d")
    assert again.sites["d"].site_id > restored.PASSED_OVER
    again.connect("c", incarnation=1)
    assert again.last("c", m.Welcome).site_id == 3


def test_commits_that_went_back_since_the_copy_are_void_and_their_samples_open() -> None:
    story, copy = a_run()
    request = story.ask_to_go_back(0)
    story.rebuilt("a", "s0")
    assert story.answers[request] == ""
    for name in "ab":
        story.connect(name, state=(0, "s0"), branch=1)
        story.offer(name)
    commit(story, "s0", "t1", a="0-4", b="70-79")
    again = go_on(story, copy)
    assert again.view.last_commit == 1
    assert again.done_samples() == story.done_samples()
    assert again.view.branch == 2 + restored.PASSED_OVER


def test_samples_that_a_rollback_has_skipped_since_the_copy_stay_done() -> None:
    """Of a commit that the copy has, and of one that only sites know."""
    story, copy = a_run()
    commit(story, "s1", "s2", a="10-19", b="60-69")
    story.ask_to_go_back(0, skip_samples=True)
    story.rebuilt("a", "s0")
    assert story.rollbacks[-1].skipped[0].ranges == ranges_of("0-19,50-69")
    for name in "ab":
        story.connect(name, state=(0, "s0"), branch=1)
        story.offer(name)
    commit(story, "s0", "t1", a="20-24", b="70-79")
    again = go_on(story, copy)
    assert again.view.last_commit == 1
    assert again.done_samples() == story.done_samples() == ranges_of("0-24,50-79")
    again.sites = {}
    for name in "ab":
        again.connect(name, state=(1, "t1"), branch=1)
        again.connect(name, state=(1, "t1"), branch=again.view.branch, again=True)
        again.offer(name)
    assert again.wants("a", 30) == ranges_of("25-49,80-84"), "harmful ones are not drawn again"


def test_what_was_decided_before_training_is_kept_and_training_begins_with_sites_enough() -> None:
    store = MemoryStore()
    story = Story(some_settings(min_sites=2, steps=1000), store=store)
    copy = store.copied()
    copy.begin(story.settings)
    story.join("a")
    story.ban("x")
    again = go_on(story, copy)
    assert [text.partition(":")[0] for text in again.view.banned] == ["x"]
    assert not again.view.commits
    again.start("b", "c")
    assert again.last("b", m.Open).sync > restored.PASSED_OVER


def test_a_run_that_is_over_stays_so() -> None:
    story, copy = a_run()
    story.happens(e.StopAsked("enough", request=7))
    commit(story, "s1", "s2", a="10-19", b="60-79")
    assert story.view.finished
    again = go_on(story, copy)
    assert again.view.finished
    assert again.view.last_commit == 2


def test_commits_that_nobody_has_kept_are_named_with_what_was_in_them() -> None:
    story, copy = a_run()
    for number in range(1, 4):
        commit(
            story,
            f"s{number}",
            f"s{number + 1}",
            a=f"{10 * number}-{10 * number + 9}",
            b=f"{60 + number}-{60 + number}",
        )
    assert isinstance(story.store, MemoryStore)
    deposits = story.store.deposits_after(copy.last_seq(), LARGE)
    records = [r for r in rows_of(deposits) if not (isinstance(r, e.CommitRecord) and r.commit.commit in (2, 3))]
    assert restored.missing(1, records) == range(2, 4)
    words = restored.in_words(copy.begin(story.settings), range(2, 4), records)
    runs = {c.commit: c for c in story.view.commits}
    assert words.startswith("commits 2 to 3 are missing")
    assert f"steps from {runs[1].run_step} to {runs[4].run_step} and tokens from {runs[1].run_tokens} to" in words
    assert not restored.missing(1, rows_of(deposits))
    assert not restored.missing(1, []), "the copy is the newest"


def test_samples_that_would_count_twice_leave_the_copy_as_it_is(tmp_path: Path) -> None:
    story, _ = a_run()
    with closing(SqliteStore(tmp_path / "run.db")) as store:
        term = store.begin(story.settings).term
        assert isinstance(story.store, MemoryStore)
        deposits = story.store.deposits_after(0, LARGE)
        (found,) = [r for r in rows_of(deposits) if isinstance(r, e.CommitRecord)]
        line = e.LineRecord(line=0, num_samples=1000, frontier=10, returned=())
        manifest = e.ManifestRecord(manifest=a_manifest(), data_fingerprint=a_hash("data"))
        store.persist(term, (manifest, line, e.DoneRecord(line=0, ranges=ranges_of("0-9"))), 1.0)
        last = store.last_seq()
        later = [replace(d, seq=last + 10 * n) for n, d in enumerate(deposits, 1)]

        def settle(folded: Persisted) -> tuple[e.Record, ...]:
            return restored.settled(story.settings, folded, {}, [found], 1.0)

        with pytest.raises(StateError, match="commit 1: positions of line 0 are done twice"):
            store.restore(term + 1000, later, settle)
        assert store.last_seq() == last
        assert store.begin(story.settings).term == term + 1


def test_syncs_that_were_abandoned_do_not_come_back() -> None:
    """A site has one record of all that were abandoned, and the opening of each."""
    story, copy = a_run()
    deposits = {d.seq: d for d in story.store.deposits_after(copy.last_seq(), LARGE)}
    for _ in range(3):
        story.abandon_sync("its attempts are used up")
        story.happens(e.Tick())
        deposits |= {d.seq: d for d in story.store.deposits_after(copy.last_seq(), LARGE)}
    box = DepositBox(None)
    box.add([deposits[seq] for seq in sorted(deposits)])
    go_on(story, copy, box.after(copy.last_seq()))
    (opened,) = [record for record in copy.all_kept() if isinstance(record, e.OpenRecord)]
    assert opened.open.sync > restored.PASSED_OVER


def test_commits_of_which_a_restored_run_had_not_heard_stay_void_in_the_next_one() -> None:
    """A site that did not tell has kept commits 2 and 3; the run went on from 1, with another 2, and is restored from
    the same copy once more."""
    story, copy = a_run()
    for number in (1, 2):
        commit(
            story,
            f"s{number}",
            f"s{number + 1}",
            a=f"{10 * number}-{10 * number + 9}",
            b=f"{60 + number}-{60 + number}",
        )
    first = copy.copied()
    again = go_on(story, first, [])
    come_back(again, (1, "s1"))
    commit(again, "s1", "t2", a="10-14", b="70-79")
    second = go_on(again, copy, kept_of(copy, story.store, first))
    assert second.view.last_commit == 2
    assert second.done_samples() == again.done_samples()


def test_a_rollback_of_which_a_restored_run_had_not_heard_is_none_in_the_next_one() -> None:
    """The copy is of commit 2. The run went back to 1, skipped samples, and had another 2 and 3; who restored it knew
    of none of that, and the run went on from 2, with another 3, in which some of these samples are. It skips its own
    ones again. A restore of the same copy has the second way, all of it, and nothing of the first."""
    story, _ = a_run()
    assert isinstance(story.store, MemoryStore)
    commit(story, "s1", "s2", a="10-19", b="60-69")
    copy = story.store.copied()
    story.ask_to_go_back(1, skip_samples=True)
    story.rebuilt("a", "s1")
    assert story.rollbacks[-1].skipped[0].ranges == ranges_of("10-19,60-69")
    come_back(story, (1, "s1"))
    story.wants("a", 30)
    commit(story, "s1", "t2", a="20-24", b="80-84")
    commit(story, "t2", "t3", a="25-29", b="85-89")
    first = copy.copied()
    again = go_on(story, first, [])
    assert again.view.last_commit == 2
    come_back(again, (2, "s2"))
    commit(again, "s2", "u3", a="20-29", b="90-94")
    assert isinstance(again.store, MemoryStore)
    last_of_way = again.view.branch
    second = go_on(again, copy.copied(), kept_of(copy, story.store, again.store))
    assert second.view.last_commit == 3
    assert second.done_samples() == again.done_samples() == ranges_of("0-29,50-69,90-94")
    assert second.view.branch > last_of_way
    again.ask_to_go_back(2, skip_samples=True)
    again.rebuilt("a", "s2")
    third = go_on(again, copy.copied(), kept_of(copy, story.store, again.store))
    assert third.view.last_commit == 2
    assert third.done_samples() == ranges_of("0-29,50-69,90-94"), "skipped on the way that counts"


def test_what_a_restored_run_knew_counts_in_the_next_one() -> None:
    """It had heard of the rollback, and of another commit 1 after it."""
    story, copy = a_run()
    story.ask_to_go_back(0)
    story.rebuilt("a", "s0")
    come_back(story, (0, "s0"))
    commit(story, "s0", "t1", a="0-4", b="70-79")
    first = copy.copied()
    assert isinstance(story.store, MemoryStore)
    again = go_on(story, first, kept_of(copy, story.store))
    assert again.done_samples() == ranges_of("0-4,70-79")
    come_back(again, (1, "t1"))
    assert isinstance(again.store, MemoryStore)
    second = go_on(again, copy, kept_of(copy, story.store, again.store))
    assert second.view.last_commit == 1
    assert second.done_samples() == ranges_of("0-4,70-79")


def test_an_end_of_which_a_restored_run_had_not_heard_is_none_in_the_next_one() -> None:
    story, copy = a_run()
    story.happens(e.StopAsked("enough", request=7))
    commit(story, "s1", "s2", a="10-19", b="60-79")
    assert story.view.finished
    first = copy.copied()
    again = go_on(story, first, [])
    come_back(again, (1, "s1"))
    commit(again, "s1", "t2", a="10-14", b="70-74")
    assert isinstance(story.store, MemoryStore)
    assert isinstance(again.store, MemoryStore)
    second = go_on(again, copy, kept_of(copy, story.store, again.store))
    assert not second.view.finished
    assert second.view.last_commit == 2
    assert second.done_samples() == again.done_samples()


def test_a_copy_of_before_the_model_is_refused() -> None:
    story, _ = a_run()
    copy = MemoryStore()
    copy.begin(story.settings)
    with pytest.raises(StateError, match="before the run had a model"):
        go_on(story, copy)


def test_what_sites_hold_shows_which_commits_are_missing() -> None:
    story, copy = a_run()
    before = copy.begin(story.settings)
    gone = e.RollbackRecord(branch=2, commit=4, voided=(5, 6), reason="?")
    assert restored.missing(1, [], restored.held(before, [], 0, 3)) == range(2, 4)
    assert not restored.missing(1, [], restored.held(before, [], 0, 1))
    no_list = restored.missing(1, [], (1 << 64) - 1)
    assert restored.in_words(before, no_list, []).startswith("commits 2 to 18446744073709551615 are missing")
    assert restored.held(before, [gone], 1, 6) == 4, "what went back since need not be there"
    assert restored.held(before, [gone], 2, 6) == 6
    assert restored.is_unknown(before, [gone], 3)
    assert not restored.is_unknown(before, [gone], 2)
    assert restored.in_words(before, range(2, 4), []).startswith("commits 2 to 3 are missing: of the run's steps from")


# --- a copy


def test_a_copy_is_whole_and_takes_no_others_place(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    target = tmp_path / "copies" / "copy.db"

    async def copied(store: Store, to: Path) -> int:
        return await backup(store, place_of(tmp_path / "run.db", bytes(16)), to, asyncio.Lock(), lambda: 7)

    with closing(SqliteStore(tmp_path / "run.db")) as store:
        term = store.begin(SETTINGS).term
        store.persist(term, [e.StopRecord("x")], 1.0)
        assert asyncio.run(copied(store, target)) == 7
        with pytest.raises(ConfigError, match="is there already"):
            asyncio.run(copied(store, target))
        for name in ("elsewhere/copy.db", "x" * 300, "a\0b"):
            with pytest.raises(HostError, match="no copy at"):
                asyncio.run(copied(store, target.parent / name))
        with pytest.raises(ConfigError, match="no full path"):
            asyncio.run(copied(store, Path("copy.db")))
        target.with_name("nowhere.db").symlink_to(tmp_path / "missing")
        with pytest.raises(ConfigError, match="is there already"):
            asyncio.run(copied(store, target.with_name("nowhere.db")))
        store.persist(term, [e.PausedRecord("later")], 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copies", "run.db"]
    assert sorted(path.name for path in target.parent.iterdir()) == ["copy.db", "nowhere.db"]
    with closing(SqliteStore(target)) as copy:
        kept = copy.begin(SETTINGS)
        assert kept.one(e.StopRecord) == e.StopRecord("x")
        assert kept.one(e.PausedRecord) is None
        assert kept.term == term + 1


def test_a_copy_is_of_the_commit_that_it_has_and_one_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    """While it is brought to its place the run goes on."""
    commits, deciding = [3], asyncio.Lock()

    class Slow:
        """Its copies are brought to their place as the next commit is made."""

        def copy_to(self, path: Path) -> None:
            assert deciding.locked()
            path.write_bytes(b"whole")

    def last_commit() -> int:
        found = commits[0]
        commits[0] += deciding.locked()  # nothing is decided before the copy is made
        return found

    store: Any = Slow()
    target = tmp_path / "copy.db"
    made, killed = (place_of(tmp_path / "run[1].db", bytes(15) + last) for last in (b"\1", b"\2"))
    assert asyncio.run(backup(store, made, target, deciding, last_commit)) == 3
    assert (target.read_bytes(), commits) == (b"whole", [4])
    kept = ["copy.db", "run1.db.copy-1f", "run[1].db", "run[1].db.copy-2026-11-28", "run[1].db.trust"]
    for path in (killed, killed.with_name(f"{killed.name}-journal"), *(tmp_path / name for name in kept)):
        path.touch()
    remove_left_over(tmp_path / "run[1].db")
    assert sorted(path.name for path in tmp_path.iterdir()) == kept, "a copy that a person made is that person's"
