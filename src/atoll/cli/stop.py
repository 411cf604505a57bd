"""End a run early, with a last sync.

Where sites train on while they exchange (sync.overlap_steps), one short sync follows the one that is open, so that what
they trained counts. The model is saved as at a normal end. The coordinator stays up for `atoll status` until it gets
Ctrl-C or SIGTERM.

examples:
  atoll stop                       the run of ./run.toml
  atoll stop --store /data/run.db
  atoll stop --home ~/operator     from another machine, where an operator has joined
"""

from __future__ import annotations

import argparse

from atoll.cli import operator
from atoll.protocol.text import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    over = operator.ask(args, "stop", reason="atoll stop")
    goes_on = "the run ends with its next sync; `atoll status` shows when"
    print(f"nothing to stop: the run is {clean(over)}" if over else goes_on)
    return 0
