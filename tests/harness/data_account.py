"""Samples of the worker without torch, and what must hold of their account whatever happened."""

from __future__ import annotations

from tests.harness.local_run import Status

DATA = "numbers"
"""The run's data set."""
LEASED = ("--fingerprint", DATA, "--samples", "500", "--batch", "4", "--tokens", "4", "--fetched-ahead", "3")
"""Options of tests/workers/plain_worker.py: it counts a token for each sample."""


def assert_account_balances(status: Status) -> None:
    """Of a run that has ended, whose workers were started with LEASED."""
    done = 0
    for line in status["data"]:
        assert (
            line["num_done"] + line["num_leased"] + line["num_open"] == line["num_passes_begun"] * line["num_samples"]
        )
        assert line["num_leased"] == 0, "nothing is in flight after the end"
        done += line["num_done"]
    assert done == status["run_tokens"], "every sample that a commit was trained on counts once"
