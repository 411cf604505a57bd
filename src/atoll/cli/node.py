"""Train in a run that this machine has joined (`atoll join`).

Without a command it runs the built-in trainer; behind -- it runs your own script, which calls atoll.join.
Ctrl-C finishes the sync under way and leaves; a second one leaves at once.

examples:
  atoll node --run mine --name berlin --data ~/texts
  atoll node --run mine --name berlin --dry-run
  atoll node --run mine --name berlin --parallel dp_shard=4,tp=2
  atoll node --run mine --name berlin --ranks 8 -- train.py --lr 3e-4
  atoll node --run mine --name berlin --parallel dp_shard=8 -- train.py   # with atoll.share
  atoll node --run mine --name berlin --hours 22-07 --max-upload-mbit 20 --max-disk-gb 50
  atoll node --insecure --coordinator 127.0.0.1:7700 --name berlin        # in plain text, without an invite

a site of two machines with eight GPUs each, on both (the second one with --site-rank 1):
  atoll node --run mine --name berlin --parallel dp_shard=16 --site-hosts 2 --site-address 192.168.0.1:7800 \\
    --site-rank 0
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.flags import Flag, add_flags, log_format
from atoll.cli.sample import require_extra
from atoll.protocol.errors import ConfigError

if TYPE_CHECKING:
    from atoll.node.daemon.config import NodeConfig


MOST_BYTES = 1 << 62
"""That a flag may say."""


def mebibytes(text: str) -> int:
    return int(text) << 20


def megabits(text: str) -> int:
    """As bytes. Raises ValueError."""
    return _bytes(float(text) * 1e6 / 8)


def gigabytes(text: str) -> int:
    """Raises ValueError."""
    return _bytes(float(text) * 1e9)


def limit(read: Callable[[str], int]) -> Callable[[str], int]:
    """0 stands for no limit where nothing is said, and nobody who says it means that. Raises as `read`, or argparse's
    error."""

    @wraps(read)  # argparse names it
    def read_limit(text: str) -> int:
        if (found := read(text)) <= 0:
            raise argparse.ArgumentTypeError("must be more than 0; leave it out for no limit")
        return found

    return read_limit


def _bytes(num_bytes: float) -> int:
    if not abs(num_bytes) < MOST_BYTES:
        raise ValueError
    return int(num_bytes)


FLAGS = {
    "data_paths": Flag("PATH", "--data"),
    "advertise": Flag("HOST:PORT"),
    "listen": Flag("HOST:PORT"),
    "relay": Flag("HOST:PORT"),
    "proxy": Flag("URL"),
    "home": Flag("DIR"),
    "from_saved": Flag("DIR", "--from"),
    "num_ranks": Flag("N", "--ranks"),
    "site_hosts": Flag("N"),
    "site_rank": Flag("K"),
    "site_address": Flag("HOST:PORT"),
    "parallel": Flag("HOW"),
    "num_threads": Flag("N", "--threads"),
    "num_node_threads": Flag("N", "--node-threads"),
    "nice": Flag("N"),
    "start_limit_s": Flag("S"),
    "launcher": Flag("HOW"),
    "interface": Flag("NAME"),
    "max_retained_bytes": Flag("MIB", "--max-retained-mib", mebibytes),
    "reduce_buffer_bytes": Flag("MIB", "--reduce-buffer-mib", mebibytes),
    "bandwidth_bytes_per_s": Flag("MBIT/S", "--bandwidth-mbit", megabits),
    "max_upload_bytes_per_s": Flag("MBIT/S", "--max-upload-mbit", limit(megabits)),
    "monthly_upload_bytes": Flag("GB", "--monthly-upload-gb", limit(gigabytes)),
    "hours": Flag("FROM-TO"),
    "max_disk_bytes": Flag("GB", "--max-disk-gb", limit(gigabytes)),
    "exchange_processes": Flag("N"),
    "http_listen": Flag("HOST:PORT"),
    "save_dir": Flag("DIR", "--save"),
    "log_format": Flag("text|json", read=log_format),
}
"""Of fields of NodeConfig."""
OF_THE_RUN = {"coordinator": Flag("HOST:PORT"), "name": Flag(), "insecure": Flag(), "insecure_network": Flag()}
"""The same, of fields that an invite says."""


def add_arguments(parser: argparse.ArgumentParser, *, asks_for_run: bool = True) -> None:
    from atoll.node.daemon.config import NodeConfig

    if asks_for_run:
        parser.usage = "atoll node --run RUN --name NAME [options] [-- SCRIPT ARGS]"
        parser.add_argument("--run", default="", metavar="RUN", help="which run, with --name; or --home says both")
        add_flags(parser, NodeConfig, OF_THE_RUN)
    add_flags(parser, NodeConfig, FLAGS)
    parser.add_argument("--dry-run", action="store_true", help="print model, memory, ports and device; do not join")


def run(args: argparse.Namespace) -> int:
    require_extra("atoll node")
    config = node_config(args)
    if args.dry_run:
        if config.site_hosts > 1 and config.command:
            raise ConfigError(
                "--dry-run starts the script on this host alone, where its ranks would wait for those of the others: "
                "leave out --site-hosts and try a layout of one host"
            )
        from atoll.cli.dry_run import dry_run

        return dry_run(config)
    if config.log_format == "text":  # beside its log, which begins only when modules, kernels and the run are there
        where = f"; its coordinator is at {config.coordinator}" if config.coordinator else ""
        print(f"site {config.name} is starting{where}", file=sys.stderr, flush=True)
    import asyncio

    from atoll.protocol.loading import nothing_is_garbage

    with nothing_is_garbage():
        from atoll.node.daemon.main import run_node
        from atoll.protocol import transport
        from atoll.protocol.exit_codes import ENDED_AT_ONCE

    try:
        return transport.run(run_node(config))
    except asyncio.CancelledError:
        return ENDED_AT_ONCE


def node_config(args: argparse.Namespace) -> NodeConfig:
    """Checked as far as this machine alone can tell. Raises ConfigError."""
    from atoll.node.daemon.config import NodeConfig, validate
    from atoll.node.dataplane.saved_manifest import place_for
    from atoll.protocol.addresses import parse_address, parse_addresses

    parse_addresses(args.coordinator or "")
    for address in (args.listen, args.advertise, args.relay, args.http_listen, args.site_address):
        if address:
            parse_address(address)
    for path in args.data_paths:
        if not path.expanduser().exists():
            raise ConfigError(f"--data {path}: no such file or folder")
    if args.from_saved is not None:
        check_from(args.from_saved, has_script=bool(args.command))
    if args.command and not args.command[0].startswith("-") and args.launcher != "exec":
        script = Path(args.command[0])
        if not script.is_file():
            raise ConfigError(f"{script}: no such script; the first word behind -- is the script to run")
    if args.save_dir is not None:
        place_for(args.save_dir)
    complete(args)
    given = {name: getattr(args, name) for name in (*FLAGS, *OF_THE_RUN)}
    given["num_ranks"] = _num_ranks(args)
    data_paths = tuple(Path(os.path.abspath(path.expanduser())) for path in args.data_paths)
    config = NodeConfig(**given | {"data_paths": data_paths}, command=tuple(args.command), debug=args.debug)
    validate(config)
    return config


def complete(args: argparse.Namespace) -> None:
    """What is known by the home of a site that has joined: its name, and the coordinator's address. Raises ConfigError
    where nobody has."""
    from atoll.node.daemon.config import default_home
    from atoll.protocol.trust import enrolled

    if args.insecure or args.insecure_network:
        if not args.name:
            raise ConfigError("--insecure needs --name NAME, of this site, and --coordinator HOST:PORT")
        return
    if args.home is None:
        if not (args.run and args.name):
            raise ConfigError(
                "which run? --run RUN --name NAME, or --home DIR, of one that was joined with `atoll join`; or "
                "--insecure --coordinator HOST:PORT --name NAME, in plain text on this machine"
            )
        args.home = default_home(args.run, home_name(args.name, args.site_rank), os.environ)
    found = enrolled.load(args.home / enrolled.FOLDER)
    if found is None:
        raise ConfigError(
            f"no site has joined a run with {args.home}: `atoll join` does, with an invite (`atoll invite --site NAME` "
            "on the coordinator's machine)"
        )
    if args.name not in ("", found.subject.site) or args.run not in ("", found.subject.run_id):
        raise ConfigError(f"{args.home} is of {found.subject}, not of site {args.name} of run {args.run}")
    enrolled.check_dates(found, time.time())  # what it warns of, the node says
    args.name, args.coordinator = found.subject.site, args.coordinator or ",".join(found.addresses)
    args.site_rank = rank_of(found.subject.name, args.site_rank)


def rank_of(name: str, site_rank: int) -> int:
    """Which host of its site the machine is whose certificate has that name. Raises ConfigError if --site-rank says
    another one."""
    from atoll.protocol.trust.names import host_number

    number = host_number(name)
    if site_rank not in (0, number):
        who = f"host {number} of its site" if number else "the site itself, its host 0"
        raise ConfigError(f"--site-rank {site_rank}: this machine was invited as {who}; leave out --site-rank")
    return number


def home_name(site: str, host: int) -> str:
    """Of the folder of a host, below that of its run."""
    return f"{site}-host{host}" if host else site


def _num_ranks(args: argparse.Namespace) -> int:
    """Of each host. Raises ConfigError."""
    from atoll.node.parallel.settings import parse

    settings, num_hosts = parse(args.parallel), max(1, args.site_hosts)
    is_said = args.num_ranks > 1 or settings.takes_the_rest
    total = settings.num_ranks(args.num_ranks * num_hosts if is_said else 1)
    if total % num_hosts:
        raise ConfigError(
            f"--parallel {args.parallel} needs {total} ranks, which {num_hosts} hosts cannot share out: choose sizes "
            f"whose product is a multiple of {num_hosts}, or other --site-hosts"
        )
    return int(total // num_hosts)


def check_from(folder: Path, *, has_script: bool) -> None:
    """Raises ConfigError unless a run may start from what is there."""
    from atoll.node.dataplane.hugging_face import is_folder, read_model
    from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, where_saved

    if is_folder(folder):
        if has_script:
            raise ConfigError(
                f"--from {folder}: a folder of Hugging Face's, from which only the built-in trainer starts; load it in "
                "the script"
            )
        read_model(folder)
    elif not (where_saved(folder) / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"--from {folder}: no manifest.json in it; give the folder of a saved model, or one of Hugging Face's with "
            "its config.json"
        )
