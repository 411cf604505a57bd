"""A slow site in a run of real processes: nobody waits for it, and nothing that it trained is lost or counted twice."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import PLAIN_WORKER, SETTINGS
from tests.harness.local_run import LocalRun
from tests.harness.replay import Replay

LIMIT_S = 150.0
TOKENS = 5
"""A step, of the plain worker."""
EVERY = 10

pytestmark = pytest.mark.timeout(400)


def test_a_straggler_receives_and_contributes_all_its_tokens_and_the_values_are_those_of_a_replay(
    tmp_path: Path,
) -> None:
    """One site is three times slower. Every value that any worker ever had is computed again and compared; most of `b`
    they read in the outer file, whose places the next commits take."""
    sync = SyncSettings(every=EVERY, chunk_elements=4096, codec="fp32")
    settings = replace(SETTINGS, steps=15 * EVERY, data="local", quorum=2, sync=sync)
    model = ["--tensors", "a=30x4,b=20000"]
    delays_s = {"a": 0.1, "b": 0.1, "c": 0.3}
    traces = {name: tmp_path / f"{name}.jsonl" for name in delays_s}
    with LocalRun(tmp_path, settings) as run:
        coordinator = run.start_coordinator()
        for name, delay_s in delays_s.items():
            faults = ["--step-delay-s", str(delay_s), "--trace", str(traces[name])]
            run.start_node(name, [sys.executable, str(PLAIN_WORKER), *model, *faults])
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0, "c": 0}
        status = run.status()
        commits = status["commits"]
        assert [c["commit"] for c in commits] == list(range(1, 16))
        assert len(set(run.hashes(15).values())) == 1
        assert status["num_evicted"] == 0
        assert all(run.journal(name, "commit")[-1]["commit"] == 15 for name in "abc")
        coordinator.wait_for_line(r"c \(site \d\) receive \(without c \(site \d\), slower than most\)", LIMIT_S)

    with_c = [c for c in commits if "c" in c["contributors"]]
    without_c = [c for c in commits if "c" not in c["contributors"]]
    assert len(without_c) >= 4, "it is not waited for"
    assert len(with_c) >= 4, "it is not starved"
    assert all({"a", "b"} <= set(c["contributors"]) for c in commits)

    assert all("read the outer values where they lie" in (run.home(name) / "node.log").read_text() for name in "abc")

    replay = Replay(traces, model, settings.seed, settings.outer)
    replay.play(commits)
    assert replay.num_compared > 60
    assert replay.sites["c"].num_shifts >= 3
    assert replay.sites["a"].num_shifts == replay.sites["b"].num_shifts == 0
