"""Send a site away; it may come back.

What the site has contributed to the sync under way is left out; its samples are drawn again. Its node may come back at
once: `atoll ban` keeps it out. What a site has done before is undone with `atoll rollback --to`.

examples:
  atoll evict berlin --reason "its disk is slow"       from the run of ./run.toml
  atoll evict --store /data/run.db berlin
"""

from __future__ import annotations

import argparse

from atoll.cli import operator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("name", metavar="NAME", help="of the site, as `atoll status` shows it")
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown at the site, and kept in the store")


def run(args: argparse.Namespace) -> int:
    operator.ask(args, "evict", name=args.name, reason=args.reason or "atoll evict")
    print(f"{args.name} is evicted")
    return 0
