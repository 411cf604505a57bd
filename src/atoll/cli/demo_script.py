"""The demo of a script of one's own: its command, and what its losses say."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLosses:
    """Training losses, the mean over all sites of a window's steps; None where the script gives site.step no loss."""

    first: float | None
    last: float | None
    alone: float | None = None
    """The last one of a single site that trained as many steps; None without --compare."""
    alone_elapsed_s: float | None = None


def script_command(text: str) -> list[str]:
    """Of `--script "train.py --lr 3e-4"`: script, by its whole path, and arguments. Raises ConfigError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--script {text}: {error}") from None
    if not words or not Path(words[0]).expanduser().is_file():
        raise ConfigError(f"--script {text}: no such script; arguments go into the same quotes, behind it")
    return [str(Path(words[0]).expanduser().absolute()), *words[1:]]


def losses_of(means: Sequence[float | None], alone: Sequence[float | None] = (), alone_s: float = 0.0) -> ScriptLosses:
    """Of the commits of a run, in their order."""
    known, of_one = ([loss for loss in losses if loss is not None] for losses in (means, alone))
    return ScriptLosses(
        first=known[0] if known else None,
        last=known[-1] if known else None,
        alone=of_one[-1] if of_one else None,
        alone_elapsed_s=alone_s if alone else None,
    )


def loss_lines(losses: ScriptLosses, num_sites: int) -> list[str]:
    if losses.first is None:
        return ["the script gives site.step no loss=, so there is none to show"]
    rows = [("first window", losses.first), (f"last window, {num_sites} sites", losses.last)]
    if losses.alone_elapsed_s is not None:
        rows.append((f"last window, one site alone, same steps, {losses.alone_elapsed_s:.0f} s", losses.alone))
    width = max(len(what) for what, _ in rows)
    return [
        "training loss, mean of a window",
        *(f"  {what:<{width}}   {'-' if loss is None else f'{loss:.3f}'}" for what, loss in rows),
    ]


def loss_failures(losses: ScriptLosses) -> list[str]:
    if losses.first is None or losses.last is None or losses.last < losses.first:
        return []
    return [f"the training loss did not fall: {losses.first:.3f} in the first window, {losses.last:.3f} in the last"]
