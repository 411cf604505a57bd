"""Say whether a coordinator, a node or a relay works: for probes and people, on its own machine.

It lives if its event loop answers within 10 s on the socket beside the store, or in the home of
the node or relay. It is ready if it can do its work as well: a coordinator whose store takes decisions, with a quorum
of sites; a node that is in the run; a relay whenever it lives.
Exit code 0 if so, else 3 with the reason. Orchestrators call it as a command: nobody needs a certificate for it.

examples:
  atoll health                          of the coordinator of ./run.toml: it lives
  atoll health --store /data/run.db --ready
  atoll health --node ~/.local/state/atoll/RUN/berlin --ready
  atoll health --relay ~/.local/state/atoll/RUN/hub
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.protocol.errors import HostError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "path", nargs="?", type=Path, default=Path("run.toml"), help="the run's file (default: run.toml)"
    )
    where.add_argument("--store", type=Path, metavar="PATH", help="the coordinator's store, if it was given one")
    where.add_argument("--node", type=Path, metavar="DIR", help="of the node with this home")
    where.add_argument("--relay", type=Path, metavar="DIR", help="of the relay with this home")
    parser.add_argument("--ready", action="store_true", help="that it can do its work, too")


def run(args: argparse.Namespace) -> int:
    from atoll.protocol import line_socket

    if args.node is not None:
        from atoll.node.daemon import health

        who = "node"
        obstacles = line_socket.ask(health.socket_path(args.node), health.ASKED, who)["found"]
    elif args.relay is not None:
        from atoll.node.relay import health as of_relay

        who = "relay"
        obstacles = line_socket.ask(of_relay.socket_path(args.relay), of_relay.ASKED, who)["found"]
    else:
        from atoll.cli import operator
        from atoll.coordinator import admin

        who = "coordinator"
        obstacles = admin.ask(operator.store_path(args), "health")
    if args.ready and obstacles:
        raise HostError(f"the {who} lives and is not ready: {obstacles}")
    print(f"the {who} lives{f', and is not ready: {obstacles}' if obstacles else ' and is ready'}")
    return 0
