"""Join a run with this machine.

Without a command it runs the built-in trainer; behind -- it runs your own script, which calls atoll.join.
Ctrl-C finishes the sync under way and leaves; a second one leaves at once.

examples:
  atoll node --coordinator 10.0.0.1:7700 --name berlin --data ~/texts
  atoll node --coordinator 10.0.0.1:7700 --name berlin --dry-run
  atoll node --coordinator 10.0.0.1:7700 --name berlin --ranks 8 -- train.py --lr 3e-4
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.sample import require_node_extra
from atoll.protocol.errors import ConfigError

if TYPE_CHECKING:
    from atoll.node.daemon.config import NodeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "atoll node --coordinator HOST:PORT --name NAME [options] [-- SCRIPT ARGS]"
    parser.add_argument("--coordinator", metavar="HOST:PORT", required=True)
    parser.add_argument("--name", required=True, help="of this site, unique within the run")
    parser.add_argument(
        "--data", nargs="+", action="extend", type=Path, default=[], metavar="PATH", help="text files and folders"
    )
    parser.add_argument(
        "--advertise", default="", metavar="HOST:PORT", help="where other nodes reach this one (default: --listen)"
    )
    parser.add_argument(
        "--listen",
        default="",
        metavar="HOST:PORT",
        help="for other nodes (default: the local address of the connection to the coordinator, any free port)",
    )
    parser.add_argument(
        "--home",
        type=Path,
        metavar="DIR",
        help="this node's own folder: key, outer state, log (default: ~/.local/state/atoll/RUN/NAME)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="where the model is saved, a folder of its own (default: HOME/model)"
    )
    parser.add_argument(
        "--from", type=Path, dest="from_saved", metavar="DIR", help="the saved model that a resumed run starts from"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="worker processes (default: 1)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of each worker (default: cores / ranks)")
    parser.add_argument(
        "--launcher",
        default="python",
        metavar="HOW",
        help="python (default): run the script once for each rank; exec: the same with any command; "
        "torchrun: its agent starts the ranks, and opens a port without a password on every address of this machine",
    )
    parser.add_argument(
        "--interface", default="", metavar="NAME", help="torchrun: network interface of its ranks (default: loopback)"
    )
    parser.add_argument(
        "--max-retained-mib",
        type=int,
        metavar="MIB",
        help="bound on contributions of others that this node holds while it averages (default: by the "
        "model's size, the free memory and the free disk)",
    )
    parser.add_argument(
        "--reduce-buffer-mib",
        type=int,
        metavar="MIB",
        help="of these, in memory; the rest is on the disk (default: at most a quarter of the free memory)",
    )
    parser.add_argument(
        "--bandwidth-mbit",
        type=float,
        default=0.0,
        metavar="MBIT/S",
        help="uplink; sites with more of it average more (default: all alike)",
    )
    parser.add_argument("--http-listen", default="", metavar="HOST:PORT", help="serve /metrics here (default: off)")
    parser.add_argument("--dry-run", action="store_true", help="print model, memory, ports and device; do not join")


def run(args: argparse.Namespace) -> int:
    require_node_extra("atoll node")
    config = node_config(args)
    if args.dry_run:
        from atoll.cli.dry_run import dry_run

        return dry_run(config)
    import asyncio

    from atoll.node.daemon.main import run_node
    from atoll.protocol import transport
    from atoll.protocol.exit_codes import ENDED_AT_ONCE

    try:
        return transport.run(run_node(config))
    except asyncio.CancelledError:
        return ENDED_AT_ONCE


def node_config(args: argparse.Namespace) -> NodeConfig:
    """Checked as far as this machine alone can tell. Raises ConfigError."""
    from atoll.node.daemon.config import (
        NodeConfig,
        validate,
    )
    from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, place_for, where_saved
    from atoll.protocol.addresses import parse_address

    for address in (args.coordinator, args.listen, args.advertise, args.http_listen):
        if address:
            parse_address(address)
    for path in args.data:
        if not path.expanduser().exists():
            raise ConfigError(f"--data {path}: no such file or folder")
    if args.from_saved is not None and not (where_saved(args.from_saved) / MANIFEST_NAME).is_file():
        raise ConfigError(f"--from {args.from_saved}: no manifest.json in it; give the folder of a saved model")
    if args.command and not args.command[0].startswith("-") and args.launcher != "exec":
        script = Path(args.command[0])
        if not script.is_file():
            raise ConfigError(f"{script}: no such script; the first word behind -- is the script to run")
    if args.save is not None:
        place_for(args.save)
    retained, buffer = args.max_retained_mib, args.reduce_buffer_mib
    config = NodeConfig(
        coordinator=args.coordinator,
        name=args.name,
        data_paths=tuple(Path(os.path.abspath(path.expanduser())) for path in args.data),
        advertise=args.advertise,
        listen=args.listen,
        home=args.home,
        from_saved=args.from_saved,
        num_ranks=args.ranks,
        num_threads=args.threads,
        command=tuple(args.command),
        launcher=args.launcher,
        interface=args.interface,
        max_retained_bytes=None if retained is None else retained << 20,
        reduce_buffer_bytes=None if buffer is None else buffer << 20,
        bandwidth_bytes_per_s=int(args.bandwidth_mbit * 1e6 / 8),
        http_listen=args.http_listen,
        save_dir=args.save,
        debug=args.debug,
    )
    validate(config)
    return config
