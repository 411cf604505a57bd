"""Join a run by an invite, and start the node.

The invite comes from a file, from standard input, or is asked for; it is never a word of the command, which other users
of this machine could read. This machine makes a key of its own, which it keeps, and which the run certifies. From then
on `atoll node --home DIR`, or `atoll node --run RUN --name NAME`, starts the node again.

examples:
  atoll join berlin.invite --data ~/texts
  atoll join --enrol-only < berlin.invite
  atoll join berlin.invite --ranks 8 -- train.py --lr 3e-4
  atoll join berlin.invite --install --data ~/texts      writes a unit for systemd in place of starting the node
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli import node
from atoll.protocol.errors import ConfigError

if TYPE_CHECKING:
    from atoll.protocol.trust.invites import Invite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "atoll join [INVITE] [options of `atoll node`] [-- SCRIPT ARGS]"
    parser.add_argument(
        "invite", type=Path, nargs="?", default=Path("-"), metavar="INVITE", help="its file (default: standard input)"
    )
    then = parser.add_mutually_exclusive_group()
    then.add_argument("--enrol-only", action="store_true", help="do not start the node")
    then.add_argument(
        "--install",
        action="store_true",
        help="do not start it, but write a unit for systemd that does, with these options",
    )
    node.add_arguments(parser, asks_for_run=False)


def run(args: argparse.Namespace) -> int:
    import os

    from atoll.cli import doctor, unit
    from atoll.node.daemon.config import default_home
    from atoll.protocol.addresses import parse_proxy
    from atoll.protocol.dates import utc
    from atoll.protocol.trust.enrolled import joined
    from atoll.protocol.trust.names import host_number, site_of

    invite = read_invite(args.invite)
    now_s, until_s = time.time(), invite.expires_s
    if now_s > until_s:
        raise ConfigError(
            f"the invite for {invite.role} {invite.name} has expired at {utc(until_s)}, and this machine's clock says "
            f"{utc(now_s)}: ask for another one"
        )
    starts_node = invite.role in ("site", "host") and not args.enrol_only
    if starts_node:
        _check(args, invite)  # before the invite is used
    name = node.home_name(site_of(invite.name), host_number(invite.name))
    home = args.home or default_home(invite.run_id, name, os.environ)
    proxy = parse_proxy(args.proxy)
    enrol(invite, home, proxy)
    print(f"joined run {invite.run_id} as {invite.role} {invite.name}; its key is in {home}", flush=True)
    if not starts_node:
        return 0
    doctor.show(doctor.of_site(joined(home), home, proxy=proxy))  # a node that would surely fail is not started
    if args.install:
        words = unit.node_command(home, unit.options(args.words, str(args.invite)), args.command)
        commands = unit.install(name, words)
        for text in unit.warnings():
            print(f"warning: {text}", file=sys.stderr)
        print("it is started by systemd with:", *commands, sep="\n    ")
        return 0
    args.home, args.name, args.coordinator, args.run = home, "", "", ""
    args.insecure = args.insecure_network = False
    return node.run(args)


def _check(args: argparse.Namespace, invite: Invite) -> None:
    """Raises ConfigError for options that the node would refuse."""
    from atoll.protocol.trust.names import site_of

    if args.dry_run:
        raise ConfigError("--dry-run is for `atoll node`, once this machine has joined (`atoll join --enrol-only`)")
    site, rank = site_of(invite.name), node.rank_of(invite.name, args.site_rank)
    if rank and args.site_hosts == 1:
        raise ConfigError(
            f"the invite is for host {rank} of site {site}: say --site-hosts N and --site-address HOST:PORT, as on its "
            "other hosts"
        )
    words = {"name": site, "site_rank": rank, "coordinator": invite.addresses[0], "run": ""}
    is_asked_no_more = {"insecure": False, "insecure_network": True}
    node.node_config(argparse.Namespace(**vars(args) | words | is_asked_no_more))


def read_invite(path: Path) -> Invite:
    """Raises ConfigError."""
    import errno
    from getpass import getpass

    from atoll.protocol.trust.invites import MAX_CHARACTERS, PREFIX, from_text

    if str(path) != "-":
        try:
            with path.open(encoding="ascii", errors="replace") as file:
                return from_text(file.read(MAX_CHARACTERS + 1))
        except OSError as error:
            if PREFIX in str(path) or error.errno == errno.ENAMETOOLONG:  # a log may keep what is said here
                raise ConfigError(
                    "that is no file; an invite itself is given on standard input, or in a file that is named here: as "
                    "a word of the command others could read it"
                ) from None
            raise ConfigError(f"{path}: {error.strerror}; name the file that `atoll invite` wrote") from None
    try:
        asked = sys.stdin.isatty()
        return from_text(getpass("invite (it is not shown): ") if asked else sys.stdin.read(MAX_CHARACTERS + 1))
    except (EOFError, UnicodeDecodeError):
        raise ConfigError("no invite was given, or no text; give the line that `atoll invite` printed") from None


def enrol(invite: Invite, home: Path, proxy: str = "") -> None:
    """This machine's key is certified as what the invite is for. Whatever breaks off, the same invite goes on from
    there. Raises as `joining.join` does, ConfigError or HostError."""
    import asyncio

    from atoll.node.daemon.home import count_on, locked
    from atoll.protocol.disk import Disk
    from atoll.protocol.errors import InvalidMessage, RefusedError
    from atoll.protocol.machine import Machine
    from atoll.protocol.trust import enrolled
    from atoll.protocol.trust.joining import join

    disk, folder, had_home = Disk(), home / enrolled.FOLDER, home.exists()
    with locked(home):
        known = enrolled.load(folder)
        if known is not None and known.subject != invite.subject:
            raise ConfigError(f"{home} is of {known.subject}: join as {invite.subject} with another --home")
        pending = enrolled.pending(folder, invite.invite_id)
        had_key = pending.exists()
        key = enrolled.key_for(folder, invite.invite_id, disk)
        try:
            signed = asyncio.run(join(invite, key, invite.subject, Machine.through(proxy).network))
        except RefusedError as error:
            # An answer that broke on its way may be asked for again.
            if not had_key and not isinstance(error, InvalidMessage):
                _take_back(home, pending, had_home=had_home)
            raise
        count_on(home, signed.incarnation, disk)
        enrolled.keep(folder, invite, key, certificate=signed.certificate, roots=signed.roots, disk=disk)


def _take_back(home: Path, pending: Path, *, had_home: bool) -> None:
    """Of the locked home what a refused join has made: its key, and folders that are empty without it. What cannot be
    removed stays: the refusal is what people have to read."""
    from contextlib import suppress

    from atoll.node.daemon.home import LOCK

    with suppress(OSError):
        pending.unlink(missing_ok=True)
        pending.parent.rmdir()
        if not had_home and [path.name for path in home.iterdir()] == [LOCK]:
            (home / LOCK).unlink()
            home.rmdir()
