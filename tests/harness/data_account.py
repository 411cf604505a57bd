"""Samples of the worker without torch, and what must hold of their account whatever happened."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

from atoll.cli.client import local_status
from atoll.coordinator import rows
from atoll.coordinator.core.events import CommitRecord
from atoll.protocol.ranges import Ranges
from atoll.protocol.sample_order import SampleOrder
from tests.harness.local_run import LocalRun, Status

DATA = "numbers"
"""The run's data set."""
NUM_SAMPLES = 500
TRACE = "loaded.jsonl"
"""In the run's folder: what its workers note, if `--trace` says so."""
LEASED = ("--fingerprint", DATA, "--samples", str(NUM_SAMPLES), "--batch", "4", "--tokens", "4", "--fetched-ahead", "3")
"""Options of tests/workers/plain_worker.py: it counts a token for each sample."""


def assert_account_balances(status: Status, tokens_a_sample: int = 1) -> None:
    """Of a run that has ended, whose workers count so many tokens for each sample, as with LEASED."""
    done = 0
    for line in status["data"]:
        assert (
            line["num_done"] + line["num_leased"] + line["num_open"] == line["num_passes_begun"] * line["num_samples"]
        )
        assert line["num_leased"] == 0, "nothing is in flight after the end"
        done += line["num_done"] * tokens_a_sample
    assert done == status["run_tokens"], "every sample that a commit was trained on counts once"


def loaded(folder: Path) -> Counter[int]:
    """Samples that any worker was given."""
    found: Counter[int] = Counter()
    for line in (folder / TRACE).read_text().splitlines():
        if (event := json.loads(line))["event"] == "loaded":
            found.update(event["samples"])
    return found


def assert_every_sample_counts_once(run: LocalRun) -> int:
    """The account of a run that has ended, against the commits in the store and what workers loaded; passes done. Ends
    the coordinator."""
    status = local_status(run.store_path, data_ranges=True)
    assert status["finished"]
    assert_account_balances(status)
    (line,) = status["data"]
    place = 0
    for item in status["data_ranges"]:
        assert item["first"] == place, "every position is in one range"
        place += item["num_samples"]
    assert place == line["num_passes_begun"] * NUM_SAMPLES
    assert run.coordinator is not None
    run.coordinator.interrupt()
    assert run.coordinator.wait(60) == 0
    done = Ranges()
    with closing(sqlite3.connect(run.store_path)) as db:
        for (body,) in db.execute("SELECT body FROM records WHERE kind = 'commit' ORDER BY number"):
            record = rows.decode("commit", body)
            assert isinstance(record, CommitRecord)
            commit = record.commit
            for part in commit.done:
                before = done.num_samples
                done.update(part.ranges)
                assert done.num_samples == before + sum(r.num_samples for r in part.ranges), "done twice"
            assert done.num_samples == commit.run_tokens
    assert [(r.first, r.num_samples) for r in done] == [
        (item["first"], item["num_samples"]) for item in status["data_ranges"] if item["state"] == "done"
    ]
    order = SampleOrder(run.settings.seed, 0, NUM_SAMPLES)
    wanted = Counter(order.sample(p) for r in done for p in range(r.first, r.end))
    assert not wanted - loaded(run.folder), "a sample is done that no worker was given so often"
    return int(line["num_passes_done"])
