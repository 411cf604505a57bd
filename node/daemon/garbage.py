"""What nothing needs any more in the homes of this machine's nodes: what killed nodes left, and what a run that has
ended leaves beside the saved model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.node.daemon.home import LOCK, HomeFolders, socket_folder_of
from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, aside_of, former_of
from atoll.protocol.disk import disk_error
from atoll.protocol.errors import ConfigError, HostError


@dataclass(frozen=True, slots=True)
class Garbage:
    path: Path
    why: str
    num_bytes: int


def homes_below(folder: Path) -> list[Path]:
    """Of RUN/NAME below it, where a node's own folder lies by default."""
    return sorted(lock.parent for lock in folder.glob(f"*/*/{LOCK}"))


def check_home(folder: Path) -> None:
    """Raises ConfigError."""
    if not (folder / LOCK).is_file():
        raise ConfigError(f"{folder} is no home of a node; name the folder that its --home says")


def garbage_in(home: Path) -> list[Garbage]:
    """While the home is locked. Raises HostError."""
    try:
        return [Garbage(path, why, size) for path, why in _found(HomeFolders(home)) if (size := size_of(path))]
    except OSError as error:
        raise disk_error(error, home) from error


def _found(home: HomeFolders) -> Iterator[tuple[Path, str]]:
    ended = home.has_ended()
    if ended:
        yield from ((path, "a site goes on with it, and the run has ended") for path in home.of_the_run)
    for kind in (home.spill_folder, home.average_error_folder):
        for path in (kind, *sorted(home.folder.glob(f"{kind.name}-*"))):
            yield path, "a killed node held it as a reducer"
    yield home.kept_folder, "a killed node kept it for audits"
    for folder in (home.folder, *(() if ended else home.of_the_run)):
        yield from ((path, "half written") for path in sorted(folder.glob("*.new")) if path.is_file())
    model = home.folder / "model"
    if (model / MANIFEST_NAME).is_file():  # else what is beside its place may be the only one
        yield aside_of(model), "a model that was not put in place"
        yield former_of(model), "the model before the saved one"
    if (sockets := socket_folder_of(home.folder)) is not None:
        yield sockets, "of a node that was killed"


def size_of(path: Path) -> int:
    """What it takes of its disk; of a folder all that is in it, and 0 if that is nothing. Raises OSError."""
    if not path.is_dir():
        return os.lstat(path).st_blocks * 512 if path.exists() else 0
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512 or 512
        for folder, _, names in os.walk(path)
        for name in names
    )


def delete(garbage: Garbage) -> None:
    """A folder is emptied: it may be a link, or another disk. Raises HostError."""
    path = garbage.path
    try:
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        for child in path.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}; {garbage.why}, it can be removed by hand") from error
