"""Data sets for `Site.loader`. Importing it imports torch."""

from __future__ import annotations

from pathlib import Path

from atoll.node.worker.data import tokens_of
from atoll.node.worker.recipe import TextWindows
from atoll.node.worker.token_index import ShardRole, open_packed

__all__ = ["PackedTokens"]


class PackedTokens(TextWindows):
    """A folder that `atoll tokenize` wrote, in windows of `sequence` predicted tokens, one after the other: each is
    (sequence + 1,) int64 and begins with the last token of the one before it. Windows go over the ends of documents and
    of shards. The shards are mapped: processes of a DataLoader share the memory.

    Raises ConfigError if the folder is damaged or there is no whole window.
    """

    def __init__(self, folder: Path | str, sequence: int, held_out: bool = False) -> None:
        self._arguments = folder, sequence, held_out
        packed = open_packed(Path(folder))
        super().__init__(tokens_of(packed, ShardRole.HELD_OUT if held_out else ShardRole.TRAINING), sequence)
        self.fingerprint = packed.index.fingerprint
        """For `atoll.join(..., data_fingerprint=)`: the same at all sites that have the same tokens."""
        self.vocab_size = packed.index.vocab_size
        self._packed = packed

    def verify(self) -> None:
        """Reads all shards. Raises ConfigError for one with other contents than were written."""
        self._packed.verify()

    def __reduce__(self) -> tuple[type[PackedTokens], tuple[Path | str, int, bool]]:
        return PackedTokens, self._arguments  # a process that is spawned maps the files anew
