"""`atoll rollback`: give up the newest commits when nobody can reach them, through the socket beside the store."""

from __future__ import annotations

import argparse

from atoll.cli import stop

HELP = "go on from an older commit, when the newest ones are lost (on the coordinator's machine)"
EPILOG = """\
After a power cut it may be that no site that is back can reach the newest commit. If every site that may have it is
back, the run goes back by itself. If one is not, the run is paused and `atoll status` names it: start that site, or
give the commits up with this command. Its own later commits are then void, and it takes the run's when it comes back.

examples:
  atoll rollback                       the run of ./run.toml
  atoll rollback --store /data/run.db
"""

add_arguments = stop.add_arguments


def run(args: argparse.Namespace) -> int:
    from atoll.coordinator.admin import request_rollback

    was = request_rollback(stop.store_path(args))
    print(f"the run goes back; it was paused because {was}")
    return 0
