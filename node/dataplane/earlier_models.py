"""Saved models of earlier commits, beside the newest: `model.commit-40` beside `model`."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from atoll.node.dataplane.saved_manifest import load_manifest
from atoll.protocol.errors import ConfigError

log = logging.getLogger("atoll.node")


def earlier_of(folder: Path, commit: int) -> Path:
    return folder.with_name(f"{folder.name}.commit-{commit}")


def retire(former: Path, folder: Path, num_earlier: int) -> None:
    """`former`: what was in `folder` until the model that is there now. It is kept as one of `num_earlier` models of
    the same run, of commits before that of `folder`; what else there is of the run beside it is removed: the oldest,
    and commits that became void. What is no saved model of the run is removed if it is `former`, else left, also where
    `former` would go.

    Raises OSError, ConfigError if `folder` holds no saved model.
    """
    if num_earlier:
        newest = load_manifest(folder)
        if (commit := commit_of(former, newest.run_id)) is not None:
            _keep(former, earlier_of(folder, commit), commit, newest.run_id)
        found = sorted(_earlier(folder, newest.run_id), reverse=True)
        valid = [path for commit, path in found if commit < newest.commit][:num_earlier]
        for _, path in found:
            if path not in valid:
                shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)


def _keep(former: Path, place: Path, commit: int, run_id: str) -> None:
    if os.path.lexists(place) and commit_of(place, run_id) is None:
        log.warning("the model of commit %d is not kept: %s is no saved model of run %s", commit, place, run_id)
        return
    shutil.rmtree(place, ignore_errors=True)  # of a void commit with the same number
    os.replace(former, place)


def _earlier(folder: Path, run_id: str) -> list[tuple[int, Path]]:
    name = re.compile(re.escape(folder.name) + r"\.commit-[0-9]{1,20}")
    paths = [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]
    return [(commit, path) for path in paths if (commit := commit_of(path, run_id)) is not None]


def commit_of(folder: Path, run_id: str) -> int | None:
    """Of the saved model that is there; None if it is none, or of another run."""
    try:
        saved = load_manifest(folder)
    except ConfigError:
        return None
    return saved.commit if saved.run_id == run_id else None
