"""The saved model that is the run's best so far, under a name of its own: `model.best` beside `model`. Its files are
the saved model's own (hard links), so that it takes no more room until that one goes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from atoll.node.dataplane.earlier_models import commit_of, earlier_of
from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, aside_of, place_for
from atoll.protocol.disk import disk_error, exchange_names, sync_folder


def best_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.best")


def keep(folder: Path, commit: int, run_id: str) -> Path | None:
    """Where the model of that commit is now; None if it is neither in `folder`, beside it, nor written to come there.
    Raises HostError."""
    folder = place_for(folder)
    place = best_of(folder)
    if commit_of(place, run_id) == commit:
        return place
    saved = (path for path in (folder, earlier_of(folder, commit), aside_of(folder)))
    source = next((path for path in saved if commit_of(path, run_id) == commit), None)
    if source is None:
        return None
    aside = place.with_name(f"{place.name}.new")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for path in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST_NAME):  # which is last: it is whole
            _link(path, aside / path.name)
        sync_folder(aside)
        if not place.exists():
            os.replace(aside, place)
        elif not exchange_names(aside, place):
            shutil.rmtree(place)
            os.replace(aside, place)
        sync_folder(place.parent)
    except OSError as error:
        raise disk_error(error, place) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return place


def drop(folder: Path, after: int, run_id: str) -> None:
    """Of a later commit than that, which is void."""
    place = best_of(place_for(folder))
    if (commit := commit_of(place, run_id)) is not None and commit > after:
        shutil.rmtree(place, ignore_errors=True)


def _link(path: Path, to: Path) -> None:
    """A copy, on a file system that has no links."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)
