"""Show what people asked of a run: the audit log, and whether its hashes hold.

A line for each command of an operator, each use of an invite, and each ban that the coordinator made or lifted by
itself: its number, time, who, what, what came of it, and its hash, which is over the hash of the line before. So no
line can be changed, left out or put in without all that follow. The coordinator's own log says each hash: kept
elsewhere, that shows whether the store was rewritten (`--holds`).

In a run with `sync.audits` the log has the digest of each secret by which audits are drawn before the first of them,
and the secret after the last, at the next start of the coordinator or the end of the run: `--draws` computes the draws
in the coordinator's log again. Those of the secret in use cannot be checked yet.

examples:
  atoll audit                               of the run of ./run.toml, on the coordinator's machine
  atoll audit --home ~/operator             elsewhere, by an operator that has joined there
  atoll audit --holds 9f3c...               fails if that hash is not in it
  atoll audit --format json                 one JSON object a line
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli import operator
from atoll.protocol.errors import StateError

if TYPE_CHECKING:
    from atoll.coordinator.core.events import AuditRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("--holds", metavar="HASH", default="", help="of a line that was seen before")
    parser.add_argument(
        "--draws", type=Path, metavar="LOG", help="whether the audits in this log of the coordinator were not chosen"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from atoll.coordinator.core.audit import break_in, in_one_line
    from atoll.protocol.dates import utc

    entries = _entries(args)
    for entry in entries:
        if args.format == "json":
            print(json.dumps(asdict(entry)))
        else:
            words = in_one_line(f"{entry.by}: {entry.what}: {entry.outcome}")
            print(f"{entry.number}  {utc(entry.at_s)}  {entry.digest}  {words}")
    if broken := break_in(entries):
        raise StateError(f"the audit log was changed: {broken}")
    if args.holds and all(entry.digest != args.holds for entry in entries):
        raise StateError(f"the audit log has no line with the hash {args.holds}: it was rewritten, or is another run's")
    if args.draws is not None:
        _check_draws(args.draws, entries)
    return 0


def _check_draws(path: Path, entries: list[AuditRecord]) -> None:
    """Raises StateError, HostError."""
    from atoll.coordinator.core.audit import COORDINATOR
    from atoll.coordinator.core.auditing.drawing import check_draws
    from atoll.protocol.errors import HostError

    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            num_right, num_open = check_draws((entry.what for entry in entries if entry.by == COORDINATOR), lines)
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise StateError(f"{path}: {error}") from None
    print(f"{num_right} draws come of secrets that are in the audit log, {num_open} of one that is not said yet")


def _entries(args: argparse.Namespace) -> list[AuditRecord]:
    """All of them. Raises InvalidMessage for what is no log, and what `operator.ask` raises."""
    from atoll.coordinator.core.events import AuditRecord
    from atoll.protocol.errors import ConfigError, InvalidMessage
    from atoll.protocol.strict import build

    found: list[AuditRecord] = []
    while True:
        text = operator.ask(args, "audit", after=found[-1].number if found else 0)
        try:
            more = [build(AuditRecord, entry, "entry") for entry in json.loads(text)]
        except (ValueError, TypeError, AttributeError, ConfigError, RecursionError) as error:
            raise InvalidMessage(f"the coordinator sent an audit log that cannot be read: {error}") from None
        if not more or (found and more[0].number <= found[-1].number):
            return found
        found += more
