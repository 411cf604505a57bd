"""Go on from an older commit

Without --to: after a power cut it may be that no site that is back can reach the newest commit. If every site that may
have it is back, the run goes back by itself. If one is not, the run is paused and `atoll status` names it: start that
site, or give the commits up with this command.

With --to N: undo everything after commit N, because what followed is of no use (a loss that ran away, wrong data, a
site that did harm; `atoll status` lists commits with their losses). Each site keeps some snapshots (sync.snapshots) and
the payloads of the last commits (sync.log_commits); from them one site at least puts the state of commit N together and
checks its hash before anything is given up. If none can, the run stays where it is, and the error names the oldest
commit that is possible.

In both cases later commits are void for good, at sites that are away too: they take the run's state when they come
back. Samples that they were trained on are drawn again, unless --skip-samples says that they are not. Commit numbers go
on from N + 1, in a new branch.

examples:
  atoll rollback                       the run of ./run.toml, when `atoll status` says that it cannot go on
  atoll rollback --to 120              undo everything after commit 120
  atoll rollback --to 120 --skip-samples      and train no site again on what these commits were trained on
  atoll rollback --to 120 --reason "wrong data from berlin" --store /data/run.db
"""

from __future__ import annotations

import argparse
import sys
from threading import Timer

from atoll.cli import operator
from atoll.protocol.errors import ConfigError
from atoll.protocol.text import clean

SAID_AFTER_S = 2.0
"""That this waits: what is refused at once is not asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("--to", type=int, metavar="N", help="the commit to go on from; 0: the starting state")
    parser.add_argument(
        "--skip-samples",
        action="store_true",
        help="with --to: the samples of the commits that are given up count as seen, and no site draws them again (bad "
        "data, say); without it, they are drawn again",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown at every site, and kept in the store")


def run(args: argparse.Namespace) -> int:
    from atoll.coordinator.admin import GO_BACK_LIMIT_S

    if args.to is None and args.skip_samples:
        raise ConfigError("--skip-samples goes with --to N: without it, sites draw again what nobody holds any more")
    if args.to is None:
        was = operator.ask(args, "rollback", reason=args.reason or "atoll rollback")
        print(f"the run goes back; it was paused because {clean(was)}")
        return 0
    if args.to < 0:
        raise ConfigError(f"--to {args.to}: commits are numbered from 0, the starting state")
    waits = f"asked for; if commit {args.to} is in reach, the run waits until a site has its state"
    waiting = Timer(SAID_AFTER_S, print, (waits,), {"file": sys.stderr, "flush": True})
    waiting.start()
    reason, skip = args.reason or f"atoll rollback --to {args.to}", args.skip_samples
    try:
        operator.ask(args, "rollback", limit_s=GO_BACK_LIMIT_S, to=args.to, reason=reason, skip_samples=skip)
    finally:
        waiting.cancel()
    print(f"the run goes on from commit {args.to}; what followed is void")
    return 0
