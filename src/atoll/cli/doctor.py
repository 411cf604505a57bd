"""Look at this machine before it trains: clock, disk, memory, ports, links, peers, GPUs, versions.

One line for each, and what to do where something is wrong. It dials the coordinator and the sites that are in the run,
sends and takes up to 8 MiB or for two seconds each way on the links to the coordinator and three of them, has one of
them dial this machine where the node is to listen, writes and removes a file of 64 MiB in the home, and joins nothing.
Exit code 3 if something would surely fail.

examples:
  atoll doctor --home ~/.local/state/atoll/RUN/berlin        of a site that has joined
  atoll doctor --home DIR --listen 0.0.0.0:7800              and whether that port can be had
  atoll doctor --insecure-network --coordinator 10.0.0.1:7700        of a run in plain text
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.protocol.addresses import parse_proxy
from atoll.protocol.errors import AtollError, ConfigError, HostError

if TYPE_CHECKING:
    from atoll.node.daemon.doctor import Finding
    from atoll.protocol.trust.enrolled import Enrolled

WRITTEN_BYTES = 64 << 20
DIAL_LIMIT_S = 5.0
MOST_PEERS = 16
ROUND_TRIPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", type=Path, metavar="DIR", help="of the site that has joined")
    parser.add_argument("--listen", default="", metavar="HOST:PORT", help="where the node is to listen")
    parser.add_argument(
        "--advertise", default="", metavar="HOST:PORT", help="where others reach that (default: the same)"
    )
    parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="its address (default: of the invite)")
    parser.add_argument("--proxy", default="", metavar="URL", help="as `atoll node` is given it")
    parser.add_argument("--insecure", action="store_true", help="of a run in plain text on this machine")
    parser.add_argument("--insecure-network", action="store_true", help="of a run in plain text elsewhere")


def run(args: argparse.Namespace) -> int:
    show(findings(args))
    return 0


def show(found: Iterable[Finding]) -> None:
    """As they come. Raises HostError at the end if something would surely fail."""
    from atoll.node.daemon.doctor import Verdict
    from atoll.protocol.text import last_line

    num_failed = 0
    for finding in found:
        line = f"{finding.verdict.value:>5}  {finding.what:<12} {last_line(finding.found)}"
        print(line + (f"\n{'':<20} -> {finding.remedy}" if finding.remedy else ""), flush=True)
        num_failed += finding.verdict is Verdict.FAIL
    if num_failed:
        raise HostError(f"{num_failed} of these would surely fail: see FAILS above")


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """As they are found. Raises ConfigError where it is not said whose machine this is."""
    import resource

    from atoll.node.daemon import doctor
    from atoll.protocol.trust import enrolled, plain_text

    is_plain_text = args.insecure or args.insecure_network
    if is_plain_text != (args.home is None) or (is_plain_text and not args.coordinator):
        raise ConfigError("whose machine? --home DIR of a site that has joined, or --insecure --coordinator HOST:PORT")
    if args.insecure and not args.insecure_network:
        plain_text.check({"--coordinator": args.coordinator, "--listen": args.listen})
    joined = None if is_plain_text else enrolled.joined(args.home)
    home = args.home or Path.cwd()
    problem = _bound(args.listen) if args.listen else ""
    links = Links("" if problem else args.listen, args.advertise)
    yield from of_site(joined, home, args.coordinator, parse_proxy(args.proxy), links)
    yield doctor.descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if args.listen:
        yield doctor.listens(args.listen, problem)
    yield _gpus()


def of_site(
    joined: Enrolled | None, home: Path, coordinator: str = "", proxy: str = "", links: Links | None = None
) -> Iterator[Finding]:
    """All that needs no torch. `proxy`: HOST:PORT of an HTTP proxy; what is behind it the node finds out. `links` are
    measured if that is said, which takes some seconds each."""
    from atoll.cli import doctor_links
    from atoll.node.daemon import doctor
    from atoll.protocol.machine import Machine

    if joined is not None:
        yield doctor.certificate(joined.expires_s, time.time())
    try:
        answer = _asked(coordinator, joined, proxy)
    except AtollError as error:
        yield doctor.Finding(doctor.Verdict.FAIL, "coordinator", str(error), "no more of the run can be looked at")
        return
    yield from _of_run(answer, home)
    if not proxy:
        yield from _of_peers(answer.document, joined.subject.name if joined is not None else "")
    if links is not None and joined is not None:
        yield from doctor_links.findings(
            doctor_links.Asked(
                joined=joined,
                coordinator=answer.address,
                document=answer.document,
                machine=Machine.through(proxy),
                listen=links.listen,
                advertise=links.advertise,
            )
        )


@dataclass(frozen=True, slots=True)
class Links:
    """To be measured, from this machine."""

    listen: str
    """Where another site is to try to dial it; empty: it is not."""
    advertise: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """Of the coordinator."""

    document: dict[str, Any]
    address: str
    round_trip_s: float
    ahead_s: float
    """This machine's clock."""


def _asked(address: str, joined: Enrolled | None, proxy: str) -> _Answer:
    """By the quickest of some calls, at the first address that answers."""
    from atoll.cli.client import fetch_status

    tried = [address] if address else list(joined.addresses if joined is not None else ())
    for candidate in tried:
        answers = []
        try:
            for _ in range(ROUND_TRIPS):
                began, wall_s = time.monotonic(), time.time()
                document = fetch_status(candidate, joined, proxy=proxy)
                took_s = time.monotonic() - began
                ahead_s = wall_s + took_s / 2 - float(document["time"])
                answers.append(_Answer(document, candidate, took_s, ahead_s))
        except AtollError:
            if candidate == tried[-1]:
                raise
            continue
        return min(answers, key=lambda answer: answer.round_trip_s)
    raise ConfigError("there is no address of a coordinator")


def _of_run(answer: _Answer, home: Path) -> Iterator[Finding]:
    from atoll import __version__
    from atoll.node.daemon import doctor
    from atoll.node.daemon.room import beside, free_for
    from atoll.node.daemon.shared_memory import RESERVE_BYTES
    from atoll.node.dataplane.footprint import footprint
    from atoll.protocol import file_systems
    from atoll.protocol.disk import Disk
    from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
    from atoll.protocol.settings import settings_from_json

    document = answer.document
    yield doctor.coordinator(answer.address, answer.round_trip_s, _sysctl("net/ipv4/tcp_slow_start_after_idle"))
    yield doctor.clock(answer.ahead_s, answer.round_trip_s / 2)
    yield doctor.versions(__version__, str(document.get("atoll_version", "")))
    settings = settings_from_json(json.dumps(document["settings"]))
    size = max(1, int(document["num_parameters"]))
    whole = Manifest.canonical([TensorSpec(name="model", shape=(size,), dtype="F32", role=Role.TRAINABLE)])
    needs, free = footprint(Layout(whole, settings.sync.chunk_elements), settings), free_for(home, Disk())
    if document["num_parameters"]:
        files_bytes = free.memory_for_files(needs)
        needed_bytes = needs.shared_bytes + files_bytes + RESERVE_BYTES
        yield doctor.memory(free.memory.available_bytes, needed_bytes, free.memory.source, files_bytes)
        more_bytes = sum(num_bytes for _, num_bytes in beside(settings, whole, 0))
        yield doctor.disk(free.disk_bytes + free.home_bytes, needs.disk_bytes, more_bytes, str(home))
    else:
        yield doctor.Finding(doctor.Verdict.UNKNOWN, "memory, disk", "the run has no model yet: atoll node --dry-run")
    yield doctor.disk_kind(file_systems.kind_of(home), str(home))
    try:
        yield doctor.disk_speed(_written_bytes_per_s(home), needs.outer_bytes)
    except OSError as error:
        found = f"{home} cannot be written: {error.strerror}"
        yield doctor.Finding(doctor.Verdict.FAIL, "disk speed", found, "make room, or choose another --home")


def _of_peers(document: dict[str, Any], own: str) -> Iterator[Finding]:
    from atoll.node.daemon import doctor

    others = [s for s in document["sites"] if s["connected"] and s["site_id"] and s["name"] != own]
    for site in others[:MOST_PEERS]:
        yield doctor.peer(site["name"], site["address"], _dialled_s(site["address"]))
    for site in document["sites"]:
        if site["name"] == own and site["connected"] and others:
            yield doctor.is_dialled(site["not_dialled_by"])


def _gpus() -> Finding:
    from atoll.node.daemon import doctor

    try:
        import torch
    except ImportError:
        remedy = 'pip install "atoll[node]"; a script of one\'s own may bring its torch'
        return doctor.Finding(doctor.Verdict.WARN, "torch", "is not installed here", remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    has_nccl = bool(names) and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""  # type: ignore[no-untyped-call]
    return doctor.gpus(names, nccl, is_here=has_gpu(Path("/dev")))


def has_gpu(devices: Path) -> bool:
    """By what their drivers put there: NVIDIA's, AMD's, or WSL's."""
    return any(any(devices.glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""


def _written_bytes_per_s(home: Path) -> float:
    """Raises OSError."""
    block = os.urandom(1 << 20)
    began = time.monotonic()
    with tempfile.TemporaryFile(dir=home) as file:  # gone with this process, however it ends
        for _ in range(WRITTEN_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN_BYTES / max(1e-6, time.monotonic() - began)


def _dialled_s(address: str) -> float | None:
    """To a site, or to the relay that leads to it."""
    from atoll.protocol.addresses import parse_address, relayed

    began = time.monotonic()
    try:
        behind = relayed(address)
        with socket.create_connection(
            parse_address(behind.relay if behind is not None else address), timeout=DIAL_LIMIT_S
        ):
            return time.monotonic() - began
    except (OSError, ConfigError):
        return None


def _bound(address: str) -> str:
    """Why that cannot be listened on; empty if it can."""
    from atoll.protocol.addresses import parse_address

    host, port = parse_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
