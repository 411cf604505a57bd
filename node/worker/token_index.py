"""A folder of packed tokens: its `index.json`, and what its files must be. Needs neither numpy nor torch.

The files hold nothing but tokens, little-endian, one document after the other, each ended by the end token. A document
may go on in the next shard of its role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path

from blake3 import blake3

from atoll.node.dataplane.hugging_face import read_table
from atoll.protocol.digest import Digest
from atoll.protocol.errors import ConfigError
from atoll.protocol.strict import build

INDEX_NAME = "index.json"
FORMAT = "atoll/tokens/1"
TOKEN_BYTES = {"uint16": 2, "uint32": 4}
MAX_VOCAB = 1 << 32
MAX_SHARDS = 1 << 16
MAX_COUNT = 1 << 46
"""Of tokens, documents or bytes in one shard: sums over all shards are below 2^64."""
_NAME = re.compile(r"(tokens|held-out)-[0-9]{5}\.bin")
_HASH = re.compile(r"[0-9a-f]{64}")


class ShardRole(Enum):
    TRAINING = auto()
    HELD_OUT = auto()


def dtype_of(vocab_size: int) -> str:
    """The smaller type that has all tokens."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    name: str
    role: ShardRole
    num_tokens: int
    num_documents: int
    """That end in it."""
    text_bytes: int
    """Of what its tokens stand for, in UTF-8; of a piece of text over two shards, in the second."""
    hash: str
    """BLAKE3 of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIndex:
    """Raises ConfigError if it contradicts itself."""

    format: str = FORMAT
    tokenizer_hash: str
    """BLAKE3 of its tokenizer.json."""
    vocab_size: int
    """One more than the highest token that the tokenizer has."""
    dtype: str
    end_token: int
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f'format is "{self.format[:40]}", this version reads "{FORMAT}"')
        if not 1 <= self.vocab_size <= MAX_VOCAB:
            raise ConfigError(f"vocab_size must be from 1 to {MAX_VOCAB}")
        if self.dtype != (dtype := dtype_of(self.vocab_size)):
            raise ConfigError(f"dtype must be {dtype} for {self.vocab_size} tokens")
        if not 0 <= self.end_token < self.vocab_size:
            raise ConfigError("end_token is not in the vocabulary")
        if not 1 <= len(self.shards) <= MAX_SHARDS:
            raise ConfigError(f"{len(self.shards)} shards; from 1 to {MAX_SHARDS} are possible")
        for number, shard in enumerate(self.shards):
            if not _NAME.fullmatch(shard.name):
                raise ConfigError(f"shards[{number}]: name must be tokens-00000.bin, held-out-00000.bin or the like")
            if not 1 <= shard.num_tokens <= MAX_COUNT:
                raise ConfigError(f"{shard.name}: num_tokens must be from 1 to {MAX_COUNT}")
            if not (0 <= shard.num_documents <= MAX_COUNT and 0 <= shard.text_bytes <= MAX_COUNT):
                raise ConfigError(f"{shard.name}: num_documents and text_bytes must be from 0 to {MAX_COUNT}")
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise ConfigError("two shards have the same name")
        if not all(_HASH.fullmatch(text) for text in (self.tokenizer_hash, *(s.hash for s in self.shards))):
            raise ConfigError("a hash must be 64 hexadecimal digits, in small letters")

    @property
    def fingerprint(self) -> bytes:
        """32 bytes, the same for the same tokens in the same shards."""
        digest = Digest("atoll/tokens/v1").data(bytes.fromhex(self.tokenizer_hash)).uint(self.vocab_size)
        digest.text(self.dtype).uint(self.end_token).uint(len(self.shards))
        for shard in self.shards:
            digest.text(shard.name).text(shard.role.name).data(bytes.fromhex(shard.hash))
            digest.uints((shard.num_tokens, shard.num_documents, shard.text_bytes))
        return digest.finish()

    def of_role(self, role: ShardRole) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.shards if shard.role is role)

    def totals(self, roles: Iterable[ShardRole]) -> tuple[int, int, int]:
        """Tokens, documents, and bytes of text."""
        shards = [shard for role in roles for shard in self.of_role(role)]
        return (
            sum(shard.num_tokens for shard in shards),
            sum(shard.num_documents for shard in shards),
            sum(shard.text_bytes for shard in shards),
        )

    def to_json(self) -> str:
        shards = [asdict(shard) | {"role": shard.role.name} for shard in self.shards]
        return json.dumps(asdict(self) | {"shards": shards}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class PackedFolder:
    path: Path
    index: TokenIndex

    def verify(self) -> None:
        """Reads all files. Raises ConfigError for one that has other contents than were written."""
        for shard in self.index.shards:
            if blake3(max_threads=blake3.AUTO).update_mmap(self.path / shard.name).hexdigest() != shard.hash:
                raise ConfigError(
                    f"{self.path / shard.name} has changed since it was written; copy it again, or make the folder anew"
                )


def open_packed(path: Path) -> PackedFolder:
    """Raises ConfigError unless there is an index and its files have the sizes that it says."""
    where = path / INDEX_NAME
    table = read_table(where, "a folder that `atoll tokenize` wrote")
    try:
        index = build(TokenIndex, table, "it")
    except ConfigError as error:
        raise ConfigError(f"{where}: not the index of packed tokens: {error}") from None
    for shard in index.shards:
        file, expected = path / shard.name, shard.num_tokens * TOKEN_BYTES[index.dtype]
        try:
            size = file.stat().st_size if file.is_file() else None
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        if size != expected:
            found = "is not there" if size is None else f"has {size} bytes"
            raise ConfigError(f"{file} {found}, and {expected} are in {INDEX_NAME}; copy the folder again")
    return PackedFolder(path, index)


def packed_among(paths: Sequence[str]) -> PackedFolder | None:
    """The folder of packed tokens, if that is what a person named. Raises ConfigError if it is damaged, or one of
    several paths."""
    for path in map(Path, paths):
        if (path / INDEX_NAME).is_file() and any(_NAME.fullmatch(file.name) for file in path.glob("*.bin")):
            if len(paths) > 1:
                raise ConfigError(f"{path} holds packed tokens; name it alone, or tokenize all of the text into one")
            return open_packed(path)
    return None
