"""End a run early, with a last sync (on the coordinator's machine).

Where sites train on while they exchange (sync.overlap_steps), one short sync follows the one that is open, so that what
they trained counts. The model is saved as at a normal end. The coordinator stays up for `atoll status` until it gets
Ctrl-C or SIGTERM.

examples:
  atoll stop                       the run of ./run.toml
  atoll stop --store /data/run.db
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.protocol.errors import ConfigError
from atoll.protocol.text import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "path", nargs="?", type=Path, default=Path("run.toml"), help="the run's file (default: run.toml)"
    )
    where.add_argument("--store", type=Path, metavar="PATH", help="the coordinator's store, if it was given one")


def store_path(args: argparse.Namespace) -> Path:
    """Of the run that `add_arguments` asks for. Raises ConfigError if there is no such file."""
    from atoll.cli.config import default_store

    if args.store is None and not args.path.is_file():
        raise ConfigError(f"{args.path}: no such file; name the run's file, or the coordinator's --store")
    found: Path = args.store or default_store(args.path)
    return found


def run(args: argparse.Namespace) -> int:
    from atoll.coordinator.admin import ask

    over = ask(store_path(args), "stop", reason="atoll stop")
    goes_on = "the run ends with its next sync; `atoll status` shows when"
    print(f"nothing to stop: the run is {clean(over)}" if over else goes_on)
    return 0
