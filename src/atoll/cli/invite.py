"""Let somebody into the run: prints an invite, one line, for one use.

Whoever has the invite comes in as what it says, once: send it by a way that nobody else reads. With it nothing else has
to be copied: it has the run's addresses, its root, and a certificate to ask for another one.

examples:
  atoll invite --site berlin                                  from the run of ./run.toml, for a day
  atoll invite --site berlin --expires 2h --file berlin.invite
  atoll invite --viewer anna --store /data/run.db
  atoll invite --relay hub
  atoll invite --site berlin --take-back                      its invite, or its key, was stolen: then invite it anew
On the other machine:
  atoll join berlin.invite --data ~/texts                     joins, and starts the node
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from atoll.cli import operator
from atoll.protocol.dates import duration_s
from atoll.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--site", metavar="NAME", help="a machine or a cluster that trains")
    who.add_argument("--viewer", metavar="NAME", help="may look at the run")
    who.add_argument("--operator", metavar="NAME", help="may change the run")
    who.add_argument("--relay", metavar="NAME", help="joins sites that nobody can dial (`atoll relay`)")
    parser.add_argument(
        "--expires", type=duration_s, default="24h", metavar="TIME", help="as 90m, 24h or 7d (default: 24h)"
    )
    parser.add_argument(
        "--address", action="append", default=[], metavar="HOST:PORT", help="where the coordinator is reached"
    )
    parser.add_argument(
        "--take-back",
        action="store_true",
        help="instead: nobody is or becomes that by the invites that there are, used or not",
    )
    parser.add_argument("--file", type=Path, metavar="PATH", help="write it there, for you alone, and print nothing")


def run(args: argparse.Namespace) -> int:
    from atoll.protocol.addresses import is_loopback
    from atoll.protocol.disk import Disk
    from atoll.protocol.trust.enrolled import joined
    from atoll.protocol.trust.invites import from_text

    if args.take_back and (args.file is not None or args.address):
        raise ConfigError("--take-back makes no invite: leave out --file and --address")
    role = next(role for role in ("site", "viewer", "operator", "relay") if getattr(args, role) is not None)
    if args.file is not None and args.file.exists():
        raise ConfigError(f"{args.file} is there already; name another file, or remove it")
    if args.take_back:
        operator.ask(args, "take-back", role=role, name=getattr(args, role))
        print(f"whatever was given to {role} {getattr(args, role)}, used or not, is of no use any more")
        return 0
    text = operator.ask(
        args,
        "invite",
        role=role,
        name=getattr(args, role),
        life_s=float(args.expires),
        addresses=args.address or (joined(args.home).addresses if args.home is not None else []),
    )
    if all(is_loopback(address) for address in from_text(text).addresses):
        print(
            "atoll invite: it is for this machine alone: the coordinator is at a loopback address; for others start it "
            "with --listen, or say --address HOST:PORT",
            file=sys.stderr,
        )
    if args.file is None:
        print(text)
        return 0
    Disk().write_whole(args.file, text.encode() + b"\n")
    print(f"the invite for {role} {getattr(args, role)} is in {args.file}", file=sys.stderr)
    return 0
