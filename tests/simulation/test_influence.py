"""Runs that average by influence (`sync.robust = "gram"`) on simulated time: whatever breaks, the state is what the
influences in the commit log say, and they are kept before anybody averages with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.simulation import audits
from tests.simulation.__main__ import one
from tests.simulation.some import seeds
from tests.simulation.world import Shape, draw_shape_of, in_gradients

pytestmark = pytest.mark.timeout(600)


def by_influence(shape: Shape) -> Shape:
    settings, sync = shape.settings, shape.settings.sync
    if sync.codec_down not in {"fp32", "bf16", "int8"}:
        sync = replace(sync, codec="int8", up="", down="", mean_over="senders", error_feedback_down=0.0)
    settings = replace(
        settings,
        sync=replace(sync, robust="gram", trim=1, clip=3.0),
        min_sites=max(3, settings.min_sites),
        quorum=3,
        max_sites=64,
    )
    return replace(shape, settings=settings, arrives_s=(), shares_s=())


@seeds(60, every=10)
def test_whatever_breaks_the_invariants_hold(seeds: Sequence[int]) -> None:
    """A quarter of the schedules exchange gradients or momenta."""
    for seed in seeds:
        shape = draw_shape_of(seed, num_sites=3 + seed % 3)
        outcome = one(seed, shape=by_influence(shape if seed % 4 else in_gradients(shape, seed)))
        assert not outcome.problem, f"seed {seed}: {outcome.problem}\n{outcome.story}"
        assert outcome.num_commits > 0


def test_auditors_average_by_influence_too() -> None:
    shape = by_influence(audits.audited_shape(0, num_sites=4, num_syncs=4))
    outcome, found = audits.schedule(0, audits.nothing, num_syncs=4, shape=shape)
    assert not outcome.problem, outcome.story
    assert found.num_right == audits.NUM_AUDITS * (outcome.num_commits - 1), "but of the last commit"
    assert (found.offences, found.num_unknown) == ({}, 0)
