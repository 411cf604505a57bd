"""Train a small language model on several sites on this machine.

Starts one coordinator and some nodes, each with a training process of its own, all on loopback. They train a
byte-level language model on the source of Python's standard library, and meet every so many steps.
Exit code 0: all sites ended with the same state, the held-out loss fell, the model was saved and loads again, and
every expected commit happened.

examples:
  atoll demo
  atoll demo --kill                           kill -9 one site in mid-run, bring it back later
  atoll demo --compare                        train the two baselines here too (takes longer)
  atoll demo --data ~/notes ~/letters.txt     on text of your own
  atoll demo --sites 2 --steps 600 --sync-every 50 --codec bf16
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from atoll.cli.sample import require_node_extra


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sites", dest="num_sites", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="inner steps of each site (default: 300)")
    parser.add_argument("--sync-every", type=int, default=20, metavar="H", help="inner steps of a sync (default: 20)")
    parser.add_argument("--codec", default="int8", help="fp32, bf16 or int8 (default)")
    parser.add_argument("--model", default="tiny", metavar="SIZE", help="nano, tiny (default) or small")
    parser.add_argument(
        "--data", nargs="+", action="extend", type=Path, default=[], metavar="PATH", help="text files and folders"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout, progress on stderr")
    parser.add_argument("--kill", action="store_true", help="kill -9 one site in mid-run, start it again later")
    parser.add_argument(
        "--compare", action="store_true", help="also train one site alone, and per-step data parallel, for comparison"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder for everything (default: atoll-demo, replaced each time)"
    )


def run(args: argparse.Namespace) -> int:
    require_node_extra("atoll demo")
    from atoll.cli.demo_run import Demo
    from atoll.cli.demo_setup import DemoOptions

    args.data = tuple(path.expanduser().absolute() for path in args.data)
    return Demo(DemoOptions(**{item.name: getattr(args, item.name) for item in fields(DemoOptions)})).run()
