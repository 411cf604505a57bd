"""A disk that loses power: what a folder may look like afterwards, given what was synced and when.

Within `Recorder` every sync and every other noted moment keeps the folder as it is. `Recorder.image` then makes one of
the folders that a cut at a moment may leave: a file's page is as it was at its last sync or at any moment since, so is
its size; a name is as it was at its folder's last sync, or at any moment since. No order between files is assumed.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

PAGE_BYTES = 512


@dataclass(slots=True)
class _Moment:
    names: dict[str, int]  # relative path -> file
    contents: dict[int, bytes]
    synced_files: dict[int, int] = field(default_factory=dict)  # file -> the moment of its last sync
    synced_folders: dict[str, int] = field(default_factory=dict)


class Recorder:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.moments: list[_Moment] = []
        self._patch = monkeypatch
        self._synced_files: dict[int, int] = {}
        self._synced_folders: dict[str, int] = {}
        self._open: dict[int, int] = {}  # descriptors: while a file is open no other one gets its number

    def __enter__(self) -> Recorder:
        self._patch.setattr(os, "fsync", self._fsync)
        self._patch.setattr(os, "fdatasync", self._fsync)
        self.note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.undo()
        for descriptor in self._open.values():
            os.close(descriptor)

    def noting(self, owner: type, name: str) -> None:
        """Every call of this method is a moment."""
        original = getattr(owner, name)

        def method(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            self.note()
            return result

        self._patch.setattr(owner, name, method)

    def note(self) -> int:
        names: dict[str, int] = {}
        contents: dict[int, bytes] = {}
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            inode = path.stat().st_ino
            if inode not in self._open:
                self._open[inode] = os.open(path, os.O_RDONLY)
            names[str(path.relative_to(self.folder))] = inode
            contents[inode] = path.read_bytes()
        before = self.moments[-1] if self.moments else None
        if before is not None:
            contents = before.contents | contents  # a file that has lost its name may get it back in a cut
        self.moments.append(_Moment(names, contents, dict(self._synced_files), dict(self._synced_folders)))
        return len(self.moments) - 1

    def _fsync(self, descriptor: int) -> None:
        moment = self.note()
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self._synced_folders[str(path.relative_to(self.folder))] = moment
        else:
            self._synced_files[os.fstat(descriptor).st_ino] = moment
        self.note()

    # --- the cut

    def cut_of(self, seed: int) -> int:
        """The moment of the cut in `image`."""
        return random.Random(seed).randrange(len(self.moments))

    def image(self, seed: int, target: Path) -> int:
        """One folder that a cut may leave; the moment of the cut."""
        choose = random.Random(seed)
        cut = choose.randrange(len(self.moments))
        at = self.moments[cut]
        every_name = sorted({name for moment in self.moments[: cut + 1] for name in moment.names})
        for name in every_name:
            since = at.synced_folders.get(str(Path(name).parent), 0)
            inode = self.moments[choose.choice([since, cut, choose.randint(since, cut)])].names.get(name)
            if inode is not None:
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._content(choose, inode, at.synced_files.get(inode, 0), cut))
        return cut

    def _content(self, choose: random.Random, inode: int, since: int, cut: int) -> bytes:
        versions = [m.contents.get(inode, b"") for m in self.moments[since : cut + 1]]
        how = choose.choice(["first", "last", "pages", "pages"])
        if how != "pages":
            return versions[0 if how == "first" else -1]
        size = len(choose.choice(versions))
        pages = []
        for start in range(0, size, PAGE_BYTES):
            page = choose.choice(versions)[start : start + PAGE_BYTES]
            pages.append(page.ljust(min(PAGE_BYTES, size - start), b"\0"))
        return b"".join(pages)
