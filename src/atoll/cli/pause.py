"""Let a run rest until `atoll resume`: no more commits, nothing is lost.

An exchange that is under way ends in its commit. Sites train on to their boundary, and on for run.overrun_steps where
they overlap with syncs, then wait; what they trained counts in the next commit. Sites may join, leave and catch up
meanwhile. `atoll status` and the page say who paused it and why. `atoll stop` ends a paused run with its last sync.

examples:
  atoll pause --reason "the cluster in Berlin is moved"
  atoll resume
"""

from __future__ import annotations

import argparse

from atoll.cli import operator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown to everybody, and kept in the store")


def run(args: argparse.Namespace) -> int:
    operator.ask(args, "pause", reason=args.reason or "atoll pause")
    print("the run is paused; `atoll resume` lets it go on")
    return 0
