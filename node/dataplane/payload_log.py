"""The payloads of the last commits on disk, and of attempts that may become one.

A commit is a small record, written whole, that names a sealed attempt (see `payload_file.py`). Methods may be called
from several threads.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

from atoll.node.dataplane.payload_file import AttemptKey, PayloadFile
from atoll.protocol import wire
from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.disk import REAL_DISK, Disk, disk_error, make_folder, sync_folder
from atoll.protocol.errors import DigestMismatch, InvalidMessage, StaleError, StateError
from atoll.protocol.history import History
from atoll.protocol.layout import Layout
from atoll.protocol.log_length import LogLength, most_ahead
from atoll.protocol.messages import Commit
from atoll.protocol.settings import RunSettings

log = logging.getLogger(__name__)

_MAX_RECORD_BYTES = 1 << 22
_ATTEMPT = re.compile(r"attempt-(\d{1,20})-(\d{1,20})-(\d{1,10})(?:-(\d{1,10}))?\.payloads")
_RECORD = re.compile(r"commit-(\d{1,20})\.record")
_TOUCHED = "touched"


class AttemptLog(Protocol):
    """Where an exchange keeps payloads."""

    def begin(
        self, sync: int, term: int, attempt: int, fragment: int = 0, *, is_over: Callable[[], bool] = lambda: False
    ) -> PayloadFile:
        """See `PayloadLog`, as for the others."""
        ...

    def attempt_of(self, fragment: int, commit: int) -> AttemptKey | None: ...

    def attempts_in_force(self) -> set[AttemptKey]: ...


@dataclass(eq=False)
class PayloadLog:
    """Keeps the last commits in `folder`, as many as `length` says. What was sealed or committed before is found again.

    Attempts that were not sealed, and records of commits whose attempt is damaged, are removed at the start.
    With `fsync` a commit is on the disk for good when `commit` returns; without, when `sync` does or the kernel likes.
    The first commit in a run of several fragments has a file beside it that says what was touched before.
    """

    folder: Path
    layout: Layout
    settings: RunSettings
    _: KW_ONLY
    disk: Disk = REAL_DISK

    def __post_init__(self) -> None:
        self.length = LogLength(self.layout.manifest, self.settings.sync)
        self._lock = threading.RLock()
        self._files: dict[AttemptKey, PayloadFile] = {}
        self._uncommitted: set[AttemptKey] = set()  # of these files: a log may have thousands that are commits
        self._commits: dict[int, Commit] = {}
        self._num_bytes: dict[int, int] = {}  # of each, as `length` counts
        self._on_disk: dict[Path, _Whole] = {}  # for good
        try:
            make_folder(self.folder)
        except OSError as error:
            raise disk_error(error, self.folder) from error
        self._load()
        self.num_kept = self.length.num_kept(max(self._commits, default=0), self._num_bytes)
        """That stay here, of as many bytes as the last ones have."""
        if self.settings.sync.fsync:
            self.sync()  # a process that was killed may have left to the kernel what it had not synced
        self._touched = self._read_touched()
        self.history = History.of_log(self._touched, self._commits)
        """Of the commits here, as far as they have no gap."""

    # --- attempts

    def begin(
        self, sync: int, term: int, attempt: int, fragment: int = 0, *, is_over: Callable[[], bool] = lambda: False
    ) -> PayloadFile:
        """The file that the payloads of this attempt go to; the same one when asked again.

        Raises StaleError if the attempt `is_over`: whoever ends one says so before it is dropped here."""
        key = AttemptKey(sync, term, attempt, fragment)
        with self._lock:
            if is_over():
                raise StaleError(f"sync {sync} attempt {attempt} was over before it began")
            if key not in self._files:
                self._files[key] = self._file(key, is_new=True)
                self._uncommitted.add(key)
            return self._files[key]

    def open_commit(self, commit: Commit, *, anew: bool = False) -> PayloadFile:
        """The file for payloads of a commit that are fetched from peers. One that is whole but has another digest
        than the commit is thrown away first; `anew`: one that is not whole, too."""
        key = AttemptKey.of(commit)
        with self._lock:
            held = self._files.get(key)
            if held is not None and (anew if held.missing() else held.digest(commit) != commit.payload_digest):
                self._remove_file(key)
            file = self.begin(commit.sync, commit.term, commit.attempt, commit.fragment)
            if (known := self._commits.get(commit.commit)) is not None and AttemptKey.of(known) == key:
                self._uncommitted.discard(key)
            return file

    def has_room_ahead(self, sync: int) -> bool:
        """Whether payloads of the sync may come ahead of earlier commits. These commits have their places in the log
        once they come, and each attempt that is here ahead, a failed one too, has a place until then."""
        with self._lock:
            num, most = len(self._commits), self.num_kept + most_ahead(self.num_kept)
            first = self._commits[max(self._commits)].sync + 1 if self._commits else 1
            ahead = sorted([sync, *(key.sync for key in self._uncommitted if key.sync != sync)])
            sums = (min(num + max(0, of - first), self.num_kept) + len(ahead) - i for i, of in enumerate(ahead))
            return max(sums) <= most

    def hashes(self, sync: int, term: int, attempt: int) -> bytes:
        """Of each chunk's payload in this attempt, zeros where there is none. Raises StateError if it is not here."""
        return self._hashes(self.held(sync, term, attempt))

    def held(self, sync: int, term: int, attempt: int) -> PayloadFile:
        """Raises StateError if nothing of that attempt is here."""
        with self._lock:
            held = self._files.get(AttemptKey(sync, term, attempt))
        if held is None:
            raise StateError(f"sync {sync} attempt {attempt}: its payloads are not in the log")
        return held

    def hashes_of(self, commit: int) -> bytes:
        """As `hashes`, of a commit."""
        return self._hashes(self._file_of(commit))

    def _hashes(self, held: PayloadFile) -> bytes:
        return b"".join(held.hash_of(chunk) or bytes(DIGEST_BYTES) for chunk in range(self.layout.num_sync_chunks))

    def drop(self, sync: int) -> None:
        """Removes the attempts of a sync that were not committed."""
        with self._lock:
            self._remove_attempts(lambda key: key.sync == sync)

    def roll_back(self, commit: int) -> None:
        """Removes the commits after `commit` and all attempts that are none, for good."""
        with self._lock:
            self._remove_commits([n for n in self._commits if n > commit])
            self._remove_attempts(lambda key: True)
            self._begin_after([0] * len(self._touched) if max(self._touched) > commit else self._touched)
            self.num_kept = self.length.num_kept(commit, self._num_bytes)
            sync_folder(self.folder)

    # --- commits

    def commit(self, commit: Commit) -> None:
        """Makes a sealed attempt a commit, and removes what the log need not keep any more. Again is no error.

        Raises StateError if the attempt is not here and sealed, DigestMismatch if its payloads are not the commit's:
        in both cases fetch them through `open_commit`.
        """
        key = AttemptKey.of(commit)
        with self._lock:
            held = self._files.get(key)
            if held is None or not held.sealed:
                raise StateError(f"commit {commit.commit}: its payloads (sync {commit.sync}) are not in the log")
            if held.digest(commit) != commit.payload_digest:
                raise DigestMismatch(f"commit {commit.commit}: the payloads in the log have another digest")
            if (known := self._commits.get(commit.commit)) != commit:  # a record that is synced stays so
                path = self._record_path(commit.commit)
                self._on_disk.pop(path, None)
                self.disk.write_whole(path, self._record(commit), fsync=self.settings.sync.fsync)
            if known is not None and (other := AttemptKey.of(known)) != key and other in self._files:
                self._uncommitted.add(other)
            self._add(commit)
            self._prune(commit)

    def sync(self) -> None:
        """All commits here are on the disk for good: a snapshot is of no use without those from which its chunks come,
        and those that tell which fragment each commit touched. Raises HostError."""
        try:
            while new := self._not_on_disk():  # also what is whole again since
                for path in new:
                    with suppress(FileNotFoundError):  # the log drops it meanwhile
                        self.disk.sync(path)
                with self._lock:
                    self._on_disk |= {path: content for path, content in self._whole() if new.get(path) == content}
            sync_folder(self.folder)
        except OSError as error:
            raise disk_error(error, self.folder) from error

    def _not_on_disk(self) -> dict[Path, _Whole]:
        with self._lock:
            return {path: content for path, content in self._whole() if self._on_disk.get(path) != content}

    def _whole(self) -> Iterator[tuple[Path, _Whole]]:
        """What does not change any more. A chunk that is damaged is put again, and its file sealed once more."""
        yield from ((file.path, (file, file.num_seals)) for file in self._files.values() if file.sealed)
        yield from ((self._record_path(number), commit) for number, commit in self._commits.items())

    def lead_to(self, touched: Sequence[int]) -> None:
        """The history here leads to the commit at which fragments were touched last so; if it did not, it begins there
        from now on."""
        with self._lock:
            if self.history.commit_of(touched) is None:
                self._begin_after(touched)

    def commits(self) -> list[Commit]:
        """The commits held, ascending."""
        with self._lock:
            return [self._commits[n] for n in sorted(self._commits)]

    def has(self, commit: int) -> bool:
        with self._lock:
            return commit in self._commits

    def attempt_of(self, fragment: int, commit: int) -> AttemptKey | None:
        """The attempt of the last commit, up to this one, that touched the fragment, of those that leave errors over;
        None if it is not here."""
        try:
            last = self.settings.sync.phases.last_of_momenta(commit)
            return AttemptKey.of(self.record(self.history.touch(fragment, last)))
        except StateError:
            return None

    def attempts_in_force(self) -> set[AttemptKey]:
        """Of each fragment, the one that is its last commit here, of those that leave errors over."""
        with self._lock:
            last = max(self._commits, default=0)
        found = (self.attempt_of(fragment, last) for fragment in range(len(self.layout.fragments)))
        return {key for key in found if key is not None}

    def record(self, commit: int) -> Commit:
        """Raises StateError if it is not held."""
        with self._lock:
            if (found := self._commits.get(commit)) is None:
                raise StateError(f"commit {commit} is not in the payload log")
        return found

    def read(self, commit: int, chunk: int) -> bytes:
        """The payload of a chunk in a commit. Raises StateError if it is not held, or damaged."""
        return self._file_of(commit).read(chunk)

    def _file_of(self, commit: int) -> PayloadFile:
        with self._lock:
            return self._files[AttemptKey.of(self.record(commit))]

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            for known in (self._files, self._uncommitted, self._commits, self._num_bytes, self._on_disk):
                known.clear()

    def num_kept_after(self, latest: Commit) -> int:
        """Commits that stay here where this is the last one, and it among them. Asked in the event loop: without the
        lock, which is held while files are removed; a copy of the sizes is made at once."""
        num_bytes = self._num_bytes | {latest.commit: self.length.bytes_of(latest)}
        return self.length.num_kept(latest.commit, num_bytes)

    # --- disk

    def _add(self, commit: Commit) -> None:
        self._commits[commit.commit] = commit
        self._num_bytes[commit.commit] = self.length.bytes_of(commit)
        self._uncommitted.discard(AttemptKey.of(commit))

    def _prune(self, latest: Commit) -> None:
        def is_void(number: int) -> bool:
            return number > latest.commit and self._commits[number].branch < latest.branch

        self.num_kept = self.length.num_kept(latest.commit, self._num_bytes)
        oldest = latest.commit - self.num_kept
        touched = History.of_log(self._touched, self._commits).touched(oldest)
        self._begin_after(touched or self._touched)
        self._remove_commits([n for n in self._commits if n <= oldest or is_void(n)])
        together = (latest.fragment, len(self.layout.fragments))  # of all fragments, where there are several
        is_of_all = latest.fragment == len(self.layout.fragments)
        self._remove_attempts(lambda key: key.sync <= latest.sync and (is_of_all or key.fragment in together))
        self.history = History.of_log(self._touched, self._commits)

    def _begin_after(self, touched: Sequence[int]) -> None:
        """On the disk before the commits that said so are not."""
        if len(touched) > 1 and tuple(touched) != self._touched:
            body = struct.pack(f"<{len(touched)}Q", *touched)
            self.disk.write_whole(self.folder / _TOUCHED, self._check(body) + body, fsync=True)
            self._touched = tuple(touched)
        self.history = History.of_log(self._touched, self._commits)

    def _read_touched(self) -> tuple[int, ...]:
        """Zeros if there is none: it is not known then what commits were before those here."""
        path, num = self.folder / _TOUCHED, len(self.layout.fragments)
        data = path.read_bytes() if path.exists() else b""
        body = data[DIGEST_BYTES:]
        if len(body) != 8 * num or data[:DIGEST_BYTES] != self._check(body):
            return (0,) * num
        return struct.unpack(f"<{num}Q", body)

    def _remove_commits(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (key := AttemptKey.of(self._commits.pop(number))) in self._files:
                self._uncommitted.add(key)
            del self._num_bytes[number]
            path = self._record_path(number)
            self._on_disk.pop(path, None)
            path.unlink(missing_ok=True)

    def _remove_attempts(self, is_old: Callable[[AttemptKey], bool]) -> None:
        """Of those that are no commits."""
        for key in [k for k in self._uncommitted if is_old(k)]:
            self._remove_file(key)

    def _remove_file(self, key: AttemptKey) -> None:
        file = self._files.pop(key)
        self._uncommitted.discard(key)
        self._on_disk.pop(file.path, None)
        file.remove()

    def _file(self, key: AttemptKey, *, is_new: bool) -> PayloadFile:
        run_id, fsync = self.settings.run_id, self.settings.sync.fsync
        return PayloadFile(self.folder, self.layout, run_id, key, is_new=is_new, fsync=fsync)

    def _record_path(self, number: int) -> Path:
        return self.folder / f"commit-{number}.record"

    def _record(self, commit: Commit) -> bytes:
        body = wire.encode(commit)
        return self._check(body) + body

    def _check(self, body: bytes) -> bytes:
        digest = Digest("atoll/commit-record/v1").text(self.settings.run_id).data(self.layout.manifest.digest)
        return digest.data(body).finish()

    def _load(self) -> None:
        for path in sorted(self.folder.iterdir()):
            match = _ATTEMPT.fullmatch(path.name)
            if match is None:
                if path.name.endswith(".new"):
                    path.unlink()
                continue
            key = AttemptKey(*(int(part or 0) for part in match.groups()))
            try:
                self._files[key] = self._file(key, is_new=False)
                self._uncommitted.add(key)
            except (StateError, InvalidMessage) as error:
                log.info("payload log: removed an unfinished attempt: %s", error)
                path.unlink()
        for path in sorted(self.folder.iterdir()):
            if _RECORD.fullmatch(path.name) is None:
                continue
            try:
                commit = self._read_record(path)
            except (StateError, InvalidMessage) as error:
                log.warning("payload log: removed %s: %s", path.name, error)
                path.unlink()
            else:
                self._add(commit)

    def _read_record(self, path: Path) -> Commit:
        with path.open("rb") as file:
            data = file.read(_MAX_RECORD_BYTES + 1)
        body = data[DIGEST_BYTES:]
        if len(data) > _MAX_RECORD_BYTES or data[:DIGEST_BYTES] != self._check(body):
            raise StateError("torn, or of another run")
        commit = wire.decode(Commit, body)
        held = self._files.get(AttemptKey.of(commit))
        if path != self._record_path(commit.commit) or held is None:
            raise StateError("its payloads are not whole")
        if held.digest(commit) != commit.payload_digest:
            raise StateError("its payloads have another digest")
        return commit


_Whole = tuple[PayloadFile, int] | Commit
"""A file and how many times it was sealed, or a record."""
