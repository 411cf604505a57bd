"""Show what happens in a run: commits, sites that come, go or are evicted, attempts that failed, and why.

The coordinator keeps the newest of its present start; all of them are in its log.

examples:
  atoll events                                of the run of ./run.toml, on the coordinator's machine
  atoll events --follow                       until Ctrl-C or the run's end
  atoll events --home DIR --format json       elsewhere; one JSON object a line: number, time_s, level, text
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from atoll.cli import status
from atoll.cli.looks import looks
from atoll.protocol.text import last_line

EVERY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    status.add_source(parser)
    parser.add_argument("--follow", action="store_true", help="go on with what happens next")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    news, said = News(), ""
    for seen in looks(status.source(args), EVERY_S):
        for line in news.lines(seen.document, in_json=args.format == "json"):
            print(line, flush=True)
        if seen.problem not in ("", said):
            print(f"atoll events: {last_line(seen.problem)}", file=sys.stderr, flush=True)
        said = seen.problem
        if not args.follow:
            break
    return 0


class News:
    """Of one document after the other, what was not there before."""

    def __init__(self) -> None:
        self._term: int | None = None
        self._seen = 0

    def lines(self, document: Mapping[str, Any], *, in_json: bool) -> list[str]:
        """Another start of the coordinator counts from 1 again. What was missed in between is said, in text."""
        from atoll.protocol.dates import utc

        if document.get("term") != self._term:
            self._term, self._seen = document.get("term"), 0
        found = [one for one in document.get("events", ()) if one["number"] > self._seen]
        if not found:
            return []
        missed = found[0]["number"] - self._seen - 1
        self._seen = found[-1]["number"]
        if in_json:
            return [json.dumps(one) for one in found]
        lines = [f"{utc(one['time_s'])}  {one['level']:<7}  {last_line(one['text'])}" for one in found]
        return [f"({missed} before these are in the coordinator's log)", *lines] if missed else lines
