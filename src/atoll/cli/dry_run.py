"""`atoll node --dry-run`: what this site would offer and need, without joining."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator

from atoll.cli.status import whole
from atoll.cli.words import count
from atoll.coordinator.core.sync.chunk_sizes import ChunkSizes
from atoll.node.daemon.config import NodeConfig, default_home
from atoll.node.daemon.peers import check_cap
from atoll.node.daemon.published import gains_in_place
from atoll.node.daemon.room import beside, room_of
from atoll.node.daemon.script_model import model_of_script
from atoll.node.dataplane.footprint import NODE_CONSTANT_BYTES, footprint
from atoll.node.parallel.settings import check_site, parse
from atoll.node.plan.activations import ON_CPU, ON_GPU
from atoll.node.plan.rank_memory import rank_memory
from atoll.node.plan.tensors import manifest_of
from atoll.protocol import file_systems
from atoll.protocol.addresses import parse_proxy
from atoll.protocol.codecs.table import SPARSE
from atoll.protocol.disk import Disk
from atoll.protocol.errors import AtollError, HostError, InvalidMessage, PeerError
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.settings import RunSettings, settings_from_json
from atoll.protocol.text import byte_count
from atoll.protocol.trust import enrolled

SCRIPT_LIMIT_S = 600.0
"""From the start of a script to its atoll.join."""


def dry_run(config: NodeConfig) -> int:
    """Prints one fact a line; the exit code says whether the coordinator answered."""
    from atoll.cli.client import fetch_status

    joined = None if config.is_plain_text or config.home is None else enrolled.load(config.home / enrolled.FOLDER)
    failed: AtollError | None = None
    settings = RunSettings(run_id="unknown")
    try:
        if not config.coordinators:
            raise PeerError(f"host {config.site_rank} was told no --coordinator, which says what the run is set to")
        document = fetch_status(config.coordinators[0], joined, proxy=parse_proxy(config.proxy))
        if "settings" not in document:
            raise InvalidMessage(f"the status of {config.coordinator} has no settings; is it of another version?")
        settings = settings_from_json(json.dumps(document["settings"]))
        _print("run", f"{settings.run_id} at {config.coordinator}: {document.get('state', '')}")
    except (PeerError, InvalidMessage) as error:
        failed = error
        _print("run", f"unknown: {error}")
        _print("", "what follows is for the default settings")
    try:
        for name, text in facts(settings, config, *described(settings, config)):
            _print(name, text)
    except AtollError as error:
        _print("refused", str(error))
        failed = error
    return failed.exit_code if failed is not None else 0


def _print(name: str, text: str) -> None:
    print(f"{name:<12} {whole(text)}", flush=True)  # the coordinator and the script say some of it


def described(settings: RunSettings, config: NodeConfig) -> tuple[Manifest, str, bool]:
    """The model of what would train here, this machine's device, and whether the ranks can read outer values in place.
    Of a site of several hosts it is the model of the built-in trainer, by its settings. Raises WorkerError,
    ConfigError."""
    if config.site_hosts > 1:  # its ranks would wait for those of the other hosts
        check_site(config.parallel, config.num_site_ranks, settings)
        manifest, read_in_place = manifest_of(settings.model), False
    else:
        what = " ".join(config.command) or "the built-in trainer"
        _print("", f"starting {what} to learn its model; it is ended once it calls atoll.join")
        pieces = asyncio.run(model_of_script(config, settings, config.start_limit_s or SCRIPT_LIMIT_S))
        manifest, read_in_place = pieces.manifest, pieces.reads_in_place
    import torch

    if not torch.cuda.is_available():
        return manifest, "CPU", read_in_place
    return manifest, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", read_in_place


def facts(
    settings: RunSettings, config: NodeConfig, manifest: Manifest, device: str, ranks_can_read_in_place: bool
) -> Iterator[tuple[str, str]]:
    """(what, in words). Raises ConfigError or HostError, after what is known, if the run does not take the model, or it
    does not fit on this machine."""
    yield "model", f"{len(manifest.tensors)} tensors, {count(manifest.num_trainable)} trainable parameters"
    yield "manifest", manifest.digest.hex()
    yield "data", ", ".join(str(path) for path in config.data_paths) or f"what the run names: {settings.data}"
    yield "ports", ports(config)
    how = f" ({config.parallel})" if config.parallel else ""
    of_hosts = f" on each of {config.site_hosts} hosts" if config.site_hosts > 1 else ""
    yield "device", f"{device}, {config.num_ranks} rank(s){of_hosts}{how} of {config.num_rank_threads} thread(s)"
    if not config.command:
        yield "a rank", rank_line(settings, config, device)
    chunks = ChunkSizes.of(manifest, settings.sync)
    yield "chunks", f"{len(chunks)} that travel; the run takes {settings.sync.max_chunks} (sync.max_chunks)"
    home = config.home or default_home(settings.run_id, config.name, os.environ)
    layout = Layout(manifest, settings.sync.chunk_elements)
    read_in_place = ranks_can_read_in_place and gains_in_place(layout, settings.sync, home)
    yield from memory_lines(settings, layout, config.num_kernel_threads, read_in_place=read_in_place)
    more = ", ".join(f"{byte_count(size)} {what}" for what, size in beside(settings, manifest, config.max_disk_bytes))
    yield "disk beside", f"at the most {more}; --max-disk-gb is compared with all of it"
    check_cap(config, settings)
    if (kind := file_systems.kind_of(home)) in file_systems.IN_MEMORY:
        yield "", f"{home} is in memory ({kind}): all of its disk is memory, which the kernel cannot drop"
    room = room_of(config, settings, manifest, home, Disk(), has_buffers=False, read_in_place=read_in_place)
    yield "as a reducer", f"holds {room}"


def rank_line(settings: RunSettings, config: NodeConfig, device: str) -> str:
    """The plan's memory of the rank that needs most, in a step of the built-in trainer."""
    parallel = parse(config.parallel).resolved(config.num_site_ranks)
    kernels = ON_CPU if device == "CPU" else ON_GPU
    needs = rank_memory(settings.model, parallel, settings.trainer.batch_size, settings.trainer.sequence, kernels)
    own = needs.weights + needs.gradients + needs.optimizer
    where = " in the host's memory" if parallel.offload else ""
    schedule = "" if parallel.pp_schedule == "1f1b" else ", with pp_schedule=1f1b"
    return (
        f"{byte_count(needs.peak)} at {needs.moment}, as planned (docs/plan.md{schedule}); {byte_count(own)} of "
        f"weights, gradients and AdamW{where}, {byte_count(needs.activations)} of activations"
    )


def memory_lines(
    settings: RunSettings, layout: Layout, num_threads: int, *, read_in_place: bool
) -> list[tuple[str, str]]:
    """Of the node, by the formulas of docs/memory.md; the training processes' own comes on top."""
    needs = footprint(layout, settings, num_threads, read_in_place=read_in_place)
    sites = f" of {settings.min_sites} sites" if settings.sync.codec_up in SPARSE else ""
    return [
        (
            "memory",
            f"{byte_count(needs.memory_bytes)} for the node: {byte_count(needs.shared_bytes)} shared with the workers "
            f"({needs.shared_in_words}), {byte_count(needs.outer_bytes)} outer state (mapped), "
            f"{byte_count(needs.sync_bytes)} held as a reducer, {byte_count(needs.thread_bytes)} that threads compute "
            f"in, {byte_count(NODE_CONSTANT_BYTES)} of its own",
        ),
        (
            "disk",
            f"{byte_count(needs.disk_bytes)} at the most: "
            + ", ".join(f"{byte_count(num_bytes)} {what}" for what, num_bytes in needs.disk_parts),
        ),
        ("traffic", f"less than {byte_count(needs.sync_bytes + needs.payload_bytes)} each way in a sync{sites}"),
    ]


def ports(config: NodeConfig) -> str:
    from atoll.node.daemon.discover import local_address_towards

    towards = (*config.coordinators, config.site_address)[0]
    dials = config.coordinator if config.site_rank == 0 else f"host 0 at {config.site_address}"
    try:
        listen = config.listen or f"{local_address_towards(towards)}, any free port"
    except HostError as error:
        listen = f"unknown ({error})"
    told = f", told to others as {config.advertise}" if config.advertise else ""
    return f"listens on {listen}{told}; dials {dials}; metrics on {config.http_listen or 'no port'}"
