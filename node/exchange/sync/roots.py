"""In a run with audits: what each contributor has said that it contributes, by the root over the hashes of all of it.

Each site says its root in Ready, and to reducers as it opens a stream. A reducer averages nothing else, and waits for
the coordinator's word on all roots: what is audited later is what was averaged. Without audits nobody has one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.attempt import Attempt
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.errors import RefusedError, StateError
from atoll.protocol.hash_tree import HashTree, check_proof
from atoll.protocol.messages import Member


def made_tree(payloads: PayloadFile, chunks: Sequence[int]) -> HashTree:
    """Over those of these chunks, ascending: their reducer signs its root. Raises StateError if one is not here."""
    hashes = []
    for chunk in chunks:
        if (found := payloads.hash_of(chunk)) is None:
            raise StateError(f"{payloads.path.name}: the payload of chunk {chunk} is not here")
        hashes.append(found)
    return HashTree(chunks, hashes)


class Roots:
    def __init__(self, attempt: Attempt, told: Sequence[bytes], known: dict[tuple[int, int], bytes]) -> None:
        """`told`: of all contributors, if the coordinator has said them. `known`: of each start of a site, heard in all
        attempts at this sync."""
        self._attempt = attempt
        self._known = known
        self._is_audited = attempt.data.is_audited
        self.are_told = not self._is_audited
        kept = attempt.data.kept
        self.own = kept.root if kept is not None and attempt.contributes else b""
        if self._is_audited and told:
            known.update(zip(self._starts(), told, strict=True))
            self.are_told = True
        if self.own:
            known.setdefault((attempt.me.site_id, attempt.me.incarnation), self.own)

    def _starts(self) -> list[tuple[int, int]]:
        return [(c.site_id, c.incarnation) for c in self._attempt.plan.contributors]

    def hear(self, member: Member, root: bytes) -> None:
        """As a contributor opens a stream, or as its Ready says. Raises RefusedError if it has said another one."""
        if not self._is_audited:
            return
        if len(root) != DIGEST_BYTES:
            text = f"site {member.site_id} contributes to a run with audits, and says no root of what it contributes"
            raise RefusedError(f"{self._attempt.where}: {text}")
        if self._known.setdefault((member.site_id, member.incarnation), root) != root:
            raise RefusedError(f"site {member.site_id} says another root than before; a contribution never changes")

    def all_told(self) -> None:
        self.are_told = True

    def check(self, member: Member, items: Iterable[Encoded]) -> None:
        """In a thread: contributions of that site are those that its root is over. Raises InvalidMessage."""
        if not self._is_audited:
            return
        root, chunks = self._known[member.site_id, member.incarnation], self._attempt.data.all_chunks
        for item in items:
            check_proof(root, len(chunks), bisect_left(chunks, item.chunk), item.chunk, item.hash, item.proof)
