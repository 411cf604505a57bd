"""A node's own folder: its lock, key and start count, and where everything else on its disk lies."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.protocol import wire
from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.disk import Disk, make_folder, sync_folder
from atoll.protocol.errors import HostError, StateError
from atoll.protocol.layout import Manifest
from atoll.protocol.machine import REAL, Machine

KEY_BYTES = 32
PROCESS_ID_BYTES = 16
MAX_INCARNATION = (1 << 63) - 1  # stores keep signed integers
LOCK = "lock"
"""A file of every home."""
SOCKET_FOLDER_PREFIX = "atoll-"
"""Of the temporary folder with the socket and pipes of one start."""
_SOCKET_NOTE = "socket_folder"


def _refuse_if_others_can_reach(folder: Path) -> None:
    """Raises HostError: key, model and log are this user's alone, and nobody else may put a folder in their place."""
    me = os.geteuid()
    found = folder.stat()
    if found.st_uid != me:
        raise HostError(
            f"home folder {folder} belongs to user {found.st_uid}, and this node runs as user {me}; choose another "
            "with --home, or give it to this user"
        )
    if found.st_mode & 0o077:
        raise HostError(
            f"home folder {folder} is open to other users (mode {found.st_mode & 0o777:o}): they can read the key and "
            f"the model; run `chmod 700 {folder}`, or choose another with --home"
        )
    for parent in folder.resolve().parents:
        found = parent.stat()
        is_anybodys = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, me) or is_anybodys:
            who = "every user" if is_anybodys else f"user {found.st_uid}"
            raise HostError(
                f"home folder {folder}: {who} can put another folder in its place, as {parent} is theirs; choose "
                "another with --home"
            )


def socket_folder_of(home: Path) -> Path | None:
    """That of the last node there."""
    note = home / _SOCKET_NOTE
    if not note.exists():
        return None
    folder = Path(os.fsdecode(note.read_bytes()))
    return folder if folder.name.startswith(SOCKET_FOLDER_PREFIX) and "\0" not in str(folder) else None


def _manifest_check(body: bytes) -> bytes:
    return Digest("atoll/manifest-file/v1").data(body).finish()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No node uses the home meanwhile, and nobody else joins with it. Raises HostError."""
    try:
        make_folder(folder)
        descriptor = _lock(folder)
    except OSError as error:
        raise HostError(f"home folder {folder}: {error.strerror}; choose another with --home") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """The descriptor that holds it. Raises HostError if another process has it, OSError."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise HostError(f"home folder {folder} is in use by another node; stop it or choose --home") from None
    if not os.fstat(descriptor).st_nlink:
        os.close(descriptor)
        raise HostError(f"home folder {folder} was removed meanwhile, by a join that was refused; try again")
    return descriptor


def count_on(folder: Path, last_start: int, disk: Disk) -> None:
    """A home that is new to a site counts its starts on from the last one that the run knows of. Raises HostError."""
    if _number_in(folder, "incarnation") < last_start:
        disk.write_whole(folder / "incarnation", b"%d" % last_start, fsync=True)


def _number_in(folder: Path, name: str) -> int:
    """0 if there is none yet. Raises HostError."""
    path = folder / name
    try:
        number = int(path.read_text()) if path.exists() else 0
        if not 0 <= number < MAX_INCARNATION:
            raise ValueError(number)
    except ValueError:
        raise HostError(f"{path} is not a count; restore it, or remove {folder}") from None
    return number


class HomeFolders:
    """Where what lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest_file = folder / "manifest.pb"
        self.deposit_file = folder / "deposits.db"
        self.state_folder = folder / "state"
        self.payload_folder = folder / "payloads"
        self.spill_folder = folder / "contributions"
        self.average_error_folder = folder / "average-errors"
        self.error_folder = folder / "errors"
        self.kept_folder = folder / "kept-contributions"
        self.evidence_folder = folder / "evidence"
        self.snapshot_folder = folder / "snapshots"
        self.optimizer_folder = folder / "optimizer"
        """Workers write the checkpoints of their optimizers there."""
        self._end_mark = folder / "ended"

    @property
    def of_the_run(self) -> tuple[Path, ...]:
        """What a site goes on with, and nobody needs once the run has ended."""
        return (
            self.manifest_file,
            self.state_folder,
            self.payload_folder,
            self.error_folder,
            self.snapshot_folder,
            self.optimizer_folder,
        )

    def has_ended(self) -> bool:
        """Whether the last node here was in the run to its end, and saved its model."""
        return self._end_mark.exists()

    def remove_spills(self) -> None:
        """In a thread: of exchange processes of an earlier start, of which there may have been more."""
        for of_processes in (self.spill_folder, self.average_error_folder):
            for folder in self.folder.glob(f"{of_processes.name}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def spills_of(self, process: int) -> tuple[Path, Path]:
        """Of an exchange process beside the node: of contributions, and of errors of averages."""
        contributions, errors = self.spill_folder, self.average_error_folder
        return contributions.with_name(f"{contributions.name}-{process}"), errors.with_name(f"{errors.name}-{process}")


class Home(HomeFolders):
    """Opens (and makes) the folder and locks it for the life of the process. Raises HostError."""

    def __init__(self, folder: Path, machine: Machine = REAL) -> None:
        super().__init__(folder)
        self.disk = machine.disk
        """Under all that lies in `folder`."""
        try:
            if not folder.exists():
                make_folder(folder)
                sync_folder(folder.parent)
            _refuse_if_others_can_reach(folder)
            self._lock_fd = _lock(folder)
        except OSError as error:
            raise HostError(f"home folder {folder}: {error.strerror}; choose another with --home") from None
        try:
            self._remove_left_over()
            self.key = self._read_key(machine)
            self.incarnation = self._next_incarnation()
            self.process_id = machine.token_bytes(PROCESS_ID_BYTES)
            """Of this start alone: a copy of the folder has the same key, and counts its starts on from the same."""
            self.branch = _number_in(folder, "branch")
            """In which the commits on this disk are numbered; see `keep_branch`."""
        except BaseException:
            self.close()
            raise

    def write(self, name: str, data: bytes) -> None:
        """A small file, whole: when this returns, a power cut does not undo it.

        The start count needs that: an incarnation that comes twice would speak for another's contributions.
        """
        self.disk.write_whole(self.folder / name, data, fsync=True)

    def note_socket_folder(self, folder: Path) -> None:
        """`folder` lies outside of the home, where paths are short. A killed node's is removed by its next start."""
        self.write(_SOCKET_NOTE, os.fsencode(folder))

    def note_end(self) -> None:
        self.write(self._end_mark.name, b"")

    def close(self) -> None:
        os.close(self._lock_fd)

    def _remove_left_over(self) -> None:
        if (folder := socket_folder_of(self.folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)  # mostly gone already, and litter at worst
        for path in (self.folder / _SOCKET_NOTE, self._end_mark):
            if path.exists():
                path.unlink()

    def _read_key(self, machine: Machine) -> bytes:
        path = self.folder / "key"
        if not path.exists():
            self.write("key", machine.token_bytes(KEY_BYTES))
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise HostError(f"{path} holds {len(key)} bytes, not {KEY_BYTES}; restore it, or remove {self.folder}")
        return key

    def keep_manifest(self, manifest: Manifest) -> None:
        """Of the model whose state is below this folder."""
        body = wire.encode(manifest)
        self.write(self.manifest_file.name, _manifest_check(body) + body)

    def read_manifest(self) -> Manifest | None:
        """The one that was kept; None if there is none. Raises StateError if it is damaged."""
        if not self.manifest_file.exists():
            return None
        data = self.manifest_file.read_bytes()
        body = data[DIGEST_BYTES:]
        if data[:DIGEST_BYTES] != _manifest_check(body):
            raise StateError(f"{self.manifest_file} is damaged; remove it, and this site takes the state of the others")
        return wire.decode(Manifest, body)

    def keep_branch(self, branch: int) -> None:
        self.write("branch", b"%d" % branch)
        self.branch = branch

    def _next_incarnation(self) -> int:
        number = _number_in(self.folder, "incarnation") + 1
        self.write("incarnation", b"%d" % number)
        return number
