"""Write a commented run.toml.

examples:
  atoll init                                    a run that only this machine can reach
  atoll init --listen 0.0.0.0:7700 --data local --min-sites 2
  atoll init big/run.toml --model small --steps 20000 --sync-every 100
"""

from __future__ import annotations

import argparse
import datetime
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings, SyncSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run, sync = RunSettings(run_id="of-the-defaults"), SyncSettings()
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("run.toml"), help="file or folder (default: run.toml)"
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="where the coordinator listens; without it, where only this machine can reach it",
    )
    parser.add_argument(
        "--data",
        metavar="NAME",
        help=f'data set: "stdlib", "local" (each site its own), or a name for files all share (default: {run.data})',
    )
    parser.add_argument("--model", metavar="SIZE", help="nano, tiny or small (default: tiny)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=int, metavar="N", help=f"length of the run in inner steps of each site (default: {run.steps})"
    )
    length.add_argument("--tokens", type=int, metavar="N", help="length of the run in tokens of all sites")
    parser.add_argument(
        "--sync-every", type=int, metavar="H", help=f"inner steps between two syncs (default: {sync.every})"
    )
    parser.add_argument("--codec", help=f"fp32, bf16 or int8 (default: {sync.codec})")
    parser.add_argument(
        "--min-sites", type=int, metavar="N", help=f"training starts with so many sites (default: {run.min_sites})"
    )
    parser.add_argument("--time-limits", metavar="PRESET", help=f"local, lan or wan (default: {run.time_limits})")
    parser.add_argument("--name", metavar="NAME", help="beginning of the run's id (default: the folder's name)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> int:
    path: Path = args.path / "run.toml" if args.path.is_dir() else args.path
    text = make_file(args, path)
    try:
        with path.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; --force replaces it") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    print(f"wrote {path}; look it over, then: atoll coordinator {path}")
    return 0


def make_file(args: argparse.Namespace, path: Path) -> str:
    """The validated text of a run.toml for the flags given. Raises ConfigError."""
    import tomllib

    from atoll.cli.config import run_settings
    from atoll.cli.template import render
    from atoll.protocol.addresses import parse_address
    from atoll.protocol.settings import MODELS
    from atoll.protocol.strict import nearest

    if args.listen is not None:
        parse_address(args.listen)
    run: dict[str, Any] = {"run_id": new_run_id(args.name or path.resolve().parent.name)}
    given = {"data": args.data, "steps": args.steps, "min_sites": args.min_sites, "time_limits": args.time_limits}
    run.update((key, value) for key, value in given.items() if value is not None)
    if args.tokens is not None:
        run |= {"steps": 0, "tokens": args.tokens}
    sync = {"every": args.sync_every, "codec": args.codec}
    tables = {
        "run": run,
        "sync": {key: value for key, value in sync.items() if value is not None},
        "coordinator": {"listen": args.listen} if args.listen is not None else {},
    }
    if args.model is not None:
        if args.model not in MODELS:
            raise ConfigError(f'--model "{args.model}"; {nearest(args.model, MODELS)}')
        tables["model"] = asdict(MODELS[args.model])
    text = render(tables)
    run_settings(tomllib.loads(text), "the new file")
    return text


def new_run_id(name: str) -> str:
    """`name-20260131-4f2a`: unique enough to never be used twice, and legible."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).strip("._-") or "run"
    today = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d")
    return f"{plain[:40]}-{today}-{secrets.token_hex(3)}"
