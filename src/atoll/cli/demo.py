"""Train a small language model on several sites on this machine.

Starts one coordinator and some nodes, each with a training process of its own, all on loopback. They train a
byte-level language model on the source of Python's standard library, and meet every so many steps.
Exit code 0: all sites ended with the same state, the held-out loss fell, the model was saved and loads again, and
every expected commit happened.

examples:
  atoll demo
  atoll demo --preset sparseloco --kill       one value of 64, 2 bits each
  atoll demo --kill                           kill -9 one site in mid-run, bring it back later
  atoll demo --layouts 1,fsdp=2,tp=2+pp=2     sites of different shapes, one model
  atoll demo --data ~/notes ~/letters.txt     on text of your own
  atoll demo --data tokens                    on what `atoll tokenize` wrote
  atoll demo --script "train.py --lr 3e-4" --compare    a script that calls atoll.join, beside one site of it alone
  atoll demo --sites 2 --steps 600 --sync-every 50 --codec bf16
  atoll demo --format json                    the report for a program
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.flags import Flag, add_flags, log_format
from atoll.cli.sample import require_extra


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The arguments of `atoll demo`."""

    num_sites: int = 3
    """Sites on this machine."""
    steps: int = 300
    """Inner steps of each site."""
    preset: str | None = None
    """Settings that belong together, see `atoll init --help`."""
    sync_every: int | None = None
    """Inner steps of a sync (default: 20, or the preset's)."""
    codec: str | None = None
    """How what they learned travels (default: int8, or the preset's)."""
    model: str = "tiny"
    """nano, tiny, small, or tiny-moe, which has experts."""
    data: tuple[Path, ...] = ()
    """Text files and folders, or a folder of `atoll tokenize`."""
    seed: int = 1
    """Of the model's first values and of the order of samples."""
    format: str = "text"
    """Of the report on stdout: text or json, with progress on stderr."""
    layouts: str = ""
    """How each site's ranks share the model: 1,fsdp=2,tp=2+pp=2 is three sites, of one, two and four processes. Without
    it, a process each."""
    script: str = ""
    """Your own, with its arguments in the same quotes: each site runs it, with an order of samples of its own."""
    compare: bool = False
    """With --script: train one site alone, too, for as many steps."""
    kill: bool = False
    """kill -9 one site in mid-run, start it again later."""
    keep: Path | None = None
    """Folder for everything; without it atoll-demo, replaced each time."""
    debug: bool = False


FLAGS = {
    "num_sites": Flag("N", "--sites"),
    "steps": Flag("N"),
    "preset": Flag("NAME"),
    "sync_every": Flag("H"),
    "codec": Flag(),
    "model": Flag("SIZE"),
    "data": Flag("PATH"),
    "seed": Flag("N"),
    "format": Flag("FORMAT", read=log_format),
    "layouts": Flag("LIST"),
    "script": Flag("TEXT"),
    "compare": Flag(),
    "kill": Flag(),
    "keep": Flag("DIR"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, DemoOptions, FLAGS)


def run(args: argparse.Namespace) -> int:
    require_extra("atoll demo")
    from atoll.cli.demo_run import Demo

    args.data = tuple(path.expanduser().absolute() for path in args.data)
    return Demo(DemoOptions(**{name: getattr(args, name) for name in (*FLAGS, "debug")})).run()
