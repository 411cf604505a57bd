"""Weights & Biases: curves are metrics over `step`, named `run/...` and `sites/NAME/...`. Without a network its files
lie in `wandb` below the folder, and `wandb sync` sends them later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from atoll.coordinator.tracking.feed import MissingLibrary
from atoll.coordinator.tracking.tracker import About, Point

STEP, TOKENS = "step", "tokens"


class WandbTracker:
    """A later start of the coordinator goes on with the run of that id."""

    def __init__(self, mode: str, project: str, about: About, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingLibrary(f"pip install 'atoll[wandb]' ({error})") from None
        folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
        )  # of this process, which is not what trains
        self._run: Any = wandb.init(
            mode=cast(Any, mode),  # as the settings have checked
            project=project,
            id=about.run_id,
            name=about.run_id,
            config=dict(about.settings),
            dir=str(folder),
            resume="allow",
            settings=quiet,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, points: Sequence[Point]) -> None:
        at: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
        for point in points:
            at[point.step, point.run_tokens][point.name] = point.value
        for (step, tokens), values in sorted(at.items()):
            self._run.log({STEP: step, TOKENS: tokens, **values})

    def close(self) -> None:
        self._run.finish()
