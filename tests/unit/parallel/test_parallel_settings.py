"""How a site's ranks share a model, from a line of text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.parallel.passes import blocks_of, stages_of
from atoll.node.parallel.settings import (
    ALONE,
    SCHEDULES,
    V_SCHEDULES,
    ParallelSettings,
    check_batch,
    check_model,
    check_sequence,
    parse,
)
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings

MODEL = ModelSettings(dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48)


@pytest.mark.parametrize(
    ("text", "num_ranks", "data_ranks"),
    [
        ("", 1, 1),
        ("", 3, 3),
        ("dp_shard=2", 2, 2),
        ("dp_shard=-1,tp=2", 8, 4),
        ("dp_replicate=-1, dp_shard=2, pp=2", 12, 6),
        ("tp=2,pp=2", 4, 1),
        ("dp_shard=-1,cp=2,cp_ulysses=1", 8, 4),
        ("tp=-1,dp_shard=2", 8, 2),
        ("pp=-1,pp_schedule=interleaved-1f1b,dp_replicate=2", 8, 2),
        ("cp=-1,cp_ulysses=2,tp=2", 8, 1),
        ("ep=-1,dp_shard=4,pp=2", 8, 4),
        ("dp_replicate=2,zero=0", 2, 2),
    ],
)
def test_sizes(text: str, num_ranks: int, data_ranks: int) -> None:
    settings = parse(text)
    assert settings.num_ranks(num_ranks) == num_ranks
    resolved = settings.resolved(num_ranks)
    assert resolved.num_data_ranks == data_ranks
    assert resolved.dp_replicate * resolved.dp_shard * resolved.cp * resolved.tp * resolved.pp == num_ranks


def test_what_nobody_said_is_ddp_of_all_ranks() -> None:
    assert parse(" ").resolved(4) == ParallelSettings(dp_replicate=4)
    assert parse("precision=bf16,accumulation=2").resolved(4).dp_replicate == 4
    assert parse("precision=bf16").resolved(1) == ParallelSettings(precision="bf16")
    assert parse("").resolved(4).is_replicated_alone
    assert ALONE.is_replicated_alone
    assert not parse("dp_shard=2").is_replicated_alone
    assert not parse("cp=2").is_replicated_alone


def test_the_number_of_ranks_follows_where_all_sizes_are_named() -> None:
    assert parse("tp=2,pp=2").num_ranks(1) == 4
    assert parse("dp_shard=-1,tp=2").num_ranks(6) == 6


@pytest.mark.parametrize(
    ("text", "num_ranks", "words"),
    [
        ("tp=2", 3, "--ranks 3 and --parallel tp=2, which needs 2"),
        ("dp_replicate=1,precision=bf16", 2, "--parallel dp_replicate=1, which needs 1"),
        ("dp_shard=-1,tp=2", 3, "--ranks 3 cannot be divided by the 2"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(text: str, num_ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text).num_ranks(num_ranks)


@pytest.mark.parametrize(
    ("text", "num_ranks", "named"),
    [
        ("dp_replicate=-1,dp_shard=2", 6, "dp_replicate=3,dp_shard=2"),
        ("dp_shard=-1,tp=3", 6, "dp_shard=2,tp=3"),
        ("cp=-1,pp=3", 6, "cp=2,pp=3"),
        ("tp=-1", 6, "tp=6"),
        ("pp=-1,dp_shard=2", 6, "pp=3,dp_shard=2"),
        ("ep=-1,dp_shard=3,cp=2", 6, "ep=6,dp_shard=3,cp=2"),
    ],
)
def test_any_one_size_takes_the_rest(text: str, num_ranks: int, named: str) -> None:
    assert parse(text).resolved(num_ranks) == parse(named)


@given(
    st.permutations(("dp_replicate", "dp_shard", "cp", "tp", "pp")),
    st.lists(st.integers(1, 4), min_size=5, max_size=5),
    st.integers(1, 400),
)
def test_the_rest_is_what_is_left_or_refused(names: list[str], sizes: list[int], num_ranks: int) -> None:
    others = dict(zip(names[1:], sizes, strict=False))
    product = math.prod(others.values())
    settings = parse(",".join(f"{name}={size}" for name, size in {**others, names[0]: -1}.items()))
    if num_ranks % product:
        with pytest.raises(ConfigError, match=f"cannot be divided by the {product} .* choose --ranks"):
            settings.resolved(num_ranks)
    else:
        taken: dict[str, Any] = {names[0]: num_ranks // product}
        assert settings.resolved(num_ranks) == replace(settings, **taken)


@pytest.mark.parametrize(
    ("text", "num_ranks", "words"),
    [
        ("pp=-1,pp_schedule=gpipe", 1, "say pp=2 or more"),
        ("pp=-1,microbatches=2,tp=2", 6, "microbatches=2 with pp=3"),
        ("pp=-1,accumulation=2", 2, "say microbatches=8"),
        ("tp=-1,sequence_parallel=1", 1, "say tp=2 or more"),
        ("tp=-1,compile=1,checkpointing=full", 2, "choose checkpointing=selective"),
        ("cp=-1,cp_ulysses=3", 4, "cp_ulysses=3 does not divide cp=4"),
        ("cp=-1,ep=3", 4, "ep=3 does not divide the 4 ranks"),
        ("ep=-1,dp_shard=2,checkpointing=selective", 2, "with ep=2"),
        ("cp=-1,offload=1", 1, "offload=1 is of parameters that FSDP2 has"),
    ],
)
def test_what_contradicts_the_rest_is_refused_when_it_is_known(text: str, num_ranks: int, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text).resolved(num_ranks)
    assert words in str(raised.value)


@pytest.mark.parametrize("text", ["offload=1", "dp_replicate=2,offload=1", "dp_shard=-1,offload=1,dp_replicate=2"])
def test_offload_is_of_what_fsdp2_has(text: str) -> None:
    with pytest.raises(ConfigError, match="say dp_shard=2 or more, or leave out offload"):
        parse(text).resolved(2)


def test_a_site_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 2 ranks, this site has 1"):
        parse("tp=2").resolved(1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpp=2", 'there is no "tpp"; did you mean "tp"'),
        ("fsdp=2", 'there is no "fsdp"; did you mean "dp_shard"'),
        ("ddp=2", 'there is no "ddp"; did you mean "dp_replicate"'),
        ("dp=2", 'there is no "dp"; did you mean "dp_replicate"'),
        ("tp=2+pp=2", 'tp is a whole number, not "2+pp=2"; settings are divided by commas'),
        ("tp", 'say "tp=..." with a value'),
        ("tp=", 'say "tp=..." with a value'),
        ("tp=2,tp=2", "tp is said twice"),
        ("tp=two", 'tp is a whole number, not "two"'),
        ("tp=0", "tp=0: choose 1 to 1048576, or -1 for the ranks that are left"),
        ("pp=-2", "pp=-2: choose 1 to"),
        (f"tp={1 << 40}", "choose 1 to 1048576"),
        ("dp_shard=-1,dp_replicate=-1", "dp_replicate=-1,dp_shard=-1: only one of them"),
        ("tp=-1,pp=-1,cp=2", "pp=-1,tp=-1: only one of them"),
        ("dp_shard=-1,ep=-1", "dp_shard=-1,ep=-1: only one of them"),
        ("ep=-1", "ep=-1 takes all ranks of dp_shard and cp, and there is one: say dp_shard=2"),
        ("ep=-1,tp=2", "ep=-1 takes all ranks"),
        ("cp=-1,zero=0", "zero=0 shares nothing"),
        ("tp=-1,dp_replicate=2,zero=1", "zero=1 is of ranks that each have the whole model"),
        ("zero=4,dp_shard=2", "zero=4"),
        ("zero=1,dp_shard=2", "zero=1 is of ranks that each have the whole model"),
        ("zero=1,dp_replicate=2,tp=2", "zero=1 is of ranks that each have the whole model"),
        ("zero=1,tp=2", "say dp_replicate=2 or more"),
        ("pp=2,microbatches=1", "at least 2"),
        ("pp=2,pp_schedule=dualpipev,microbatches=3", "at least 4"),
        ("pp=2,pp_schedule=interleaved-1f1b,microbatches=5", "choose microbatches=4"),
        ("pp=2,pp_schedule=interleaved-zero-bubble,microbatches=7", "choose microbatches=6"),
        ("pp=2,pp_schedule=zbv,checkpointing=selective", "choose checkpointing=full or none"),
        ("zero=2", "say dp_shard=2 or more"),
        ("zero=3", "say dp_shard=2 or more"),
        ("dp_replicate=4,zero=3", "zero=3 is of shards: say dp_shard=2 or more"),
        ("cp=4,cp_ulysses=3", "cp_ulysses=3 does not divide cp=4"),
        ("cp_ulysses=2", "cp_ulysses=2 does not divide cp=1"),
        ("cp=2,cp_ulysses=-1", "cp_ulysses=-1"),
        ("cp=2,pp=2,pp_schedule=zbv", "needs zero=2"),
        ("pp_schedule=gpipe", "say pp=2 or more"),
        ("microbatches=4", "say pp=2 or more"),
        ("pp=2,pp_schedule=1f", 'did you mean "1f1b"'),
        ("pp=2,microbatches=-1", "at least 1"),
        ("dp_shard=2,pp=2,pp_schedule=zbv", "needs zero=2"),
        ("dp_shard=-1,pp=2,pp_schedule=dualpipev", "needs zero=2"),
        ("accumulation=0", "at least 1"),
        ("pp=2,accumulation=2", "say microbatches=8"),
        ("checkpointing=some", "checkpointing=some"),
        ("precision=fp8", "precision=fp8"),
        ("dp_shard=2,zero=0", "say dp_replicate in place of dp_shard"),
        ("cp=2,zero=0", "zero=0 shares nothing"),
        ("ep=0", "ep=0: choose 1 to"),
        ("dp_shard=2,ep=2,checkpointing=selective", "choose checkpointing=full or none"),
        ("sequence_parallel=1", "say tp=2 or more"),
        ("sequence_parallel=2,tp=2", "sequence_parallel=2"),
        ("compile=2", "compile=2"),
        ("compile=1,pp=2,pp_schedule=zbv", "leave out compile, or choose another pp_schedule"),
        ("compile=1,tp=2,checkpointing=full", "choose checkpointing=selective"),
        ("offload=2,dp_shard=2", "offload=2"),
    ],
)
def test_what_contradicts_is_refused_with_what_to_choose(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text)
    assert words in str(raised.value)


@given(
    st.builds(
        ParallelSettings,
        dp_replicate=st.integers(1, 64),
        dp_shard=st.integers(2, 64) | st.just(-1),
        cp=st.integers(1, 64),
        tp=st.integers(1, 64),
        zero=st.sampled_from((2, 3)),
        accumulation=st.integers(1, 64),
        checkpointing=st.sampled_from(("none", "selective", "full")),
        precision=st.sampled_from(("fp32", "bf16")),
        offload=st.sampled_from((0, 1)),
    )
)
def test_its_text_says_all_of_it(settings: ParallelSettings) -> None:
    assert parse(str(settings)) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=3", "tp=3 does not divide model.num_heads = 4"),
        ("tp=4", "tp=4 does not divide model.num_kv_heads = 2"),
        ("pp=8", "8 stages of a pipeline, but model.num_layers = 4"),
        ("pp=4,pp_schedule=zbv", "8 stages of a pipeline"),
        ("cp=3,cp_ulysses=3", "cp_ulysses=3 does not divide the 4 heads"),
        ("cp=8,cp_ulysses=8", "cp_ulysses=8 does not divide the 4 heads"),
        ("cp=2,cp_ulysses=1,compile=1,checkpointing=selective", "nothing would be compiled"),
        ("cp=4,cp_ulysses=4,tp=2", "cp_ulysses=4 does not divide the 2 heads"),
    ],
)
def test_a_model_that_cannot_be_shared_so_is_refused(text: str, words: str) -> None:
    check_model(parse("tp=2,pp=4"), MODEL)
    with pytest.raises(ConfigError, match=words):
        check_model(parse(text), MODEL)


@pytest.mark.parametrize(
    ("text", "num_ulysses"), [("cp=4", 2), ("cp=4,tp=2", 1), ("cp=3", 1), ("cp=4,cp_ulysses=4", 4), ("cp=8", 2)]
)
def test_as_many_ranks_exchange_heads_as_there_are_key_heads_for(text: str, num_ulysses: int) -> None:
    check_model(parse(text), MODEL)
    assert parse(text).num_ulysses(MODEL) == num_ulysses


@pytest.mark.parametrize(
    ("text", "num_ranks"), [("ep=2", 1), ("dp_replicate=2,ep=2", 2), ("dp_shard=-1,ep=2", 3), ("tp=2,ep=2", 2)]
)
def test_experts_are_shared_by_ranks_that_share_parameters(text: str, num_ranks: int) -> None:
    assert parse("dp_shard=-1,ep=2").resolved(4).ep == 2
    assert parse("cp=2,ep=2").resolved(2).num_data_ranks == 1
    with pytest.raises(ConfigError, match=r"ep=2 does not divide the [13] ranks of .*or say dp_shard=2"):
        parse(text).resolved(num_ranks)


def test_experts_are_shared_equally() -> None:
    check_model(parse("dp_shard=4,ep=2"), replace(MODEL, num_experts=6))
    check_model(parse("dp_shard=4"), replace(MODEL, num_experts=6))
    with pytest.raises(ConfigError, match=r"ep=4 does not divide model\.num_experts = 6"):
        check_model(parse("dp_shard=4,ep=4"), replace(MODEL, num_experts=6))
    for text in ("tp=2,sequence_parallel=1", "compile=1,dp_shard=2", "dp_shard=2,offload=1"):
        check_model(parse(text), MODEL)
        with pytest.raises(ConfigError, match="it is of dense models alone; leave out"):
            check_model(parse(text), replace(MODEL, num_experts=6))
    with pytest.raises(ConfigError, match="the model has no experts to share; leave out ep"):
        check_model(parse("dp_shard=2,ep=2"), MODEL)


def test_no_rank_has_the_matrix_of_tied_embeddings_twice() -> None:
    tied = ModelSettings(num_layers=4, tie_embeddings=True)
    check_model(parse("tp=2,pp=2"), tied)
    check_model(parse("pp=2,pp_schedule=interleaved-1f1b"), tied)
    check_model(parse("pp=2,pp_schedule=zbv"), ModelSettings(num_layers=4))
    with pytest.raises(ConfigError, match=r"pp_schedule=zbv with model\.tie_embeddings"):
        check_model(parse("pp=2,pp_schedule=zbv"), tied)


def test_one_rank_that_was_left_for_shards_says_nothing_of_them() -> None:
    for text in ("dp_shard=-1,zero=2", "dp_shard=-1,zero=3", "dp_shard=-1"):
        alone = parse(text).resolved(1)
        assert str(alone) == ""
        assert parse(str(alone)).resolved(1) == alone
    assert str(parse("dp_shard=-1,zero=2").resolved(2)) == "dp_shard=2,zero=2"


def test_a_batch_is_shared_equally() -> None:
    check_batch(parse("dp_shard=2,accumulation=2"), 8)
    check_batch(parse("pp=2,dp_shard=2"), 8)
    for text, batch_size, said in (
        ("dp_shard=2,accumulation=2", 6, "by 2 data ranks, in 2 parts each; choose another --parallel accumulation"),
        ("pp=2,dp_shard=2", 4, "by 2 data ranks, in 4 parts each; choose another --parallel microbatches"),
        ("pp=2,microbatches=3", 16, "in 3 parts each; choose another --parallel microbatches"),
        ("dp_shard=2", 3, "by 2 data ranks; choose another --ranks or --parallel"),
    ):
        with pytest.raises(ConfigError, match=f"{batch_size} sequences cannot be shared equally {said}$"):
            check_batch(parse(text), batch_size)


def test_positions_are_shared_equally() -> None:
    check_sequence(parse("tp=4,sequence_parallel=1"), 20)
    check_sequence(parse("tp=4"), 18)
    check_sequence(parse("cp=3,tp=4,sequence_parallel=1"), 22)  # filled up to 24
    with pytest.raises(ConfigError, match=r"tp=4 does not divide the 18 positions .* leave out sequence_parallel"):
        check_sequence(parse("tp=4,sequence_parallel=1"), 18)
    with pytest.raises(ConfigError, match=r"the 6 positions of a rank \(trainer\.sequence = 18, cp=3\)"):
        check_sequence(parse("cp=3,tp=4,sequence_parallel=1"), 18)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_each_block_is_in_one_stage_of_one_rank(schedule: str, pp: int) -> None:
    settings = ParallelSettings(pp=pp, pp_schedule=schedule)
    stages = [stage for rank in range(pp) for stage in stages_of(rank, settings)]
    assert sorted(stages) == list(range(settings.num_stages))
    if schedule in V_SCHEDULES:
        assert stages_of(0, settings) == (0, settings.num_stages - 1)
    blocks = [range(*blocks_of(stage, settings.num_stages, 11)) for stage in range(settings.num_stages)]
    assert [block for stage in blocks for block in stage] == list(range(11))
    assert min(map(len, blocks)) >= 1
