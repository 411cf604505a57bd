"""Times the exchange of one sync alone: site processes on loopback, random data, the real codec, reduction and log.

    python -m benchmarks.exchange_speed --params 16777216 --sites 3

From the word "go" to the last site's digest; the smallest, the median and all rounds. Each round is a sync of its own.
With `--mbit` (root) each site is in a network namespace whose link is limited to so much in each direction, and the
ratio to the link's limit is printed: the time that the busier direction of the busiest site's chunks need alone.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.hub import Hub
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.listener import listen
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.service import PeerService
from atoll.protocol.codecs import kernels
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import Member, Plan, Tree
from atoll.protocol.plans import weights
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import netns

RUN_ID = "exchange-speed"


def _layout(args: argparse.Namespace) -> Layout:
    shape = (args.params,)
    manifest = Manifest.canonical([TensorSpec(name="w", shape=shape, dtype="F32", role=Role.TRAINABLE)])
    return Layout(manifest, args.chunk_elements)


def _plan(sync: int, addresses: list[str], layout: Layout) -> Plan:
    """Reducers take turns, so that each has its share of every part of the model."""
    members = tuple(
        Member(site_id=i + 1, incarnation=1, address=address, tokens=100 + i) for i, address in enumerate(addresses)
    )
    count = len(members)
    trees = []
    for chunk in range(layout.num_sync_chunks):
        top = chunk % count
        parents = tuple(-1 if i == top else top for i in range(count))
        trees.append(Tree(first_chunk=chunk, num_chunks=1, parents=parents))
    return Plan(
        sync=sync,
        attempt=1,
        term=1,
        base_commit=0,
        contributors=members,
        trees=tuple(trees),
        stall_limit_s=30,
        num_steps=1,
        deadline_s=600.0,
        slowest_bytes_per_s=1 << 10,
    )


async def _site(args: argparse.Namespace) -> None:
    kernels.warm_up()
    layout = _layout(args)
    random = np.random.default_rng(args.site)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        outer = OuterState.create(Path(folder) / "state", layout, (), RUN_ID)
        snapshot = memoryview(bytearray(layout.buffer_bytes))
        local = np.frombuffer(snapshot, np.float32)
        for chunk in layout.chunks:
            values = random.standard_normal(chunk.num_elements, np.float32)
            outer.seed(chunk.index, values.tobytes())
            first = chunk.offset_bytes // 4
            step = random.standard_normal(chunk.num_elements, np.float32)
            local[first : first + chunk.num_elements] = values + np.float32(0.01) * step
        log = PayloadLog(Path(folder) / "log", layout, RunSettings(run_id=RUN_ID, sync=SyncSettings(log_commits=1)))
        hub = Hub(
            run_id=RUN_ID,
            incarnation=1,
            dialer=Dialer(),
            pool=ThreadPoolExecutor(args.threads),
            site_id=args.site,
        )
        hub.max_retained_bytes = 4 << 30
        hub.serve(layout, lambda: outer, log, Pace(stall_s=30, slowest_bytes_per_s=1 << 10))
        listener, port = await listen(f"{args.host}:0", PeerService(hub).handlers)
        print(port, flush=True)
        addresses = json.loads(await asyncio.to_thread(sys.stdin.readline))
        settings = SyncSettings(codec=args.codec, chunk_elements=args.chunk_elements)
        while (line := await asyncio.to_thread(sys.stdin.readline)).strip():
            sync = int(line)
            cpu, sent_bytes = time.process_time(), hub.counters.sent_bytes
            data = SyncData(layout, spec_of(settings, 0, 0), outer, snapshot, {"w": "F32"})
            plan = _plan(sync, addresses, layout)
            share = await asyncio.to_thread(hub.share(plan, data))
            told = weights(plan)
            exchange = hub.begin(plan, data, share, tokens=told[args.site - 1], weights=told)
            result = await exchange.run()
            print(
                json.dumps(
                    {
                        "digest": result.payload_digest.hex(),
                        "sent_bytes": hub.counters.sent_bytes - sent_bytes,
                        "cpu_s": time.process_time() - cpu,
                    }
                ),
                flush=True,
            )
            await asyncio.to_thread(sys.stdin.readline)  # all are done
            hub.drop_sync(sync)
            log.drop(sync)
        await hub.close()
        await listener.stop(0)
        log.close()


def _run(args: argparse.Namespace) -> None:
    if not args.mbit:
        _measure(args, [[] for _ in range(args.sites)], [args.host] * args.sites)
        return
    if why := netns.available():
        sys.exit(f"--mbit {why}")
    with netns.Hosts(args.sites, args.mbit * 1_000_000, rtt_s=args.rtt / 1e3) as hosts:
        sites = range(args.sites)
        _measure(args, [hosts.prefix(i) for i in sites], [hosts.address(i) for i in sites])


def _limit_s(args: argparse.Namespace, sent: list[float]) -> float:
    """What the busiest uplink needs for the chunks it sends, and one trip for contributions and one for payloads."""
    return max(sent) * 2**20 * 8 / (float(args.mbit) * 1e6) + args.rtt / 1e3


def _measure(args: argparse.Namespace, prefixes: list[list[str]], hosts: list[str]) -> None:
    sites = []
    for i, (prefix, host) in enumerate(zip(prefixes, hosts, strict=True)):
        command = [*prefix, sys.executable, "-m", "benchmarks.exchange_speed", "--site", str(i + 1), "--host", host]
        for option in ("params", "chunk_elements", "codec", "threads", "folder"):
            if (value := getattr(args, option)) is not None:
                command += ["--" + option.replace("_", "-"), str(value)]
        sites.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))

    def tell(line: str) -> None:
        for site in sites:
            assert site.stdin is not None
            site.stdin.write(line + "\n")
            site.stdin.flush()

    def hear() -> list[str]:
        lines = [site.stdout.readline() for site in sites if site.stdout is not None]
        if not all(lines):
            sys.exit("a site process ended early; its error is above")
        return lines

    try:
        ports = [int(line) for line in hear()]
        tell(json.dumps([f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]))
        times = []
        reports = []
        for sync in range(1, args.rounds + 1):
            started = time.perf_counter()
            tell(str(sync))
            reports = [json.loads(line) for line in hear()]
            times.append(time.perf_counter() - started)
            if len({r["digest"] for r in reports}) != 1:
                sys.exit(f"round {sync}: the sites' payload digests differ")
            tell("done")
        tell("")
        sent = [r["sent_bytes"] / 2**20 for r in reports]
        print(f"{args.params} parameters, {args.codec}, {args.sites} sites, {args.threads} threads each")
        print(f"sent by each site, MiB: {', '.join(f'{s:.2f}' for s in sent)}")
        cpu = ", ".join(format(r["cpu_s"], ".3f") for r in reports)
        print(f"CPU of each site in the last round, s: {cpu}")
        rounds = ", ".join(f"{t:.3f}" for t in times)
        if args.mbit:
            limit_s = _limit_s(args, sent)
            print(
                f"limit of {args.mbit} Mbit/s: {limit_s:.3f} s; median {statistics.median(times) / limit_s:.3f} of it"
            )
        print(f"exchange, s: smallest {min(times):.3f}, median {statistics.median(times):.3f} ({rounds})")
    finally:
        for site in sites:
            if site.poll() is None:
                site.terminate()
            site.wait(10)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=16 << 20)
    parser.add_argument("--chunk-elements", type=int, default=1 << 20)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=min(8, max(2, cores)), help="of each site's pool")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--mbit", type=int, default=0, help="limit of each site's link, Mbit/s (root)")
    parser.add_argument("--rtt", type=int, default=0, help="round trip time between two sites, ms (with --mbit)")
    parser.add_argument("--folder", default=None, help="for the sites' files (default: the temporary folder)")
    parser.add_argument("--site", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.site:
        asyncio.run(_site(args))
    else:
        _run(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
