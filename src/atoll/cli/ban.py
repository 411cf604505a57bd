"""Keep a site out of the run, until its ban is lifted or a time has come.

What the site has contributed to the sync under way is left out; its samples are drawn again. Neither its name nor its
key comes in again, with any invite, also after a restart of the coordinator, and other sites end what they have open
with it; `atoll status` names the sites that are banned. A name that was never here may be banned too: the answer says
so, as it may be mistyped. Another name needs an invite of its own; in plain text
(--insecure) whoever reaches the coordinator has one. If a key was stolen: ban the site, `atoll invite --take-back`,
lift the ban, and send a new invite.

If sites hold different states of one commit and none of them finds damage, the run is paused and names them: ban those
that you do not trust, and the others go on. What a site has done before is undone with `atoll rollback --to`.

examples:
  atoll ban berlin --reason "sends garbage"            from the run of ./run.toml
  atoll ban --store /data/run.db berlin --until 7d
  atoll ban berlin --until 2026-12-24T18:00
  atoll ban berlin --lift
"""

from __future__ import annotations

import argparse

from atoll.cli import operator
from atoll.protocol.dates import date_s, duration_s
from atoll.protocol.errors import ConfigError
from atoll.protocol.text import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("name", metavar="NAME", help="of the site, as `atoll status` shows it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--until", metavar="TIME", help="lifted by itself then: a time from now on (90m, 24h, 7d), or a date in UTC"
    )
    what.add_argument("--lift", action="store_true", help="instead: it may come in again")
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown at the site, and kept in the store")


def run(args: argparse.Namespace) -> int:
    if args.lift and args.reason:
        raise ConfigError("--reason says why a site is banned; leave it out with --lift")
    if args.lift:
        operator.ask(args, "lift-ban", name=args.name)
        print(f"{args.name} may come in again")
        return 0
    found = operator.ask(args, "ban", name=args.name, reason=args.reason or "atoll ban", **_end(args.until))
    print(f"{args.name} is {clean(found) or 'banned'}")
    return 0


def _end(until: str | None) -> dict[str, float]:
    """A duration counts by the coordinator's clock. Raises ConfigError."""
    if until is None:
        return {}
    try:
        return {"for_s": float(duration_s(until))}
    except ValueError:
        return {"until_s": date_s(until)}
