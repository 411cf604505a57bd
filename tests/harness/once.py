"""What is made once in a run of the tests, whichever of pytest's processes needs it first; the others wait for it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

WORKER = "PYTEST_XDIST_WORKER"
"""Its variable in each of several processes, whose folders lie beside each other."""


def once_a_run(own_folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of that name, in which `make` was called. `own_folder`: pytest's, of this process. If it raises, the
    next one tries again."""
    of_the_run = own_folder.parent if WORKER in os.environ else own_folder
    folder, is_made = of_the_run / name, of_the_run / f"{name}.made"
    with (of_the_run / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder
