"""Send a site away, and keep it out (on the coordinator's machine).

What the site has contributed to the sync under way is left out; its samples are drawn again. Without --keep-out its
node may come back at once. With it neither its name nor its key comes in again, also after a restart of the
coordinator, until it is let in, and other sites end what they have open with it; `atoll status` names who is kept out.
Another name needs an invite of its own; in plain text (--insecure) whoever reaches the coordinator has one. If a key
was stolen: --keep-out, `atoll invite --take-back`, --let-in, and a new invite.

If sites hold different states of one commit and none of them finds damage, the run is paused and names them: keep out
those that you do not trust, and the others go on. What a site has done before is undone with `atoll rollback --to`.

examples:
  atoll evict berlin --keep-out --reason "sends garbage"       from the run of ./run.toml
  atoll evict --store /data/run.db berlin --keep-out
  atoll evict berlin --let-in
"""

from __future__ import annotations

import argparse

from atoll.cli import stop
from atoll.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    stop.add_arguments(parser)
    parser.add_argument("name", metavar="NAME", help="of the site, as `atoll status` shows it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--keep-out", action="store_true", help="it cannot come back, by its name or its key")
    what.add_argument("--let-in", action="store_true", help="it may come back")
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown at the site, and kept in the store")


def run(args: argparse.Namespace) -> int:
    from atoll.coordinator.admin import ask

    if args.let_in and args.reason:
        raise ConfigError("--reason says why a site is sent away; leave it out with --let-in")
    store = stop.store_path(args)
    if args.let_in:
        ask(store, "let-in", name=args.name)
        print(f"{args.name} may come in again")
        return 0
    ask(store, "evict", name=args.name, reason=args.reason or "atoll evict", keep_out=args.keep_out)
    print(f"{args.name} is evicted{' and kept out' if args.keep_out else ''}")
    return 0
