"""Let a browser or a Prometheus look at the run over https: prints a viewer's token.

The coordinator shows its page and its metrics to other machines if it listens there (`atoll coordinator --http-listen
HOST:PORT --http-name NAME`), over TLS, and to whoever has a token: a browser is asked for it, a program shows it in a
header (Authorization: Bearer TOKEN). `atoll invite --viewer NAME --take-back` ends it. A node with an --http-listen of
its own takes another kind (--nodes), so that no site is shown what the coordinator takes.

With --prometheus a folder is written from which a Prometheus can be started: its configuration, the run's root by
which it knows whom it asks, and a token of each kind. Rules and alerts are in deploy/prometheus.

examples:
  atoll token --viewer anna                                     from the run of ./run.toml, for 90 days
  atoll token --viewer prometheus --prometheus /etc/prometheus/run --target run.example:7701
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from atoll.cli import operator
from atoll.cli.flags import lasting
from atoll.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operator.add_arguments(parser)
    parser.add_argument("--viewer", metavar="NAME", required=True, help="whose it is")
    parser.add_argument(
        "--expires", type=lasting, default="90d", metavar="TIME", help="as 90m, 24h or 7d (default: 90d)"
    )
    parser.add_argument("--nodes", action="store_true", help="for the metrics of nodes, not for the coordinator's page")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--file", type=Path, metavar="PATH", help="write it there, for you alone, and print nothing")
    where.add_argument(
        "--prometheus", type=Path, metavar="DIR", help="write a folder for Prometheus, and print nothing"
    )
    parser.add_argument("--target", metavar="HOST:PORT", help="with --prometheus: where the coordinator's page is")


def run(args: argparse.Namespace) -> int:
    from atoll.cli import scrape
    from atoll.protocol.addresses import parse_address
    from atoll.protocol.disk import Disk

    if (args.prometheus is None) != (args.target is None):
        raise ConfigError("--prometheus DIR and --target HOST:PORT go together")
    if args.prometheus is not None and args.nodes:
        raise ConfigError("--prometheus writes a token of each kind: leave --nodes out")
    if args.target is not None:
        parse_address(args.target)
    if args.file is not None and args.file.exists():
        raise ConfigError(f"{args.file} is there already; name another file, or remove it")
    token = _made(args, is_of_nodes=args.nodes)
    if args.prometheus is not None:
        scrape.write(args.prometheus, token, _made(args, is_of_nodes=True), _root(args), args.target)
        print(f"{args.prometheus} is ready: prometheus --config.file {args.prometheus}/prometheus.yml", file=sys.stderr)
    elif args.file is not None:
        Disk().write_whole(args.file, token.encode() + b"\n")
        print(f"the token of viewer {args.viewer} is in {args.file}", file=sys.stderr)
    else:
        print(token)
    return 0


def _made(args: argparse.Namespace, *, is_of_nodes: bool) -> str:
    life_s = float(args.expires)
    return operator.ask(
        args, "invite", role="viewer", name=args.viewer, life_s=life_s, is_token=True, is_of_nodes=is_of_nodes
    )


def _root(args: argparse.Namespace) -> bytes:
    """Of the run, as PEM."""
    import json

    root: str = json.loads(operator.ask(args, "status"))["root"]
    return root.encode()
