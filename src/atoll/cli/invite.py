"""Let somebody into the run: prints an invite, one line, for one use; or writes several, a file each.

Whoever has the invite comes in as what it says, once: send it by a way that nobody else reads. With it nothing else has
to be copied: it has the run's addresses, its root, and a certificate to ask for another one.

examples:
  atoll invite --site berlin                                  from the run of ./run.toml, for a day
  atoll invite --site berlin --expires 2h --file berlin.invite
  atoll invite --site berlin --site paris --relay hub --folder invites
  atoll invite --site berlin --hosts 4 --file berlin.invite   for a site of four machines: an invite for each, in the
                                                              files berlin.invite, berlin.invite.1, .2 and .3
  atoll invite --site berlin --host 3                         for one of them that lost its disk
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
from atoll.cli.flags import lasting
from atoll.protocol.errors import ConfigError

ROLES = {
    "site": "a machine or a cluster that trains",
    "viewer": "may look at the run",
    "operator": "may change the run",
    "relay": "joins sites that nobody can dial (`atoll relay`)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    for role, what in ROLES.items():
        parser.add_argument(f"--{role}", action="append", default=[], metavar="NAME", help=what)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="the site has so many machines (`atoll node --site-hosts`): an invite for each, host 0 first",
    )
    which.add_argument("--host", type=int, metavar="K", help="for that machine of the site alone, from 1")
    parser.add_argument(
        "--expires", type=lasting, default="24h", metavar="TIME", help="as 90m, 24h or 7d (default: 24h)"
    )
    parser.add_argument(
        "--address", action="append", default=[], metavar="HOST:PORT", help="where the coordinator is reached"
    )
    parser.add_argument(
        "--take-back",
        action="store_true",
        help="instead: nobody is or becomes that by the invites that there are, used or not",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--file", type=Path, metavar="PATH", help="write it there, for you alone, and print nothing")
    where.add_argument("--folder", type=Path, metavar="DIR", help="the same for several: DIR/NAME.invite")


def run(args: argparse.Namespace) -> int:
    invited = [(role, name) for role in ROLES for name in getattr(args, role)]
    if not invited:
        raise ConfigError("for whom? --site NAME, --viewer NAME, --operator NAME or --relay NAME")
    wanted = _hosts(args, invited)
    if args.take_back:
        return _take_back(args, wanted)
    for (role, name), file in zip(wanted, _files(args, wanted), strict=True):
        _invite(args, role, name, file)
    return 0


def _hosts(args: argparse.Namespace, invited: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same, with the hosts of a site of several beside it, or that one of its hosts. Raises ConfigError."""
    from atoll.node.host_protocol import MAX_HOSTS
    from atoll.protocol.trust.names import host_of_site

    if args.hosts == 1 and args.host is None:
        return invited
    if len(invited) > 1 or invited[0][0] != "site":
        raise ConfigError("--hosts and --host are for one site: say --site NAME alone")
    if not 1 <= args.hosts <= MAX_HOSTS or (args.host is not None and not 1 <= args.host < MAX_HOSTS):
        raise ConfigError(
            f"a site has at most {MAX_HOSTS} hosts; --host counts from 1, host 0 has the site's own invite"
        )
    ((_, site),) = invited
    if args.host is not None:
        return [("host", host_of_site(site, args.host))]
    if args.take_back:
        raise ConfigError("--take-back takes back what all hosts of a site were given: leave out --hosts")
    return [("site", site), *(("host", host_of_site(site, number)) for number in range(1, args.hosts))]


def _take_back(args: argparse.Namespace, wanted: list[tuple[str, str]]) -> int:
    if args.file is not None or args.folder is not None or args.address:
        raise ConfigError("--take-back makes no invite: leave out --file, --folder and --address")
    for role, name in wanted:
        operator.ask(args, "take-back", role=role, name=name)
        print(f"whatever was given to {role} {name}, used or not, is of no use any more")
    return 0


def _files(args: argparse.Namespace, wanted: list[tuple[str, str]]) -> list[Path | None]:
    """One for each, or None: it is printed. Raises ConfigError before anything is asked for."""
    names = [name for _, name in wanted]
    files: list[Path | None] = [None] * len(names)
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
        files = [args.folder / f"{name.replace('/', '-host')}.invite" for name in names]
    elif args.file is not None and (len(names) == 1 or args.hosts > 1):
        first = args.file
        files = [first.with_name(f"{first.name}.{number}") if number else first for number in range(len(names))]
    elif len(names) > 1 and args.hosts == 1:
        raise ConfigError(f"invites for {', '.join(names)}: say --folder DIR, where each has a file of its own")
    for file in files:
        if file is not None and (file.exists() or files.count(file) > 1):
            raise ConfigError(f"{file} is there already; name another file, or remove it")
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent}; make it, or name another file")
    return files


def _invite(args: argparse.Namespace, role: str, name: str, file: Path | None) -> None:
    from atoll.protocol.addresses import is_loopback
    from atoll.protocol.disk import Disk
    from atoll.protocol.trust.enrolled import joined
    from atoll.protocol.trust.invites import MAX_ADDRESSES, from_text

    text = operator.ask(
        args,
        "invite",
        role=role,
        name=name,
        life_s=float(args.expires),
        addresses=args.address or (joined(args.home).addresses[:MAX_ADDRESSES] if args.home is not None else []),
    )
    if all(is_loopback(address) for address in from_text(text).addresses):
        print(
            "atoll invite: it is for this machine alone: the coordinator is at a loopback address; for others start it "
            "with --listen, or say --address HOST:PORT",
            file=sys.stderr,
        )
    if file is None:
        print(text)
        return
    Disk().write_whole(file, text.encode() + b"\n")
    print(f"the invite for {role} {name} is in {file}", file=sys.stderr)
