"""Says to a run's coordinator what an operator wants: on its own machine through the socket beside its store, from
elsewhere by the certificate of an operator that has joined (`--home`)."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from atoll.cli.client import ANSWER_LIMIT_S
from atoll.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser, *, who: str = "an operator") -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "path", nargs="?", type=Path, default=Path("run.toml"), help="the run's file (default: run.toml)"
    )
    where.add_argument("--store", type=Path, metavar="PATH", help="the coordinator's store, if it was given one")
    where.add_argument(
        "--home", type=Path, metavar="DIR", help=f"on another machine: where {who} has joined the run (`atoll join`)"
    )


def store_path(args: argparse.Namespace) -> Path:
    """Of the run that `add_arguments` asks for. Raises ConfigError if there is no such file."""
    from atoll.cli.config import default_store

    if args.store is None and not args.path.is_file():
        raise ConfigError(
            f"{args.path}: no such file; name the run's file, or the coordinator's --store, or from another machine "
            "the --home of an operator"
        )
    found: Path = args.store or default_store(args.path)
    return found


def ask(args: argparse.Namespace, command: str, *, limit_s: float = ANSWER_LIMIT_S, **fields: object) -> str:
    """Returns once it is done: what was asked for, or how the run stood before.

    Raises ConfigError, HostError or PeerError if no coordinator answers, RefusedError or HostError if it refuses: why.
    """
    from atoll.cli.client import operate
    from atoll.coordinator import admin
    from atoll.protocol.trust.enrolled import check_dates, joined

    if args.home is not None:
        found = joined(args.home)
        check_dates(found, time.time())  # what it warns of, `atoll status` says, and mends
        return operate(found, command, limit_s=limit_s, **fields)
    return admin.ask(store_path(args), command, limit_s=limit_s, **fields)
