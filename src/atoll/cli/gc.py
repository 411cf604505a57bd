"""List, or delete, what nothing needs any more in the homes of this machine's nodes.

That is what killed nodes left behind, and, once the run has ended, all but the saved model, logs, identity, and what
the site keeps for its coordinator (deposits.db). A site that was not there at the end does not know of it: start its
node once more, or remove its home. A home that a node uses is left alone, and so is everything that a site needs to go
on. Without --delete nothing is deleted.

examples:
  atoll gc                                       all homes below ~/.local/state/atoll
  atoll gc --delete
  atoll gc --delete /data/berlin                 a node's --home
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from atoll.protocol.errors import HostError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "homes", nargs="*", type=Path, metavar="HOME", help="of a node (default: all of this user's own)"
    )
    parser.add_argument("--delete", action="store_true", help="delete what is listed")


def run(args: argparse.Namespace) -> int:
    from atoll.node.daemon.config import default_home
    from atoll.node.daemon.garbage import check_home, delete, garbage_in, homes_below
    from atoll.node.daemon.home import locked
    from atoll.protocol.text import byte_count

    for home in args.homes:
        check_home(home)
    found = [] if args.homes else homes_below(default_home("", "", os.environ))
    num_bytes = 0
    for home in args.homes or found:
        try:
            with locked(home):
                for garbage in garbage_in(home):
                    if args.delete:
                        delete(garbage)
                    num_bytes += garbage.num_bytes
                    print(f"{byte_count(garbage.num_bytes):>10}  {garbage.path}: {garbage.why}")
        except HostError as error:
            if args.homes:
                raise
            print(f"{'':>10}  left alone: {error}")
    done = "deleted" if args.delete else "--delete deletes it" if num_bytes else "nothing to delete"
    print(f"{byte_count(num_bytes):>10}  in all; {done}")
    return 0
