"""What a reducer says, and gives to auditors, of the errors that it adds to its averages (`average_errors.py`).

With Done it signs two roots over its chunks: of the hashes of what it added, and of what its codec left. An error
counts only after an attempt whose roots it has signed, and under the coordinator's start that heard them. What has
counted is kept for auditors until the audits of the average that it was added to are over. See
docs/decisions/0069-audited-reducers.md.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.exchange.peers.errors_given import Given
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.spill import Spilled
from atoll.protocol.audit_messages import NO_ERROR
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.errors import StateError
from atoll.protocol.hash_tree import HashTree
from atoll.protocol.plans import payload_hash
from atoll.protocol.sync_settings import KEPT_SYNCS

Item = Encoded | Spilled


def hash_of(error: Floats) -> bytes:
    return payload_hash(error.tobytes()) if error.size else NO_ERROR


@dataclass(frozen=True, slots=True)
class _Note:
    """Of one average."""

    before: bytes = NO_ERROR
    """The hash of what was added."""
    after: bytes = NO_ERROR
    earlier: AttemptKey | None = None
    """The attempt that had left what was added."""


@dataclass(frozen=True, slots=True)
class _Signed:
    chunks: tuple[int, ...]
    before: HashTree
    after: HashTree


@dataclass(eq=False)
class AuditedErrors:
    """Of one node. Methods are called in threads."""

    num_in_flight: int = 1
    """Syncs that may be open at once."""
    _notes: dict[AttemptKey, dict[int, _Note]] = field(default_factory=dict, init=False)
    _signed: dict[AttemptKey, _Signed] = field(default_factory=dict, init=False)
    _past: dict[AttemptKey, tuple[int, dict[int, Item]]] = field(default_factory=dict, init=False)
    """Errors that count no more, with the newest commit's sync when they last did."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def counting(self, attempt: AttemptKey | None, term: int) -> AttemptKey | None:
        """That attempt, if what it has left counts for an average under this term."""
        return attempt if attempt in self._signed and attempt is not None and attempt.term == term else None

    def whole(self, chunk: int, attempt: AttemptKey | None, error: Floats) -> Floats:
        """What that attempt has left of the chunk; nothing if other bytes are here now than were signed."""
        with self._lock:
            note = self._notes.get(attempt, {}).get(chunk) if attempt is not None else None
        return error if note is not None and hash_of(error) == note.after else NOTHING

    def note(self, attempt: AttemptKey, chunk: int, earlier: AttemptKey | None, added: Floats, left: Floats) -> None:
        """An average was made."""
        note = _Note(hash_of(added), hash_of(left), earlier if added.size else None)
        with self._lock:
            self._notes.setdefault(attempt, {})[chunk] = note

    def sign(self, attempt: AttemptKey, chunks: Sequence[int]) -> tuple[bytes, bytes]:
        """The roots over what was added and left, of these chunks, ascending: they are said in Done."""
        with self._lock:
            notes = self._notes.setdefault(attempt, {})
        found = [notes.get(chunk, _Note()) for chunk in chunks]
        signed = _Signed(
            tuple(chunks), HashTree(chunks, [n.before for n in found]), HashTree(chunks, [n.after for n in found])
        )
        with self._lock:
            self._signed[attempt] = signed
        return signed.before.root, signed.after.root

    def earlier(self, attempt: AttemptKey, chunk: int) -> AttemptKey | None:
        """The attempt that had left what was added in this one. Raises StateError if it is not known any more."""
        with self._lock:
            if attempt not in self._signed or chunk not in self._signed[attempt].chunks:
                raise StateError(f"what was added to chunk {chunk} in sync {attempt.sync} is not known here any more")
            return self._notes[attempt].get(chunk, _Note()).earlier

    def past(self, attempt: AttemptKey, chunk: int) -> Item | None:
        with self._lock:
            return self._past[attempt][1].get(chunk) if attempt in self._past else None

    def given(self, attempt: AttemptKey, chunk: int, error: bytes) -> Given:
        """`error`: what was added. Raises StateError if that is not known any more."""
        with self._lock:
            signed, note = self._signed.get(attempt), self._notes.get(attempt, {}).get(chunk, _Note())
            before = self._signed.get(note.earlier) if note.earlier is not None else None
        if signed is None or (note.earlier is not None and before is None):
            raise StateError(f"what was added to chunk {chunk} in sync {attempt.sync} is not known here any more")
        place = bisect_left(signed.chunks, chunk)
        return Given(
            error=error,
            before_hash=note.before,
            before_proof=signed.before.proof(place),
            after_hash=note.after,
            after_proof=signed.after.proof(place),
            earlier_proof=b"" if before is None else before.after.proof(bisect_left(before.chunks, chunk)),
        )

    def expired(
        self, void: Mapping[AttemptKey, dict[int, Item]], kept: Collection[AttemptKey], newest: int
    ) -> list[Item]:
        """Errors of `void` count no more: what of these, and of those before, nobody asks for. `kept`: attempts whose
        errors may count; `newest`: the sync of the newest commit here."""
        most = KEPT_SYNCS + self.num_in_flight
        with self._lock:
            self._past |= {key: (newest, items) for key, items in void.items()}
            over = [key for key, (since, _) in self._past.items() if newest - since > most]
            found = [item for key in over for item in self._past.pop(key)[1].values()]
            for key in [key for key in self._notes if newest - key.sync > most]:
                if key not in kept and key not in self._past:
                    del self._notes[key]
                    self._signed.pop(key, None)
        return found
