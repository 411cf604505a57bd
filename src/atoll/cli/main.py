"""Train one model on many islands of compute that are joined by thin links.

examples:
  atoll demo                                             three sites on this machine, in a few minutes
  atoll init && atoll coordinator run.toml               start a run of your own
  atoll invite --site berlin --file berlin.invite        let a machine into it
  atoll join berlin.invite                               come into it, on that machine
  atoll status --watch                                   look at it, on the coordinator's machine
"""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from atoll import __version__
from atoll.cli import (
    audit,
    backup,
    ban,
    coordinator,
    demo,
    doctor,
    drain,
    events,
    evict,
    evidence,
    export,
    gc,
    health,
    init,
    invite,
    join,
    node,
    pause,
    plan,
    plot,
    relay,
    reset,
    resume,
    rollback,
    rotate,
    sample,
    set,
    status,
    stop,
    token,
    tokenize,
    top,
)
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.exit_codes import exit_code_of
from atoll.protocol.text import clean

# Above is what `atoll --help` says. Below, a verb is found and run, and an error becomes one line and an exit code.


class Verb(Protocol):
    """What each verb's module offers. Its docstring is its help, the first line of which stands in the list of verbs.
    Heavy imports (torch, grpc) belong inside `run`."""

    __name__: str
    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """The exit code. Raises AtollError."""


_MODULES: tuple[Verb, ...] = (
    plan, init, coordinator, invite, token, join, doctor, node, relay, status, top, events, plot, health, pause,
    resume, set, stop, rollback, drain, evict, ban, rotate, reset, audit, evidence, backup, gc, demo, tokenize, sample,
    export,
)  # fmt: skip
VERBS = {verb.__name__.rpartition(".")[2]: verb for verb in _MODULES}


class _VerbParser(argparse.ArgumentParser):
    """What is left over would be reported by the parser of `atoll`, with its usage and not the verb's."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def make_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """With the arguments of this verb alone; of all, which takes a quarter of a second of a core, if none has that
    name."""
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="tracebacks of errors, and debug lines in logs"
    )
    description, _, epilog = (__doc__ or "").partition("\n\n")
    common: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "parents": [debug],
        "allow_abbrev": False,
    }
    parser = argparse.ArgumentParser(prog="atoll", description=description, epilog=epilog, **common)
    parser.add_argument("--version", action="version", version=f"atoll {__version__}")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_VerbParser)
    for name, module in VERBS.items():
        description, _, epilog = (module.__doc__ or "").partition("\n\n")
        line = description[:1].lower() + description[1:].removesuffix(".")
        of_verb = commands.add_parser(name, help=line, description=description, epilog=epilog, **common)
        if verb not in VERBS or verb == name:
            module.add_arguments(of_verb)
    return parser


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of `atoll node` or `join`, and the user's command behind `--`; argparse would mix up the two."""
    if _verb_of(argv) not in ("node", "join") or "--" not in argv:
        return list(argv), []
    cut = list(argv).index("--")
    if cut == len(argv) - 1:
        raise ConfigError("nothing stands behind `--`: write a script there, or leave it out for the built-in trainer")
    return list(argv[:cut]), list(argv[cut + 1 :])


def _verb_of(argv: Sequence[str]) -> str:
    return next((word for word in argv if not word.startswith("-")), "")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        own, command = split_command(words)
    except ConfigError as error:
        print(f"atoll {_verb_of(words)}: {error}", file=sys.stderr)
        return error.exit_code
    args = make_parser(_verb_of(own)).parse_args(own)
    args.debug = getattr(args, "debug", False)
    args.command, args.words = command, own
    if argv is None:  # else the process, and its environment, is somebody else's
        if not args.debug:
            # gRPC's C library writes lines of its own to stderr; what matters arrives as an error here.
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        if isinstance(sys.stdout, io.TextIOWrapper):
            with suppress(OSError):  # its file was exchanged for a pipe
                sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal that has not all characters
    try:
        code = VERBS[args.verb].run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        return 0 if _is_unread() else _failed(args, error)  # `atoll status | head`
    except (AtollError, OSError) as error:
        return _failed(args, error)
    except KeyboardInterrupt as error:
        return exit_code_of(error)
    finally:
        _drop_unwritten()


def _is_unread() -> bool:
    """Whether the reader of our output has gone."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError):
        return False
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in output.poll(0))


def _drop_unwritten() -> None:
    """What our output does not take: Python would try again as it exits, and change the exit code."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _failed(args: argparse.Namespace, error: Exception) -> int:
    if args.debug:
        traceback.print_exception(error)
    print(f"atoll {args.verb}: {' '.join(clean(str(error)).split())}", file=sys.stderr)
    return exit_code_of(error)


if __name__ == "__main__":
    sys.exit(main())
