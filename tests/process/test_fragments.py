"""Workers with torch whose model is synced in two fragments: each sync takes one of them, and the last one both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun
from tests.process.test_overlap import LIMIT_S, SCRIPT, Line, as_f32, assert_close

EVERY, NUM_CYCLES = 12, 3
WINDOW, NUM_SYNCS = EVERY // 2, 2 * NUM_CYCLES
FRAGMENTS = [slice(0, 64), slice(64, 72)]
"""Of the values: the first layer and the second one."""
STEP_S = "0.1"
"""In a window shorter than an exchange takes the last two commits would be taken in one step, and one not be seen."""

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("overlap_steps", [0, pytest.param(WINDOW, marks=pytest.mark.slow)])
def test_each_commit_takes_its_fragment_and_leaves_the_other(tmp_path: Path, overlap_steps: int) -> None:
    """The outer step is a plain mean: the outer values of a fragment are the mean of its snapshots."""
    settings = RunSettings(
        run_id="run",
        steps=EVERY * NUM_CYCLES,
        min_sites=2,
        quorum=2,
        data="local",
        time_limits="wan",
        sync=SyncSettings(every=EVERY, fragments=2, codec="fp32", overlap_steps=overlap_steps),
        outer=OuterSettings(optimizer="sgd"),
    )
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        for name in "ab":
            worker = [str(SCRIPT), str(tmp_path / f"{name}.jsonl"), "--layers", "2", "--step-delay-s", STEP_S]
            run.start_node(name, worker, launcher="python")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        for number in range(1, NUM_SYNCS + 1):
            assert len(set(run.hashes(number).values())) == 1, number
        status = run.status()
        assert (status["finished"], status["run_step"]) == (True, EVERY * NUM_CYCLES)
        assert {tuple(sorted(c["contributors"])) for c in status["commits"]} == {("a", "b")}
    sites: list[list[Line]] = [
        [json.loads(text) for text in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in "ab"
    ]
    for lines in sites:
        assert len(lines) == EVERY * NUM_CYCLES, "no step too many, no step too few"
        assert [line["num_steps"] for line in lines] == list(range(1, len(lines) + 1)), "a buffer counts all steps"
    taken = [[i for i, line in enumerate(lines) if "outer" in line] for lines in sites]
    before = None
    for number in range(NUM_SYNCS):
        boundary, is_last = WINDOW * (number + 1) - 1, number == NUM_SYNCS - 1
        own = slice(0, 72) if is_last else FRAGMENTS[number % 2]
        mean = np.mean([as_f32(lines[boundary]["before"]) for lines in sites], axis=0)
        for lines, at in zip(sites, taken, strict=True):
            line, snapshot = lines[at[number]], as_f32(lines[boundary]["before"])
            assert boundary <= at[number] <= boundary + (0 if is_last else overlap_steps)
            local, after, outer = (as_f32(line[name]) for name in ("before", "after", "outer"))
            assert_close(outer[own], mean[own], f"commit {number + 1}")
            expected = local.copy()
            expected[own] = outer[own] + (local - snapshot)[own]
            assert_close(after, expected, f"commit {number + 1}, taken {at[number] - boundary} steps late")
            if before is not None and not is_last:
                other = FRAGMENTS[1 - number % 2]
                assert_close(outer[other], before[other], f"commit {number + 1} leaves the other fragment")
        before = outer
    for lines, at in zip(sites, taken, strict=True):
        assert len(at) == NUM_SYNCS
        losses = [line["loss"] for line in lines]
        assert np.mean(losses[-EVERY:]) < np.mean(losses[:EVERY])
        if overlap_steps:
            assert any(at[number] > WINDOW * (number + 1) - 1 for number in range(NUM_SYNCS - 1)), "something overlaps"
