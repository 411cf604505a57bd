"""Change a setting of a run that goes on, from its next commit on.

The coordinator decides it, and each commit says what is changed: all sites take it at the same step, a site that joins
or catches up takes each commit as it was made, and a rollback goes back to the settings of the commit it goes to. The
file of the run stays as it is. `atoll status` and the page say what is changed.

What can be set is the length of the run (run.steps or run.tokens, whichever it has) and, where sites average what they
trained, the outer step: outer.learning_rate, outer.momentum, outer.warmup, outer.decay, outer.momentum_warmup,
outer.momentum_decay. Where the training script's own optimizer has the rates, change them there. Schedules of scripts
hear of a new length with the next commit (site.run_length).

examples:
  atoll set outer.learning_rate=0.4
  atoll set run.steps=20000 --store /data/run.db
"""

from __future__ import annotations

import argparse

from atoll.cli import operator
from atoll.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("change", metavar="NAME=VALUE", help="as in the file of the run")


def run(args: argparse.Namespace) -> int:
    name, is_given, value = args.change.partition("=")
    if not is_given:
        raise ConfigError(f"{args.change!r}: say NAME=VALUE, as outer.learning_rate=0.4")
    found = operator.ask(args, "set", name=name.strip(), value=value.strip())
    print(f"from the next commit on: {found}")
    return 0
