"""A sync between three nodes as real processes: from the last SEALED to Commit, and to the parameters published.

On loopback, and as root between network namespaces with limited links; there the ratio to the link's limit: the time
that the link takes for the bytes that went through the interface, and with `--rtt` the trips that no sync can do
without (contributions, payloads, and Done and Commit with the coordinator in the middle: one round trip and a half).
Beside it what `atoll plan` says of a sync over such a link, and measured over planned.

With `--synced` each row again with `sync.fsync`, in turns: what a Done costs whose payloads are on the disk.

With `--hosts-per-site` each site is so many hosts, too, each with a link of its own, and a network without a limit
between them; then how much faster that is than one host a site. That is of links: nothing else said, these are so slow
that the cores of one machine, which all hosts share, are not the limit, and chunks so small that each host has many for
each site to reduce. With `--exchange-processes` the host of each site exchanges by so many processes, too, on loopback,
beside one: where there are cores for all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from atoll.node.plan.syncs import Link, sync_plans
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import ROBUST, SyncSettings
from benchmarks import netns
from tests.harness.collector import collecting
from tests.harness.local_run import PLAIN, LocalRun

NAMES = ("a", "b", "c")
WARM_UP_SYNCS = 2
TRIPS = 1.5
TURNS = 5
STEP_S = 1.0
LINKS_MBIT, LINKS_OF_HOSTS_MBIT = (200, 2000), (25,)
CHUNK_ELEMENTS_OF_HOSTS = 1 << 18
"""As many chunks of these 16 Mi parameters as a model four times as large has without a word."""
HEADER_BYTES = 66
"""Of each frame: Ethernet, IPv4, and TCP with time stamps. Nodes count what they hand over and take, without these."""
WORKER = Path(__file__).parents[1] / "tests" / "workers" / "plain_worker.py"


def main(argv: list[str]) -> int:
    args = arguments(argv)
    print(
        f"{args.parameters} parameters ({args.parameters * 4 / 2**20:.0f} MiB in fp32) in chunks of "
        f"{args.chunk_elements}, {args.codec}, 3 sites"
    )
    print(
        f"{'link':>12} {'to Commit s':>12} {'to published s':>15} {'MB sent a site':>15} {'at the interface':>17} "
        f"{'less headers':>12} {'limit s':>8} {'ratio':>6} {'planned s':>10} {'ratio':>6}"
    )
    alone = _measure(args, None)
    _print_row("loopback", alone)
    if args.secured:
        secured = _measure(args, None, secured=True)
        _print_row("over TLS", secured)
        print(f"TLS on loopback: {secured.commit_s / alone.commit_s:.2f} times as long, to Commit")
    if args.traced:
        _print_traced(args)
    if args.synced:
        _print_synced(args, None)
    if (num := args.exchange_processes) > 1:
        shared = _measure(args, None, num_processes=num)
        _print_row(f"{num} processes", shared)
        print(f"{num} exchange processes: {alone.commit_s / shared.commit_s:.2f} times as fast as one, to Commit")
        if (cores := len(os.sched_getaffinity(0))) < (needed := num * len(NAMES)):
            print(f"not a measure of them: they need {needed} cores to run side by side, this machine has {cores}")
    reason = netns.available() if args.mbit else ""
    if reason:
        print(f"links with a limit: not measured ({reason})")
        return 0
    for mbit in args.mbit:
        measured = _measure(args, mbit)
        _print_row(f"{mbit} Mbit/s", measured, _limit_s(args, measured, mbit), _planned_s(args, mbit))
        if args.secured:
            secured = _measure(args, mbit, secured=True)
            _print_row("over TLS", secured, _limit_s(args, secured, mbit), _planned_s(args, mbit))
            print(f"TLS at {mbit} Mbit/s: {secured.commit_s / measured.commit_s:.2f} times as long, to Commit")
        if args.synced:
            _print_synced(args, mbit)
        if args.hosts_per_site > 1:
            shared = _measure(args, mbit, args.hosts_per_site)
            _print_row(f"{mbit} x {args.hosts_per_site}", shared, _limit_s(args, shared, mbit, args.hosts_per_site))
            times = measured.commit_s / shared.commit_s
            print(f"{args.hosts_per_site} hosts a site: {times:.2f} times as fast as one, to Commit")
    return 0


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sync", description=__doc__)
    parser.add_argument("--parameters", type=int, default=16 << 20)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--robust", choices=ROBUST, default=SyncSettings().robust)
    parser.add_argument("--chunk-elements", type=int, help="the default of a run; with --hosts-per-site 262144")
    parser.add_argument("--syncs", type=int, default=12, help=f"counted, after {WARM_UP_SYNCS} that are not")
    parser.add_argument(
        "--mbit", type=int, nargs="*", help="links to limit (root); none: loopback; 200 2000, with --hosts-per-site 25"
    )
    parser.add_argument("--rtt", type=int, default=0, help="round trip time between two sites in ms (root)")
    parser.add_argument("--forgets", action="store_true", help="hosts without deploy/sysctl.d (with --rtt)")
    parser.add_argument("--congestion", default="cubic", help="TCP congestion control of the hosts")
    parser.add_argument("--hosts-per-site", type=int, default=1, help="beside sites of one host (root)")
    parser.add_argument("--exchange-processes", type=int, default=1, help="beside one of each host, on loopback")
    parser.add_argument("--secured", action="store_true", help="each row again over TLS")
    parser.add_argument("--traced", action="store_true", help="on loopback, with traces and without, in turns")
    parser.add_argument("--synced", action="store_true", help="with sync.fsync and without, in turns")
    args = parser.parse_args(argv)
    has_hosts = args.hosts_per_site > 1
    if args.mbit is None:
        args.mbit = LINKS_OF_HOSTS_MBIT if has_hosts else LINKS_MBIT
    if args.chunk_elements is None:
        args.chunk_elements = CHUNK_ELEMENTS_OF_HOSTS if has_hosts else SyncSettings().chunk_elements
    return args


def _print_traced(args: argparse.Namespace) -> None:
    """To a collector in this process, which needs a share of the same cores."""
    ratios = []
    with collecting() as collector:
        for _ in range(TURNS):
            plain = _measure(args, None)
            traced = _measure(args, None, environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint})
            ratios.append(traced.commit_s / plain.commit_s)
    shown = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    print(f"traces: {statistics.median(ratios):.2f} times as long, to Commit ({shown}); {len(collector.spans)} spans")


def _print_synced(args: argparse.Namespace, mbit: int | None) -> None:
    """All sites write to one disk here. The first of a turn is another one each time."""
    ratios = []
    for turn in range(TURNS):
        order = (False, True) if turn % 2 else (True, False)
        found = {fsync: _measure(args, mbit, fsync=fsync) for fsync in order}
        ratios.append(found[True].commit_s / found[False].commit_s)
        print(f"turn {turn}: {found[True].commit_s:.3f} s and without {found[False].commit_s:.3f} s", flush=True)
    shown = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    link = f"{mbit} Mbit/s" if mbit else "loopback"
    print(f"sync.fsync at {link}: {statistics.median(ratios):.2f} times as long, to Commit ({shown})", flush=True)


def _limit_s(args: argparse.Namespace, measured: Measured, mbit: int, num_hosts: int = 1) -> float:
    rtt_s: float = args.rtt / 1e3
    return measured.interface_bytes / num_hosts * 8 / mbit / 1e6 + TRIPS * rtt_s


def _planned_s(args: argparse.Namespace, mbit: int) -> float:
    tensor = TensorSpec(name="w", shape=(args.parameters,), dtype="F32", role=Role.TRAINABLE)
    link = Link(bits_per_s=mbit * 1e6, rtt_s=args.rtt / 1e3, num_sites=len(NAMES))
    (plan,) = sync_plans("bench", _settings(args).sync, Manifest.canonical([tensor]), link, step_s=STEP_S)
    return plan.sync_s


class Measured(NamedTuple):
    """Medians, of a site and sync."""

    commit_s: float
    """From the last SEALED to the last Commit received."""
    published_s: float
    """To the last PUBLISH."""
    sent_bytes: float
    """As the nodes count them."""
    interface_bytes: float
    """That went through the interface; 0 on loopback."""
    header_bytes: float
    """Of these."""


def _print_row(link: str, measured: Measured, limit_s: float = 0.0, planned_s: float = 0.0) -> None:
    through = limit = ""
    if limit_s:
        through_bytes, sent_bytes = measured.interface_bytes, measured.sent_bytes
        counted = (through_bytes - measured.header_bytes) / sent_bytes - 1
        through = f"{through_bytes / 1e6:8.2f} ({through_bytes / sent_bytes - 1:+6.1%}) {counted:+12.1%}"
        limit = f"{limit_s:8.3f} {measured.commit_s / limit_s:6.2f}"
        limit += f" {planned_s:10.3f} {measured.commit_s / planned_s:6.2f}" if planned_s else ""
    times = f"{measured.commit_s:12.3f} {measured.published_s:15.3f}"
    print(f"{link:>12} {times} {measured.sent_bytes / 1e6:15.2f} {through:>30} {limit}", flush=True)


def _settings(args: argparse.Namespace, *, fsync: bool = False) -> RunSettings:
    """All sites take part in all syncs: what some values of `robust` ask for, said or not."""
    return RunSettings(
        run_id="bench",
        steps=WARM_UP_SYNCS + args.syncs,
        min_sites=len(NAMES),
        max_sites=len(NAMES),
        quorum=len(NAMES),
        data="local",
        time_limits="lan",
        sync=SyncSettings(
            every=1,
            codec=args.codec,
            robust=args.robust,
            log_commits=2,
            snapshots=0,
            chunk_elements=args.chunk_elements,
            fsync=fsync,
        ),
    )


def _measure(
    args: argparse.Namespace,
    mbit: int | None,
    num_hosts: int = 1,
    num_processes: int = 1,
    *,
    secured: bool = False,
    fsync: bool = False,
    environment: dict[str, str] | None = None,
) -> Measured:
    num_syncs = WARM_UP_SYNCS + args.syncs
    settings = _settings(args, fsync=fsync)
    tensors = ",".join(f"w{part}={args.parameters // num_hosts}" for part in range(num_hosts))
    worker = [sys.executable, str(WORKER), "--tensors", tensors, "--step-delay-s", str(STEP_S), "--shard"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        hosts = None
        if mbit:
            links = (num_hosts * len(NAMES), mbit * 1_000_000, args.congestion, args.rtt / 1e3)
            hosts = stack.enter_context(netns.Hosts(*links, forgets=args.forgets, has_lan=num_hosts > 1))
        run = stack.enter_context(LocalRun(folder, settings, PLAIN, secured=secured))
        run.start_coordinator(f"{hosts.bridge_address}:17700" if hosts else "", environment=environment)
        for i, name in enumerate(NAMES):
            for k in range(num_hosts):
                first, extra = num_hosts * i, ["--exchange-processes", str(num_processes)]
                if hosts is not None and num_hosts > 1:
                    address = f"{hosts.lan_address(first)}:17800"
                    extra += ["--site-hosts", str(num_hosts), "--site-rank", str(k), "--site-address", address]
                    extra += ["--name", name]
                called = f"{name}-host{k}" if k else name
                prefix = hosts.prefix(first + k) if hosts else ()
                run.start_node(called, worker, prefix=prefix, extra=extra, environment=environment)
        run.wait(lambda s: s["last_commit"] >= WARM_UP_SYNCS, 300)
        before = _through(hosts)
        run.wait(lambda s: s["last_commit"] >= num_syncs - 1, 300)
        num_bytes, num_frames = (now - was for now, was in zip(_through(hosts), before, strict=True))
        codes = run.wait_all(300)
        if any(codes.values()):
            raise SystemExit(run.story())
        num = len(NAMES) * (args.syncs - 1)
        return _medians(run, num_syncs, num_bytes / num, HEADER_BYTES * num_frames / num)


def _through(hosts: netns.Hosts | None) -> tuple[int, int]:
    """Bytes and frames of all interfaces."""
    if hosts is None:
        return 0, 0
    every = range(hosts.num_hosts)
    return sum(map(hosts.sent_bytes, every)), sum(map(hosts.sent_frames, every))


def _medians(run: LocalRun, num_syncs: int, interface_bytes: float, header_bytes: float) -> Measured:
    to_commit, to_published, sent = [], [], []
    for commit in range(WARM_UP_SYNCS + 1, num_syncs + 1):
        sealed_s, committed_s, published_s, sent_bytes = [], [], [], []
        for name in NAMES:
            commits = {line["commit"]: line for line in run.journal(name, "commit")}
            if not commits.keys() >= {commit - 1, commit}:
                continue  # fetched as a state
            windows = [line["time_s"] for line in run.journal(name, "window")]
            of_this = [at_s for at_s in windows if commits[commit - 1]["time_s"] < at_s < commits[commit]["time_s"]]
            sent_bytes.append(commits[commit]["sent_bytes"] - commits[commit - 1]["sent_bytes"])
            if sent_bytes[-1]:  # else it only received
                sealed_s += of_this[-1:]
            committed_s += [x["time_s"] for x in run.journal(name, "commit_received") if x["commit"] == commit]
            published_s += [x["time_s"] for x in run.journal(name, "published") if x["commit"] == commit][:1]
        if len(sealed_s) < len(NAMES):
            print(f"commit {commit} is not counted: {len(NAMES) - len(sealed_s)} of the sites only received")
            continue
        to_commit.append(max(committed_s) - max(sealed_s))
        to_published.append(max(published_s) - max(sealed_s))
        sent.append(statistics.mean(sent_bytes))
    if not to_commit:
        raise SystemExit("in no sync did all sites contribute: nothing is measured; give the sites more time a step")
    commit_s, published_s, sent_bytes = map(statistics.median, (to_commit, to_published, sent))
    return Measured(commit_s, published_s, sent_bytes, interface_bytes, header_bytes)
