"""Text into a folder of packed tokens: `atoll tokenize`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from atoll.node.worker.data import is_held_out
from atoll.node.worker.documents import pieces
from atoll.node.worker.token_index import INDEX_NAME, MAX_SHARDS, Shard, ShardRole, TokenIndex, dtype_of
from atoll.node.worker.tokenizer import vocab_size_of
from atoll.protocol.disk import PUBLIC_FILE, REAL_DISK, new_folder, open_new
from atoll.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 18
"""Characters that are encoded as one: a longer document is cut, without an end token between its pieces."""
BATCH = 1 << 21
"""Characters that are encoded at once, by all threads."""
NAMES = {ShardRole.TRAINING: "tokens", ShardRole.HELD_OUT: "held-out"}


class _Piece(NamedTuple):
    text: str
    role: ShardRole
    is_last: bool


class _Writer:
    """The shards of one role, each of `shard_tokens` tokens but for the last."""

    def __init__(self, folder: Path, role: ShardRole, dtype: str, shard_tokens: int) -> None:
        self._folder, self._role, self._shard_tokens = folder, role, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file: BinaryIO | None = None
        self.shards: list[Shard] = []
        self.num_tokens = 0
        self._begin()

    def _begin(self) -> None:
        self._name = f"{NAMES[self._role]}-{len(self.shards):05}.bin"
        self._hash = blake3()
        self._in_shard = self._num_documents = self._text_bytes = 0

    def add(self, tokens: npt.NDArray[np.int64], text_bytes: int, num_documents: int) -> None:
        left = tokens.astype(self._dtype)
        while len(left):
            if self._file is None:
                self._file = open_new(self._folder / self._name, PUBLIC_FILE)
            part, left = np.split(left, [self._shard_tokens - self._in_shard])
            self._file.write(part.tobytes())
            self._hash.update(part.tobytes())
            self._in_shard += len(part)
            self.num_tokens += len(part)
            if not len(left):
                self._text_bytes += text_bytes
                self._num_documents += num_documents
            if self._in_shard == self._shard_tokens:
                self.finish()

    def close(self) -> None:
        """After an error: the shard that is open is of no use."""
        if self._file is not None:
            self._file.close()

    def finish(self) -> None:
        """The shard that is open, if any, is whole and on the disk."""
        if self._file is None:
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file = None
        self.shards.append(
            Shard(
                name=self._name,
                role=self._role,
                num_tokens=self._in_shard,
                num_documents=self._num_documents,
                text_bytes=self._text_bytes,
                hash=self._hash.hexdigest(),
            )
        )
        if len(self.shards) > MAX_SHARDS // 2:
            raise ConfigError(f"more than {MAX_SHARDS // 2} shards; raise --shard-tokens {self._shard_tokens}")
        self._begin()


def pack(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    tokenizer_hash: str,
    end: int,
    out: Path,
    *,
    shard_tokens: int,
    progress: Callable[[int], None],
) -> TokenIndex:
    """One document in twenty or so is held out, by the hash of its text, in shards of its own; of few, the last one.
    `out` is there whole or not at all. `progress` is told of the tokens so far.

    Raises ConfigError if `out` is not empty, there is no text, or some that the tokenizer does not take; HostError if
    the disk is full.
    """
    vocab_size = vocab_size_of(tokenizer)
    dtype = dtype_of(vocab_size)
    with new_folder(out) as folder, ExitStack() as stack:
        writers = {role: _Writer(folder, role, dtype, shard_tokens) for role in ShardRole}
        for writer in writers.values():
            stack.callback(writer.close)
        for batch in _batches(texts):
            try:
                encoded = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            except Exception as error:  # the library raises nothing narrower
                raise ConfigError(f"the tokenizer cannot encode a document: {error}") from None
            for piece, encoding in zip(batch, encoded, strict=True):
                tokens = np.array([*encoding.ids, end][: len(encoding.ids) + piece.is_last], dtype=np.int64)
                writers[piece.role].add(tokens, len(piece.text.encode()), int(piece.is_last))
            progress(sum(writer.num_tokens for writer in writers.values()))
        for writer in writers.values():
            writer.finish()
        shards = tuple(shard for writer in writers.values() for shard in writer.shards)
        if not shards:
            raise ConfigError("no text in these files: there is nothing to write")
        index = TokenIndex(
            tokenizer_hash=tokenizer_hash, vocab_size=vocab_size, dtype=dtype, end_token=end, shards=shards
        )
        REAL_DISK.write_whole(folder / INDEX_NAME, index.to_json().encode(), fsync=True, mode=PUBLIC_FILE)
    return index


def _batches(texts: Iterable[str]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for text, role in _roles(texts):
        *before, last = pieces(text, PIECE)
        for piece in (*(_Piece(part, role, False) for part in before), _Piece(last, role, True)):
            batch.append(piece)
            size += len(piece.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _role_of(text: str) -> ShardRole:
    return ShardRole.HELD_OUT if is_held_out(text) else ShardRole.TRAINING


def _roles(texts: Iterable[str]) -> Iterator[tuple[str, ShardRole]]:
    """The last one goes where there is none, so that there is text of both roles."""
    used: set[ShardRole] = set()
    last: str | None = None
    for text in texts:
        if last is not None:
            used.add(role := _role_of(last))
            yield last, role
        last = text
    if last is not None:
        (role, *_) = [role for role in ShardRole if role not in used] or [_role_of(last)]
        yield last, role
