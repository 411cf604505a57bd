"""Draw a run from its store: losses, what scripts logged, and bytes, for papers and tickets.

A coordinator that serves the run holds its store; draw a copy then (`atoll backup`). The file's name says its format:
.png, .pdf or .svg. Needs matplotlib, the extra `plots`.

examples:
  atoll plot run.db -o run.png
  atoll backup run.toml --to copy.db && atoll plot copy.db -o run.svg --log
"""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.protocol.errors import ConfigError, HostError, StateError

FORMATS = (".png", ".pdf", ".svg")
MAX_LINES = 24
"""Of one part of the picture: more cannot be told apart."""
MAX_LOGGED = 8
"""Names that scripts log, each a part of its own: their values have nothing in common. Those of the outer parameters
come first."""
OUTER = ", of the outer parameters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="the coordinator's store, a SQLite file, or a copy of it")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the picture")
    parser.add_argument("--log", action="store_true", help="losses on a logarithmic axis")


def run(args: argparse.Namespace) -> int:
    if args.output.suffix not in FORMATS:
        raise ConfigError(f"{args.output}: choose a name that ends in {', '.join(FORMATS)}")
    parts = read(args.store)
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        raise ConfigError("atoll plot needs matplotlib: pip install 'atoll[plots]'") from None
    draw(parts, args.output, is_log=args.log)
    print(f"{args.output}: {sum(len(part.lines) for part in parts)} curves of {args.store}")
    return 0


@dataclass(slots=True)
class Part:
    """Of the picture: lines by name, each with its steps and values."""

    title: str
    lines: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)

    @property
    def has_outer(self) -> bool:
        """Whether some of it is of the outer parameters."""
        return any(name.endswith(OUTER) for name in self.lines)


def read(path: Path) -> list[Part]:
    """Of the run that the store has, parts that are not empty. Raises HostError if it is in use or no file, StateError
    if it is no store or has no commit with a loss."""
    from atoll.coordinator.core.curves import SENT_BYTES, TRAINING_LOSS, UTILIZATION
    from atoll.coordinator.core.persisted import LossRecord
    from atoll.coordinator.core.records import CurveRecord, SiteRecord

    rows = _rows(path, ("loss", "curve", "site"))
    names = {row.site_id: row.name for row in rows if isinstance(row, SiteRecord)}
    losses = [row for row in rows if isinstance(row, LossRecord)]
    if not losses:
        raise StateError(f"{path}: the run has no commit with a loss yet")
    loss, logged = Part("training loss"), dict[str, Part]()
    share, sent = Part("share of time training"), Part("bytes sent, since its node started")
    loss.lines["the run"] = [row.run_step for row in losses], [row.median_loss for row in losses]
    own = {TRAINING_LOSS: loss, UTILIZATION: share, SENT_BYTES: sent}
    for row in rows:
        if isinstance(row, CurveRecord):
            part = own.get(row.name) or logged.setdefault(row.name, Part(row.name))
            name = f"{names.get(row.site_id, row.site_id)}{OUTER if row.of_outer else ''}"
            part.lines[name] = [point[0] for point in row.points], [point[3] for point in row.points]
    held_out = sorted(logged.values(), key=lambda part: (not part.has_outer, part.title))
    shown, more = held_out[:MAX_LOGGED], held_out[MAX_LOGGED:]
    if more:
        shown[-1].title += f" (and {len(more)} more that scripts log: {', '.join(part.title for part in more)})"[:200]
    return [part for part in (loss, *shown, share, sent) if part.lines]


def _rows(path: Path, kinds: Sequence[str]) -> list[Any]:
    from atoll.coordinator import rows
    from atoll.protocol.errors import InvalidMessage

    if not path.is_file():
        raise HostError(f"{path}: no such file; name the coordinator's store")
    query = f"SELECT kind, body FROM records WHERE kind IN ({','.join('?' * len(kinds))}) ORDER BY kind, number, part"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as db:
            return [rows.decode(kind, body) for kind, body in db.execute(query, tuple(kinds))]
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise HostError(f"{path} is in use by its coordinator: draw a copy (`atoll backup`)") from None
        raise StateError(f"{path} is no store that can be read: {error}") from None
    except (sqlite3.DatabaseError, InvalidMessage, LookupError, TypeError, ValueError) as error:
        raise StateError(f"{path} is no store, or is damaged: {error}") from None


def _is_loss(part: Part) -> bool:
    return "loss" in part.title and all(value > 0 for _, values in part.lines.values() for value in values)


def draw(parts: Sequence[Part], output: Path, *, is_log: bool) -> None:
    """One above the other, by step. Raises HostError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6 * len(parts)), layout="constrained")
    for axes, part in zip(figure.subplots(len(parts), sharex=True, squeeze=False)[:, 0], parts, strict=True):
        for name, (steps, values) in list(part.lines.items())[:MAX_LINES]:
            is_run = name == "the run"
            style = "--" if name.endswith(OUTER) else "-"
            axes.plot(steps, values, style, label=name, linewidth=2.0 if is_run else 1.0, zorder=3 if is_run else 2)
        more = len(part.lines) - MAX_LINES
        axes.set_title(f"{part.title}{f' (and {more} more)' if more > 0 else ''}", loc="left", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=2)
        if is_log and _is_loss(part):
            axes.set_yscale("log")
    axes.set_xlabel("step of the run")
    try:
        figure.savefig(output, dpi=150)
    except OSError as error:
        raise HostError(f"{output}: {error.strerror}") from None
