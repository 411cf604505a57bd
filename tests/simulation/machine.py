"""What a simulated process is given in place of its machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.daemon.deposit_box import DepositBox
from atoll.protocol.disk import PRIVATE_FILE, Disk
from atoll.protocol.errors import HostError
from atoll.protocol.machine import Machine
from atoll.protocol.resources import Resources

PLENTY_BYTES = 1 << 40


class SimDisk(Disk):
    """Files are real, in the folder of the schedule; how much room there is, is not."""

    def __init__(self) -> None:
        self.is_full = False
        self.is_short = False
        """There is no room for contributions."""
        self.synced: set[str] = set()
        """Names of files that a power cut leaves as they are."""

    def allocate(self, path: Path, size_bytes: int) -> None:
        self.look(path)
        super().allocate(path, size_bytes)

    def write_whole(self, path: Path, data: bytes, *, fsync: bool = False, mode: int = PRIVATE_FILE) -> None:
        self.look(path)
        super().write_whole(path, data, fsync=fsync, mode=mode)
        (self.synced.add if fsync else self.synced.discard)(path.name)

    def sync(self, path: Path) -> None:
        path.stat()  # raises FileNotFoundError, as a real one would
        self.synced.add(path.name)

    def free_bytes(self, folder: Path) -> int:
        return 0 if self.is_short and folder.name == "contributions" else PLENTY_BYTES

    def look(self, path: Path) -> None:
        """Raises HostError if it is full."""
        if self.is_full:
            raise HostError(f"{path}: no space is left")  # how much is, is of the real disk, and no story tells it


class SimDepositBox(DepositBox):
    """In memory, where it outlives its node: no power cut takes it."""

    def __init__(self) -> None:
        super().__init__(None)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimMachine(Machine):
    """Of one site, or of the coordinator, whichever of its processes runs."""

    disk: SimDisk = field(default_factory=SimDisk)
    deposit_box: SimDepositBox = field(default_factory=SimDepositBox)
    resources: Callable[[Path], Resources] = lambda _: Resources()
