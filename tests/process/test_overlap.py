"""Workers with torch that train on while their sites exchange: every value that they took is what the formulas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.local_run import LocalRun

SCRIPT = Path(__file__).parents[1] / "workers" / "recording_worker.py"
EVERY, TAU, NUM_SYNCS = 12, 8, 6
LIMIT_S = 150.0
Line = dict[str, Any]
F32 = npt.NDArray[np.float32]

pytestmark = pytest.mark.timeout(400)


def as_f32(values: list[float]) -> F32:
    return np.array(values, np.float32)


def assert_close(found: F32, expected: F32, what: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=what)


@pytest.mark.parametrize(("merge", "alpha"), [("keep", 0.0), ("mix", 0.25)])
def test_merges_of_two_sites_are_what_the_formulas_say(tmp_path: Path, merge: str, alpha: float) -> None:
    """The outer step is a plain mean, in fp32: the outer parameters are the mean of the snapshots, whatever was mixed
    into them, because the base of a pseudo-gradient is the outer value."""
    settings = RunSettings(
        run_id="run",
        steps=EVERY * NUM_SYNCS,
        min_sites=2,
        quorum=2,
        data="local",
        time_limits="wan",
        sync=SyncSettings(every=EVERY, codec="fp32", overlap_steps=TAU, merge=merge, alpha=alpha),
        outer=OuterSettings(optimizer="sgd"),
    )
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        for name in "ab":
            worker = [str(SCRIPT), str(tmp_path / f"{name}.jsonl"), "--step-delay-s", "0.02"]
            run.start_node(name, worker, launcher="python")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        for number in range(1, NUM_SYNCS + 1):
            assert len(set(run.hashes(number).values())) == 1, number
        status = run.status()
        assert (status["finished"], status["run_step"]) == (True, EVERY * NUM_SYNCS)
        assert {tuple(sorted(c["contributors"])) for c in status["commits"]} == {("a", "b")}
    lines = [[json.loads(text) for text in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in "ab"]
    outer_of_both = [took_what_the_formula_says(site, alpha if merge == "mix" else None) for site in lines]
    for number, outer in enumerate(outer_of_both[0]):
        assert_close(outer, outer_of_both[1][number], f"commit {number + 1} at both sites")
        snapshots = [as_f32(site[EVERY * (number + 1) - 1]["before"]) for site in lines]
        assert_close(outer, np.mean(snapshots, axis=0), f"commit {number + 1}")
    for site in lines:
        losses = [line["loss"] for line in site]
        assert np.mean(losses[-EVERY:]) < np.mean(losses[:EVERY]) / 2


def took_what_the_formula_says(lines: list[Line], alpha: float | None) -> list[F32]:
    """The outer parameters of each commit. Every one but the last is taken beyond its snapshot, which is of the last
    step of its window."""
    assert len(lines) == EVERY * NUM_SYNCS, "no step too many, no step too few"
    counted = [line["num_steps"] for line in lines]
    assert counted == list(range(1, len(lines) + 1)), "a buffer keeps what it counted beyond a snapshot"
    taken = [i for i, line in enumerate(lines) if "outer" in line]
    assert len(taken) == NUM_SYNCS
    for number, index in enumerate(taken[:-1]):
        boundary = EVERY * (number + 1) - 1
        assert boundary < index <= boundary + TAU
        snapshot, local = as_f32(lines[boundary]["before"]), as_f32(lines[index]["before"])
        outer, after = as_f32(lines[index]["outer"]), as_f32(lines[index]["after"])
        assert_close(as_f32(lines[boundary]["after"]), snapshot, "the snapshot changes nothing")
        expected = outer + (local - snapshot) if alpha is None else alpha * local + (1 - alpha) * outer
        assert_close(after, expected, f"commit {number + 1}, taken {index - boundary} steps beyond its snapshot")
        assert not np.allclose(local, snapshot), "something was trained"
    assert taken[-1] == len(lines) - 1, "the last one is waited for"
    assert_close(as_f32(lines[-1]["after"]), as_f32(lines[-1]["outer"]), "and replaces")
    return [as_f32(lines[index]["outer"]) for index in taken]
