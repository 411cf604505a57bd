"""The built-in model in every layout of its ranks: five steps are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.node.parallel.settings import SCHEDULES, parse
from tests.harness.sockets import free_address

RANK = Path(__file__).parents[1] / "workers" / "layouts.py"
LIMIT_S = 200.0
CLOSE = {"loss": 2e-6, "norm": 3e-4, "values": 1e-5}
"""fp32, summed in another order: of the loss (5.5 at first), of the gradients' norm (13), of the largest difference of
a parameter after five steps of SGD with a rate of 0.25."""
BF16 = {"loss": 0.05, "norm": 2.0, "values": 0.1}
"""Computed in 8 bits of mantissa."""
pytestmark = pytest.mark.timeout(240)


def held(num_ranks: int, layouts: list[str]) -> list[dict[str, Any]]:
    """Each layout against one process; the ranks and their groups are started once for all of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    address = free_address()
    commands = [[sys.executable, str(RANK), str(rank), str(num_ranks), address, *layouts] for rank in range(num_ranks)]
    ranks = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for command in commands
    ]
    try:
        told = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(
        errors.decode()[-3000:] for _, errors in told
    )
    found = [json.loads(line) for line in told[0][0].splitlines()]
    assert [one["layout"] for one in found] == layouts
    return found


def is_one_process(found: dict[str, Any]) -> None:
    settings = parse(found["layout"].removeprefix("tied "))
    close = BF16 if settings.precision == "bf16" else CLOSE
    far = {name: found[name] for name, limit in close.items() if not found[name] <= limit}
    assert not far, found
    assert found["first"] == 0.0, "the first values are those of the whole model, to the bit"
    assert found["num_tensors"] == 75
    # Embedding and norms are whole on each rank of tensor parallelism; stages are not equally large.
    shares = settings.dp_shard * settings.tp * settings.pp
    assert found["largest_share"] <= (1 if shares == 1 else 1 / shares + 0.11), found
    assert settings.precision == "fp32" or found["loss"] > CLOSE["loss"], "it was computed in fp32"


def test_two_ranks() -> None:
    pipelines = [f"pp=2,pp_schedule={name}" for name in SCHEDULES if name != "1f1b"]
    alone = ["dp_replicate=2", "dp_shard=2", "dp_shard=2,zero=2", "tp=2", "pp=2", "pp=2,microbatches=8"]
    options = [
        "dp_replicate=2,accumulation=2",
        "dp_shard=2,accumulation=4",
        "dp_shard=2,checkpointing=full",
        "tp=2,checkpointing=selective",
        "pp=2,checkpointing=full",
        "dp_replicate=2,precision=bf16",
        "dp_shard=2,precision=bf16",
        "tp=2,precision=bf16",
        "pp=2,precision=bf16",
    ]
    tied = ["tied dp_shard=2", "tied tp=2", "tied pp=2"]
    for found in held(2, [*alone, *pipelines, *options, *tied]):
        is_one_process(found)


def test_four_ranks() -> None:
    pairs = [
        "dp_replicate=2,dp_shard=2",
        "dp_shard=2,tp=2",
        "dp_replicate=2,tp=2",
        "dp_shard=2,pp=2",
        "dp_replicate=2,pp=2",
        "tp=2,pp=2",
        "dp_shard=2,pp=2,pp_schedule=interleaved-1f1b",
        "dp_shard=2,zero=2,pp=2,pp_schedule=interleaved-zero-bubble",
        "dp_shard=2,zero=2,pp=2,pp_schedule=zbv",
        "dp_shard=2,zero=2,pp=2,pp_schedule=dualpipev",
        "dp_replicate=2,pp=2,pp_schedule=zbv",
        "dp_shard=2,tp=2,accumulation=2,checkpointing=full",
        "pp=4",
        "tied dp_shard=2,tp=2",
        "tied tp=2,pp=2",
    ]
    for found in held(4, pairs):
        is_one_process(found)


@pytest.mark.slow
def test_eight_ranks() -> None:
    for found in held(8, ["dp_shard=2,tp=2,pp=2"]):
        is_one_process(found)
