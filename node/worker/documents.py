"""Documents out of files: text, rows of .jsonl (.gz, .zst), rows of .parquet. What is held at once is bounded, whatever
a file's size."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from atoll.protocol.errors import ConfigError

ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Other files are text."""
TEXT_DOCUMENT = 1 << 16
"""Characters: a longer text file is several documents, so that some of them can be held out."""
READ_CHARACTERS = 1 << 20
READ_BYTES = 1 << 20
UNPACKED_FROM_BYTES = 1 << 14
MAX_ROW_BYTES = 1 << 26
PARQUET_ROWS = 64


def documents(path: Path, column: str) -> Iterator[str]:
    """Those that are not empty, in their order; `column` holds the text of a row. What is no UTF-8 is replaced.

    Raises ConfigError, naming file and row.
    """
    try:
        if path.name.endswith(".parquet"):
            found = _parquet(path, column)
        elif path.name.endswith(ROWS):
            found = _rows(path, column)
        else:
            found = _text(path)
        yield from (text for text in found if text)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def pieces(text: str, most: int) -> Iterator[str]:
    """Together `text`, each of at most `most` characters; they end after a line if they can, else after a word."""
    first = 0
    while len(text) - first > most:
        end = first + most
        cut = text.rfind("\n", first, end) + 1 or text.rfind(" ", first, end) + 1 or end
        yield text[first:cut]
        first = cut
    yield text[first:]


def _text(path: Path) -> Iterator[str]:
    rest = ""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        while block := file.read(READ_CHARACTERS):
            *whole, rest = pieces(rest + block, TEXT_DOCUMENT)
            yield from whole
    yield rest


def _rows(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(_lines(_unpacked(path, file)), 1):
            if len(line) > MAX_ROW_BYTES:
                raise ConfigError(f"{path}, line {number}: longer than {MAX_ROW_BYTES >> 20} MiB; split it")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise ConfigError(f'{path}, line {number}: no text in "{column}"; name the key that has it: --column')
            yield text.encode(errors="replace").decode()  # JSON can have halves of characters


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The last one may have no end. One that is too long comes as far as it was read."""
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        if len(rest) > MAX_ROW_BYTES:
            break
    yield rest


def _unpacked(path: Path, file: BinaryIO) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _zst_frames(file)
        return
    source = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    read: Callable[[int], bytes] = source.read
    while block := read(READ_BYTES):
        yield block


def _zst_frames(file: BinaryIO) -> Iterator[bytes]:
    """One after the other. Raises EOFError if the last one is torn, which zstandard's own readers pass over."""
    frame = None
    while packed := file.read(UNPACKED_FROM_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f'{path}: .parquet needs pyarrow: pip install "atoll[data]"') from None
    try:
        with parquet.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
            kinds = {item.name: item.type for item in file.schema_arrow}
            if str(kinds.get(column)) not in ("string", "large_string"):
                found = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
                raise ConfigError(f'{path}: no column "{column}" of text; name one with --column: {found}')
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column], use_threads=False):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
