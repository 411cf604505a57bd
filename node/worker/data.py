"""Text as bytes or packed tokens: the files of a data set, its fingerprint, the part that is held out. No torch.

A data set is the source of the running Python's standard library ("stdlib"), any files and folders, or a folder of
packed tokens. Files of text are ordered by relative name, so that the same files give the same data set wherever they
lie.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from atoll.node.worker.token_index import PackedFolder, ShardRole, packed_among
from atoll.protocol.digest import Digest
from atoll.protocol.errors import ConfigError

STDLIB = "stdlib"
LOCAL = "local"
STDLIB_MAX_BYTES = 16 << 20
STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
HELD_OUT_ONE_IN = 20
FEWEST_FILES_TO_SPLIT = 40  # below, the end of every file is held out instead of whole files
MAPPED_FROM_BYTES = 4 << 20  # larger files are mapped instead of read
BINARY_PROBE_BYTES = 1024
MAX_FILES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceFile:
    name: str  # relative, with forward slashes
    path: Path
    size_bytes: int


Listing = tuple[SourceFile, ...]
"""The files of a data set in order of their names. Hidden, empty and binary ones are left out."""


def _folder(
    root: Path, prefix: str, skipped_folders: frozenset[str], suffix: str, binary: tuple[str, ...] = ()
) -> list[SourceFile]:
    found: list[SourceFile] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skipped_folders)
        for name in sorted(names):
            path = Path(folder) / name
            if name.startswith(".") or not name.endswith(suffix) or not path.is_file():
                continue
            if not name.endswith(binary) and _is_binary_or_empty(path):
                continue
            found.append(SourceFile(prefix + path.relative_to(root).as_posix(), path, path.stat().st_size))
            if len(found) > MAX_FILES:
                raise ConfigError(f"{root}: more than {MAX_FILES} files; join them into larger ones")
    return found


def _is_binary_or_empty(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(BINARY_PROBE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return not head or b"\0" in head


def list_files(paths: Sequence[str], binary: tuple[str, ...] = ()) -> Listing:
    """The files under `paths` (files or folders; none: the standard library): those of text, and those whose names end
    with one of `binary`. Raises ConfigError naming the path."""
    if not paths:
        root = Path(sysconfig.get_path("stdlib"))
        found = sorted(_folder(root, "", STDLIB_SKIPPED_FOLDERS, ".py"), key=lambda f: f.name.encode())
        ends = itertools.accumulate(file.size_bytes for file in found)
        kept = tuple(file for file, end in zip(found, ends, strict=True) if end <= STDLIB_MAX_BYTES)
        if not kept:
            raise ConfigError(f"no source files of the standard library in {root}; name a data set with --data PATH")
        return kept
    files: list[SourceFile] = []
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            prefix = f"{path.resolve().name}/" if len(paths) > 1 else ""
            found = _folder(path, prefix, frozenset({"__pycache__"}), "", binary)
            if not found:
                raise ConfigError(f"no text in the folder {path}: hidden, empty and binary files are left out")
            files += found
        elif path.is_file():
            if not path.name.endswith(binary) and _is_binary_or_empty(path):
                raise ConfigError(f"{path} is empty or binary; give a text file")
            files.append(SourceFile(path.name, path, path.stat().st_size))
        else:
            raise ConfigError(f"no such file or folder: {path}")
    files.sort(key=lambda f: f.name.encode())
    for one, other in itertools.pairwise(files):
        if one.name == other.name:
            raise ConfigError(f"{one.path} and {other.path} have the same name in the data set; put both in one folder")
    return tuple(files)


def fingerprint(source: Listing | PackedFolder) -> bytes:
    """32 bytes over names, sizes and contents: of text as they are on the disk now, of packed tokens as their index
    has them."""
    if isinstance(source, PackedFolder):
        return source.index.fingerprint
    digest = Digest("atoll/data/v1").uint(len(source))
    for file in source:
        content = blake3(max_threads=blake3.AUTO).update_mmap(file.path).digest()
        digest.text(file.name).uint(file.size_bytes).data(content)
    return digest.finish()


class Text:
    """Bytes or tokens of several files, one after the other. What is mapped stays on disk."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        self._parts: list[npt.NDArray[Any]] = []
        for is_mapped, group in itertools.groupby(parts, lambda part: isinstance(part, np.memmap)):
            found = list(group)
            self._parts += found if is_mapped else [np.concatenate(found)]
        self._ends = np.cumsum([len(p) for p in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def window(self, offset: int, size: int) -> npt.NDArray[Any]:
        """A copy of bytes or tokens [offset, offset + size): uint8, or int64. Raises ValueError outside the text."""
        if offset < 0 or offset + size > len(self):
            raise ValueError(f"{offset} to {offset + size} of a text of {len(self)}")
        out = np.empty(size, dtype=np.uint8 if not self._parts or self._parts[0].itemsize == 1 else np.int64)
        filled = 0
        index = int(np.searchsorted(self._ends, offset, side="right"))
        while filled < size:
            start = offset + filled - (int(self._ends[index - 1]) if index else 0)
            piece = self._parts[index][start : start + size - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            index += 1
        return out


@dataclass(frozen=True, slots=True)
class Corpus:
    training: Text
    held_out: Text
    vocab_size: int = 256
    bytes_a_token: float = 1.0
    """Of the held-out text."""


def load(source: Listing | PackedFolder) -> Corpus:
    """Read a data set and split it: about one file in twenty is held out, by the hash of its name; of packed tokens,
    what was when they were written."""
    if isinstance(source, PackedFolder):
        held_out_tokens, _, held_out_bytes = source.index.totals([ShardRole.HELD_OUT])
        return Corpus(
            training=tokens_of(source, ShardRole.TRAINING),
            held_out=tokens_of(source, ShardRole.HELD_OUT),
            vocab_size=source.index.vocab_size,
            bytes_a_token=held_out_bytes / max(1, held_out_tokens),
        )
    whole_files = len(source) >= FEWEST_FILES_TO_SPLIT
    training: list[npt.NDArray[np.uint8]] = []
    held_out: list[npt.NDArray[np.uint8]] = []
    for file in source:
        try:
            if file.size_bytes < MAPPED_FROM_BYTES:
                content = np.fromfile(file.path, dtype=np.uint8)
            else:
                content = np.memmap(file.path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise ConfigError(f"cannot read {file.path}: {error.strerror}") from None
        if whole_files:
            (held_out if is_held_out(file.name) else training).append(content)
        else:
            cut = len(content) - len(content) // HELD_OUT_ONE_IN
            training.append(content[:cut])
            held_out.append(content[cut:])
    corpus = Corpus(Text(training), Text(held_out))
    if not len(corpus.training) or not len(corpus.held_out):
        raise ConfigError(f"{source[0].path}: too little text to train on and to hold a part out")
    return corpus


def tokens_of(packed: PackedFolder, role: ShardRole) -> Text:
    """Mapped. Raises ConfigError."""
    dtype = np.dtype(packed.index.dtype).newbyteorder("<")
    try:
        return Text([np.memmap(packed.path / s.name, dtype=dtype, mode="r") for s in packed.index.of_role(role)])
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot map the shards in {packed.path}: {error}") from None


def is_held_out(name: str) -> bool:
    """By the hash of a file's name, or of a document's text."""
    return int.from_bytes(blake3(name.encode()).digest()[:8], "little") % HELD_OUT_ONE_IN == 0


def source_for_run(data_name: str, paths: Sequence[str]) -> Listing | PackedFolder:
    """What a site of a run trains on: `data_name` is the run's, `paths` are the node's."""
    if not paths and data_name not in (STDLIB, LOCAL):
        raise ConfigError(f"this run trains on the data set {data_name!r}: say where it lies here with --data PATH")
    return packed_among(paths) or list_files(paths)


def fingerprint_for_run(data_name: str, source: Listing | PackedFolder) -> bytes:
    """What the site offers: nothing for "local", where every site has data of its own."""
    return b"" if data_name == LOCAL else fingerprint(source)
