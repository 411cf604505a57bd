"""The payloads of one attempt in one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from atoll.node.dataplane.chunk_file import ChunkFile
from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Layout
from atoll.protocol.messages import Commit, Plan
from atoll.protocol.plans import payload_digest, payload_hash
from atoll.protocol.spec import check_payload


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    sync: int
    term: int
    attempt: int
    fragment: int = field(default=0, compare=False)
    """Of the sync."""

    @classmethod
    def of(cls, said: Plan | Commit) -> Self:
        """The attempt of a plan, or that became this commit."""
        return cls(said.sync, said.term, said.attempt, said.fragment)

    @property
    def file_name(self) -> str:
        fragment = f"-{self.fragment}" if self.fragment else ""
        return f"attempt-{self.sync}-{self.term}-{self.attempt}{fragment}.payloads"


class PayloadFile(ChunkFile):
    """Raises as `ChunkFile` does, and InvalidMessage if the run has no such fragment."""

    hashed = staticmethod(payload_hash)

    def __init__(
        self, folder: Path, layout: Layout, run_id: str, attempt: AttemptKey, *, is_new: bool | None, fsync: bool
    ) -> None:
        key = Digest("atoll/payload-log/v3").text(run_id).data(layout.manifest.digest).uint(layout.chunk_elements)
        key.uint(attempt.sync).uint(attempt.term).uint(attempt.attempt)
        path, chunks = folder / attempt.file_name, layout.chunks_of(attempt.fragment)
        super().__init__(path, key.finish(), chunks, is_new=is_new, fsync=fsync)
        self._layout = layout
        self._fragment = attempt.fragment
        self._run_id = run_id

    def put(self, chunk: int, data: bytes, hash: bytes, version: int = 0) -> None:
        """Raises InvalidMessage too, if it is no payload of this chunk."""
        if not self._layout.travels(chunk, self._fragment):
            raise InvalidMessage(f"{self.path.name}: chunk {chunk} has no payload in this layout")
        spec = self._layout.chunks[chunk]
        check_payload(spec.role, data, spec.num_elements, self._layout.wire_dtype(spec))
        super().put(chunk, data, hash, version)

    def digest(self, plan: Plan | Commit) -> bytes:
        """The digest that Done and Commit carry. Raises StateError while payloads are missing."""
        return payload_digest(self._run_id, plan, self.all_hashes())
