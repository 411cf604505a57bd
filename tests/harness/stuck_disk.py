"""A disk that is stuck from some moment on: a thread that waits for it never comes back, and no signal ends it."""

from __future__ import annotations

import os
from pathlib import Path

_CODE = """
import os, pathlib, threading
_stuck = pathlib.Path({stuck!r})
def _may_be_stuck(plain):
    def sync(descriptor):
        if _stuck.exists() and threading.current_thread() is not threading.main_thread():
            _stuck.with_suffix(".seen").touch()
            threading.Event().wait()
        plain(descriptor)
    return sync
os.fsync, os.fdatasync = _may_be_stuck(os.fsync), _may_be_stuck(os.fdatasync)
"""


class StuckDisk:
    """For a process that is started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._stuck = folder / "disk.stuck"
        place = folder / "stuck-disk"
        place.mkdir()
        (place / "sitecustomize.py").write_text(_CODE.format(stuck=str(self._stuck)))
        self.environment = {"PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}

    def begin(self) -> None:
        self._stuck.touch()

    @property
    def is_waited_for(self) -> bool:
        return self._stuck.with_suffix(".seen").exists()
