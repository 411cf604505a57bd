"""Files with their space really allocated, and renames that survive a crash. Errors name the file and what to do."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

from atoll.protocol.errors import HostError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def disk_error(error: OSError, path: Path, need_bytes: int = 0) -> HostError:
    """The HostError that tells a person what an OSError on `path` means."""
    if error.errno in _NO_SPACE:
        try:
            free = f", {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free"
        except OSError:
            free = ""
        need = f", {need_bytes / 2**20:.1f} MiB are needed" if need_bytes else ""
        return HostError(f"{path}: no space is left{need}{free}; make room, or choose another folder with --home")
    return HostError(f"{path}: {error.strerror or error}")


def allocate(path: Path, size_bytes: int) -> None:
    """A new file of zeros that has its blocks on the disk. Raises HostError, and leaves no file, if it does not fit."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(1, size_bytes))
            os.fsync(descriptor)  # its size: a shorter one would have to be made anew
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise disk_error(error, path, size_bytes) from error


def write_new(path: Path, data: bytes) -> None:
    """A new file. Raises HostError, and leaves none, if it cannot be written. A crash may leave a part of it."""
    try:
        path.write_bytes(data)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise disk_error(error, path, len(data)) from error


def write_whole(path: Path, data: bytes, *, fsync: bool = False) -> None:
    """Replaces `path` by a file with `data`: readers and crashes see the old one or the new one."""
    aside = path.with_name(path.name + ".new")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(aside, path)
        if fsync:
            sync_folder(path.parent)
    except OSError as error:
        raise disk_error(error, path, len(data)) from error


def allow_open_files(count: int, what: str) -> None:
    """Raises this process's soft limit of open files if it is below `count`. HostError if the hard one is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        if resource.RLIM_INFINITY != hard < count:
            raise HostError(f"{what} needs {count} open files, this process may have {hard}; raise `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
