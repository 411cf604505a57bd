"""Write a commented run.toml.

examples:
  atoll init                                    a run that only this machine can reach
  atoll init --listen 0.0.0.0:7700 --data local --min-sites 2
  atoll init big/run.toml --model small --steps 20000 --sync-every 100
  atoll init --preset sparseloco                over a very thin link
  atoll init --from-hf llama-folder             of the size of pretrained weights, to start from them
"""

from __future__ import annotations

import argparse
import datetime
import secrets
from dataclasses import asdict
from pathlib import Path

from atoll.cli.flags import Flag, add_flags, given
from atoll.protocol.disk import Disk, disk_error
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.presets import PRESETS
from atoll.protocol.run_length import too_short
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import too_many_bundled
from atoll.protocol.sync_settings import SyncSettings

RUN_FLAGS = {
    "preset": Flag("NAME"),
    "data": Flag("NAME"),
    "steps": Flag("N"),
    "tokens": Flag("N"),
    "min_sites": Flag("N"),
    "time_limits": Flag("PRESET"),
}
SYNC_FLAGS = {"every": Flag("H", "--sync-every"), "codec": Flag()}
EVALUATED_STEPS = 200
"""From one evaluation of the built-in trainer to the next, about: it takes as long as one and a third of a step."""


def presets_in_words() -> str:
    lines = [f"  {name:<13} {preset.what} ({preset.source})" for name, preset in PRESETS.items()]
    return "\n".join(["presets, for --preset and run.preset:", *lines])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", type=Path, default=Path("run.toml"), help="file or folder (default: run.toml)"
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="where the coordinator listens; without it, where only this machine can reach it",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--model",
        metavar="SIZE",
        help="nano, tiny, small or tiny-moe, or a larger one that `atoll plan --help` lists (default: tiny)",
    )
    size.add_argument(
        "--from-hf", type=Path, metavar="DIR", help="the model of this folder of Hugging Face's transformers (Llama)"
    )
    parser.epilog = f"{parser.epilog or ''}\n\n{presets_in_words()}"
    add_flags(parser, RunSettings, RUN_FLAGS, set_only=True)
    add_flags(parser, SyncSettings, SYNC_FLAGS, set_only=True)
    parser.add_argument("--name", metavar="NAME", help="beginning of the run's id (default: the folder's name)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> int:
    path: Path = args.path / "run.toml" if args.path.is_dir() else args.path
    text, settings = make_file(args, path)
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file that could be replaced; name another one")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it, or name another file")
    target = path.resolve() if path.is_symlink() else path
    try:
        if not args.force:
            target.open("xb").close()  # of two at once one makes it
        Disk().write_whole(target, text.encode(), mode=0o644)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; --force replaces it") from None
    except OSError as error:
        raise disk_error(error, path) from error
    except HostError:
        if not args.force:
            target.unlink(missing_ok=True)
        raise
    if args.from_hf is None:
        print(f"wrote {path}; look it over, then: atoll coordinator {path}")
    else:
        print(
            f"wrote {path}; look it over, then: atoll coordinator {path} --resume {args.from_hf}, and on the first "
            f"site: atoll node --from {args.from_hf} ...\n"
            "the built-in trainer reads text as bytes, tokens 0 to 255: for the tokens of that folder's tokenizer, "
            f"atoll tokenize --tokenizer {args.from_hf} ..., and --data"
        )
    if advice := too_many_bundled(settings.sync.codec_up, settings.min_sites):
        print(advice)
    if advice := too_short(settings):
        print(advice)
    return 0


def make_file(args: argparse.Namespace, path: Path) -> tuple[str, RunSettings]:
    """The text of a run.toml for the flags given, and what it says. Raises ConfigError."""
    import tomllib

    from atoll.cli.config import OPTIONS, check_preset, run_settings
    from atoll.cli.template import render
    from atoll.node.dataplane.hugging_face import read_model
    from atoll.protocol.addresses import parse_address
    from atoll.protocol.model_settings import MODELS, TrainerSettings
    from atoll.protocol.strict import nearest

    if args.listen is not None:
        parse_address(args.listen)
    length = {"steps": 0} if args.tokens is not None else {}
    tables = {
        "run": {"run_id": new_run_id(args.name or path.resolve().parent.name)} | length | given(args, RUN_FLAGS),
        "sync": given(args, SYNC_FLAGS),
        "coordinator": given(args, ["listen"]),
    }
    if args.preset is not None:
        check_preset("--preset", args.preset)
    if args.model is not None:
        if args.model not in MODELS:
            raise ConfigError(f'--model "{args.model}"; {nearest(args.model, MODELS)}')
        tables["model"] = asdict(MODELS[args.model])
    if args.from_hf is not None:
        model = read_model(args.from_hf)
        tables["model"] = asdict(model)
        tables["trainer"] = {"sequence": min(TrainerSettings().sequence, model.max_sequence)}
    settings = run_settings(tomllib.loads(render(tables)), "the new file", OPTIONS)
    every = max(1, EVALUATED_STEPS // settings.sync.window_steps(0, 0))
    tables["trainer"] = {**tables.get("trainer", {}), "evaluate_every": every}
    text = render(tables)
    return text, run_settings(tomllib.loads(text), "the new file")


def new_run_id(name: str) -> str:
    """`name-20260131-4f2a`: unique enough to never be used twice, and legible."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).strip("._-") or "run"
    today = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d")
    return f"{plain[:40]}-{today}-{secrets.token_hex(3)}"
