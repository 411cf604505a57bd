"""Serve a run: membership, plans, commits.

Needs neither torch nor a GPU. Whoever is to come in needs an invite (`atoll invite`). Its store (run.db beside the
file) lets it go on after a crash: start it again.

examples:
  atoll coordinator run.toml
  atoll coordinator run.toml --listen 0.0.0.0:7700
  atoll coordinator run.toml --insecure                              # in plain text, on this machine alone
  atoll coordinator run.toml --insecure-network --listen 10.0.0.1:7700     # and on a network that is trusted
  atoll coordinator run.toml --restore
      the database was lost, and an old copy of it, with run.db.trust, was put in its place
  atoll coordinator more.toml --resume saved/manifest.json
      a new run (another run_id, more steps) from a saved model; its first site brings the model:
      atoll join berlin.invite --from saved
      The same with a folder of Hugging Face's (Llama); see `atoll init --from-hf`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.flags import given
from atoll.coordinator.limits import CONNECTIONS_PER_ADDRESS, REFILL_S
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.outer_settings import AUTO
from atoll.protocol.text import LOG_FORMATS

if TYPE_CHECKING:
    from atoll.coordinator.config import CoordinatorConfig, Restore
    from atoll.node.dataplane.saved_manifest import SavedManifest
    from atoll.protocol.settings import RunSettings


FLAGS = (
    "listen",
    "advertise",
    "insecure",
    "insecure_network",
    "connections_per_address",
    "http_listen",
    "http_name",
    "trust",
)
"""Of fields of CoordinatorConfig."""
MORE_THAN_HALF = "more than half"
"""Of the sites; `--restore` without a number."""


def _num_sites(text: str) -> int | str:
    return text if text == MORE_THAN_HALF else int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the run's file, see `atoll init`")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where nodes connect (port 0: any free one)")
    parser.add_argument("--advertise", metavar="HOST:PORT", help="where nodes reach it, for invites")
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="plain text, and no invites, on this machine alone: each of its users can join",
    )
    parser.add_argument(
        "--insecure-network",
        action="store_true",
        default=None,
        help="the same for other machines too: for a network on which everybody is trusted",
    )
    parser.add_argument(
        "--connections-per-address",
        type=int,
        metavar="N",
        help=f"from one address, on which nobody has shown a certificate yet (default: {CONNECTIONS_PER_ADDRESS}): as "
        f"many at once, and then as many new ones in {REFILL_S:g} s. Sites that are in do not count, so hundreds may "
        "share an address behind a NAT; raise it if more than that start at the same moment behind one",
    )
    parser.add_argument(
        "--http-listen",
        metavar="HOST:PORT",
        help="status page and metrics (default: on this machine alone); elsewhere by https, for whoever has a token "
        "(`atoll token --viewer NAME`)",
    )
    parser.add_argument("--http-name", metavar="NAME", help="of this machine, by which browsers come to them")
    parser.add_argument(
        "--store",
        metavar="PATH|URL",
        help="the run's database: a file (default: run.db beside the run's file), or postgresql://USER@HOST/DATABASE "
        "without a password, which several coordinators may share. Socket and root lie beside the file, also where the "
        "run's file names such a database",
    )
    parser.add_argument(
        "--trust",
        metavar="DIR",
        help="the folder of the run's root (default: beside the database, made at its first start)",
    )
    parser.add_argument(
        "--restore",
        type=_num_sites,
        nargs="?",
        const=MORE_THAN_HALF,
        metavar="SITES",
        help="the database is an old copy (`atoll backup`): sites say first what they have kept of the time since; so "
        "many have to (default: more than half of those that were in the run)",
    )
    parser.add_argument(
        "--tensorboard",
        metavar="DIR",
        help="write the curves of the run and of its sites there, for TensorBoard; "
        "other tools are in [track] of the run's file",
    )
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="of the log (default: text); as json an object a line, with time, level, run, logger, sync and message",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR/manifest.json",
        help="start from this saved model, or from a folder of Hugging Face's (Llama)",
    )


def run(args: argparse.Namespace) -> int:
    import logging

    from atoll.coordinator.main import NewestSync, serve, to_stdout
    from atoll.protocol import transport
    from atoll.protocol.text import CleanFormatter, JsonFormatter

    def formatter(run_id: str) -> logging.Formatter:
        if args.log_format == "json":
            return JsonFormatter(lambda: newest.sync, run=run_id)
        return CleanFormatter(f"%(asctime)s %(levelname).1s {run_id} %(sync)s %(message)s", lambda: newest.sync)

    newest = NewestSync()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter("-"))
    logging.basicConfig(level=logging.DEBUG if args.debug else logging.INFO, handlers=[handler], force=True)
    settings, config, parent = prepare(args)
    handler.setFormatter(formatter(settings.run_id))
    say = logging.getLogger("atoll.coordinator").info if args.log_format == "json" else to_stdout
    restore = _restore(args.restore)
    transport.run(serve(config, settings, resume_parent=parent, restore=restore, newest=newest, say=say))
    return 0


def _restore(given: int | str | None) -> Restore | None:
    """Raises ConfigError."""
    from atoll.coordinator.config import Restore

    if given is None:
        return None
    if isinstance(given, str):
        return Restore()
    if given < 1:
        raise ConfigError(f"--restore {given}: one site has to say what it kept, or without a number most of them")
    return Restore(given)


def prepare(args: argparse.Namespace) -> tuple[RunSettings, CoordinatorConfig, dict[str, Any] | None]:
    """What the file and the flags ask for, and the parent of a resumed run. Raises ConfigError."""
    from atoll.cli.config import default_store, load_run
    from atoll.coordinator.config import DATABASES
    from atoll.node.dataplane import hugging_face
    from atoll.node.dataplane.saved_manifest import load_manifest

    flags = given(args, FLAGS)
    if args.restore is not None and args.resume is not None:
        raise ConfigError("--restore is for a copy of the run's own database, and --resume for a new run: choose one")
    _restore(args.restore)
    store_path = default_store(args.path)
    if args.store is not None and args.store.startswith(DATABASES):
        flags["store"] = args.store
    elif args.store is not None:
        store_path = Path(args.store)
    track = given(args, ("tensorboard",))
    settings, config = load_run(args.path, coordinator_flags=flags, track_flags=track, store_path=store_path)
    if args.resume is None:
        return settings, config, None
    pretrained = args.resume.parent if args.resume.name == hugging_face.CONFIG_NAME else args.resume
    if hugging_face.is_folder(pretrained):
        hugging_face.check_same(pretrained, settings.model)
        return settings, config, {"run_id": pretrained.resolve().name, "commit": 0, "run_step": 0, "run_tokens": 0}
    saved = load_manifest(args.resume)
    parent: dict[str, Any] = {
        "run_id": saved.run_id,
        "commit": saved.commit,
        "run_step": saved.run_step,
        "run_tokens": saved.run_tokens,
    }
    if settings.run_id == parent["run_id"]:
        raise ConfigError(
            f'{args.path}: run.run_id = "{parent["run_id"]}" is the run that saved {args.resume}; a resumed run needs '
            "an id and a store of its own: copy the file, and change run_id and the run's length in the copy"
        )
    if 0 < settings.steps <= parent["run_step"] or 0 < settings.tokens <= parent["run_tokens"]:
        raise ConfigError(
            f"{args.resume} is at step {parent['run_step']} and {parent['run_tokens']} tokens, the end of this run; "
            f"raise run.steps or run.tokens in {args.path}"
        )
    if settings.outer.optimizer == AUTO:
        settings = as_before(settings, saved, args.resume)
    return settings, config, parent


def as_before(settings: RunSettings, saved: SavedManifest, path: Path) -> RunSettings:
    """With the outer optimizer of the run that is resumed, whose slots are saved: `auto` chooses no other one. Raises
    ConfigError if the saved model does not say it, and has slots."""
    from atoll.protocol.outer import resolved
    from atoll.protocol.outer_settings import FOR_GRADIENTS, OuterSettings
    from atoll.protocol.settings import read_settings

    if settings.sync.steps_at_nodes:
        return resolved(settings)  # with other slots than are saved the sites refuse it
    try:
        before, _ = read_settings(json.dumps(saved.info["settings"]))
    except (InvalidMessage, LookupError, ValueError, TypeError) as error:
        if not saved.slots:
            return resolved(settings, OuterSettings(optimizer="sgd"))
        raise ConfigError(
            f"{path} does not say which outer optimizer its run had ({error}): say outer.optimizer in the run's file"
        ) from None
    if before.outer.optimizer in FOR_GRADIENTS:
        raise ConfigError(
            f"the run that saved {path} had outer.optimizer = {before.outer.optimizer}, which is for gradients: say "
            "outer.optimizer in the run's file"
        )
    return resolved(settings, before.outer)
