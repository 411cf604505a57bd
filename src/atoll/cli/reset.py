"""Take back the model before training has started (on the coordinator's machine).

The first site that offers a model fixes it for the run, and the first state that sites agree on is what training starts
from. Until training has started both can be taken back: if the model was the wrong one, or strangers came first with a
state that nobody can fetch. All sites are sent away (their nodes end with exit code 4) and may be started again; who
holds the state that was taken back needs another --home. Ban strangers first (`atoll ban NAME`): that
stays.

Once training has started this is refused: undo commits with `atoll rollback --to`, or start another run.

examples:
  atoll reset                       the run of ./run.toml
  atoll reset --store /data/run.db
"""

from __future__ import annotations

import argparse

from atoll.cli import operator


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("--reason", default="atoll reset", metavar="TEXT", help="shown at every site")


def run(args: argparse.Namespace) -> int:
    operator.ask(args, "reset", reason=args.reason)
    print("model and starting state are taken back; the next site that offers a model fixes it")
    return 0
