"""What a model is said to need is what its files and buffers have, and what it may hold follows from that."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.coordinator.core.sync.topology import Reducer, direct
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.deposit_box import SHARE_OF_HOME, box_bytes, most_on_disk
from atoll.node.daemon.room import LOG_BYTES, Free, Room, free_for, room_for, room_of
from atoll.node.daemon.shared_memory import RESERVE_BYTES, MemoryLimit
from atoll.node.dataplane.error_feedback import ErrorFeedback
from atoll.node.dataplane.footprint import footprint
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.snapshot import Snapshots
from atoll.protocol import disk, file_systems
from atoll.protocol.codecs import max_encoded_bytes
from atoll.protocol.disk import REAL_DISK, Disk
from atoll.protocol.errors import HostError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.log_length import LogLength
from atoll.protocol.outer_settings import OUTER_OPTIMIZERS, OuterSettings
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness import data_plane
from tests.harness.data_plane import RUN

GIB = 1 << 30
SETTINGS = RunSettings(run_id="r", sync=SyncSettings(codec="int8", chunk_elements=4096, log_commits=10, snapshots=2))
MANIFEST = Manifest.canonical(
    [
        TensorSpec(name="w", shape=(700, 1000), dtype="F32", role=Role.TRAINABLE),
        TensorSpec(name="mean", shape=(10,), dtype="F32", role=Role.BUFFER_MEAN),
        TensorSpec(name="table", shape=(999,), dtype="I64", role=Role.FROZEN),
    ]
)
LAYOUT = Layout(MANIFEST, 4096)
PLENTY = Free(memory=MemoryLimit(64 * GIB, "a test"), disk_bytes=1000 * GIB, home_bytes=0)


def room(
    free: Free,
    layout: Layout = LAYOUT,
    *,
    retained: int | None = None,
    buffer: int | None = None,
    home_has: int = 0,
    beside: int = 0,
) -> Room:
    return room_for(
        footprint(layout, SETTINGS),
        free,
        Path("/home/of/a"),
        max_retained_bytes=retained,
        reduce_buffer_bytes=buffer,
        has_buffers=False,
        max_disk_bytes=home_has,
        beside=(("logs", beside),) if beside else (),
    )


def large(num_parameters: int) -> Layout:
    spec = TensorSpec(name="w", shape=(num_parameters,), dtype="F32", role=Role.TRAINABLE)
    return Layout(Manifest.canonical([spec]), 1 << 24)


@pytest.mark.parametrize("optimizer", OUTER_OPTIMIZERS)
def test_the_outer_file_has_the_size_that_is_told(optimizer: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, outer=OuterSettings(optimizer=optimizer))
    slots = OuterOptimizer(settings).slots
    OuterState.create(tmp_path / "state", LAYOUT, slots, "r")
    assert (tmp_path / "state" / "outer.chunks").stat().st_size == footprint(LAYOUT, settings).outer_bytes


def test_the_errors_have_the_size_that_is_told(tmp_path: Path) -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, error_feedback=0.5))
    ErrorFeedback.create(tmp_path, LAYOUT, settings, REAL_DISK)
    more = set(footprint(LAYOUT, settings).disk_parts) - set(footprint(LAYOUT, SETTINGS).disk_parts)
    assert more == {("error feedback", size_of(tmp_path / "error.chunks", tmp_path / "error.index"))}


def test_errors_of_averages_have_at_most_the_size_that_is_told() -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, error_feedback_down=1.0))
    (more,) = set(footprint(LAYOUT, settings).disk_parts) - set(footprint(LAYOUT, SETTINGS).disk_parts)
    trained = sum(chunk.num_bytes for chunk in LAYOUT.chunks if chunk.role is Role.TRAINABLE)
    assert more == ("error feedback of averages, at most", 2 * trained)


def test_the_parts_on_the_disk_have_the_sizes_of_their_files(tmp_path: Path) -> None:
    """Where the most of each lies there at one time: headers and what is of no size of its own are what is left."""
    used = data_plane.layout()
    settings = RunSettings(
        run_id=RUN,
        save_every=1,
        sync=SyncSettings(codec="fp32", chunk_elements=used.chunk_elements, log_commits=3, snapshots=2),
    )
    state, payload_log, model, kept = (tmp_path / name for name in ("state", "payloads", "model", "snapshots"))
    outer = data_plane.seeded(state, used)
    data_plane.apply_all(outer, data_plane.payloads(outer), 1)
    snapshots = Snapshots(kept, used, outer.slots, RUN, lambda: None)
    snapshots.write(outer, 2, snapshots.num_cleared)
    frozen = outer.freeze()
    log = PayloadLog(payload_log, used, RunSettings(run_id=RUN, sync=SyncSettings(log_commits=3)))
    file = log.begin(2, 1, 1)
    sent = data_plane.payloads(outer, (5, 6), "fp32")
    for chunk, data in sent.items():
        file.put(chunk, data, payload_hash(data))
    data_plane.apply_all(outer, sent, 2)
    size_pinned = sum(os.fstat(file).st_size for file in [frozen._file] if file is not None)
    data_plane.save(model, outer, used, outer.slots, {"run_step": 1, "run_tokens": 1, "settings": {}})
    sizes = [
        size_of(state / "outer.chunks", state / "outer.index"),
        5 * size_of(*payload_log.glob("*.payloads")),
        4 * size_of(kept / "commit-1.snapshot") + size_of(kept / "frozen.snapshot"),
        2 * size_of(model / "model.safetensors", model / "outer.safetensors") + size_pinned,
    ]
    told = [num_bytes for _, num_bytes in footprint(used, settings).disk_parts]
    headers = [0, 5 * 80, 5 * 80, 2 * 1024]
    for size, most, header in zip(sizes, told, headers, strict=True):
        assert size - header <= most <= size + size // 20, (sizes, told)
    at_the_end = footprint(used, replace(settings, save_every=0)).disk_parts[-1][1]
    assert at_the_end == (told[-1] - size_pinned) // 2, "the last model alone, and no commit after it"
    three = footprint(used, replace(settings, keep_models=3)).disk_parts[-1]
    assert three[0].startswith("3 saved models, the next one")
    assert three[1] == told[-1] + 2 * at_the_end
    assert footprint(used, replace(settings, sync=replace(settings.sync, snapshots=0))).disk_parts[2][1] == 0
    assert footprint(used, settings).disk_bytes == sum(told)
    frozen.close()


def test_a_bundle_has_the_contributions_of_all_sites() -> None:
    sparse = replace(SETTINGS, sync=replace(SETTINGS.sync, codec="topk2"))
    (one, three), parts = (footprint(LAYOUT, replace(sparse, min_sites=n)) for n in (1, 3)), []
    for chunk in LAYOUT.chunks[: LAYOUT.num_sync_chunks]:
        codec = "topk2" if chunk.role is Role.TRAINABLE else "fp32"
        parts.append((max_encoded_bytes(codec, chunk.num_elements), chunk.role is Role.TRAINABLE))
    assert one.sync_bytes == three.sync_bytes == sum(size for size, _ in parts)
    assert three.payload_bytes == sum(16 + 3 * (4 + size) if is_trained else size for size, is_trained in parts)
    log = {needs.payload_bytes: needs.disk_parts[1][1] for needs in (one, three)}
    assert log[three.payload_bytes] - log[one.payload_bytes] == 13 * (three.payload_bytes - one.payload_bytes)


def test_payloads_have_the_bytes_of_four_states_where_sites_exchange_at_every_step() -> None:
    """Of 12 bytes a parameter; a quarter more while a site is behind, and two commits."""
    layout = Layout(large(1 << 30).manifest, 1 << 20)
    changes: dict[str, Any] = {"every": 1, "log_commits": 0, "chunk_elements": 1 << 20}
    for sync in (
        replace(SETTINGS.sync, strategy="gradient", codec="bf16", **changes),
        replace(SETTINGS.sync, strategy="momentum", codec="sign1", warmup_commits=5, warmup_codec="bf16", **changes),
    ):
        what, num_bytes = footprint(layout, replace(SETTINGS, min_sites=2, sync=sync)).disk_parts[1]
        assert what == "payloads of commits and of the sync under way"
        commit_bytes = LogLength(layout.manifest, sync).bytes_of(data_plane.commit_record(1))
        assert num_bytes == 5 * 12 * (1 << 30) + 2 * commit_bytes
        assert commit_bytes > 2 << 30


def size_of(*paths: Path) -> int:
    assert paths
    return sum(path.stat().st_size for path in paths)


def test_a_sync_has_the_size_that_the_coordinator_plans_with() -> None:
    assert (
        footprint(LAYOUT, SETTINGS).sync_bytes
        == ChunkSizes.of(MANIFEST, SyncSettings(codec="int8", chunk_elements=4096)).total_bytes
    )


@pytest.mark.parametrize("billions", [5, 70])
@pytest.mark.parametrize("num_sites", [2, 3, 50])
def test_a_model_that_fits_can_be_planned_with_the_default_bounds(billions: int, num_sites: int) -> None:
    layout = large(billions * 10**9)
    needs = footprint(layout, SETTINGS)
    free = Free(
        memory=MemoryLimit(needs.shared_bytes + 16 * GIB, "a test"),
        disk_bytes=needs.disk_bytes + 2 * needs.sync_bytes,
        home_bytes=0,
    )
    retained = room(free, layout).max_retained_bytes
    sites = [Reducer(site_id=i + 1, bandwidth_bytes_per_s=0, max_retained_bytes=retained) for i in range(num_sites)]
    sync = SyncSettings(codec="int8", chunk_elements=layout.chunk_elements)
    trees = direct(ChunkSizes.of(layout.manifest, sync), sites)
    assert sum(tree.num_chunks for tree in trees) == layout.num_sync_chunks
    assert len(trees) == num_sites


def test_contributions_leave_memory_and_disk_to_others() -> None:
    needs = footprint(LAYOUT, SETTINGS)
    tight = Free(
        memory=MemoryLimit(needs.shared_bytes + RESERVE_BYTES + 4000, "a test"),
        disk_bytes=needs.disk_bytes + 8000,
        home_bytes=0,
    )
    assert room(tight) == Room(max_retained_bytes=1000 + needs.sync_bytes + 7000, reduce_buffer_bytes=1000)
    assert room(PLENTY).reduce_buffer_bytes == GIB  # a small model does not take a quarter of a large machine
    assert room(tight, retained=5, buffer=3) == Room(max_retained_bytes=5, reduce_buffer_bytes=3)


def test_what_cannot_fit_is_refused_with_the_figures() -> None:
    needs = footprint(LAYOUT, SETTINGS)
    memory = MemoryLimit(needs.shared_bytes + RESERVE_BYTES, "a test")
    room(replace(PLENTY, memory=memory))
    with pytest.raises(HostError, match=r"does not fit into this machine's memory.*limited by a test"):
        room(replace(PLENTY, memory=replace(memory, available_bytes=memory.available_bytes - 1)))
    has_most = replace(PLENTY, disk_bytes=1000, home_bytes=needs.disk_bytes - 1000)
    room(has_most)
    with pytest.raises(HostError, match=r"does not fit on the disk of /home/of/a.*sync.log_commits"):
        room(replace(has_most, disk_bytes=999))


def test_a_home_takes_no_more_of_the_disk_than_its_owner_gives() -> None:
    """With what is there of the model and beside it, and contributions that are spilled."""
    needs = footprint(LAYOUT, SETTINGS)
    most = needs.disk_bytes + 500
    assert room(PLENTY, buffer=3000, home_has=most, beside=500).max_retained_bytes == 3000
    assert room(PLENTY, buffer=3000, home_has=most + 70, beside=500).max_retained_bytes == 3070
    assert room(PLENTY, home_has=10_000 * GIB, beside=500) == room(PLENTY), "the free disk is less"
    assert room(PLENTY, buffer=3000, retained=3070, home_has=most + 70, beside=500).max_retained_bytes == 3070
    with pytest.raises(HostError, match=r"--max-disk-gb 0\.\d+: .* are needed \(.*500 B logs\).*/home/of/a; raise it"):
        room(PLENTY, home_has=most - 1, beside=500)
    with pytest.raises(HostError, match=r"--max-retained-mib 0: 71 B of it would be on the disk.* leaves 70 B for it"):
        room(PLENTY, buffer=3000, retained=3071, home_has=most + 70, beside=500)


def test_what_a_site_keeps_for_its_coordinator_is_of_what_the_home_may_have(tmp_path: Path) -> None:
    """As much as its files may grow to (tests/unit/local/test_deposits.py)."""
    settings, most = replace(SETTINGS, checkpoint_every=0), GIB
    config = replace(node_config(tmp_path), max_disk_bytes=most, reduce_buffer_bytes=3000)
    needs = footprint(LAYOUT, settings, config.num_kernel_threads).disk_bytes
    found = room_of(config, settings, MANIFEST, tmp_path, Disk(), has_buffers=False)
    kept = most_on_disk(box_bytes(most))
    assert kept > most // SHARE_OF_HOME
    assert found.max_retained_bytes == 3000 + most - needs - LOG_BYTES - kept


def test_what_the_home_has_already_is_counted(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "outer.chunks").write_bytes(bytes(1 << 20))
    free = free_for(tmp_path, Disk())
    assert free.home_bytes >= 1 << 20
    assert free.disk_bytes > 0


def test_a_home_that_is_to_be_made_has_nothing_whatever_lies_above_it(tmp_path: Path) -> None:
    (tmp_path / "others").write_bytes(bytes(1 << 20))
    free = free_for(tmp_path / "state" / "run" / "a", Disk())
    assert free.home_bytes == 0
    assert free.disk_bytes > 0


def node_config(home: Path) -> NodeConfig:
    return NodeConfig(name="a", coordinator="localhost:1", listen="127.0.0.1:0", home=home, insecure=True)


def test_what_a_quota_leaves_is_tried_before_the_site_offers_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space says nothing of quotas; the refusal comes from what the kernel answers as the room is asked for."""
    asked: list[int] = []

    def over_quota(descriptor: int, mode: int, offset: ctypes.c_int64, length: ctypes.c_int64) -> int:
        asked.append(length.value)
        ctypes.set_errno(errno.EDQUOT)
        return -1

    home = tmp_path / "home"
    home.mkdir()
    (home / "log").write_bytes(bytes(1 << 16))
    room_of(node_config(home), SETTINGS, MANIFEST, home, Disk(), has_buffers=False)
    assert [file.name for file in home.iterdir()] == ["log"], "what was tried is given back"
    monkeypatch.setattr(disk, "_fallocate", over_quota)
    with pytest.raises(HostError, match=r"home/room: no space is left, .* MiB are needed, .* MiB are free; make room"):
        room_of(node_config(home), SETTINGS, MANIFEST, home, Disk(), has_buffers=False)
    assert asked == [footprint(LAYOUT, SETTINGS).disk_bytes - free_for(home, Disk()).home_bytes]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EFBIG])
def test_a_disk_that_cannot_be_tried_is_believed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    assert Disk().try_room(tmp_path, 1 << 16) is True
    monkeypatch.setattr(disk, "_fallocate", refused)
    assert Disk().try_room(tmp_path, 1 << 16) is False
    assert Disk().try_room(tmp_path, 0) is True
    with caplog.at_level("INFO", "atoll.node"):
        room_of(node_config(tmp_path), SETTINGS, MANIFEST, tmp_path, Disk(), has_buffers=False)
    assert "what a quota leaves for this node cannot be tried on" in caplog.text


@pytest.mark.parametrize(("kind", "is_tried"), [("ext4", True), ("tmpfs", False), ("nfs4", False)])
def test_a_home_on_a_network_file_system_is_said(
    kind: str, is_tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    class Tried(Disk):
        def try_room(self, folder: Path, size_bytes: int) -> bool:
            tried.append(size_bytes)
            return True

    monkeypatch.setattr(file_systems, "kind_of", lambda path: kind)
    room_of(node_config(tmp_path), SETTINGS, MANIFEST, tmp_path, Tried(), has_buffers=False)
    assert len(tried) == is_tried
    assert (f"is on a network file system ({kind})" in caplog.text) == (kind == "nfs4")
