"""`atoll node --dry-run`: what this site would offer and need, without joining."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.cli.words import byte_count, count
from atoll.node.daemon.config import NodeConfig
from atoll.protocol.codecs import codec_of, encoded_bytes
from atoll.protocol.errors import AtollError, HostError, InvalidMessage, PeerError, WorkerError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec, TiedName
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json

DESCRIBE_LIMIT_S = 120.0
NODE_CONSTANT_BYTES = 150 << 20  # Python, gRPC, numpy, compiled kernels
OUTER_SLOTS = {"sgd": 0, "nesterov": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a process with torch says about the built-in model and this machine."""

    manifest: Manifest
    device: str


def dry_run(config: NodeConfig) -> int:
    """Prints one fact a line; the exit code says whether the coordinator answered."""
    from atoll.cli.client import fetch_status

    failed: AtollError | None = None
    settings = RunSettings(run_id="unknown")
    try:
        document = fetch_status(config.coordinator)
        if "settings" not in document:
            raise InvalidMessage(f"the status of {config.coordinator} has no settings; is it of another version?")
        settings = settings_from_json(json.dumps(document["settings"]))
        _print("run", f"{settings.run_id} at {config.coordinator}: {document.get('state', '')}")
    except (PeerError, InvalidMessage) as error:
        failed = error
        _print("run", f"unknown: {error}")
        _print("", "what follows is for the default settings")
    for name, text in facts(settings, config, describe(settings)):
        _print(name, text)
    return failed.exit_code if failed is not None else 0


def _print(name: str, text: str) -> None:
    print(f"{name:<12} {text}", flush=True)


def facts(settings: RunSettings, config: NodeConfig, described: Described) -> list[tuple[str, str]]:
    """(what, in words), for the built-in model or as much as is known of a user's script."""
    lines: list[tuple[str, str]] = []
    if config.command:
        lines.append(("model", f"made by {config.command[0]}, so known only once it calls atoll.join"))
    else:
        manifest = described.manifest
        lines += [
            ("model", f"{len(manifest.tensors)} tensors, {count(manifest.num_trainable)} trainable parameters"),
            ("manifest", manifest.digest.hex()),
        ]
        lines += memory_lines(settings, manifest)
    data = ", ".join(str(path) for path in config.data_paths) or f"what the run names: {settings.data}"
    lines += [
        ("data", data),
        ("ports", ports(config)),
        ("device", f"{described.device}, {config.num_ranks} rank(s) of {config.num_rank_threads} thread(s)"),
    ]
    return lines


def memory_lines(settings: RunSettings, manifest: Manifest) -> list[tuple[str, str]]:
    """Of the node, by the formula of docs/memory.md; the training processes' own comes on top."""
    layout = Layout(manifest, settings.sync.chunk_elements)
    num_slots = OUTER_SLOTS[settings.outer.optimizer]
    outer = sum(chunk.num_bytes * (1 + num_slots if chunk.role is Role.TRAINABLE else 1) for chunk in layout.chunks)
    encoded = sum(
        encoded_bytes(
            codec_of(chunk.role, settings.sync.codec),
            chunk.num_elements,
            manifest.tensors[chunk.tensor].carried_itemsize,
        )
        for chunk in layout.chunks[: layout.num_sync_chunks]
    )
    shared = 2 * layout.buffer_bytes
    total = NODE_CONSTANT_BYTES + outer + shared + encoded
    log = encoded * settings.sync.log_commits
    snapshots = outer * (settings.sync.snapshots + 1 if settings.sync.snapshots else 0)  # one more while it is written
    return [
        (
            "memory",
            f"{byte_count(total)} for the node: {byte_count(shared)} shared with the workers, "
            f"{byte_count(outer)} outer state (mapped), {byte_count(encoded)} held as a reducer, "
            f"{byte_count(NODE_CONSTANT_BYTES)} of its own",
        ),
        (
            "disk",
            f"{byte_count(outer + log + snapshots)}: outer state, payloads of {settings.sync.log_commits} commits, "
            f"{settings.sync.snapshots} snapshots and one being written",
        ),
        ("traffic", f"less than {byte_count(2 * encoded)} each way in a sync"),
    ]


def ports(config: NodeConfig) -> str:
    from atoll.node.daemon.discover import local_address_towards

    try:
        listen = config.listen or f"{local_address_towards(config.coordinator)}, any free port"
    except HostError as error:
        listen = f"unknown ({error})"
    told = f", told to others as {config.advertise}" if config.advertise else ""
    return f"listens on {listen}{told}; dials {config.coordinator}; metrics on {config.http_listen or 'no port'}"


def describe(settings: RunSettings, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Described:
    """Builds the model in a process of its own. Raises WorkerError if that fails."""
    try:
        result = run(
            [sys.executable, "-m", "atoll.cli.describe_model"],
            input=settings_to_json(settings),
            capture_output=True,
            text=True,
            timeout=DESCRIBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WorkerError(f"building the model took longer than {DESCRIBE_LIMIT_S:.0f} s") from None
    if result.returncode != 0:
        raise WorkerError(f"the model cannot be built here: {(result.stderr.strip() or 'no reason given')[-500:]}")
    return _parse(json.loads(result.stdout))


def _parse(document: dict[str, Any]) -> Described:
    return Described(
        manifest=Manifest(
            tensors=tuple(
                TensorSpec(name=name, shape=tuple(shape), dtype=dtype, role=Role(role))
                for name, shape, dtype, role in document["tensors"]
            ),
            tied=tuple(TiedName(alias=alias, name=name) for alias, name in document["tied"]),
        ),
        device=document["device"],
    )
