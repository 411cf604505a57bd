"""Put another root in the place of the run's, while the run goes on.

In three steps, each of which is refused while it would cut somebody off. The first makes the next root, which all that
are in the run trust from then on. With --sign, the next root signs: sites, their other hosts and relays get
certificates of it at once. With --retire, a day later, the old root is trusted no more.

Whoever is away until the old root is retired needs another invite; so do viewers and operators, and Prometheus another
root.pem and tokens (`atoll token`). If the root's key was stolen, --now takes the last two steps at once.

Where a coordinator stands by, the first step is refused until the next root was copied to it: it says what and where.

examples:
  atoll rotate                         the next root of the run of ./run.toml
  atoll rotate --sign
  atoll rotate --retire                a day after that
"""

from __future__ import annotations

import argparse

from atoll.cli import operator

DONE = {
    "make": "the next root is made and trusted; `atoll rotate --sign` comes next",
    "sign": "the next root signs; `atoll rotate --retire` ends the old one, a day from now",
    "retire": "the old root is trusted no more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--sign", action="store_true", help="the next root signs from now on")
    step.add_argument("--retire", action="store_true", help="the old root is trusted no more")
    parser.add_argument(
        "--now",
        action="store_true",
        help="though some do not trust the next root yet, or have it not, or use the old one still",
    )


def run(args: argparse.Namespace) -> int:
    step = "sign" if args.sign else "retire" if args.retire else "make"
    left_behind = operator.ask(args, "rotate", step=step, at_once=args.now)
    print(DONE[step])
    if left_behind:
        print(f"these have no identity of the new root, and need another invite: {left_behind}")
    return 0
