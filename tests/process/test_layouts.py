"""The built-in model in every layout of its ranks: five steps are those of one process."""

from __future__ import annotations

from shutil import which
from typing import Any

import pytest

from atoll.node.parallel.settings import SCHEDULES, parse
from tests.harness.rank_lines import LIMIT_S, told_by

CLOSE = {"loss": 2e-6, "norm": 3e-4, "gradients": 1e-5, "values": 1e-5}
"""fp32, summed in another order: of the loss (5.5 at first), of the gradients' norm (13), of the largest difference of
an element of the first step's gradients, and of a parameter after five steps of SGD with a rate of 0.25."""
BF16 = {"loss": 0.03, "norm": 0.6, "gradients": 0.1, "values": 0.15}
"""Computed in 8 bits of mantissa, as the one process: in other places of the model, as FSDP2 casts norms too."""
BF16_OF_EXPERTS = {"loss": 0.2, "norm": 1.0, "gradients": 0.3, "values": 0.3}
"""The same, where a last bit sends a token to another expert."""
COMPILING_LIMIT_S = 900.0
"""Alone, a minute: the C++ compiler works for each stage in turn, for its forward and its backward pass. On a machine
that has other work it took more than four."""
pytestmark = pytest.mark.timeout(240)


def held(num_ranks: int, layouts: list[str], limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """Each layout against one process; the ranks and their groups are started once for all of them."""
    found = told_by("layouts.py", num_ranks, layouts, limit_s)
    assert [one["layout"] for one in found] == layouts
    return found


def is_one_process(found: dict[str, Any], num_ranks: int) -> None:
    model, _, text = found["layout"].rpartition(" ")
    settings, has_experts = parse(text).resolved(num_ranks), model in ("experts", "crowded")
    close = CLOSE
    if settings.precision == "bf16":
        close = BF16_OF_EXPERTS if has_experts else BF16
    else:
        assert found["biases"] == 0.0, "a router's biases move by what all ranks together count, to the bit"
    far = {name: found[name] for name, limit in close.items() if not found[name] <= limit}
    assert not far, found
    assert found["first"] == 0.0, "the first values are those of the whole model, to the bit"
    assert found["num_tensors"] == {"experts": 59, "crowded": 59, "own": 60, "halves": 60}.get(model, 75)
    # Embedding and norms are whole on each rank of tensor parallelism; stages are not equally large.
    shares = settings.dp_shard * settings.cp * settings.tp * settings.pp
    assert found["largest_share"] <= (1 if shares == 1 else 1 / shares + 0.11), found
    assert (found["num_graphs"] > 0) == (settings.compile == 1), found
    assert found["num_breaks"] == 0 or settings.cp > 1, found
    assert found["computed_in"] == ["bfloat16" if settings.precision == "bf16" else "float32"]


SCHEDULED = [f"pp=2,pp_schedule={name}" for name in SCHEDULES if name not in ("1f1b", "zbv")]
LAYOUTS = [
    pytest.param(
        2,
        [
            "dp_replicate=2,zero=1",
            "dp_shard=2",
            "dp_shard=2,zero=2,accumulation=2",
            "tp=-1,checkpointing=selective",
            "pp=-1",
            "pp=2,pp_schedule=zbv,checkpointing=full",
            "cp=2,cp_ulysses=1",
            "dp_shard=2,precision=bf16",
            "tied pp=2",
            "experts dp_shard=2",
            "experts dp_shard=2,ep=2",
            "experts cp=2,ep=-1",
            "crowded dp_shard=2,ep=2",
            "own dp_shard=2",
            "halves pp=2",
            "tp=2,sequence_parallel=1",
            "dp_shard=2,offload=1",
        ],
        id="two ranks",
    ),
    pytest.param(
        4,
        [
            "dp_replicate=2,dp_shard=2",
            "dp_shard=2,tp=2",
            "tied tp=2,pp=2",
            "dp_shard=2,zero=2,pp=2,pp_schedule=zbv",
            "experts dp_shard=4,ep=2",
        ],
        id="four ranks",
    ),
    pytest.param(
        2,
        [
            *SCHEDULED,
            "cp=2,cp_ulysses=2",
            "experts tp=2",
            "experts pp=2",
            "own tp=2",
            "own pp=2",
            "dp_replicate=2",
            "pp=2,microbatches=8",
            "dp_replicate=2,accumulation=2",
            "dp_shard=2,accumulation=4",
            "dp_shard=2,checkpointing=full",
            "pp=2,checkpointing=full",
            "dp_replicate=2,precision=bf16",
            "tp=2,precision=bf16",
            "pp=2,precision=bf16",
            "tied dp_shard=2",
            "tied tp=2",
            "cp=2,cp_ulysses=1,accumulation=2,checkpointing=selective",
            "cp=2,cp_ulysses=2,zero=2,checkpointing=full",
            "cp=2,cp_ulysses=1,precision=bf16",
            "own dp_replicate=2",
            "own dp_shard=2,checkpointing=full,accumulation=2,offload=1",
            "own pp=2,pp_schedule=interleaved-1f1b",
            "halves pp=2,pp_schedule=interleaved-1f1b",
            "halves dp_replicate=2",
            "halves dp_shard=2,accumulation=2",
            "own tp=2,checkpointing=selective",
            "own dp_shard=2,precision=bf16",
            "tied tp=2,sequence_parallel=1",
            "tp=2,sequence_parallel=1,checkpointing=selective",
            "tp=2,sequence_parallel=1,checkpointing=full,accumulation=2",
            "tp=2,sequence_parallel=1,precision=bf16",
            "cp=2,offload=1",
            "dp_shard=2,offload=1,precision=bf16,accumulation=2",
        ],
        id="more of two ranks",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        4,
        [
            "dp_replicate=2,tp=2",
            "dp_shard=2,pp=2",
            "dp_replicate=2,pp=2",
            "tp=2,pp=2",
            "dp_shard=2,pp=2,pp_schedule=interleaved-1f1b",
            "dp_shard=2,zero=2,pp=2,pp_schedule=interleaved-zero-bubble",
            "dp_shard=2,zero=2,pp=2,pp_schedule=dualpipev",
            "dp_replicate=2,pp=2,pp_schedule=zbv",
            "dp_shard=2,tp=2,accumulation=2,checkpointing=full",
            "pp=4",
            "dp_shard=2,tp=2,precision=bf16",
            "dp_shard=2,pp=2,precision=bf16",
            "tied dp_shard=2,pp=2",
            "halves dp_shard=2,pp=2",
            "halves tp=2,pp=2",
            "tied dp_shard=2,tp=2",
            "dp_shard=2,cp=2",
            "dp_replicate=2,cp=2,cp_ulysses=1",
            "cp=2,tp=2",
            "cp=2,pp=2",
            "cp=2,cp_ulysses=1,zero=2,pp=2,pp_schedule=zbv",
            "cp=4,cp_ulysses=2",
            "cp=4,cp_ulysses=1",
        ],
        id="more of four ranks",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        2,
        [
            "experts dp_replicate=2",
            "experts dp_replicate=2,zero=1,accumulation=2",
            "experts cp=2",
            "experts dp_shard=2,ep=2,zero=2",
            "experts dp_shard=2,ep=2,accumulation=2,checkpointing=full",
            "experts tp=2,checkpointing=selective",
            "experts pp=2,microbatches=8,checkpointing=selective",
            "experts pp=2,pp_schedule=zbv,checkpointing=full",
            "experts dp_shard=2,ep=2,precision=bf16",
            "experts dp_replicate=2,precision=bf16",
        ],
        id="experts of two ranks",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        4,
        [
            "experts dp_replicate=2,dp_shard=2,ep=2",
            "experts dp_replicate=2,cp=2,ep=2",
            "experts dp_shard=2,cp=2,ep=2",
            "experts dp_shard=2,ep=2,tp=2,checkpointing=full",
            "experts dp_shard=2,ep=2,pp=2",
            "experts dp_shard=2,ep=2,zero=2,pp=2,pp_schedule=interleaved-zero-bubble",
            "experts dp_shard=2,ep=2,zero=2,pp=2,pp_schedule=dualpipev",
            "experts cp=2,ep=2,zero=2,pp=2,pp_schedule=zbv",
            "experts tp=2,pp=2",
        ],
        id="experts of four ranks",
        marks=pytest.mark.slow,
    ),
    pytest.param(8, ["dp_shard=2,tp=2,pp=2"], id="eight ranks", marks=pytest.mark.slow),
    pytest.param(
        4,
        [
            "dp_shard=2,tp=2,sequence_parallel=1",
            "dp_replicate=2,tp=2,sequence_parallel=1",
            "dp_shard=2,zero=2,tp=2,sequence_parallel=1,precision=bf16",
            "cp=2,tp=2,sequence_parallel=1",
            "cp=2,cp_ulysses=1,tp=2,sequence_parallel=1",
            "tp=2,sequence_parallel=1,pp=2",
            "tied tp=2,sequence_parallel=1,pp=2",
            "tp=2,sequence_parallel=1,pp=2,pp_schedule=zbv",
            "tp=2,sequence_parallel=1,pp=2,precision=bf16",
            "dp_shard=2,pp=2,offload=1",
            "dp_shard=2,tp=2,sequence_parallel=1,offload=1",
        ],
        id="sequence parallelism of four ranks",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        8,
        [
            "experts dp_shard=8,ep=2",
            "experts dp_shard=4,ep=2,tp=2",
        ],
        id="experts of eight ranks",
        marks=pytest.mark.slow,
    ),
]
"""The first of them in `make test`, all in `make test-all`."""
COMPILED = [
    (2, "dp_replicate=2,compile=1,precision=bf16"),
    (2, "dp_shard=2,compile=1"),
    (2, "dp_shard=2,compile=1,checkpointing=full,accumulation=2,offload=1"),
    (2, "tp=2,compile=1"),
    (2, "tied tp=2,compile=1"),
    (2, "tp=2,sequence_parallel=1,compile=1,checkpointing=selective"),
    (2, "pp=2,compile=1"),
    (2, "cp=2,compile=1,checkpointing=full"),
    (2, "cp=2,cp_ulysses=1,compile=1"),
    (4, "dp_shard=2,tp=2,sequence_parallel=1,compile=1"),
    (4, "dp_shard=2,pp=2,compile=1"),
]
"""Each alone: to compile takes most of the time."""


@pytest.mark.parametrize(("num_ranks", "layouts"), LAYOUTS)
def test_each_is_one_process(num_ranks: int, layouts: list[str]) -> None:
    for found in held(num_ranks, layouts):
        is_one_process(found, num_ranks)


@pytest.mark.slow
@pytest.mark.timeout(COMPILING_LIMIT_S + 60)
@pytest.mark.skipif(which("g++") is None, reason="torch.compile needs a C++ compiler: g++")
@pytest.mark.parametrize(("num_ranks", "layout"), COMPILED)
def test_each_is_one_process_when_compiled(num_ranks: int, layout: str) -> None:
    (found,) = held(num_ranks, [layout], COMPILING_LIMIT_S)
    is_one_process(found, num_ranks)


def test_ranks_without_a_node_average_their_gradients() -> None:
    """As torchrun starts them."""
    (found,) = told_by("shared_without_node.py", 2, [])
    assert found["size"] == 4
    assert found["gradients"] < CLOSE["gradients"]
    assert found["loss"] < CLOSE["loss"]
