"""One stream of gRPC with TLS between two sites, directly and through an `atoll relay`: real processes on loopback.

Caller, relay and called site share the cores of this machine, so the ratio is that of processor time more than of any
link; the relay's own processor time for each GB is said beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atoll.node.relay.client import RelayClient
from atoll.protocol import transport
from atoll.protocol.addresses import Relayed
from atoll.protocol.trust import enrolled
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls
from benchmarks.relay_sink import METHOD, SERVICE
from tests.harness.chaos import settings
from tests.harness.local_run import PLAIN, LocalRun
from tests.harness.sockets import free_address

LIMIT_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks relay", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="in each stream")
    parser.add_argument("--frame-kib", type=int, default=1024)
    parser.add_argument("--times", type=int, default=5, help="of each, in turn")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        run = stack.enter_context(LocalRun(folder, settings(min_sites=2), PLAIN, secured=True))
        run.start_coordinator()
        relay_home = _joined(run, "hub", "relay")
        command = [sys.executable, *PLAIN, "relay", "--home", str(relay_home), "--listen", free_address()]
        relay = run.start("relay", command)
        address = relay.wait_for_line(r"listening on (\S+)", LIMIT_S).group(1)
        caller, called = (_among_sites(run, _joined(run, name, "site")) for name in "ab")
        port = _start_sink(stack, run.settings.run_id, called, address)
        direct, relayed, cpu_s = asyncio.run(_measure(args, caller, port, address, relay.popen.pid))
    print(f"{args.times} streams of {args.mib} MiB each, frames of {args.frame_kib} KiB, {os.cpu_count()} cores")
    for what, speeds in (("direct", direct), ("relayed", relayed)):
        low, high = min(speeds), max(speeds)
        print(f"{what}: {statistics.median(speeds):.0f} MB/s ({low:.0f} to {high:.0f})")
    ratios = [through / straight for through, straight in zip(relayed, direct, strict=True)]
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"processor time of the relay: {cpu_s / (args.times * args.mib * 2**20 / 1e9):.2f} s a GB")
    return 0


def _joined(run: LocalRun, name: str, role: str) -> Path:
    home = run.home(name)
    words = ["join", str(run.invite(name, role=role)), "--home", str(home)]
    words += ["--enrol-only"] if role == "site" else []
    if run.start("join", [sys.executable, *PLAIN, *words]).wait(LIMIT_S):
        raise SystemExit(f"{name} could not join:\n{run.story()}")
    return home


def _among_sites(run: LocalRun, home: Path) -> MutualTls:
    found = enrolled.joined(home)
    subject = Subject(found.subject.run_id, Kind.SITE, found.subject.name)
    identity = MutualTls(subject.run_id, found.shown)
    return MutualTls(subject.run_id, asyncio.run(renew(identity, [run.address], subject)))


def _start_sink(stack: ExitStack, run_id: str, tls: MutualTls, relay: str) -> int:
    """Its own port."""
    command = [sys.executable, "-m", "benchmarks.relay_sink"]
    sink = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert sink.stdin is not None
    assert sink.stdout is not None
    shown = {name: getattr(tls.shown, name).decode() for name in type(tls.shown).__annotations__}
    sink.stdin.write(json.dumps({"run_id": run_id, "shown": shown, "relay": relay}) + "\n")
    sink.stdin.flush()
    stack.callback(sink.stdin.close)
    return int(sink.stdout.readline())


async def _measure(
    args: argparse.Namespace, tls: MutualTls, port: int, relay: str, process_id: int
) -> tuple[list[float], list[float], float]:
    """MB/s of each stream, directly and through the relay, and the relay's processor time."""
    relays = RelayClient(tls)
    through = relays.address_for(Relayed("b", relay))
    direct, relayed, cpu_s = [], [], 0.0
    for _ in range(args.times):
        direct.append(await _speed(args, tls, f"127.0.0.1:{port}"))
        before = _cpu_s(process_id)
        relayed.append(await _speed(args, tls, through))
        cpu_s += _cpu_s(process_id) - before
    relays.close()
    return direct, relayed, cpu_s


async def _speed(args: argparse.Namespace, tls: MutualTls, address: str) -> float:
    frame, num_frames = os.urandom(args.frame_kib << 10), (args.mib << 10) // args.frame_kib

    async def frames() -> AsyncIterator[bytes]:
        for _ in range(num_frames):
            yield frame

    channel = transport.open_channel(
        address, handshake=tls.towards(Kind.SITE, "b"), max_message_bytes=2 * transport.MAX_FRAME_BYTES
    )
    try:
        await channel.channel_ready()
        take: Any = channel.stream_unary(f"/{SERVICE}/{METHOD}")
        began = time.monotonic()
        if int(await take(frames(), timeout=LIMIT_S)) != num_frames * len(frame):
            raise SystemExit("the called site did not get all")
        return num_frames * len(frame) / 1e6 / (time.monotonic() - began)
    finally:
        await channel.close()


def _cpu_s(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return float(int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
