"""Copy a run's database while its coordinator goes on, on the coordinator's machine.

The copy is one file, whole as of one moment. The coordinator writes it, as its own user, where its unit lets it. It
need not be the newest when it is needed: sites keep what was decided since, and `atoll coordinator --restore` asks them
for it. Keep the folder with the run's root (run.db.trust) as well, once, where nobody else can read it: without it no
site knows the coordinator any more.

examples:
  atoll backup --to /backup/run.db                      of the run of ./run.toml
  atoll backup --store /data/run.db --to /backup/run-$(date +%F).db
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.cli import operator
from atoll.protocol.errors import HostError

COPY_LIMIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "path", nargs="?", type=Path, default=Path("run.toml"), help="the run's file (default: run.toml)"
    )
    where.add_argument("--store", type=Path, metavar="PATH", help="the coordinator's store, if it was given one")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="a new file, for the copy")


def run(args: argparse.Namespace) -> int:
    from atoll.coordinator import admin

    to = args.to.absolute()
    found = admin.ask(operator.store_path(args), "backup", limit_s=COPY_LIMIT_S, path=str(to))
    if not to.is_file():
        raise HostError(
            f"the coordinator has written a copy, and there is none at {to}: its unit has a /tmp of its own "
            "(PrivateTmp=), or it takes no such name; choose a plain name in a folder that is the same for both"
        )
    print(f"{to}: the run as of {found}")
    return 0
