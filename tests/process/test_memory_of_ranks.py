"""What a step of the ranks of a site has in memory at most, against the plan."""

from __future__ import annotations

import pytest

from atoll.node.parallel.settings import parse
from atoll.node.plan.activations import ON_CPU
from atoll.node.plan.rank_memory import rank_memory
from tests.harness.rank_lines import told_by
from tests.workers.memory_of_ranks import SETTINGS

TOLERANCE = 0.1
LAYOUTS = [
    "dp_replicate=2",
    "dp_replicate=2,zero=1",
    "dp_shard=2",
    "dp_shard=2,zero=2",
    "dp_shard=2,precision=bf16",
    "dp_shard=2,checkpointing=full",
    "dp_shard=2,precision=bf16,checkpointing=full",
    "dp_shard=2,accumulation=2",
    "cp=2,cp_ulysses=2",
    "cp=2,cp_ulysses=1",
    "pp=2",
    "pp=2,checkpointing=full",
]
LAYOUTS_OF_TP = [
    "tp=2",
    "tp=2,checkpointing=selective",
    "tp=2,checkpointing=full",
    "tp=2,sequence_parallel=1",
    "tp=2,sequence_parallel=1,checkpointing=selective",
    "tp=2,sequence_parallel=1,checkpointing=full",
]
LAYOUTS_OF_FOUR = [
    "dp_replicate=2,dp_shard=2",
    "dp_shard=2,tp=2",
    "dp_shard=2,pp=2",
    "tp=2,pp=2",
    "cp=2,tp=2,sequence_parallel=1",
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [(2, LAYOUTS), (2, LAYOUTS_OF_TP), (4, LAYOUTS_OF_FOUR)],
    ids=["whole matrices", "shared ones", "products"],
)
def test_ranks_have_the_memory_of_the_plan(num_ranks: int, layouts: list[str]) -> None:
    measured = {}
    for found in told_by("memory_of_ranks.py", num_ranks, layouts):
        settings = parse(found["layout"]).resolved(num_ranks)
        trainer = SETTINGS.trainer
        said = rank_memory(SETTINGS.model, settings, trainer.batch_size, trainer.sequence, ON_CPU)
        buckets = said.gradients if settings.is_replicated_alone else 0  # of DDP, there between steps too
        measured[found["layout"]] = (said.weights + said.optimizer + buckets + found["most_bytes"]) / said.peak
    assert list(measured) == layouts
    far = {layout: ratio for layout, ratio in measured.items() if abs(ratio - 1) > TOLERANCE}
    assert not far, measured
