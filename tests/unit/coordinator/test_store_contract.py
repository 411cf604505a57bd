"""One contract for every store."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from atoll.coordinator import store as store_module
from atoll.coordinator.core import events as e
from atoll.coordinator.core.persisted import (
    KEPT_EXCLUSIONS,
    MAX_LOSSES,
    THINNED_EVERY,
    LossRecord,
    Persisted,
    Row,
    RunRecord,
    key_of,
    thinned,
)
from atoll.coordinator.sql_store import SqlStore
from atoll.coordinator.store import Store
from atoll.protocol.errors import ConfigError, StaleError
from atoll.protocol.messages import Commit, DataRange, Member, Open, Outlier, Plan, Tree
from atoll.protocol.outer import resolved
from atoll.protocol.outer_settings import AUTO, OuterSettings
from atoll.protocol.settings import settings_from_json, settings_to_json
from tests.harness.coordinator_story import a_hash, a_manifest, some_settings
from tests.harness.memory_store import MemoryStore, fold, newest

SETTINGS = some_settings()
Reopen = Callable[[], Store]


def begun_with(reopen: Reopen, monkeypatch: pytest.MonkeyPatch, table: dict[str, Any]) -> None:
    """By another version of atoll, which wrote its settings so."""
    with monkeypatch.context() as other:
        other.setattr(store_module, "settings_to_json", lambda _: json.dumps(table))
        reopen().begin(SETTINGS)


def test_a_new_setting_does_not_end_a_run(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored by an older version, which lacks one, and by a newer one, which has one more."""
    table = json.loads(settings_to_json(SETTINGS))
    table["sync"]["overlap"] = 3
    del table["overrun_steps"], table["outer"]["momentum"]
    begun_with(reopen, monkeypatch, table)
    kept = reopen().begin(SETTINGS)
    assert kept.term == 2
    assert settings_from_json(kept.run.settings_json) == SETTINGS, "what nodes are told is whole"
    assert "sync.overlap" in caplog.text


def test_what_a_run_needs_and_this_version_cannot_do_is_refused_by_name(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_with(reopen, monkeypatch, json.loads(settings_to_json(SETTINGS)) | {"needs": ["overlap mix"]})
    with pytest.raises(ConfigError, match="needs what this version cannot do: overlap mix"):
        reopen().begin(SETTINGS)


def persisted(*rows: Row, term: int = 1, parent_json: str = "") -> Persisted:
    run = RunRecord(run_id="run", settings_json=settings_to_json(SETTINGS), parent_json=parent_json)
    return Persisted(run=run, term=term, records={key_of(row): row for row in rows})


def a_site(site_id: int = 1, **changes: object) -> e.SiteRecord:
    record = e.SiteRecord(
        site_id=site_id,
        name=f"s{site_id}",
        key_digest=a_hash("key"),
        incarnation=1,
        address="h:1",
        live=True,
        evicted="",
        max_retained_bytes=1 << 30,
        bandwidth_bytes_per_s=0,
        may_hold=0,
        voided_sync=7,
        contributed=False,
        strikes=2,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def an_open(sync: int, base: int = 0, fragment: int = 0) -> e.OpenRecord:
    opened = Open(
        sync=sync,
        fragment=fragment,
        base_commit=base,
        run_step=10 * base,
        run_tokens=base,
        num_steps=10,
        resting=(7, 9),
    )
    return e.OpenRecord(open=opened, expected=(1, 2))


def a_plan(sync: int, attempt: int) -> e.PlanRecord:
    member = Member(site_id=1, incarnation=1, address="h:1")
    return e.PlanRecord(
        Plan(
            sync=sync,
            attempt=attempt,
            term=1,
            base_commit=0,
            contributors=(member,),
            trees=(Tree(first_chunk=0, num_chunks=3, parents=(-1,)),),
            stall_limit_s=6.0,
            num_steps=10,
            deadline_s=600.0,
            slowest_bytes_per_s=1 << 10,
        )
    )


def some_weights(sync: int, attempt: int) -> e.WeightsRecord:
    return e.WeightsRecord(
        sync=sync,
        attempt=attempt,
        tokens=(5,),
        said=(80,),
        ranges=((DataRange(first=3, num_samples=4), DataRange(first=9, num_samples=1)),),
    )


def a_commit(number: int, loss: float | None = 1.5) -> e.CommitRecord:
    return e.CommitRecord(
        commit=Commit(
            commit=number,
            sync=number,
            attempt=1,
            term=1,
            contributors=(Member(site_id=1, incarnation=1, address="h:1", tokens=5),),
            payload_digest=a_hash("p"),
            run_step=10 * number,
            run_tokens=5 * number,
            next=an_open(number + 1, number).open,
        ),
        mean_loss=loss,
        median_loss=loss if loss is None else loss - 0.25,
        stood_out=Outlier(site_id=1, norm=30.0, limit=1000.0) if number % 2 else None,
        cut=("b (site 2) says 1000000 tokens, which count as 80 (sync.max_weight_ratio)",),
    )


def test_a_new_store_has_the_run_and_nothing_else(reopen: Reopen) -> None:
    assert reopen().begin(SETTINGS, '{"run_id": "parent"}') == persisted(parent_json='{"run_id": "parent"}')


def test_every_start_raises_the_term(reopen: Reopen) -> None:
    assert [reopen().begin(SETTINGS).term for _ in range(3)] == [1, 2, 3]


def test_what_was_kept_comes_back(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    manifest = e.ManifestRecord(manifest=a_manifest(), data_fingerprint=a_hash("data"))
    store.persist(1, (manifest, a_site(1), a_site(2)), 1.0)
    store.persist(1, (a_site(2, live=False, evicted="silent", incarnation=4),), 2.0)
    store.persist(1, (e.AttestationRecord(0, a_hash("s0")), an_open(1)), 3.0)
    store.persist(1, (a_plan(1, 1), some_weights(1, 1)), 4.0)
    store.persist(1, (a_commit(1), an_open(2, 1)), 5.0)
    store.persist(1, (e.AttestationRecord(1, a_hash("first")),), 6.0)
    store.persist(1, (e.AttestationRecord(1, a_hash("corrected")),), 6.0)
    store.persist(1, (a_plan(2, 1),), 7.0)
    store.persist(1, (a_plan(2, 2), some_weights(2, 2), e.StopRecord("enough")), 8.0)
    found = reopen().begin(SETTINGS)
    assert found == persisted(
        manifest,
        a_site(1),
        a_site(2, live=False, evicted="silent", incarnation=4),
        an_open(2, 1),
        a_plan(2, 1),
        a_plan(2, 2),
        some_weights(2, 2),
        a_commit(1),
        LossRecord(commit=1, run_step=10, run_tokens=5, median_loss=1.25),
        e.AttestationRecord(0, a_hash("s0")),
        e.AttestationRecord(1, a_hash("corrected")),
        e.StopRecord("enough"),
        term=2,
    )
    assert found.last_sync == 2


def test_commits_that_are_older_than_the_log_can_be_read(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    for number in range(1, 13):
        store.persist(1, (a_commit(number),), 1.0)
    for number in (2, 5, 9):
        store.persist(1, (e.AttestationRecord(number, a_hash(f"s{number}")),), 1.0)
    assert store.begin(SETTINGS).all(e.CommitRecord)[0] == a_commit(5)
    commits, attestations = store.read_commits(2, 4)
    assert commits == tuple(a_commit(number) for number in (2, 3, 4))
    assert attestations == (e.AttestationRecord(2, a_hash("s2")),)


def test_the_account_of_samples_comes_back_as_it_was_last(reopen: Reopen) -> None:
    def a_line(number: int, frontier: int, *returned: tuple[int, int]) -> e.LineRecord:
        return e.LineRecord(line=number, num_samples=10, frontier=frontier, returned=some(*returned))

    def a_lease(line: int, site_id: int, incarnation: int, *ranges: tuple[int, int]) -> e.LeaseRecord:
        return e.LeaseRecord(line=line, site_id=site_id, incarnation=incarnation, ranges=some(*ranges))

    def some(*ranges: tuple[int, int]) -> tuple[DataRange, ...]:
        return tuple(DataRange(first=first, num_samples=count) for first, count in ranges)

    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (a_line(0, 20), a_lease(0, 2, 1, (0, 20)), a_line(7, 5), a_lease(7, 7, 3, (0, 5))), 1.0)
    store.persist(1, (e.DoneRecord(line=0, ranges=some((0, 5))), a_lease(0, 2, 1, (5, 15))), 2.0)
    store.persist(1, (a_line(0, 20, (5, 3), (9, 2)), a_lease(0, 2, 1), a_lease(0, 2, 0, (8, 1))), 3.0)
    store.persist(1, (e.DoneRecord(line=0, ranges=some((0, 5), (8, 1))), a_lease(0, 1, 1, ((1 << 62) - 1, 1))), 4.0)
    found = reopen().begin(SETTINGS)
    assert found.all(e.LineRecord) == (a_line(0, 20, (5, 3), (9, 2)), a_line(7, 5))
    assert found.all(e.DoneRecord) == (e.DoneRecord(line=0, ranges=some((0, 5), (8, 1))),)
    assert found.all(e.LeaseRecord) == (
        a_lease(0, 1, 1, ((1 << 62) - 1, 1)),
        a_lease(0, 2, 0, (8, 1)),
        a_lease(7, 7, 3, (0, 5)),
    )


def test_times_of_commits_are_kept_for_people(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (an_open(1),), 1.0)
    store.persist(1, (a_commit(1), an_open(2, 1)), 1234.5)
    assert reopen().commit_times() == {1: 1234.5}


def test_an_abandoned_sync_is_not_open_and_its_number_is_used(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (an_open(1),), 1.0)
    store.persist(1, (a_plan(1, 1), some_weights(1, 1)), 1.0)
    store.persist(1, (e.AbandonRecord(1, "nobody agreed", 1), an_open(2)), 2.0)
    found = reopen().begin(SETTINGS)
    assert (found.all(e.OpenRecord), found.last_sync) == ((an_open(2),), 2)
    assert (found.all(e.PlanRecord), found.all(e.WeightsRecord)) == ((), ())
    assert found.one(e.AbandonRecord) == e.AbandonRecord(1, "nobody agreed", 1)
    reopen().persist(2, (e.AbandonRecord(2, "nobody agreed", 2), e.FinishedRecord(0, "enough")), 3.0)
    found = reopen().begin(SETTINGS)
    assert (found.all(e.OpenRecord), found.last_sync) == ((), 2)


def test_a_sync_that_ends_leaves_those_of_other_fragments_as_they_are(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (an_open(1), an_open(2, fragment=1), an_open(3, fragment=2)), 1.0)
    attempts = [record for n in (1, 2, 10) for sync in (2, 1) for record in (a_plan(sync, n), some_weights(sync, n))]
    store.persist(1, (*attempts, a_plan(3, 1)), 2.0)
    store.persist(1, (replace(a_commit(1), commit=replace(a_commit(1).commit, sync=2, fragment=1)),), 3.0)
    store.persist(1, (an_open(4, 1, fragment=1), a_plan(4, 1), some_weights(4, 1)), 3.0)
    found = reopen().begin(SETTINGS)
    assert found.all(e.OpenRecord) == (an_open(1), an_open(3, fragment=2), an_open(4, 1, fragment=1))
    assert found.all(e.PlanRecord) == (a_plan(1, 1), a_plan(1, 2), a_plan(1, 10), a_plan(3, 1), a_plan(4, 1))
    assert found.all(e.WeightsRecord) == (*(some_weights(1, n) for n in (1, 2, 10)), some_weights(4, 1))
    assert found.last_sync == 4
    store = reopen()
    store.begin(SETTINGS)
    store.persist(3, (e.AbandonRecord(1, "nobody agreed", 1), an_open(5)), 4.0)
    store.persist(3, (e.AbandonRecord(4, "nobody agreed", 2), e.AbandonRecord(3, "nor here", 3)), 5.0)
    found = reopen().begin(SETTINGS)
    assert (found.all(e.OpenRecord), found.all(e.PlanRecord), found.all(e.WeightsRecord)) == ((an_open(5),), (), ())
    assert found.last_sync == 5


def test_a_finished_run_has_no_open_sync(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (an_open(1),), 1.0)
    store.persist(1, (a_commit(1), e.FinishedRecord(1, "the length is reached")), 2.0)
    found = reopen().begin(SETTINGS)
    assert (found.all(e.OpenRecord), found.last_sync) == ((), 1)
    assert found.one(e.FinishedRecord) == e.FinishedRecord(1, "the length is reached")


def test_only_the_newest_commits_come_back_but_all_losses(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (an_open(1), e.AttestationRecord(0, a_hash("0"))), 1.0)
    for n in range(1, 13):
        loss = None if n == 2 else float(n)
        store.persist(1, (a_commit(n, loss), an_open(n + 1, n), e.AttestationRecord(n, a_hash(str(n)))), float(n))
    found = reopen().begin(SETTINGS)
    kept = SETTINGS.sync.log_commits
    assert [r.commit.commit for r in found.all(e.CommitRecord)] == list(range(13 - kept, 13))
    assert [r.commit for r in found.all(e.AttestationRecord)] == [0, *range(13 - kept, 13)]
    assert [point.commit for point in found.all(LossRecord)] == [1, *range(3, 13)]


def test_the_curve_of_a_long_run_is_thinned_out(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.coordinator.core.persisted.MAX_LOSSES", 16)
    store = reopen()
    store.begin(SETTINGS)
    last = 3 * THINNED_EVERY
    store.persist(1, [a_commit(n) for n in range(1, last + 1)], 1.0)
    points = [point.commit for point in reopen().begin(SETTINGS).all(LossRecord)]
    assert len(points) <= 16 + 1
    assert all(b - a <= last / 8 for a, b in pairwise([0, *points, last])), points
    assert reopen().commit_times().keys() == set(range(1, last + 1)), "its commits stay"


def test_of_a_run_of_very_many_commits_the_newest_stay(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.coordinator.core.persisted.KEPT_COMMITS", 20)
    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (e.AttestationRecord(0, a_hash("0")),), 1.0)
    for n in range(1, 101):
        store.persist(1, (a_commit(n), e.AttestationRecord(n, a_hash(str(n)))), float(n))
    store = reopen()
    found = store.begin(SETTINGS)
    assert next(r.commit for r in found.all(e.AttestationRecord)) == 0, "of the starting state"
    commits, attestations = store.read_commits(81, 100)
    assert [r.commit.commit for r in commits] == [r.commit for r in attestations] == list(range(81, 101))
    assert 80 not in store.commit_times() or not isinstance(store, SqlStore)


@pytest.mark.parametrize("number", [0, 1, MAX_LOSSES, MAX_LOSSES + 1, 5 * MAX_LOSSES])
def test_points_of_a_curve(number: int) -> None:
    kept = thinned(range(1, number + 1))
    assert len(kept) <= MAX_LOSSES
    assert len(kept) == number or 2 * len(kept) >= MAX_LOSSES
    assert len({b - a for a, b in pairwise(kept)}) <= 1


def test_void_commits_are_gone_and_their_numbers_are_used_again(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    store.persist(1, (an_open(1),), 1.0)
    for n in (1, 2, 3):
        store.persist(1, (a_commit(n), an_open(n + 1, n), e.AttestationRecord(n, a_hash(str(n)))), float(n))
    first = e.RollbackRecord(branch=1, commit=1, voided=(2, 3), reason="a power cut")
    store.persist(1, (e.AbandonRecord(4, "rolled back", 1), first, an_open(5, 1)), 4.0)
    found = reopen().begin(SETTINGS)
    assert found.all(e.RollbackRecord) == (first,)
    numbers = [r.commit.commit for r in found.all(e.CommitRecord)]
    assert numbers == [r.commit for r in found.all(e.AttestationRecord)] == [1]
    assert [point.commit for point in found.all(LossRecord)] == [1]
    assert found.all(e.OpenRecord) == (an_open(5, 1),)
    store = reopen()
    store.begin(SETTINGS)
    store.persist(3, (replace(a_commit(2), commit=replace(a_commit(2).commit, sync=5, branch=1)),), 5.0)
    second = e.RollbackRecord(branch=2, commit=0, voided=(1, 2), reason="another")
    store.persist(3, (second, an_open(6)), 6.0)
    assert reopen().begin(SETTINGS).all(e.RollbackRecord) == (first, second)


def test_the_newest_exclusions_are_found_again(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    kept = [
        e.ExclusionRecord(sync=n, attempt=1, site_id=site, incarnation=7, by_site_id=1, reason=f"{site} in {n}")
        for n in range(1, KEPT_EXCLUSIONS)
        for site in (2, 3)
    ]
    store.persist(1, kept, 1.0)
    assert reopen().begin(SETTINGS).all(e.ExclusionRecord) == tuple(kept[-KEPT_EXCLUSIONS:])


def test_all_exclusions_of_the_newest_sync_are_found_again(reopen: Reopen) -> None:
    """It may be open: who is not found again would contribute to it once more."""
    store = reopen()
    store.begin(SETTINGS)
    before, after = (
        [
            e.ExclusionRecord(sync=n, attempt=1, site_id=site, incarnation=7, by_site_id=1, reason="absurd")
            for site in range(2, 2 + 2 * KEPT_EXCLUSIONS)
        ]
        for n in (1, 2)
    )
    store.persist(1, before, 1.0)
    assert reopen().begin(SETTINGS).all(e.ExclusionRecord) == tuple(before)
    store = reopen()
    store.begin(SETTINGS)
    store.persist(3, after, 2.0)
    assert reopen().begin(SETTINGS).all(e.ExclusionRecord) == tuple(after)


def test_exclusions_go_when_newer_ones_come_and_with_their_sites(reopen: Reopen) -> None:
    """Nobody would read them: the store has a row of each that is found again, and no other."""
    store = reopen()
    store.begin(SETTINGS)
    sites = tuple(a_site(n) for n in (1, 2, 3))
    kept = [
        e.ExclusionRecord(sync=n, attempt=1, site_id=2 + n % 2, incarnation=7, by_site_id=1, reason=f"in {n}")
        for n in range(1, 2 * KEPT_EXCLUSIONS)
    ]
    store.persist(1, (*sites, *kept), 1.0)
    assert num_exclusions(store) == KEPT_EXCLUSIONS
    store.persist(1, (e.ForgetRecord(site_ids=(2,), last_site_id=3),), 2.0)
    of_the_other = [r for r in kept[-KEPT_EXCLUSIONS:] if r.site_id == 3]
    assert num_exclusions(store) == len(of_the_other)
    assert reopen().begin(SETTINGS).all(e.ExclusionRecord) == tuple(of_the_other)


def num_exclusions(store: Store) -> int:
    if isinstance(store, SqlStore):
        (found,) = store._execute("SELECT count(*) FROM records WHERE kind = 'exclusion'").fetchone()
        return int(found)
    assert isinstance(store, MemoryStore)
    return sum(isinstance(record, e.ExclusionRecord) for record in store._records.values())


def test_an_older_term_may_not_write(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    store = reopen()
    store.begin(SETTINGS)
    with pytest.raises(StaleError, match="term 1 is over"):
        store.persist(1, (an_open(1),), 1.0)
    assert reopen().begin(SETTINGS).all(e.OpenRecord) == ()


@pytest.mark.parametrize(
    ("settings", "parent", "says"),
    [
        (some_settings(run_id="other"), "", "holds run 'run'.*run 'other'"),
        (some_settings(steps=50), "", "steps was 40, now 50"),
        (some_settings(every=11), "", "sync.every was 10, now 11"),
        (SETTINGS, '{"run_id": "p"}', "begun afresh"),
    ],
)
def test_another_run_is_refused_with_both_values(reopen: Reopen, settings, parent: str, says: str) -> None:  # type: ignore[no-untyped-def]
    reopen().begin(SETTINGS)
    with pytest.raises(ConfigError, match=says):
        reopen().begin(settings, parent)
    assert reopen().begin(SETTINGS).term == 2, "a refused start is no start"


def test_what_a_run_leaves_to_be_chosen_is_chosen_once(reopen: Reopen) -> None:
    asked = replace(SETTINGS, outer=OuterSettings(optimizer=AUTO))
    began = settings_from_json(reopen().begin(asked).run.settings_json)
    assert began == resolved(asked)
    assert began.outer == OuterSettings(optimizer="sgd")
    again = settings_from_json(reopen().begin(asked).run.settings_json)
    assert again == began
    reopen().begin(began)
    with pytest.raises(ConfigError, match="begun with other settings"):
        reopen().begin(replace(SETTINGS, outer=OuterSettings(momentum=0.5)))


def test_the_name_of_a_preset_means_nothing_to_a_store(reopen: Reopen) -> None:
    reopen().begin(SETTINGS)
    for name in ("diloco", "of a later version"):
        assert settings_from_json(reopen().begin(replace(SETTINGS, preset=name)).run.settings_json) == SETTINGS


def test_one_that_was_begun_with_momentum_goes_on_with_it(reopen: Reopen) -> None:
    """By a version that had no other default."""
    reopen().begin(SETTINGS)
    asked = replace(SETTINGS, outer=OuterSettings(optimizer=AUTO))
    assert settings_from_json(reopen().begin(asked).run.settings_json) == SETTINGS
    assert resolved(asked) != SETTINGS


def test_who_is_banned_and_what_was_taken_back_come_back(reopen: Reopen) -> None:
    store = reopen()
    store.begin(SETTINGS)
    bad = e.BanRecord(name="bad", key_digest=a_hash("key"), reason="garbage")
    worse = e.BanRecord(name="worse", key_digest=b"", reason="more of it")
    manifest = e.ManifestRecord(manifest=a_manifest(), data_fingerprint=a_hash("data"))
    store.persist(1, (a_site(1), manifest, worse, bad, e.AttestationRecord(0, a_hash("s0"))), 1.0)
    store.persist(1, (e.LineRecord(line=0, num_samples=10, frontier=5, returned=()), e.BanLiftedRecord("worse")), 2.0)
    assert reopen().begin(SETTINGS).all(e.BanRecord) == (bad,)
    store = reopen()
    store.begin(SETTINGS)
    store.persist(3, (e.ResetRecord((a_hash("s0"), a_hash("t0")), 7), replace(bad, reason="again")), 3.0)
    found = reopen().begin(SETTINGS)
    assert found == persisted(replace(bad, reason="again"), e.ResetRecord((a_hash("s0"), a_hash("t0")), 7), term=4), (
        "sites, model, starting state and lines are forgotten"
    )
    assert found.last_site_id == 7, "ids are not given again"


def random_records(seed: int, num: int) -> Iterator[list[e.Record]]:
    """In any order, in transactions of any size."""
    generator = random.Random(seed)
    number, branch = 0, 0
    some = (DataRange(first=3, num_samples=4),)

    def a_record() -> e.Record:
        rare: list[e.Record]
        nonlocal number, branch
        site = generator.randint(1, 5)
        match generator.randrange(14):
            case 0:
                return a_site(site, strikes=generator.randrange(9))
            case 1:
                return e.ForgetRecord(site_ids=(site,), last_site_id=site)
            case 2:
                return an_open(number + 1, number)
            case 3:
                make = generator.choice((a_plan, some_weights))
                return make(number + 1, generator.randint(1, 3))
            case 4 | 5 | 6:
                number += 1
                return a_commit(number, generator.choice([None, 2.0]))
            case 7:
                return e.AttestationRecord(number, generator.randbytes(32))
            case 8:
                return e.LineRecord(line=site, num_samples=10, frontier=number, returned=some)
            case 9:
                return e.LeaseRecord(line=site, site_id=site, incarnation=1, ranges=generator.choice([(), some]))
            case 10:
                branch, last = branch + 1, number
                number = generator.randint(max(0, number - 12), number)
                voided = tuple(range(number + 1, last + 1))
                return e.RollbackRecord(branch=branch, commit=number, voided=voided, reason="a power cut")
            case 11:
                return e.ExclusionRecord(
                    sync=number, attempt=1, site_id=site, incarnation=1, by_site_id=1, reason="absurd"
                )
            case 12:
                rare = [e.BanRecord(name="x", key_digest=b"", reason="?"), e.BanLiftedRecord("x")]
            case _:
                rare = [e.AbandonRecord(number + 1, "?", 1), e.DoneRecord(line=site, ranges=some)]
        return generator.choice(rare)

    for _ in range(num):
        yield [a_record() for _ in range(generator.randrange(12))]


def test_what_is_read_is_what_was_folded(reopen: Reopen) -> None:
    """After every start, all that is there, and nothing else."""
    store, term, wanted = reopen(), 1, MemoryStore()
    store.begin(SETTINGS)
    kept = wanted.begin(SETTINGS)
    for records in random_records(1, 60):
        store.persist(term, records, 1.0)
        kept = fold(kept, *records)
        store, term = reopen(), term + 1
        assert store.begin(SETTINGS) == replace(newest(kept, SETTINGS), term=term)
        last = max((r.commit.commit for r in kept.all(e.CommitRecord)), default=0)
        if last:
            assert store.read_commits(1, last)[0] == kept.all(e.CommitRecord)
