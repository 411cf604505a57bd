"""Watch a run on the whole terminal: sites, pace, curve, and what happened last.

examples:
  atoll top                                   of the run of ./run.toml, on the coordinator's machine
  atoll top --home DIR                        elsewhere, by whoever has joined there (`atoll join`)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atoll.cli import figures, status
from atoll.cli.events import News
from atoll.cli.looks import looks
from atoll.protocol.text import last_line

if TYPE_CHECKING:
    from rich.console import Group

EVERY_S = 1.0
SHOWN_EVENTS = 10
BAR_COLUMNS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    status.add_source(parser)


def run(args: argparse.Namespace) -> int:
    from rich.live import Live

    from atoll.protocol.errors import ConfigError

    if not sys.stdout.isatty():
        raise ConfigError("atoll top draws on a terminal, and this is none; `atoll status --watch` writes lines")
    look = status.source(args)
    with Live(screen=True, auto_refresh=False) as live:
        for seen in looks(look, EVERY_S):
            document = seen.document
            live.update(picture(document, live.console.width, seen.problem), refresh=True)
    print("\n".join([status.headline(status.parsed(document)), *figures.lines(document)]))
    return 0


def picture(document: Mapping[str, Any], width: int, problem: str = "") -> Group:
    """The run's bar, the table of sites with its notes, figures, newest events; `problem`: why none of it is newer."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    parsed = status.parsed(document)
    done, total = (parsed.run_step, parsed.steps) if parsed.steps else (parsed.run_tokens, parsed.tokens)
    happened = News().lines(document, in_json=False)[-SHOWN_EVENTS:]
    return Group(
        *([Text(last_line(problem), style="bold red")] if problem else ()),
        status.table(parsed, width),
        Text(),
        Padding(ProgressBar(total=max(1, total), completed=done, width=min(BAR_COLUMNS, width)), 0),  # ends its line
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in figures.lines(document)),
        Text(),
        *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in happened),
    )
