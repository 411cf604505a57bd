"""A file of chunks: whole once it is sealed, whatever happens to it, and never read as another one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.node.dataplane.chunk_file import ChunkFile
from atoll.protocol.errors import DigestMismatch, HostError, StateError
from atoll.protocol.layout import chunk_hash

KEY = b"k" * 32
CHUNKS = {1: b"first", 2: b"", 7: bytes(range(200))}


class File(ChunkFile):
    hashed = staticmethod(chunk_hash)

    def versions(self) -> list[int]:
        return sorted(self._versions())


def new(folder: Path) -> File:
    return File(folder / "file", KEY, tuple(CHUNKS), is_new=True, fsync=False)


def found(folder: Path, key: bytes = KEY, chunks: tuple[int, ...] = tuple(CHUNKS)) -> File:
    return File(folder / "file", key, chunks, is_new=False, fsync=False)


def filled(file: File) -> File:
    for chunk, data in reversed(CHUNKS.items()):
        file.put(chunk, data, chunk_hash(data), 10 + chunk)
    return file


def test_what_is_sealed_is_found_again_with_its_versions(tmp_path: Path) -> None:
    file = filled(new(tmp_path))
    with pytest.raises(StateError, match="not sealed, torn, or of another run"):
        found(tmp_path)
    file.seal()
    again = found(tmp_path)
    assert {chunk: again.read(chunk) for chunk in CHUNKS} == CHUNKS
    assert again.all_hashes() == [chunk_hash(data) for data in CHUNKS.values()]
    assert again.versions() == [11, 12, 17]
    with pytest.raises(StateError, match="chunk 3 is not here"):
        again.read(3)
    with pytest.raises(StateError, match="sealed, chunk 8 comes too late"):
        again.put(8, b"x", chunk_hash(b"x"))


def test_a_file_of_another_kind_or_of_other_chunks_is_none_of_these(tmp_path: Path) -> None:
    filled(new(tmp_path)).seal()
    with pytest.raises(StateError, match="another run"):
        found(tmp_path, key=b"j" * 32)
    with pytest.raises(StateError, match="another run"):
        found(tmp_path, chunks=(1, 2))
    (tmp_path / "file").unlink()
    with pytest.raises(StateError, match="file: it was dropped"):
        found(tmp_path)
    with pytest.raises(HostError, match="No such file"):
        new(tmp_path / "nowhere")


def test_it_is_not_sealed_before_all_chunks_are_there(tmp_path: Path) -> None:
    file = new(tmp_path)
    file.put(2, b"", chunk_hash(b""))
    assert file.missing() == [1, 7]
    with pytest.raises(StateError, match="2 of 3 chunks are missing"):
        file.seal()
    with pytest.raises(DigestMismatch, match="chunk 2 comes twice"):
        file.put(2, b"other", chunk_hash(b"other"))


def test_a_damaged_chunk_is_missing_until_it_is_put_again(tmp_path: Path) -> None:
    filled(new(tmp_path)).seal()
    path = tmp_path / "file"
    data = path.read_bytes()
    path.write_bytes(data.replace(CHUNKS[1], b"FIRST"))
    file = found(tmp_path)
    with pytest.raises(StateError, match="chunk 1 is damaged; fetch it again"):
        file.read(1)
    assert (file.missing(), file.sealed) == ([1], False)
    file.put(1, CHUNKS[1], chunk_hash(CHUNKS[1]))
    file.seal()
    assert {chunk: found(tmp_path).read(chunk) for chunk in CHUNKS} == CHUNKS


def test_who_reads_as_it_is_closed_ends_that_and_nobody_reads_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = filled(new(tmp_path))
    reads, may_go_on = threading.Event(), threading.Event()

    def slow(data: bytes) -> bytes:
        reads.set()
        assert may_go_on.wait(60)
        return chunk_hash(data)

    monkeypatch.setattr(File, "hashed", staticmethod(slow))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(file.read, 7)
        assert reads.wait(60)
        file.remove()
        may_go_on.set()
        assert reading.result() == CHUNKS[7]
    assert not file.path.exists()
    with pytest.raises(StateError, match="it was dropped"):
        file.read(7)
    file.close()
