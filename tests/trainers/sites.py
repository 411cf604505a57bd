"""An example with somebody's trainer as two sites of a run, one of them of two ranks, which joins late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.harness import chaos
from tests.harness.chaos import ChaosRun
from tests.harness.local_run import Process, Status

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300.0
"""To import the library in two processes beside another site that trains."""
NUM_RANKS = {"a": 1, "b": 2}


class TrainerRun(ChaosRun):
    """The node starts a site's ranks, each with what torchrun would tell it."""

    def start_site(self, name: str) -> Process:
        return self.start_node(name, self.worker, launcher="python", extra=["--ranks", str(NUM_RANKS[name])])


def late_joiner_ends_equal(
    folder: Path, example: str, words: Sequence[str], *, tokens_a_sample: int, chunk_elements: int = 1000
) -> Status:
    """Both sites contribute, hold the same bits at each commit, and every sample that a commit lists counts once; the
    workers of each are killed and come back with the optimizer that they had."""
    settings = chaos.settings(every=5, min_sites=1, checkpoint_every=20)
    settings = replace(settings, sync=replace(settings.sync, chunk_elements=chunk_elements))
    with TrainerRun(folder, settings, [str(EXAMPLES / example), *words]) as run:
        run.tokens_a_sample = tokens_a_sample
        run.start_coordinator()
        run.start_site("a")
        run.wait_for_commits(2, LIMIT_S)
        run.start_site("b")
        run.wait_for_contributors("ab", LIMIT_S)
        for name, num_ranks in NUM_RANKS.items():
            killed = run.kill_below(name, example)
            assert len(killed) == num_ranks, killed
            run.wait_for_journal(name, "WorkersFailed", 1)
            run.wait_for_contributors("ab", LIMIT_S)
        status = run.end_well(timeout_s=LIMIT_S)
        assert status["data"][0]["num_done"] > 0
        return status
