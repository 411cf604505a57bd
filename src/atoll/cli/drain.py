"""Ask a site to leave the run, after the sync under way.

As SIGTERM to its node, from here: what it trained counts, and its node ends with exit code 0, so systemd does not start
it again. Kubernetes does: scale the site's StatefulSet to 0 there. A site comes back when its node is started. One that
does not answer is sent away with `atoll evict`.

examples:
  atoll drain berlin --reason "new disks"
  atoll drain --store /data/run.db berlin
"""

from __future__ import annotations

import argparse

from atoll.cli import operator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("name", metavar="NAME", help="of the site, as `atoll status` shows it")
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown at the site")


def run(args: argparse.Namespace) -> int:
    operator.ask(args, "drain", name=args.name, reason=args.reason or "atoll drain")
    print(f"{args.name} is asked to leave; `atoll status` says when it has")
    return 0
