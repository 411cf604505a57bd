"""Files with their space really allocated, and renames that survive a crash. Errors name the file and what to do."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from atoll.protocol.errors import ConfigError, HostError

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
PUBLIC_FILE = 0o666
"""As open to others as this process's umask lets files be."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_C = ctypes.CDLL(None, use_errno=True)
_renameat2 = getattr(_C, "renameat2", None)
_fallocate = getattr(_C, "fallocate", None)
_sync_file_range = getattr(_C, "sync_file_range", None)
_SYNC_FILE_RANGE_WRITE = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def disk_error(error: OSError, path: Path, need_bytes: int = 0) -> HostError:
    """The HostError that tells a person what an OSError on `path` means."""
    if error.errno in _NO_SPACE:
        try:
            free = f", {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free"
        except OSError:
            free = ""
        need = f", {need_bytes / 2**20:.1f} MiB are needed" if need_bytes else ""
        return HostError(f"{path}: no space is left{need}{free}; make room, or choose another folder")
    return HostError(f"{path}: {error.strerror or error}")


def make_folder(folder: Path) -> None:
    """For this user alone, if it is not there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)


def open_new(path: Path, mode: int = PRIVATE_FILE) -> BinaryIO:
    """An empty file to be written, instead of what was there. Raises OSError."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb")


def exchange_names(first: Path, second: Path) -> bool:
    """Each gets the other's name in one step, which no crash can cut in two. False if this kernel or file system cannot
    do that, and nothing has changed. Raises OSError."""
    if _renameat2 is None:
        return False
    if _renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """All of `data`: the kernel may take a part only. Raises OSError."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        offset, rest = offset + written, rest[written:]


def begin_to_write_back(descriptor: int, offset: int, num_bytes: int) -> None:
    """The kernel begins to write these bytes to the disk, and a sync finds them there or on their way. A hint: where
    the kernel or the file system takes none, the sync has them all to wait for."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """A folder to fill with files that are synced one by one. It is made aside and renamed in the end: `to` is there
    whole or not at all.

    Raises ConfigError unless nothing is there, or an empty folder; HostError if it cannot be written.
    """
    try:
        to = to.resolve()
        if to.exists() and next(to.iterdir(), None) is not None:
            raise ConfigError(f"{to} is not empty; name another folder, or remove it")
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{to}: no place for a new folder: {error}") from None
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix=f".{to.name}.new-", dir=to.parent))
        aside = own / to.name  # of everybody's mode, as the one around it is not
        try:
            aside.mkdir()
            yield aside
            sync_folder(aside)
            os.replace(aside, to)
        finally:
            shutil.rmtree(own, ignore_errors=True)  # a full disk would stay full
        sync_folder(to.parent)
    except OSError as error:
        raise disk_error(error, to) from error


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Disk:
    """What may find a disk full. Each owner of a folder is given the disk that its folder is on."""

    def allocate(self, path: Path, size_bytes: int) -> None:
        """A new file of zeros that has its blocks on the disk. Raises HostError, and leaves no file, if it does not
        fit."""
        try:
            make_folder(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
            try:
                os.posix_fallocate(descriptor, 0, max(1, size_bytes))
                os.fsync(descriptor)  # its size: a shorter one would have to be made anew
            finally:
                os.close(descriptor)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise disk_error(error, path, size_bytes) from error

    def try_room(self, folder: Path, size_bytes: int) -> bool:
        """Whether it is known that so much more can be had there: it is allocated, and freed again. What is free says
        nothing of quotas. False if this kernel or file system allocates nothing that is not written, or no file of that
        size. Raises HostError if it cannot be had."""
        if size_bytes <= 0 or _fallocate is None:
            return size_bytes <= 0
        try:
            with tempfile.TemporaryFile(prefix=".room-", dir=folder) as file:  # gone with this process, however it ends
                length = ctypes.c_int64(size_bytes)
                if _fallocate(file.fileno(), 0, ctypes.c_int64(0), length) == 0:
                    return True
                number = ctypes.get_errno()
        except OSError as error:
            raise disk_error(error, folder) from error
        if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EFBIG):
            return False
        raise disk_error(OSError(number, os.strerror(number)), folder / "room", size_bytes)

    def write_whole(self, path: Path, data: bytes, *, fsync: bool = False, mode: int = PRIVATE_FILE) -> None:
        """Replaces `path` by a file with `data`: readers and crashes see the old one or the new one."""
        aside = path.with_name(path.name + ".new")
        try:
            with open_new(aside, mode) as file:
                file.write(data)
                file.flush()
                if fsync:
                    os.fsync(file.fileno())
            os.replace(aside, path)
            if fsync:
                sync_folder(path.parent)
        except OSError as error:
            with suppress(OSError):
                aside.unlink()  # it has taken the last room of a full disk
            raise disk_error(error, path, len(data)) from error

    def sync(self, path: Path) -> None:
        """What was written to that file is on the disk for good. Raises OSError."""
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def free_bytes(self, folder: Path) -> int:
        """For this user, where `folder` lies. Raises HostError."""
        try:
            return shutil.disk_usage(folder).free
        except OSError as error:
            raise disk_error(error, folder) from error


REAL_DISK = Disk()
