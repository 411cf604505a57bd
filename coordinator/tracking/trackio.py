"""Trackio: curves are metrics, named `run/...` and `sites/NAME/...`, in a database below the folder, or in a Space of
Hugging Face's."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.coordinator.tracking.feed import MissingLibrary
from atoll.coordinator.tracking.tracker import About, Point, flat

LOCAL = "local"
FOLDER = "TRACKIO_DIR"
"""Of the environment, which it reads as it is imported; a person's own counts."""


class TrackioTracker:
    """A later start of the coordinator goes on with the run of that name."""

    def __init__(self, where: str, project: str, about: About, folder: Path) -> None:
        os.environ.setdefault(FOLDER, str(folder))
        try:
            import trackio
        except ImportError as error:
            raise MissingLibrary(f"pip install 'atoll[trackio]' ({error})") from None
        self._run: Any = trackio.init(
            project=project,
            name=about.run_id,
            space_id=None if where == LOCAL else where,
            config=flat(about.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, points: Sequence[Point]) -> None:
        at: dict[int, dict[str, float]] = defaultdict(dict)
        for point in points:
            at[point.step][point.name] = point.value
        for step, values in sorted(at.items()):
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
