"""`atoll node --dry-run`: facts without joining, whether or not the coordinator is there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import client, dry_run
from atoll.cli.main import main
from atoll.node.daemon import room
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.script_model import model_of_script
from atoll.node.daemon.shared_memory import MemoryLimit
from atoll.protocol import file_systems
from atoll.protocol.errors import ConfigError, HostError, PeerError, WorkerError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.model_settings import MODELS, TrainerSettings
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.sync_settings import SyncSettings
from examples.own_model import Model
from tests.harness.chaos import command_line, descendants

WORKERS = Path(__file__).parents[2] / "workers"
CONFIG = NodeConfig(coordinator="127.0.0.1:7700", name="a")
SETTINGS = RunSettings(run_id="r", sync=SyncSettings(codec="fp32", log_commits=10))
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(1024, 1024), dtype="F32", role=Role.TRAINABLE)])

LAYOUT = Layout(MANIFEST, SETTINGS.sync.chunk_elements)


def fake_torch(settings: RunSettings, config: NodeConfig) -> tuple[Manifest, str, bool]:
    del settings, config
    return MANIFEST, "CPU", False


def test_memory_follows_the_formula() -> None:
    text = " ".join(line for _, line in dry_run.memory_lines(SETTINGS, LAYOUT, 2, read_in_place=False))
    # 1 Mi parameters, Nesterov: 8 MiB shared, 8 MiB outer with a spare place as large, 4 MiB encoded (and its headers);
    # 2 threads that exchange, 2 that apply and a job of the disk compute in four chunks of 4 MiB each.
    assert (
        "258.0 MiB for the node: 8.0 MiB shared with the workers (SNAPSHOT and PUBLISH), 16.0 MiB outer state" in text
    )
    assert "80.0 MiB that threads compute in, 150.0 MiB of its own" in text
    plain = replace(SETTINGS, outer=OuterSettings(optimizer="sgd"))
    assert "8.0 MiB outer state" in dict(dry_run.memory_lines(plain, LAYOUT, 2, read_in_place=False))["memory"]


def test_what_a_cap_on_the_disk_is_compared_with_is_said_and_a_cap_on_the_link_is_looked_at(tmp_path: Path) -> None:
    told = dict(dry_run.facts(SETTINGS, replace(CONFIG, home=tmp_path), MANIFEST, "CPU", False))
    assert told["disk beside"].startswith("at the most 40.0 MiB checkpoints of an AdamW, 1.3 GiB records"), told
    assert "96.0 MiB logs" in told["disk beside"]
    capped = replace(CONFIG, home=tmp_path, max_disk_bytes=1 << 30)
    told = dict(dry_run.facts(SETTINGS, capped, MANIFEST, "CPU", False))
    assert "40.0 MiB checkpoints of an AdamW, 48.0 MiB records" in told["disk beside"]
    with pytest.raises(ConfigError, match=r"--max-upload-mbit 0\.08: run .* takes no link of less than"):
        list(
            dry_run.facts(
                SETTINGS, replace(CONFIG, home=tmp_path, max_upload_bytes_per_s=10_000), MANIFEST, "CPU", False
            )
        )


def test_what_ranks_read_in_place_is_on_the_disk_and_a_home_in_memory_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, home=tmp_path)

    def lines(kind: str, settings: RunSettings = SETTINGS) -> dict[str, str]:
        monkeypatch.setattr(file_systems, "kind_of", lambda path: kind)
        return dict(dry_run.facts(settings, config, MANIFEST, "CPU", True))

    copied = dict(dry_run.memory_lines(SETTINGS, LAYOUT, 2, read_in_place=False))
    in_place = lines("ext4")
    assert (
        "4.0 MiB shared with the workers (SNAPSHOT; PUBLISH is on the disk, as they read in place)"
        in (in_place["memory"])
    )
    assert "20.0 MiB what ranks may still read of the state before" in in_place["disk"]  # PUBLISH, and the outer file
    assert "still read" not in copied["disk"]
    overlapping = replace(SETTINGS, sync=replace(SETTINGS.sync, overlap_steps=1))
    for elsewhere in (lines("nfs4"), lines("ext4", overlapping)):
        assert "8.0 MiB shared with the workers (SNAPSHOT and PUBLISH)" in elsewhere["memory"]
        assert "still read" not in elsewhere["disk"]
    in_memory = lines("tmpfs")
    assert in_memory[""] == f"{tmp_path} is in memory (tmpfs): all of its disk is memory, which the kernel cannot drop"
    assert "" not in in_place
    # All that is free would hold what is shared, but not the files as well.
    monkeypatch.setattr(room, "memory_limit", lambda: MemoryLimit(40 << 20, "a test"))
    assert "as a reducer" in lines("ext4")
    with pytest.raises(HostError, match=r"MiB for files of \S+, which is in memory \(choose a disk with --home\)"):
        lines("tmpfs")


def test_a_rank_has_the_memory_of_the_plan() -> None:
    settings = replace(SETTINGS, model=MODELS["llama3-8b"], trainer=TrainerSettings(batch_size=16, sequence=4096))
    layout = "dp_replicate=2,dp_shard=4,checkpointing=selective,precision=bf16"  # that of docs/plan.md
    config = replace(CONFIG, num_ranks=8, parallel=layout)
    lines = dict(dry_run.facts(settings, config, MANIFEST, "8 x NVIDIA H100", False))
    assert lines["a rank"] == (
        "64.1 GiB at the loss, as planned (docs/plan.md); 29.9 GiB of weights, gradients and AdamW, 27.1 GiB of "
        "activations"
    )
    offloaded = replace(config, parallel=f"{layout},offload=1")
    assert "AdamW in the host's memory" in dict(dry_run.facts(settings, offloaded, MANIFEST, "GPUs", False))["a rank"]
    on_cpu = dict(dry_run.facts(settings, config, MANIFEST, "CPU", False))["a rank"]
    assert on_cpu != lines["a rank"]  # kernels of a CPU keep more


def test_the_built_in_model_is_learned_by_starting_the_trainer(tmp_path: Path) -> None:
    settings = replace(SETTINGS, model=MODELS["nano"])
    config = replace(CONFIG, home=tmp_path, num_threads=1)
    manifest, device, read_in_place = dry_run.described(settings, config)
    assert read_in_place == (device == "CPU")
    assert manifest.num_trainable == 41120
    assert device
    of_hosts = replace(config, site_hosts=2, site_address="127.0.0.1:7800", num_ranks=2, parallel="dp_shard=2,pp=2")
    assert dry_run.described(settings, of_hosts) == (manifest, device, False), (
        "of a site of two hosts nothing is started"
    )
    lines = dict(dry_run.facts(settings, of_hosts, manifest, "8 x NVIDIA H100", False))
    assert lines["device"].startswith("8 x NVIDIA H100, 2 rank(s) on each of 2 hosts (dp_shard=2,pp=2) of ")
    of_four = replace(config, num_ranks=4, parallel="dp_shard=2,pp=2")
    assert lines["a rank"] == dict(dry_run.facts(settings, of_four, manifest, "8 x NVIDIA H100", False))["a rank"]
    with pytest.raises(ConfigError, match=r"tp=16 does not divide model\.num_heads"):
        dry_run.described(settings, replace(of_hosts, num_ranks=8, parallel="tp=16"))
    with pytest.raises(WorkerError, match="'books': say where it lies here with --data PATH"):
        dry_run.described(replace(settings, data="books"), config)


def test_the_model_of_a_script_is_learned_by_starting_it(tmp_path: Path) -> None:
    worker = (sys.executable, str(WORKERS / "plain_worker.py"), "--tensors", "a=300x40,b=10")
    config = replace(
        CONFIG,
        command=worker,
        launcher="exec",
        home=tmp_path,
        num_ranks=1,
        num_threads=3,
        advertise="203.0.113.7:7000",
        listen="127.0.0.1:7000",
    )
    manifest = asyncio.run(model_of_script(config, SETTINGS, limit_s=60.0)).manifest
    assert manifest.num_trainable == 300 * 40 + 10
    lines = dict(dry_run.facts(SETTINGS, config, manifest, "CPU", False))
    assert lines["model"] == "2 tensors, 12010 trainable parameters"
    assert lines["device"] == "CPU, 1 rank(s) of 3 thread(s)"
    assert "a rank" not in lines
    assert "listens on 127.0.0.1:7000, told to others as 203.0.113.7:7000" in lines["ports"]
    assert lines["as a reducer"].startswith("holds at most ")


@pytest.mark.slow  # seven processes with torch
def test_a_script_that_shares_its_model_has_the_same_one_in_every_layout_and_leaves(tmp_path: Path) -> None:
    script = str(Path(__file__).parents[3] / "examples" / "own_model.py")
    config = replace(CONFIG, command=(script,), launcher="python", home=tmp_path, num_threads=1)
    found = {}
    for layout, num_ranks in {"": 1, "pp=2": 2, "dp_shard=2,tp=2": 4}.items():
        shared = replace(config, parallel=layout, num_ranks=num_ranks)
        found[layout] = asyncio.run(model_of_script(shared, SETTINGS, limit_s=120.0)).manifest
        assert not [pid for pid in descendants(os.getpid()) if script in command_line(pid)]
    assert len({manifest.digest for manifest in found.values()}) == 1
    assert found[""].num_trainable == sum(p.numel() for p in Model().parameters())


def test_a_script_that_ends_before_it_joins_says_why() -> None:
    broken = (sys.executable, "-c", "import sys; print('no such folder: /data'); sys.exit(3)")
    config = replace(CONFIG, command=broken, launcher="exec")
    with pytest.raises(WorkerError, match=r"did not come to atoll.join: (?s:.)*no such folder: /data"):
        asyncio.run(model_of_script(config, SETTINGS, limit_s=60.0))


def test_a_model_that_does_not_fit_is_refused_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        client, "fetch_status", lambda address, joined, proxy: {"settings": json.loads(settings_to_json(SETTINGS))}
    )
    monkeypatch.setattr(dry_run, "described", fake_torch)
    monkeypatch.setattr(room, "memory_limit", lambda: MemoryLimit(7 << 20, "a test"))
    command = [
        "node",
        "--insecure",
        "--coordinator",
        "127.0.0.1:7700",
        "--name",
        "a",
        "--home",
        str(tmp_path),
        "--dry-run",
    ]
    assert main(command) == HostError.exit_code
    out = capsys.readouterr().out
    assert MANIFEST.digest.hex() in out  # what is known is said first
    assert "does not fit into this machine's memory" in out
    assert "limited by a test" in out


@pytest.mark.parametrize("is_there", [True, False])
def test_with_and_without_a_coordinator(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(address: str, joined: None, proxy: str) -> dict[str, Any]:
        if not is_there:
            raise PeerError(f"no coordinator answers at {address}")
        return {"settings": json.loads(settings_to_json(SETTINGS)), "state": "waiting for sites 0 of 1"}

    monkeypatch.setattr(client, "fetch_status", fetch)
    monkeypatch.setattr(dry_run, "described", fake_torch)
    code = main(["node", "--insecure", "--coordinator", "127.0.0.1:7700", "--name", "a", "--dry-run"])
    out = capsys.readouterr().out
    assert MANIFEST.digest.hex() in out
    assert "1 tensors, 1.05 million trainable parameters" in out
    if is_there:
        assert code == 0
        assert "r at 127.0.0.1:7700: waiting for sites 0 of 1" in out
    else:
        assert code == 5
        assert "unknown: no coordinator answers" in out
        assert "what follows is for the default settings" in out


def test_a_host_that_was_told_no_coordinator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dry_run, "described", fake_torch)
    config = replace(CONFIG, coordinator="", home=tmp_path, site_hosts=2, site_rank=1, site_address="127.0.0.1:7800")
    assert dry_run.dry_run(config) == 5
    out = capsys.readouterr().out
    assert "listens on 127.0.0.1, any free port; dials host 0 at 127.0.0.1:7800" in out
    assert "unknown: host 1 was told no --coordinator" in out
    assert MANIFEST.digest.hex() in out


def test_a_model_of_more_chunks_than_the_run_takes_is_refused_before_anything_is_joined() -> None:
    settings = replace(SETTINGS, sync=replace(SETTINGS.sync, chunk_elements=1024, max_chunks=1023))
    with pytest.raises(ConfigError, match="has 1024 chunks of 1024 elements, a run takes 1023: raise"):
        dict(dry_run.facts(settings, CONFIG, MANIFEST, "CPU", False))


def test_what_a_coordinator_says_does_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads(settings_to_json(SETTINGS)) | {"data": "\x1b]0;owned\x07\nmodel        a line of another's"}
    monkeypatch.setattr(
        client, "fetch_status", lambda *_, proxy: {"settings": settings, "state": "training\x1b[2J\u202e"}
    )
    monkeypatch.setattr(dry_run, "described", fake_torch)
    main(["node", "--insecure", "--coordinator", "127.0.0.1:7700", "--name", "a", "--dry-run"])
    out = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in out)
    assert r"training\x1b[2J" in out
    assert sum(line.startswith("model ") for line in out.splitlines()) == 1
