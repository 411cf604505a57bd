"""Show a run: sites, pace, time left, loss.

examples:
  atoll status                                    of the run of ./run.toml, on the coordinator's machine
  atoll status --home DIR --watch                 elsewhere, by whoever has joined there (`atoll join`)
  atoll status --coordinator 10.0.0.1:7700        of a run in plain text
  atoll status --data                             the account of samples: done, in flight, open
  atoll status --format json | python -m json.tool
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.cli import figures, operator
from atoll.cli.looks import looks
from atoll.cli.words import share
from atoll.protocol.text import CONTINUED, byte_count, clean, last_line

if TYPE_CHECKING:
    from rich.table import Table

    from atoll.coordinator.core.view.document import BestView, RunView, SiteView

WATCH_EVERY_S = 1.0
NARROW_LEAVES_OUT = ("received",)
WIDE_FROM_COLUMNS = 100
STATE_CHARACTERS = 40
STUCK_FROM_S = 2.0
NOT_IN_THE_RUN = ("starting", "gone")
COLUMNS = ("site", "state", "step", "steps/s", "loss", "commit", "sent", "received", "busy", "state hash")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C or the run's end")
    parser.add_argument("--data", action="store_true", help="account for every sample; with json: every range of them")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Where the run is that is looked at."""
    operator.add_arguments(parser, who="a site, a viewer or an operator")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="its address, in plain text unless --home is given")


def run(args: argparse.Namespace) -> int:
    from rich.live import Live

    look = source(args, data_ranges=args.data)
    in_place = args.watch and args.format == "text" and not args.data and sys.stdout.isatty()
    said = ""
    with Live(refresh_per_second=4) if in_place else nullcontext() as live:
        for seen in looks(look, WATCH_EVERY_S):
            document, status = seen.document, parsed(seen.document)
            lines = [*figures.lines(document), *([last_line(seen.problem)] if seen.problem else ())]
            if live is not None:
                live.update(table(status, live.console.width, lines))
            elif not seen.problem:
                text = "\n".join([text_lines(status), *lines, *(data_lines(status) if args.data else ())])
                print(json.dumps(document) if args.format == "json" else text, flush=True)
            elif seen.problem != said:
                print(f"atoll status: {last_line(seen.problem)}", file=sys.stderr, flush=True)
            said = seen.problem
            if not args.watch:
                break
    return 0


def source(args: argparse.Namespace, *, data_ranges: bool = False) -> Callable[[], dict[str, Any]]:
    """Brings the document. Raises ConfigError; what it returns raises HostError, PeerError or RefusedError."""
    from atoll.cli.client import fetch_status, local_status, status_of
    from atoll.protocol.trust import enrolled

    if args.home is None:
        if args.coordinator is not None:
            return partial(fetch_status, args.coordinator, data_ranges=data_ranges)
        return partial(local_status, operator.store_path(args), data_ranges=data_ranges)
    found = enrolled.joined(args.home)
    if warning := enrolled.check_dates(found, time.time()):
        print(f"atoll status: {warning}", file=sys.stderr)
    return partial(status_of, args.home, args.coordinator or "", data_ranges=data_ranges)


def parsed(document: Mapping[str, Any]) -> RunView:
    """Raises InvalidMessage."""
    from atoll.cli.client import parse_status

    return parse_status(document)


def headline(status: RunView) -> str:
    length = f"of {status.steps}" if status.steps else f"({status.run_tokens} of {status.tokens} tokens)"
    return (
        f"run {status.run_id}: {last_line(status.state)}, step {status.run_step} {length}, commit {status.last_commit}"
    )


def shortened(state: str) -> str:
    """A state may carry a reason of any length; where it is an error, the lines below the table have all of it."""
    state = last_line(state)
    return state if len(state) <= STATE_CHARACTERS else state[: STATE_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"


def whole(text: str) -> str:
    """All lines of it, those after the first indented; what is no text shown as escapes."""
    return CONTINUED.join(clean(text).strip().split("\n"))


def rows(status: RunView) -> list[tuple[str, ...]]:
    """One row a site, as COLUMNS."""
    return [
        (
            site.name,
            shortened(site.state if site.state_kind != "member" or not site.phase else site.phase),
            str(site.inner_step),
            f"{site.steps_per_s:.1f}",
            "-" if site.loss is None else f"{site.loss:.3f}",
            "-" if site.last_commit is None else str(site.last_commit),
            byte_count(site.sent_bytes),
            byte_count(site.received_bytes),
            share(site.utilization),
            site.state_hash[:10] or "-",
        )
        for site in status.sites
    ]


def best_in_words(best: BestView) -> str:
    where = f"commit {best.commit}, step {best.run_step}"
    return f"the best saved model is that of {where}: {clean(best.name)} {best.value:g}, by {clean(best.site)}"


def open_syncs(status: RunView) -> list[str]:
    """What each of them waits for."""
    return [
        f"sync {sync.sync}{f' of fragment {sync.fragment}' * bool(sync.fragment)}"
        f"{f', attempt {sync.attempt}' * bool(sync.attempt)}: {sync.wait}"
        for sync in status.syncs
    ]


def notes(status: RunView) -> list[str]:
    """What the run waits for, and what a person may have to do something about."""
    stuck = f"the coordinator's store has not answered for {status.store_stuck_s:.0f} s: this is what was known before"
    return [
        *open_syncs(status),
        *([f"{stuck}; look at its disk"] if status.store_stuck_s >= STUCK_FROM_S else ()),
        *(
            f"{site.name} at {site.address} cannot be dialled by {', '.join(site.not_dialled_by)}"
            for site in status.sites
            if site.not_dialled_by
        ),
        *(
            f"{site.name} contributes to one sync of {site.contributes_every}: "
            f"its link makes each {site.extra_s:.1f} s longer"
            for site in status.sites
            if site.contributes_every > 1
        ),
        *(
            crashes_in_words(site)
            for site in status.sites
            if site.telemetry.num_crashes and site.state_kind not in NOT_IN_THE_RUN
        ),
        *_slow_links(status),
        *_at_the_door(status),
        *(f"a site left for good: {whole(text)}" for text in status.errors),
        *_newest_cut(status),
        *status.high,
        *status.same_samples,
        *status.audit_silence,
        *([status.too_many_bundled] if status.too_many_bundled else ()),
        *(f"left out of a sync: {text}" for text in status.excluded),
        *(f"banned: {text}" for text in status.banned),
        *([best_in_words(best)] if (best := status.best) is not None else []),
        *([status.best_in_vain] if status.best_in_vain else []),
        *([f"changed by an operator: {status.changed}"] if status.changed else []),
    ]


def crashes_in_words(site: SiteView) -> str:
    """Of one whose workers have crashed."""
    number, why = site.telemetry.num_crashes, last_line(site.telemetry.last_crash)
    times = "once" if number == 1 else f"{number} times"
    return f"the workers of {site.name} crashed {times} since its node started{f', last: {why}' if why else ''}"


def _slow_links(status: RunView) -> list[str]:
    found = (f"{link.sender} to {link.receiver} {byte_count(link.bytes_per_s)}/s" for link in status.slow_links)
    return [f"the slowest links: {', '.join(found)}"] if status.slow_links else []


def _at_the_door(status: RunView) -> list[str]:
    more = status.num_at_the_door - sum(not site.site_id for site in status.sites)
    return [f"{more} more sites have said Hello and were never in the run"] if more > 0 else []


def _newest_cut(status: RunView) -> list[str]:
    """One line for a thousand weights."""
    with_cuts = [commit for commit in status.commits if commit.cut]
    if not with_cuts:
        return []
    commit = with_cuts[-1]
    more = f"; and {len(commit.cut) - 1} more" if len(commit.cut) > 1 else ""
    return [f"a weight was cut in commit {commit.commit}: {commit.cut[0]}{more}"]


def text_lines(status: RunView) -> str:
    """Columns of plain text."""
    cells = [COLUMNS, *rows(status)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = [headline(status)]
    if status.sites:
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
    lines += notes(status)
    return "\n".join(lines)


def data_lines(status: RunView) -> list[str]:
    """The account of samples: a line of totals, then the passes that are not done, for each line of positions."""
    if not status.data:
        return ["data: no site has asked for samples yet"]
    lines = []
    for line in status.data:
        whose = f" of {line.site}" if line.line else ""
        lines.append(
            f"data{whose}: {line.num_samples} samples a pass, {line.num_passes_done} passes done, "
            f"{line.num_passes_begun} begun: {line.num_done} done once + {line.num_leased} in flight + "
            f"{line.num_open} open = {line.num_done + line.num_leased + line.num_open}"
        )
        for item in line.passes:
            leased = ", ".join(f"{held.site} {held.num_samples}" for held in item.leased)
            lines.append(
                f"  pass {item.number}: {item.num_done} done once, {item.num_leased} in flight"
                f"{f' ({leased})' if leased else ''}, {item.num_open} open"
            )
    return lines


def table(status: RunView, width: int = WIDE_FROM_COLUMNS, more: Sequence[str] = ()) -> Table:
    """The same for a terminal of `width` characters, with `more` lines; a narrow one does without some columns."""
    from rich.table import Table
    from rich.text import Text

    result = Table(title=Text(headline(status)), title_justify="left", box=None, padding=(0, 2, 0, 0))
    shown = [i for i, name in enumerate(COLUMNS) if width >= WIDE_FROM_COLUMNS or name not in NARROW_LEAVES_OUT]
    for i in shown:
        is_text = COLUMNS[i] in ("site", "state", "state hash")
        result.add_column(COLUMNS[i], justify="left" if is_text else "right", no_wrap=COLUMNS[i] != "state")
    for row in rows(status):
        result.add_row(*(Text(row[i]) for i in shown))
    if found := [*notes(status), *more]:
        result.caption = Text("\n".join(found))
    return result
