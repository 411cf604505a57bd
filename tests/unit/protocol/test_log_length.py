"""How long payload logs are, by the bytes of a state and of commits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.protocol import log_length as ll
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.log_length import LogLength, commit_bytes, log_length
from atoll.protocol.presets import with_preset
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import MAX_LOG_COMMITS, SyncSettings

GRADIENT = SyncSettings(strategy="gradient", every=1, codec="bf16")
ONEBIT = SyncSettings(strategy="momentum", every=1, codec="sign1", warmup_commits=100, warmup_codec="bf16")


def model(num_parameters: int) -> Manifest:
    return Manifest.canonical([TensorSpec(name="w", shape=(num_parameters,), dtype="F32", role=Role.TRAINABLE)])


LARGE, SMALL = model(1 << 30), model(1 << 12)


def test_a_log_that_is_set_is_as_long_as_that() -> None:
    for sync in (SyncSettings(log_commits=7), replace(GRADIENT, log_commits=7), replace(ONEBIT, log_commits=7)):
        for manifest in (LARGE, SMALL):
            assert [log_length(manifest, sync, 3).at(commit) for commit in (0, 1, 100, 101)] == [7] * 4


def test_sites_that_train_between_syncs_have_logs_of_32_commits() -> None:
    for codec in ("fp32", "int8", "topk2"):
        assert log_length(LARGE, SyncSettings(codec=codec), 3) == LogLength(32)


@pytest.mark.parametrize(
    ("codec", "num_sites", "least", "most"),
    [("fp32", 2, 16, 16), ("int8", 2, 20, 24), ("int4", 2, 40, 48), ("sign1", 2, 184, 192), ("dct1", 4, 550, 570)],
)
def test_the_log_of_a_large_model_has_twice_the_bytes_of_its_state(
    codec: str, num_sites: int, least: int, most: int
) -> None:
    sync = replace(GRADIENT, codec=codec)
    length = log_length(LARGE, sync, num_sites)
    assert least <= length.num_commits <= most
    state_bytes = 12 << 30
    one = commit_bytes(LARGE, sync, spec_of(sync, 0, 0), num_sites)
    assert length.num_commits * one >= 2 * state_bytes
    if length.num_commits > ll.LEAST_COMMITS:
        assert (length.num_commits - 1) * one < 2 * state_bytes, "and no more than that"


def test_in_the_warm_up_it_has_fewer_commits_of_more_bytes() -> None:
    length = log_length(LARGE, ONEBIT, 2)
    assert length.at(0) == length.at(1) == length.at(100) == 16
    assert length.at(101) == length.at(1 << 40) == log_length(LARGE, replace(GRADIENT, codec="sign1"), 2).num_commits


def test_a_small_model_has_a_thousand_commits_in_the_log_while_their_bytes_are_few() -> None:
    assert log_length(SMALL, GRADIENT, 2) == LogLength(1024)
    between = model(1 << 22)
    length = log_length(between, GRADIENT, 2)
    one = commit_bytes(between, GRADIENT, spec_of(GRADIENT, 0, 0), 2)
    assert length.num_commits == ll.SMALL_LOG_BYTES // one == 31


def test_a_log_has_no_more_commits_than_a_coordinator_reads() -> None:
    sparse = replace(GRADIENT, codec="dct1k4")
    assert log_length(LARGE, sparse, 1).num_commits == MAX_LOG_COMMITS, "of 28 million values in 4 GiB"
    for sync in (sparse, GRADIENT, ONEBIT, SyncSettings(), SyncSettings(log_commits=3)):
        assert log_length(LARGE, sync, 1).num_commits <= sync.most_log_commits


@pytest.mark.parametrize("name", ["adamw", "onebit-adam", "zeroone-adam", "demo"])
def test_presets_that_exchange_at_every_step_leave_it_to_the_model(name: str) -> None:
    sync = SyncSettings(**with_preset(name, {})["sync"])
    assert log_length(SMALL, sync, 2).num_commits == 1024 != log_length(LARGE, sync, 2).num_commits


def test_frozen_tensors_are_no_part_of_commits() -> None:
    frozen = TensorSpec(name="z", shape=(1 << 30,), dtype="F32", role=Role.FROZEN)
    with_frozen = Manifest.canonical([*LARGE.tensors, frozen])
    assert log_length(with_frozen, GRADIENT, 2) == log_length(LARGE, GRADIENT, 2)


def test_snapshots_are_taken_so_often_that_the_log_leads_on_from_each() -> None:
    length = LogLength(30, 9, 100)
    assert length.snapshot_every(101, 2) == 10
    assert length.snapshot_every(100, 2) == 3
    assert length.snapshot_every(100, 20) == 1
    assert length.snapshot_every(101, 0) == 0
