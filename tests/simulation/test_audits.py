"""Runs with audits on simulated time: liars are named, and nobody honest is banned.

`python -m tests.simulation --flips` plays thousands of those with flipped bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from atoll.coordinator.core.auditing import drawing
from atoll.protocol.effects import check_effects
from tests.simulation import audits
from tests.simulation.some import seeds

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("seed", range(40))
def test_each_shape_is_of_a_run_that_may_begin(seed: int) -> None:
    """Thousands of schedules are drawn of them; the few that are played here may all be of one kind."""
    for shape in (
        audits.audited_shape(seed, num_sites=4, num_syncs=6),
        audits.with_errors(seed, num_syncs=6),
        audits.with_gradients(seed, num_steps=6),
        audits.with_gradients(seed, num_steps=6, warmup=2),
        audits.with_hosts(seed, num_syncs=6),
    ):
        check_effects(shape.settings)


def test_nobody_is_judged_where_all_are_honest() -> None:
    outcome, found = audits.schedule(0, audits.nothing, num_syncs=3)
    assert not outcome.problem, outcome.story
    assert found.num_right == audits.NUM_AUDITS * (outcome.num_commits - 1), "but of the last commit"
    assert (found.offences, found.faults, found.num_unknown) == ({}, {}, 0)


def test_a_contributor_that_nobody_can_dial_dials_its_auditor() -> None:
    outcome, found = audits.schedule(0, audits.behind_nat, num_syncs=10)
    assert not outcome.problem, outcome.story
    assert found.num_right > found.num_unknown, outcome.story
    assert not found.offences | found.faults


@seeds(8, every=8)
def test_sites_that_lose_other_hosts_all_the_time_are_audited_and_judged_for_nothing(seeds: Sequence[int]) -> None:
    num_right = 0
    for seed in seeds:
        outcome, found = audits.schedule(seed, audits.losing_hosts, shape=audits.with_hosts(seed, num_syncs=8))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 1, outcome.story
        assert not found.offences | found.faults | found.silences, outcome.story
        num_right += found.num_right
    assert num_right


def test_a_site_that_comes_back_within_a_sync_is_not_judged_by_the_root_of_its_start_before() -> None:
    outcome, found = audits.schedule(0, audits.coming_back_within_a_sync, num_syncs=4)
    assert not outcome.problem, outcome.story
    assert re.search(r"audit: .*: sync \d: start \d+ of this site is over", outcome.story), "nobody asked for it"
    assert not found.offences | found.faults, outcome.story


@seeds(8, every=8)
def test_a_reducer_that_always_lies_is_named_and_nobody_else(seeds: Sequence[int]) -> None:
    """Of four sites, by two audits a commit: 11 of them miss it one time in five hundred."""
    for seed in seeds:
        outcome, found = audits.schedule(seed, audits.full_liar, num_syncs=12)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert found.first_lie, outcome.story
        assert set(found.offences) == {found.liar}, outcome.story
        assert found.banned <= {found.liar}


def test_a_reducer_that_lies_and_owns_up_each_time_is_banned() -> None:
    """It may have three flipped bits, and no more. How soon they are drawn is chance, and each keeps it out for a time:
    of the first seeds the slowest needs more than 14 syncs."""
    outcome, found = audits.schedule(1, audits.liar_that_owns_up, num_syncs=24)
    assert not outcome.problem, outcome.story
    assert (set(found.faults), found.banned, found.offences) == ({found.liar}, {found.liar}, {})


def test_averages_of_momenta_at_every_step_are_audited_and_nobody_honest_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a warm-up with gradients. Each commit is audited here, in place of one in 16."""
    monkeypatch.setattr(drawing, "AUDITED_STEPS", 1)
    shape = audits.with_gradients(0, num_steps=12, warmup=5)
    outcome, found = audits.schedule(0, audits.nothing, shape=shape)
    assert not outcome.problem, outcome.story
    assert found.num_right == audits.NUM_AUDITS * (outcome.num_commits - 1)
    assert (found.offences, found.faults, found.num_unknown) == ({}, {}, 0)


def test_a_reducer_that_lies_about_gradients_is_named_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the commits are audited."""
    monkeypatch.setattr(drawing, "AUDITED_STEPS", 2)
    outcome, found = audits.schedule(0, audits.full_liar, shape=audits.with_gradients(0, num_steps=24))
    assert not outcome.problem, outcome.story
    assert set(found.offences) == {found.liar}, outcome.story
    assert found.banned <= {found.liar}
    assert not found.faults


@seeds(2, every=2)
def test_cut_links_and_starts_anew_amid_gradients_make_nobody_a_liar(
    seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "AUDITED_STEPS", 2)
    for seed in seeds:
        shape = audits.with_gradients(seed, num_steps=24, warmup=seed % 2 * 8)
        outcome, found = audits.schedule(seed, audits.weather, shape=shape)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert not found.offences | found.faults | found.silences, outcome.story
        assert found.num_right


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(2)])
def test_of_commits_at_every_step_one_in_sixteen_is_audited_which_finds_a_liar(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome, found = audits.schedule(seed, audits.full_liar, shape=audits.with_gradients(seed, num_steps=160))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert set(found.offences) == {found.liar}, outcome.story


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(6)])
def test_a_reducer_that_lies_in_a_third_of_its_averages_is_named(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome, found = audits.schedule(seed, audits.seldom_liar, num_syncs=30)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert set(found.offences) == {found.liar}, outcome.story


@seeds(4, every=4)
def test_an_auditor_that_accuses_and_one_that_covers_are_no_match_for_the_others(seeds: Sequence[int]) -> None:
    for seed in seeds:
        outcome, found = audits.schedule(seed, audits.lying_auditor, num_syncs=8)  # in five it may not be drawn
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert set(found.offences) == {found.liar}, outcome.story


@seeds(8, every=8)
def test_bits_that_flip_at_every_site_ban_nobody(seeds: Sequence[int]) -> None:
    num_found = 0
    for seed in seeds:
        outcome, found = audits.schedule(seed, audits.flipped_bits, num_syncs=6)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert not found.banned, outcome.story
        num_found += len(found.faults)
    assert num_found


def test_with_errors_of_averages_a_reducer_that_gives_none_or_others_is_named_and_nobody_else() -> None:
    outcome, found = audits.schedule(0, audits.silent_reducer, shape=audits.with_errors(0, num_syncs=7))
    assert not outcome.problem, outcome.story
    assert (set(found.silences), found.offences, found.faults) == ({found.liar}, {}, {}), outcome.story
    outcome, found = audits.schedule(1, audits.made_up_errors, shape=audits.with_errors(1, num_syncs=5))
    assert not outcome.problem, outcome.story
    assert (set(found.offences), found.silences, found.faults) == ({found.liar}, {}, {}), outcome.story


@seeds(8, every=8)
def test_cut_links_and_starts_anew_make_nobody_a_liar(seeds: Sequence[int]) -> None:
    num_right = 0  # of the last start of each coordinator
    for seed in seeds:
        outcome, found = audits.schedule(seed, audits.weather, shape=audits.with_errors(seed, num_syncs=7))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert not found.offences | found.faults | found.silences, outcome.story
        num_right += found.num_right
    assert num_right
