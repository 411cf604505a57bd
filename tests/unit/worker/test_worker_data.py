"""Data sets, their fingerprint and split; which samples a site draws."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from atoll.node import local_protocol
from atoll.node.worker import data
from atoll.protocol.errors import ConfigError


def make(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return make(tmp_path / "many", {f"part{i % 3}/file{i:03}.txt": b"%03d" % i * 50 for i in range(200)})


def test_the_standard_library_is_the_default() -> None:
    listing = data.list_files([])
    names = [f.name for f in listing]
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not [n for n in names if n.startswith(("site-packages/", "test/"))]
    assert 1 << 20 < sum(f.size_bytes for f in listing) <= data.STDLIB_MAX_BYTES


def test_files_of_a_folder(tmp_path: Path) -> None:
    folder = make(tmp_path, {"b.txt": b"b", "a/z.txt": b"z", ".hidden": b"h", "empty": b"", "image": b"\x89\0\0"})
    listing = data.list_files([str(folder)])
    assert [f.name for f in listing] == ["a/z.txt", "b.txt"]


def test_names_do_not_depend_on_where_the_files_lie(tmp_path: Path, many: Path) -> None:
    moved = tmp_path / "moved" / "elsewhere"
    moved.parent.mkdir()
    before = data.fingerprint(data.list_files([str(many)]))
    many.rename(moved)
    assert data.fingerprint(data.list_files([str(moved)])) == before


def test_fingerprint_sees_names_and_contents(tmp_path: Path) -> None:
    def fingerprint(files: dict[str, bytes], name: str) -> bytes:
        return data.fingerprint(data.list_files([str(make(tmp_path / name, files))]))

    prints = [
        fingerprint({"a": b"1", "b": b"2"}, "one"),
        fingerprint({"a": b"1", "c": b"2"}, "renamed"),
        fingerprint({"a": b"1", "b": b"3"}, "changed"),
        fingerprint({"a": b"12"}, "joined"),
    ]
    assert len(set(prints)) == 4
    assert fingerprint({"a": b"1", "b": b"2"}, "again") == prints[0]


def test_a_fingerprint_is_of_what_is_on_the_disk_now(tmp_path: Path) -> None:
    folder = make(tmp_path / "data", {"a": b"one"})
    before = data.fingerprint(data.list_files([str(folder)]))
    stat = (folder / "a").stat()
    (folder / "a").write_bytes(b"two")
    os.utime(folder / "a", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # nothing but its content tells
    assert data.fingerprint(data.list_files([str(folder)])) != before
    (folder / "a").write_bytes(b"one")
    assert data.fingerprint(data.list_files([str(folder)])) == before


@pytest.mark.parametrize("name", ["missing", "empty.txt", "binary", "hollow"])
def test_what_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    make(tmp_path, {"empty.txt": b"", "binary": b"a\0b"})
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ConfigError, match=name):
        data.list_files([str(tmp_path / name)])


def test_two_paths(tmp_path: Path) -> None:
    make(tmp_path, {"x/a": b"1", "y/a": b"2", "z/x/a": b"3"})
    listing = data.list_files([str(tmp_path / "y"), str(tmp_path / "x")])
    assert [f.name for f in listing] == ["x/a", "y/a"]
    with pytest.raises(ConfigError, match="same name"):
        data.list_files([str(tmp_path / "x"), str(tmp_path / "z" / "x")])


def test_whole_files_are_held_out(many: Path) -> None:
    corpus = data.load(data.list_files([str(many)]))
    assert len(corpus.training) + len(corpus.held_out) == 200 * 150
    held_out = {bytes(corpus.held_out.window(i, 3)) for i in range(0, len(corpus.held_out), 150)}
    training = {bytes(corpus.training.window(i, 3)) for i in range(0, len(corpus.training), 150)}
    assert not held_out & training
    assert 2 <= len(held_out) <= 25  # about one in twenty


def test_the_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    text = bytes(range(1, 201))
    corpus = data.load(data.list_files([str(make(tmp_path, {"a.txt": text}) / "a.txt")]))
    assert bytes(corpus.training.window(0, 190)) == text[:190]
    assert bytes(corpus.held_out.window(0, 10)) == text[190:]
    with pytest.raises(ConfigError, match=r"b\.txt.*too little"):
        data.load(data.list_files([str(make(tmp_path, {"b.txt": b"short"}) / "b.txt")]))


def test_windows_cross_files_and_mapped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAPPED_FROM_BYTES", 50)
    sizes = [10, 60, 5, 5, 70, 1]
    parts = [np.arange(size, dtype=np.uint8) + 10 * i for i, size in enumerate(sizes)]
    whole = np.concatenate(parts)
    text = data.Text(parts)
    assert len(text) == len(whole)
    for offset, size in [(0, len(whole)), (5, 10), (69, 3), (70, 0), (149, 2), (9, 62)]:
        np.testing.assert_array_equal(text.window(offset, size), whole[offset : offset + size])
    with pytest.raises(ValueError, match="of a text of"):
        text.window(150, 2)


def test_which_files_a_run_wants(tmp_path: Path) -> None:
    path = str(make(tmp_path, {"a": b"text"}))
    with pytest.raises(ConfigError, match=r"'wiki'.*--data PATH"):
        data.source_for_run("wiki", [])
    listing = data.source_for_run("local", [path])
    assert data.fingerprint_for_run("local", listing) == b""
    assert len(data.fingerprint_for_run("wiki", data.source_for_run("wiki", [path]))) == 32
    assert data.source_for_run("local", []) == data.source_for_run("stdlib", [])


def test_sites_and_restarts_draw_other_samples() -> None:
    base = (1, 1, 1, 1)
    seeds = {local_protocol.data_seed(*(v + (i == j) for j, v in enumerate(base))) for i in range(5)}
    assert len(seeds) == 5
    assert all(0 <= seed < 1 << 63 for seed in seeds)
