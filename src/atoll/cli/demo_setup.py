"""What the demo runs: its settings, its folder, the command line of each process."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

from atoll.cli.config import OPTIONS, default_store, run_settings
from atoll.cli.demo import DemoOptions
from atoll.cli.demo_script import script_command
from atoll.cli.join import enrol
from atoll.cli.template import render
from atoll.coordinator.admin import ask
from atoll.node.parallel.settings import ALONE, OTHER_WORDS, ParallelSettings, check_batch, check_model, parse
from atoll.node.worker.token_index import packed_among
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import MODELS, ON_ONE_MACHINE
from atoll.protocol.settings import RunSettings
from atoll.protocol.strict import nearest
from atoll.protocol.trust.invites import from_text

DEFAULT_FOLDER = Path("atoll-demo")
MARKER = "demo.lock"
NAMES = ("amsterdam", "berlin", "cairo", "delhi", "essen", "fukuoka", "geneva", "helsinki")
FEWEST_COMMITS_TO_KILL = 6
EVALUATIONS = 5
"""Of the outer parameters, about, while it trains."""


def site_names(num_sites: int) -> tuple[str, ...]:
    return tuple(NAMES[i] if i < len(NAMES) else f"site-{i + 1}" for i in range(num_sites))


def demo_settings(options: DemoOptions) -> RunSettings:
    """Raises ConfigError for options that do not make a run."""
    if not 1 <= options.num_sites <= 64:
        raise ConfigError(f"--sites {options.num_sites}: choose 1 to 64")
    if options.model not in ON_ONE_MACHINE:
        large = " is too large for sites on one machine" if options.model in MODELS else ""
        raise ConfigError(f'--model "{options.model}"{large}; {nearest(options.model, ON_ONE_MACHINE)}')
    for path in options.data:
        if not path.exists():
            raise ConfigError(f"--data {path}: no such file or folder")
    if options.script and options.data:
        raise ConfigError("--data is of the built-in trainer; a script of --script reads its own")
    if options.compare and not options.script:
        raise ConfigError("--compare is for --script; the built-in demo has recorded figures of one site alone")
    model = MODELS[options.model]
    if (packed := packed_among([str(path) for path in options.data])) is not None:
        model = replace(model, vocab_size=max(model.vocab_size, packed.index.vocab_size))
    run = {
        "run_id": f"demo-{secrets.token_hex(4)}",
        "preset": options.preset or "",
        "seed": options.seed,
        "data": "local" if options.script else "demo" if options.data else "stdlib",
        "steps": options.steps,
        "min_sites": options.num_sites,
        "time_limits": "local",
    }
    asked = {"every": options.sync_every, "codec": options.codec}
    sync = {key: value for key, value in asked.items() if value is not None}
    if options.script:
        script_command(options.script)
    settings = run_settings({"run": run, "model": asdict(model), "sync": sync}, "the demo's run", OPTIONS)
    for layout in layouts(options):
        check_batch(layout, settings.trainer.batch_size)
        check_model(layout, settings.model)
    commits = expected_commits(settings)
    settings = replace(settings, trainer=replace(settings.trainer, evaluate_every=max(1, commits // EVALUATIONS)))
    if options.kill and options.num_sites < 2:
        raise ConfigError("--kill needs at least two sites, so that one goes on")
    if options.kill and commits < FEWEST_COMMITS_TO_KILL:
        raise ConfigError(
            f"--kill needs at least {FEWEST_COMMITS_TO_KILL} syncs to show a return, these are "
            f"{commits}; raise --steps or lower --sync-every"
        )
    return settings


def layouts(options: DemoOptions) -> tuple[ParallelSettings, ...]:
    """Of the sites, in order. Raises ConfigError."""
    if not options.layouts.strip():
        return (ALONE,) * options.num_sites
    listed = [text.strip() for text in options.layouts.split(",")]
    if len(listed) != options.num_sites:
        raise ConfigError(
            f"--layouts {options.layouts} names {len(listed)} of {options.num_sites} sites; say --sites {len(listed)}, "
            "or name each, with + within one: 1,fsdp=2,tp=2+pp=2"
        )
    return tuple(_layout(text) for text in listed)


def _layout(text: str) -> ParallelSettings:
    if text == "1":
        return ALONE
    if not text:
        raise ConfigError("--layouts: a site without a layout; 1 is one rank")
    parts = (part.partition("=") for part in text.split("+"))
    try:
        found = parse(",".join(f"{OTHER_WORDS.get(name, name)}{equals}{size}" for name, equals, size in parts))
    except ConfigError as error:
        raise ConfigError(f"--layouts {text}: {error}") from None
    if found.takes_the_rest and "-1" in text:  # without any size there is one rank
        raise ConfigError(f"--layouts {text}: the number of ranks follows from the layout; give each size a number")
    return found.resolved(found.num_ranks(1))


def expected_commits(settings: RunSettings) -> int:
    """One at each boundary before the end, and one of all fragments there."""
    sync, step, number = settings.sync, 0, 0
    while step < settings.steps:
        step += sync.window_steps(number % sync.fragments, number)
        number += 1
    return number


def prepare_folder(folder: Path | None) -> Path:
    """An empty folder: the default one is emptied if a demo made it. Raises ConfigError rather than delete others'."""
    target = (folder or DEFAULT_FOLDER).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if folder is not None or not (target / MARKER).is_file():
            raise ConfigError(f"{target} is there, and no demo to replace; choose another with --keep DIR")
        _lock(target / MARKER)
        shutil.rmtree(target)
    (target / "logs").mkdir(parents=True)
    _lock(target / MARKER)
    return target


def _lock(marker: Path) -> None:
    """Of the demo that is made in its folder, for the life of this process."""
    try:
        fcntl.lockf(os.open(marker, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"a demo is using {marker.parent}; give this one another folder with --keep DIR") from None


def write_run_file(settings: RunSettings, path: Path) -> None:
    table = asdict(settings)
    parts = {key: value for key, value in table.items() if isinstance(value, dict)}
    run = {key: value for key, value in table.items() if key not in parts}
    path.write_text(
        render({"run": run, **parts, "coordinator": {"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"}}),
        encoding="utf-8",
    )


def _atoll(*words: str) -> list[str]:
    return [sys.executable, "-m", "atoll", *words]


def coordinator_command(folder: Path) -> list[str]:
    return _atoll("coordinator", str(folder / "run.toml"))


def store_path(folder: Path) -> Path:
    return default_store(folder / "run.toml")


def let_in(folder: Path, name: str) -> None:
    """The site gets an invite, and joins by it. Raises HostError, PeerError or RefusedError."""
    invite = from_text(ask(store_path(folder), "invite", role="site", name=name))
    enrol(invite, folder / "sites" / name)


def node_command(options: DemoOptions, folder: Path, name: str) -> list[str]:
    command = _atoll("node", "--threads", "1")
    layout = layouts(options)[site_names(options.num_sites).index(name)]
    if layout != ALONE:
        command += ["--parallel", str(layout)]
    command += ["--home", str(folder / "sites" / name), "--save", str(model_folder(folder, name))]
    if options.data:
        command += ["--data", *(str(path) for path in options.data)]
    if options.debug:
        command.append("--debug")
    return [*command, "--", *script_command(options.script)] if options.script else command


def model_folder(folder: Path, name: str) -> Path:
    """The first site's is the one that people are pointed to; all hold the same."""
    return folder / "model" if name == NAMES[0] else folder / "sites" / name / "model"
