"""The demo's last word: figures, and whether everything that was promised happened. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from atoll.cli.demo_script import ScriptLosses, loss_failures, loss_lines
from atoll.cli.words import count, duration, share
from atoll.protocol.text import byte_count

VALUE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of a site, or of all."""

    sent_bytes: int
    received_bytes: int
    utilization: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport(Totals):
    name: str
    state_hash: str
    """Of the model that it saved, hexadecimal; empty if it saved none."""
    commit: int | None
    """The same."""
    note: str = ""
    num_crashes: int = 0
    """Of its workers."""
    num_commits: int | None = None
    """That it contributed to; None if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    alone: float
    data_parallel: float
    source: str
    """Where they were trained, and with which Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    run_id: str
    num_parameters: int
    steps: int
    sync_every: int
    longest_window: int
    """Steps: more than `sync_every` where sites do more and more by themselves."""
    codec: str
    expected_commits: int
    commits: int
    bits_per_byte_before: float | None
    bits_per_byte_after: float | None
    """None if the model was not saved or does not load, and of a script, whose losses are in its place."""
    baselines: Baselines | None
    sites: tuple[SiteReport, ...]
    state_hash: str
    """Of the run at its end, as its sites attested it, hexadecimal."""
    model_folder: str
    elapsed_s: float
    script: ScriptLosses | None = None
    """None: the built-in trainer."""
    killed: str = ""
    """What happened to the site that was killed; empty without --kill."""
    returned: bool = True
    """The killed site came back and contributed."""


def data_parallel_bytes(num_sites: int, num_parameters: int, steps: int, value_bytes: int) -> int:
    """What a site sends if gradients are averaged at every step by a ring all-reduce: 2 (n - 1) / n of them a step."""
    return round(2 * (num_sites - 1) / num_sites * num_parameters * value_bytes * steps)


def failures(report: Report) -> list[str]:
    """Why the demo did not succeed; empty if it did."""
    reasons = []
    if report.commits != report.expected_commits:
        reasons.append(f"{report.commits} commits happened, {report.expected_commits} were expected")
    for site in report.sites:
        if site.num_crashes:
            times = "once" if site.num_crashes == 1 else f"{site.num_crashes} times"
            reasons.append(f"the workers of {site.name} crashed or hung {times}; logs/{site.name}.log says why")
        if site.commit is None:
            reasons.append(f"{site.name} saved no model")
        elif site.commit != report.commits:
            reasons.append(f"{site.name} saved the model of commit {site.commit}, the run ended at {report.commits}")
        elif site.state_hash != report.state_hash:
            reasons.append(f"{site.name} saved another state than the run's, {report.state_hash or 'which is unknown'}")
    if report.script is not None:
        reasons += loss_failures(report.script)
    elif report.bits_per_byte_after is None or report.bits_per_byte_before is None:
        reasons.append("the saved model could not be loaded and evaluated")
    elif not report.bits_per_byte_after < report.bits_per_byte_before:
        reasons.append(
            f"the held-out loss did not fall: {report.bits_per_byte_before:.3f} before, "
            f"{report.bits_per_byte_after:.3f} after"
        )
    if not report.returned:
        reasons.append(f"the killed site was not back before the end ({report.killed}); a longer run gives it time")
    return reasons


def as_document(report: Report) -> dict[str, Any]:
    """For --format json."""
    num_sites = len(report.sites)
    reasons = failures(report)
    return asdict(report) | {
        "data_parallel_sent_bytes": {
            name: data_parallel_bytes(num_sites, report.num_parameters, report.steps, size)
            for name, size in VALUE_BYTES.items()
        },
        "ok": not reasons,
        "failures": reasons,
    }


def as_text(report: Report, program: str = "atoll") -> str:
    """`program`: how atoll was called, as it may not be on the PATH."""
    every = " to ".join(map(str, dict.fromkeys((report.sync_every, report.longest_window))))
    lines = [
        "",
        f"run {report.run_id}: {count(report.num_parameters)} parameters, {len(report.sites)} sites, "
        f"{report.steps} steps each, a sync every {every} as {report.codec}, {duration(report.elapsed_s)}",
        "",
        *(_loss_lines(report) if report.script is None else loss_lines(report.script, len(report.sites))),
        "",
        f"commits: {report.commits} of {report.expected_commits}",
        *([f"killed: {report.killed}"] if report.killed else []),
        "",
        *_site_lines(report),
        "",
        *_traffic_lines(report),
        "",
    ]
    reasons = failures(report)
    if reasons:
        return "\n".join([*lines, "FAILED:", *(f"  {reason}" for reason in reasons)])
    return "\n".join(
        [
            *lines,
            f"all {len(report.sites)} sites ended with the same state; the model is in {report.model_folder}",
            "",
            "try next:",
            *([f'  {program} sample {report.model_folder} "def "'] if report.script is None else []),
            f"  {program} demo --kill        one site dies and comes back",
            f"  {program} init               a run of your own on several machines, see README.md",
        ]
    )


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _loss_lines(report: Report) -> list[str]:
    lines = [
        "held-out loss, bits per byte",
        f"  before training                  {_bits(report.bits_per_byte_before)}",
        f"  after, {len(report.sites)} sites                   {_bits(report.bits_per_byte_after)}",
    ]
    if report.baselines is None:
        return [*lines, "  (no recorded baselines for these settings)"]
    return [
        *lines,
        f"  one site alone, same steps       {_bits(report.baselines.alone)}   ({report.baselines.source})",
        f"  data parallel at every step      {_bits(report.baselines.data_parallel)}   ({report.baselines.source})",
    ]


def _site_lines(report: Report) -> list[str]:
    width = max([4, *(len(site.name) for site in report.sites)])
    lines = [f"{'site':<{width}}  {'sent':>10}  {'received':>10}  {'training':>8}  {'in commits':>10}  state hash"]
    for site in report.sites:
        crashed = f"workers crashed: {site.num_crashes}" if site.num_crashes else ""
        note = ", ".join(text for text in (site.note, crashed) if text)
        note = f"  ({note})" if note else ""
        in_commits = "-" if site.num_commits is None else site.num_commits
        lines.append(
            f"{site.name:<{width}}  {byte_count(site.sent_bytes):>10}  {byte_count(site.received_bytes):>10}  "
            f"{share(site.utilization):>8}  {in_commits:>10}  {site.state_hash or 'none'}{note}"
        )
    return lines


def _traffic_lines(report: Report) -> list[str]:
    num_sites = len(report.sites)
    if num_sites < 2:
        return ["one site alone exchanges nothing"]
    mean = sum(site.sent_bytes for site in report.sites) / num_sites
    lines = [
        f"a site sent {byte_count(mean)} on average, states for those who joined included; "
        "averaging gradients at every step would have sent"
    ]
    for name, size in VALUE_BYTES.items():
        other = data_parallel_bytes(num_sites, report.num_parameters, report.steps, size)
        times = f", {other / mean:.0f} times as much" if mean > 0 else ""
        lines.append(f"  {byte_count(other)} in {name}{times}")
    return lines
