"""Documents out of files of each kind, and what is wrong with a file."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.worker import data
from atoll.node.worker import documents as module
from atoll.node.worker.documents import ROWS, documents, pieces
from atoll.protocol.errors import ConfigError
from tests.harness.fuzzing import fuzz, peak_bytes

TEXTS = ["one\r\nline", "zwei Zeilen\nund \u00fcber", "\u4e09"]
ROWS_OF = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def read(path: Path, content: bytes, column: str = "text") -> list[str]:
    path.write_bytes(content)
    return list(documents(path, column))


@fuzz()
@given(st.text(alphabet="ab \n\u00e9", max_size=60), st.integers(1, 20))
def test_pieces_are_the_text_and_none_is_too_long(text: str, most: int) -> None:
    found = list(pieces(text, most))
    assert "".join(found) == text
    assert all(len(piece) <= most for piece in found)
    assert all(found[:-1])


def test_pieces_end_after_a_line_if_they_can_else_after_a_word() -> None:
    assert list(pieces("one two\nthree four", 10)) == ["one two\n", "three four"]
    assert list(pieces("one two three", 9)) == ["one two ", "three"]
    assert list(pieces("abcdef", 4)) == ["abcd", "ef"]


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    assert read(tmp_path / "a.md", TEXTS[0].encode()) == TEXTS[:1], "line ends are part of it"
    assert read(tmp_path / "b.py", b"a\xff\xfeb") == ["a\ufffd\ufffdb"]
    assert read(tmp_path / "empty", b"") == []


def test_a_long_text_file_is_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {i}\n" for i in range(1000)]
    for read_characters in (10, 333, 1 << 20):
        monkeypatch.setattr(module, "READ_CHARACTERS", read_characters)
        monkeypatch.setattr(module, "TEXT_DOCUMENT", 100)
        found = read(tmp_path / "a.txt", "".join(lines).encode())
        assert "".join(found) == "".join(lines)
        assert all(len(text) <= 100 and text.endswith("\n") for text in found)
        assert len(found) < 110


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"sixteen letters\n" * (1 << 21))  # 32 MiB
    row = b'{"text": "' + 64 * b"sixteen letters\\n" + b'"}\n'
    (tmp_path / "a.jsonl").write_bytes(row * ((32 << 20) // len(row)))
    for name in ("a.txt", "a.jsonl"):
        assert peak_bytes(lambda name=name: sum(map(len, documents(tmp_path / name, "text")))) < 16 << 20  # type: ignore[misc]


@pytest.mark.parametrize("blocks", [5, 1 << 20])
def test_rows_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    monkeypatch.setattr(module, "READ_BYTES", blocks)
    monkeypatch.setattr(module, "UNPACKED_FROM_BYTES", blocks)
    packed = zstandard.ZstdCompressor().compress
    half = ROWS_OF.index(b"\n") + 4  # frames end anywhere
    assert read(tmp_path / "a.jsonl", ROWS_OF) == TEXTS
    assert read(tmp_path / "b.jsonl", b"\n" + ROWS_OF.rstrip() + b"\r\n \n") == TEXTS
    assert read(tmp_path / "a.jsonl.gz", gzip.compress(ROWS_OF[:half]) + gzip.compress(ROWS_OF[half:])) == TEXTS
    assert read(tmp_path / "a.jsonl.zst", packed(ROWS_OF[:half]) + packed(ROWS_OF[half:])) == TEXTS
    assert read(tmp_path / "c.jsonl", b'{"body": "x", "text": 3}\n{"body": ""}', "body") == ["x"]
    assert read(tmp_path / "d.jsonl", b'{"text": "half \\ud800"}') == ["half ?"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", ROWS_OF + b"{", r"a\.jsonl, line 4: not JSON"),
        ("a.jsonl", ROWS_OF + b'{"body": "x"}', r'line 4: no text in "text".*--column'),
        ("a.jsonl", b'{"text": 3}', "line 1: no text"),
        ("a.jsonl", b'["text"]', "line 1: no text"),
        ("a.jsonl", b'{"text": "' + b"x" * 2000 + b'"}', "line 1: longer than"),
        ("a.jsonl", ROWS_OF + b'{"text": "' + b"x" * 2000, "line 4: longer than"),
        ("a.jsonl.gz", gzip.compress(ROWS_OF)[:-9], r"cannot read .*a\.jsonl\.gz"),
        ("a.jsonl.gz", b"no gzip at all", "cannot read"),
        ("a.jsonl.gz", gzip.compress(ROWS_OF)[:12] + b"\xff" * 30, "cannot read"),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress(ROWS_OF * 50)[:-1], "ends in the middle of a frame"),
        ("a.jsonl.zst", b"no zstandard", "cannot read"),
        ("a.parquet", b"PAR1 no parquet PAR1", "cannot read"),
    ],
    ids=itertools.count(),  # not the contents, which say when they were packed
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, text: str
) -> None:
    monkeypatch.setattr(module, "MAX_ROW_BYTES", 1000)
    with pytest.raises(ConfigError, match=text):
        read(tmp_path / name, content)


def test_a_row_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 4: not JSON"):
        read(tmp_path / "a.jsonl", ROWS_OF + b"[" * 100_000)


def test_rows_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for kind in (pa.string(), pa.large_string()):
        table = pa.table({"id": range(4), "text": pa.array([*TEXTS, None], kind)})
        pq.write_table(table, path, row_group_size=2)
        assert list(documents(path, "text")) == TEXTS
    with pytest.raises(ConfigError, match=r'no column "body" of text.*--column: id \(int64\), text \(large_string\)'):
        list(documents(path, "body"))
    with pytest.raises(ConfigError, match='no column "id" of text'):
        list(documents(path, "id"))


def test_memory_does_not_grow_with_a_group_of_rows(tmp_path: Path) -> None:
    rows = [bytes([97 + i % 26]).decode() * 5000 + str(i) for i in range(6400)]  # 32 MiB
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", compression="none", use_dictionary=False)
    before = pa.total_allocated_bytes()
    del rows
    most = max(pa.total_allocated_bytes() for _ in documents(tmp_path / "a.parquet", "text"))
    assert most - before < 8 << 20


def test_parquet_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r'pip install "atoll\[data\]"'):
        list(documents(tmp_path / "a.parquet", "text"))


def test_a_folder_is_read_with_its_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROWS_OF))
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "c.bin").write_bytes(b"a\0b")
    assert [file.name for file in data.list_files([str(tmp_path)], ROWS)] == ["a.jsonl.gz", "b.txt"]
    assert [file.name for file in data.list_files([str(tmp_path / "a.jsonl.gz")], ROWS)] == ["a.jsonl.gz"]
    assert [file.name for file in data.list_files([str(tmp_path)])] == ["b.txt"]
