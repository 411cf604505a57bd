"""Runs that are as long as a number of tokens. A tenth of the schedules that are drawn are, with faults."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from atoll.coordinator.core.sync import outcomes
from tests.simulation import test_in_flight
from tests.simulation.__main__ import drawn, one
from tests.simulation.faults import Fault
from tests.simulation.sites import TOKENS_A_STEP
from tests.simulation.test_fragments import a_shape
from tests.simulation.test_overlap import on_a_slow_network
from tests.simulation.world import draw_shape_of, in_tokens

pytestmark = pytest.mark.timeout(600)

STEPS = 24
EACH = 3
"""Schedules of each number of fragments."""


@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_whatever_breaks_it_ends_with_the_first_commit_of_all_that_has_its_tokens(num: int) -> None:
    for seed in range(9100, 9100 + EACH):
        shape = in_tokens(draw_shape_of(seed, num_fragments=num), seed)
        outcome = one(seed, shape=shape)
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0


@pytest.mark.parametrize("num", [1, 2, 8])
@pytest.mark.parametrize("overlaps", [False, True])
def test_where_nothing_breaks_it_has_the_steps_that_its_tokens_are(num: int, overlaps: bool) -> None:
    """Whoever knows how many tokens a step has knows the last window: no site trains a step more."""
    for seed in range(3):
        shape = a_shape(seed, num, overlaps=overlaps)
        num_sites = shape.num_sites
        tokens = STEPS * sum(TOKENS_A_STEP[:num_sites])
        shape = replace(shape, settings=replace(shape.settings, steps=0, tokens=tokens))
        outcome = on_a_slow_network(seed, shape)
        assert outcome.num_steps == outcome.num_steps_in_commits == STEPS * num_sites, outcome.story


def test_with_several_syncs_in_flight_it_has_the_steps_that_its_tokens_are() -> None:
    """The first sync is alone, of all fragments; from then on the tokens of those that are open count as well."""
    for seed in range(4):
        shape = test_in_flight.a_shape(seed)
        num_sites, num_steps = shape.num_sites, shape.settings.steps
        tokens = num_steps * sum(TOKENS_A_STEP[:num_sites])
        shape = replace(shape, settings=replace(shape.settings, steps=0, tokens=tokens))
        outcome = test_in_flight.played(seed, shape, test_in_flight.nothing)
        assert outcome.num_steps == outcome.num_steps_in_commits == num_steps * num_sites, outcome.story
        assert outcome.most_in_flight > 1, outcome.story


def test_an_operator_changes_the_length_and_it_ends_with_that() -> None:
    num_set = 0
    for seed in range(9200, 9206):
        times = [Fault(kind="change", after_events=20, delay_s=0.01, lasts_s=1.0, draw=10 * seed + i) for i in range(6)]
        outcome = one(seed, times, in_tokens(draw_shape_of(seed), seed))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        num_set += len(re.findall(r"atoll set run.tokens=\d+: .*run.tokens = \d+ \(\d+ as", outcome.story))
    assert num_set > 3


def test_a_run_that_goes_on_with_its_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a run that is over some tokens late."""

    on_time = outcomes._is_over

    def is_over(run: Any, run_step: int, run_tokens: int) -> bool:
        return on_time(run, run_step, run_tokens - 30)

    monkeypatch.setattr(outcomes, "_is_over", is_over)
    outcome = one(9201, [], in_tokens(draw_shape_of(9201), 9201))
    assert "44: it goes on after" in outcome.problem


def test_some_of_the_schedules_that_are_drawn_are_so() -> None:
    lengths = [(settings.steps > 0, settings.tokens > 0) for settings in (drawn(seed).settings for seed in range(400))]
    assert 20 < lengths.count((False, True)) < 60
    assert lengths.count((True, False)) + lengths.count((False, True)) == 400
