"""Workers with torch whose model is synced in four fragments, of which several are in flight at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun
from tests.process.test_overlap import F32, LIMIT_S, SCRIPT, as_f32, assert_close

NUM, EVERY, NUM_CYCLES = 4, 8, 4
WINDOW, STEPS = EVERY // NUM, EVERY * NUM_CYCLES
LAST = STEPS - 1
FRAGMENTS = [slice(64 * i, min(64 * i + 64, 200)) for i in range(NUM)]
"""Of the values: layer by layer."""

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(("merge", "alpha"), [("keep", 0.0), ("mix", 0.25)])
def test_each_copy_takes_its_own_commits_and_no_other(tmp_path: Path, merge: str, alpha: float) -> None:
    """The outer step is a plain mean: the outer values of a fragment are the mean of its snapshots. A window is shorter
    than a sync takes, and an update may be taken as late as the next snapshot of the same fragment."""
    settings = RunSettings(
        run_id="run",
        steps=STEPS,
        min_sites=2,
        quorum=2,
        data="local",
        time_limits="wan",
        sync=SyncSettings(every=EVERY, fragments=NUM, codec="fp32", overlap_steps=EVERY, merge=merge, alpha=alpha),
        outer=OuterSettings(optimizer="sgd"),
    )
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        for name in "ab":
            worker = [str(SCRIPT), str(tmp_path / f"{name}.jsonl"), "--layers", str(NUM), "--step-delay-s", "0.005"]
            run.start_node(name, worker, launcher="python")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        for number in range(1, NUM * NUM_CYCLES + 1):
            assert len(set(run.hashes(number).values())) == 1, number
        status = run.status()
        assert (status["finished"], status["run_step"]) == (True, STEPS)
        assert {tuple(sorted(c["contributors"])) for c in status["commits"]} == {("a", "b")}
    sites = [Recorded(tmp_path / f"{name}.jsonl") for name in "ab"]
    num_in_flight = 0
    for number in range(NUM * NUM_CYCLES - 1):
        fragment, boundary = number % NUM, WINDOW * (number + 1) - 1
        mean = np.mean([site.after[boundary, FRAGMENTS[fragment]] for site in sites], axis=0)
        taken = [site.take(fragment, boundary, mean, alpha if merge == "mix" else None) for site in sites]
        num_in_flight += max(taken) > boundary + WINDOW
    assert num_in_flight > 0, "an update is taken after the next snapshot is sealed"
    mean = np.mean([site.at_last for site in sites], axis=0)
    for site in sites:
        assert_close(site.after[LAST], mean, "the last commit is of all, and replaces")


class Recorded:
    """What one site wrote down around each of its steps."""

    def __init__(self, path: Path) -> None:
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        assert len(lines) == STEPS, "no step too many, no step too few"
        assert [line["num_steps"] for line in lines] == list(range(1, STEPS + 1)), "a buffer counts all steps"
        self.before, self.after = (np.array([as_f32(line[name]) for line in lines]) for name in ("before", "after"))
        self.at_last = self.before[LAST].copy()
        """The last snapshot: before it what is still in flight is taken."""

    def take(self, fragment: int, boundary: int, outer: F32, alpha: float | None) -> int:
        """At which step the site took the outer values of the fragment: once, and as the formula says."""
        own = FRAGMENTS[fragment]
        before, after = self.before[:, own], self.after[:, own]
        until = min(boundary + EVERY, LAST)
        steps = [i for i in range(boundary + 1, until + 1) if i < LAST and not np.array_equal(before[i], after[i])]
        assert len(steps) <= 1, f"fragment {fragment} of boundary {boundary} was taken at {steps}"
        at = steps[0] if steps else LAST
        assert at <= until, f"fragment {fragment} of boundary {boundary} was not taken until {until}"
        local = before[at]
        expected = outer + (local - after[boundary]) if alpha is None else alpha * local + (1 - alpha) * outer
        if at == LAST:
            self.at_last[own] = expected
        else:
            assert_close(after[at], expected, f"fragment {fragment}, taken {at - boundary} steps late")
        return at
