"""Let a run go on that was paused (`atoll pause`).

examples:
  atoll resume                     the run of ./run.toml
  atoll resume --home ~/operator   from another machine, where an operator has joined
"""

from __future__ import annotations

import argparse

from atoll.cli import operator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    operator.ask(args, "resume")
    print("the run goes on")
    return 0
