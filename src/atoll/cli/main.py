"""`atoll VERB ...`: finds the verb's module, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Protocol

from atoll import __version__
from atoll.cli import coordinator, demo, evict, init, node, reset, rollback, sample, status, stop
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.exit_codes import exit_code_of
from atoll.protocol.text import clean

EPILOG = """\
examples:
  atoll demo                                             three sites on this machine, in a few minutes
  atoll init && atoll coordinator run.toml               start a run of your own
  atoll node --coordinator 10.0.0.1:7700 --name berlin   join it, on each machine
  atoll status --coordinator 10.0.0.1:7700 --watch       look at it
"""


class Verb(Protocol):
    """What each verb's module offers. Heavy imports (torch, grpc) belong inside `run`."""

    __name__: str
    HELP: str
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """The exit code. Raises AtollError."""


_MODULES: tuple[Verb, ...] = (init, coordinator, node, status, stop, rollback, evict, reset, demo, sample)
VERBS = {verb.__name__.rpartition(".")[2]: verb for verb in _MODULES}


def make_parser() -> argparse.ArgumentParser:
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="tracebacks of errors, and debug lines in logs"
    )
    parser = argparse.ArgumentParser(
        prog="atoll",
        description="Train one model on many islands of compute that are joined by thin links.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[debug],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"atoll {__version__}")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        command = commands.add_parser(
            name,
            help=verb.HELP,
            description=verb.HELP[0].upper() + verb.HELP[1:] + ".",
            epilog=verb.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[debug],
            allow_abbrev=False,
        )
        verb.add_arguments(command)
    return parser


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of `atoll node`, and the user's command behind `--`; argparse would mix up the two."""
    verb = next((a for a in argv if not a.startswith("-")), "")
    if verb != "node" or "--" not in argv:
        return list(argv), []
    cut = list(argv).index("--")
    if cut == len(argv) - 1:
        raise ConfigError(
            "nothing stands behind `--`: write the script there, or leave it out for the built-in trainer"
        )
    return list(argv[:cut]), list(argv[cut + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
    try:
        own, command = split_command(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"atoll node: {error}", file=sys.stderr)
        return error.exit_code
    args = make_parser().parse_args(own)
    args.debug = getattr(args, "debug", False)
    args.command = command
    if not args.debug:
        # gRPC's C library writes lines of its own to stderr; what matters arrives as an error here.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return VERBS[args.verb].run(args)
    except BrokenPipeError:
        # The reader of our output has gone (`atoll status | head`). Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AtollError, OSError) as error:
        return _failed(args, error)
    except KeyboardInterrupt as error:
        return exit_code_of(error)


def _failed(args: argparse.Namespace, error: Exception) -> int:
    if args.debug:
        traceback.print_exception(error)
    print(f"atoll {args.verb}: {' '.join(clean(str(error)).split())}", file=sys.stderr)
    return exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main())
