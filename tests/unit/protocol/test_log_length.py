"""How long payload logs are, by the bytes of a state and of commits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from atoll.protocol import log_length as ll
from atoll.protocol.layout import Manifest, Role, TensorSpec, chunk_runs
from atoll.protocol.log_length import LogLength
from atoll.protocol.messages import Commit
from atoll.protocol.presets import with_preset
from atoll.protocol.sync_settings import MAX_LOG_COMMITS, SyncSettings
from tests.harness.data_plane import commit_record

GRADIENT = SyncSettings(strategy="gradient", every=1, codec="bf16")
ONEBIT = SyncSettings(strategy="momentum", every=1, codec="sign1", warmup_commits=100, warmup_codec="bf16")


def model(num_parameters: int) -> Manifest:
    return Manifest.canonical([TensorSpec(name="w", shape=(num_parameters,), dtype="F32", role=Role.TRAINABLE)])


LARGE, SMALL = model(1 << 30), model(1 << 12)
STATE_BYTES = 12 << 30


def commit(number: int, num_sites: int = 2) -> Commit:
    record = commit_record(number)
    (one,) = record.contributors[:1]
    return replace(record, contributors=tuple(replace(one, site_id=i + 1) for i in range(num_sites)))


def sizes(length: LogLength, last: int, num_sites: int = 2) -> dict[int, int]:
    return {number: length.bytes_of(commit(number, num_sites)) for number in range(1, last + 1)}


def num_kept(sync: SyncSettings, last: int = 6000, num_sites: int = 2, manifest: Manifest = LARGE) -> int:
    length = LogLength(manifest, sync)
    return length.num_kept(last, sizes(length, last, num_sites))


def test_a_log_that_is_set_is_as_long_as_that() -> None:
    for sync in (SyncSettings(log_commits=7), replace(GRADIENT, log_commits=7), replace(ONEBIT, log_commits=7)):
        for manifest in (LARGE, SMALL, None):
            length = LogLength(manifest, sync)
            assert not length.counts_bytes
            assert [length.num_kept(last, {}) for last in (0, 1, 100, 101)] == [7] * 4


def test_sites_that_train_between_syncs_have_logs_of_32_commits() -> None:
    for codec in ("fp32", "int8", "topk2"):
        assert LogLength(LARGE, SyncSettings(codec=codec)).num_kept(50, {}) == 32


@pytest.mark.parametrize(
    ("codec", "num_sites", "kept"), [("bf16", 2, 24), ("int8", 9, 48), ("int4", 3, 94), ("sign1", 2, 372)]
)
def test_the_log_of_a_large_model_has_four_times_the_bytes_of_its_state(codec: str, num_sites: int, kept: int) -> None:
    length = LogLength(LARGE, replace(GRADIENT, codec=codec))
    assert length.num_kept(2000, sizes(length, 2000, num_sites)) == kept
    one = length.bytes_of(commit(1, num_sites))
    assert (kept - 1) * one < 4 * STATE_BYTES <= kept * one


def test_bundles_have_the_contributions_of_as_many_sites_as_the_commit() -> None:
    sparse = replace(GRADIENT, codec="dct1")
    few, many = num_kept(sparse, num_sites=2), num_kept(sparse, num_sites=64)
    assert 2200 < few < 2300
    assert 60 < many < 80
    length = LogLength(LARGE, sparse)
    joined = {number: length.bytes_of(commit(number, 2 if number <= 3000 else 64)) for number in range(1, 3051)}
    assert many < length.num_kept(3050, joined) < few, "50 commits of 64 sites, and then many of two"


def test_after_a_warm_up_the_log_grows_with_each_commit_and_never_begins_earlier() -> None:
    length = LogLength(LARGE, ONEBIT)
    all_sizes = sizes(length, 1000)
    kept = [length.num_kept(last, all_sizes) for last in range(1, 1001)]
    assert kept[:100] == [24] * 100
    assert kept[900] == 372
    first = [last - num for last, num in enumerate(kept, start=1)]
    assert all(b >= a for a, b in pairwise(first)), "what was dropped is not there"


def test_where_commits_become_larger_a_log_falls_step_by_step() -> None:
    """A snapshot of every third of it is always one from which it leads on."""
    grows = replace(ONEBIT, warmup_codec="sign1", codec="bf16", warmup_commits=1000)
    length = LogLength(LARGE, grows)
    all_sizes = sizes(length, 1200)
    snapshot = 999 - length.num_kept(999, all_sizes) // 3 + 1
    for last in range(1000, 1201):
        kept = length.num_kept(last, all_sizes)
        if last >= snapshot + kept // 3:
            snapshot = last
        assert last - kept < snapshot, f"commit {last}"


def test_in_a_warm_up_in_which_gradients_thin_out_each_commit_counts_as_what_it_is() -> None:
    preset = SyncSettings(**with_preset("zeroone-adam", {})["sync"])
    length = LogLength(LARGE, replace(preset, warmup_commits=2000))
    all_sizes = sizes(length, 2000)
    assert len({all_sizes[number] for number in range(1, 2001)}) == 2
    for last in (16, 100, 700, 2000):
        kept = length.num_kept(last, all_sizes)
        held = [all_sizes[number] for number in range(max(1, last - kept + 1), last + 1)]
        assert last < kept or sum(held[1:]) < 4 * STATE_BYTES <= sum(held), f"commit {last}"
        assert sum(held) + max(all_sizes.values()) <= length.most_bytes(2, 2)


def test_a_small_model_has_a_thousand_commits_in_the_log_while_their_bytes_are_few() -> None:
    assert num_kept(GRADIENT, manifest=SMALL) == 1024
    between = LogLength(model(1 << 20), GRADIENT)
    assert between.num_kept(200, sizes(between, 200)) == 128
    num_tensors = 10_000
    tiny = Manifest.canonical(
        [TensorSpec(name=f"w{i}", shape=(64,), dtype="F32", role=Role.TRAINABLE) for i in range(num_tensors)]
    )
    assert num_kept(GRADIENT, 200, manifest=tiny) < 100, "whose tables are larger than their values"


def test_a_log_has_no_more_commits_than_a_coordinator_reads() -> None:
    sparse = replace(GRADIENT, codec="dct1k4")
    assert num_kept(sparse) == MAX_LOG_COMMITS
    for sync in (sparse, GRADIENT, ONEBIT, SyncSettings(), SyncSettings(log_commits=3)):
        assert num_kept(sync, 10) <= sync.most_log_commits == LogLength(None, sync).num_commits


@pytest.mark.parametrize("num_sites", [2, 8, 16])
@pytest.mark.parametrize(
    "sync",
    [GRADIENT, ONEBIT, replace(GRADIENT, codec="dct1"), replace(ONEBIT, warmup_codec="int8", codec="fp32")],
    ids=["bf16", "onebit", "dct1", "int8 then fp32"],
)
@pytest.mark.parametrize("manifest", [SMALL, model(1 << 20), LARGE], ids=["small", "between", "large"])
def test_no_log_is_larger_than_it_is_told_to_be(manifest: Manifest, sync: SyncSettings, num_sites: int) -> None:
    length = LogLength(manifest, sync)
    all_sizes = sizes(length, 1200, num_sites)
    more = max(length.bytes_of(commit(n, num_sites)) - length.bytes_of(commit(n)) for n in (1, 101))
    for last in range(1, 1200, 7):
        kept = length.num_kept(last, all_sizes)
        held = sum(all_sizes[number] for number in range(max(1, last - kept + 1), last + 1))
        assert held + all_sizes[last + 1] <= length.most_bytes(2, 16) + 2 * more, "but for two commits"


@pytest.mark.parametrize("name", ["adamw", "onebit-adam", "zeroone-adam", "demo"])
def test_presets_that_exchange_at_every_step_leave_it_to_the_model(name: str) -> None:
    sync = SyncSettings(**with_preset(name, {})["sync"])
    assert LogLength(LARGE, sync).counts_bytes
    assert MAX_LOG_COMMITS > num_kept(sync, manifest=SMALL) >= 1024


def test_frozen_tensors_are_no_part_of_commits() -> None:
    frozen = TensorSpec(name="z", shape=(1 << 30,), dtype="F32", role=Role.FROZEN)
    with_frozen = Manifest.canonical([*LARGE.tensors, frozen])
    assert num_kept(GRADIENT, manifest=with_frozen) == num_kept(GRADIENT)


def test_of_one_chunk_that_is_trained_a_log_has_no_more_bytes_than_of_its_states() -> None:
    """Of a parameter they have four bytes at least, and the log of four states of twelve."""
    record_bytes, role = 4 << 20, Role.TRAINABLE
    large, fixed = LogLength(LARGE, GRADIENT), LogLength(LARGE, replace(GRADIENT, log_commits=1024))
    assert large.most_read_bytes(4, record_bytes, role) == 4 * record_bytes
    assert large.most_read_bytes(1024, record_bytes, role) == 12 * record_bytes + ll.SMALL_LOG_BYTES
    assert large.most_read_bytes(1024, record_bytes, Role.BUFFER_MEAN) == 1024 * record_bytes
    assert fixed.most_read_bytes(1024, record_bytes, role) == 1024 * record_bytes


def test_tables_in_memory_are_bounded() -> None:
    small_chunks = replace(GRADIENT, codec="dct1k4", chunk_elements=1 << 16)
    for manifest, sync in ((LARGE, small_chunks), (SMALL, replace(small_chunks, chunk_elements=1))):
        length = LogLength(manifest, sync)
        num_chunks = sum(count for _, count, _ in chunk_runs(manifest, sync.chunk_elements))
        parameters = sum(tensor.num_elements for tensor in manifest.tensors)
        assert length.num_kept(9000, {}) * num_chunks <= max(1 << 20, parameters // 150)


def test_an_empty_log_is_as_long_as_commits_of_two_sites_would_make_it() -> None:
    for sync in (GRADIENT, ONEBIT):
        length = LogLength(LARGE, sync)
        assert length.num_kept(0, {}) == length.num_kept(50, sizes(length, 50))
        assert length.num_kept(2000, {}) == length.num_kept(2000, sizes(length, 2000))
