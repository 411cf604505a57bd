"""The files of checkpoints in one folder: of which start, step and rank, as their names say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.local_protocol import CheckpointId
from atoll.protocol.errors import ConfigError, HostError

UNREADABLE = (ConfigError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, RecursionError)
"""What comes of a damaged header."""
_NAME = re.compile(r"rank-(\d{1,9})-of-(\d{1,9})\.(\d{1,19})-(\d{1,19})-(\d{1,19})\.(?:safetensors|new)")


@dataclass(slots=True)
class Files:
    """Of one checkpoint, by rank."""

    world: int
    paths: dict[int, Path] = field(default_factory=dict)

    def are_all(self, here: range, world: int) -> bool:
        """That this host may have: those of its own ranks, where there are others and the layout has not changed."""
        return self.paths.keys() >= set(here if self.world == world else range(self.world))


def listed(folder: Path, kind: str = "safetensors") -> dict[CheckpointId, Files]:
    """What lies in the folder; "new": what is being written."""
    found: dict[CheckpointId, Files] = {}
    for path in folder.glob(f"rank-*.{kind}"):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            rank, world, incarnation, generation, step = (int(n) for n in match.groups())
            item = CheckpointId(incarnation=incarnation, generation=generation, step=step)
            found.setdefault(item, Files(world)).paths[rank] = path
    return found


def path_of(folder: Path, item: CheckpointId, rank: int, world: int) -> Path:
    start = f"{item.incarnation}-{item.generation}"
    return folder / f"rank-{rank}-of-{world}.{start}-{item.step}.safetensors"


def remove(path: Path | None) -> None:
    with suppress(OSError):  # a file too many does no harm
        if path is not None:
            path.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises HostError with the path for whatever is wrong with the file."""
    try:
        yield
    except (HostError, OSError, *UNREADABLE) as error:
        raise HostError(f"{path}: {error}") from None
