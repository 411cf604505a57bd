"""What a reducer gives to an auditor of the error that it added to an average, held against what it has signed. Pure.

See docs/decisions/0069-audited-reducers.md, "Errors of averages".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.exchange.peers.errors_given import Given
from atoll.protocol.audit_messages import NO_ERROR
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.hash_tree import check_proof
from atoll.protocol.layout import Layout
from atoll.protocol.messages import AuditChunk, Made, SignedErrors
from atoll.protocol.plans import payload_hash


class Refuted(InvalidMessage):
    """What a site gave is not what it has signed."""


def found_hash(payload: bytes, left: bytes) -> bytes:
    """Of a payload and of what its codec left, by their hashes: an auditor compares both."""
    return Digest("atoll/audited/v1").data(payload).data(left).finish()


def made_chunks(layout: Layout, fragment: int, made: Made, chunk: int) -> list[int]:
    """Those that it made, ascending. Raises InvalidMessage if the chunk is none of them."""
    if len(made.first_chunks) != len(made.nums_chunks):
        raise InvalidMessage(f"an audit of chunk {chunk}, whose reducer made no such chunks")
    within = [range(f, f + n) for f, n in zip(made.first_chunks, made.nums_chunks, strict=True)]
    chunks = [c for c in layout.chunks_of(fragment) if any(c in some for some in within)]
    if chunk not in chunks:
        raise InvalidMessage(f"chunk {chunk} is none of those that its reducer made")
    return chunks


def signed_errors(asked: AuditChunk) -> tuple[Made, SignedErrors]:
    """What the reducer signed in the attempt. Raises InvalidMessage if it said nothing."""
    made = asked.made
    if made is None or made.errors is None:
        raise InvalidMessage(f"the reducer of chunk {asked.chunk} has not said what it added to its averages")
    return made, made.errors


def checked(layout: Layout, asked: AuditChunk, earlier: AttemptKey | None, given: Given) -> Floats:
    """What the reducer added. `earlier`: by this site's log, the last commit that touched the chunk before.

    Raises Refuted; StateError or InvalidMessage where nobody can say.
    """
    made, errors = signed_errors(asked)
    chunk, num_elements = asked.chunk, layout.chunks[asked.chunk].num_elements
    chunks = made_chunks(layout, asked.fragment, made, chunk)
    try:
        _check_within(errors.before, chunks, chunk, given.before_hash, given.before_proof)
        _check_within(errors.after, chunks, chunk, given.after_hash, given.after_proof)
        if given.before_hash == NO_ERROR:
            if given.error:
                raise InvalidMessage(f"chunk {chunk}: an error that its reducer did not add")
            return NOTHING
        if len(given.error) != 4 * num_elements or payload_hash(given.error) != given.before_hash:
            raise InvalidMessage(f"chunk {chunk}: an error that does not have its hash")
        error = np.frombuffer(given.error, np.float32)
        if not np.isfinite(error).all():
            raise InvalidMessage(f"chunk {chunk}: an error that is not finite")
    except InvalidMessage as problem:
        raise Refuted(str(problem)) from None
    _check_earlier(layout, asked, earlier, given)
    return error


def _check_earlier(layout: Layout, asked: AuditChunk, earlier: AttemptKey | None, given: Given) -> None:
    """That it had left that of its last average of the chunk."""
    before, chunk = asked.before, asked.chunk
    if earlier is None:
        raise StateError(f"the commit before that touched chunk {chunk} is not in the log here")
    if earlier.term != asked.term:
        raise Refuted(f"chunk {chunk}: an error of another start of the coordinator was added, which counts no more")
    if before is None or before.made.errors is None:
        raise StateError(f"nobody knows what the reducer of chunk {chunk} had signed of its average before")
    if (before.sync, before.term, before.attempt) != (earlier.sync, earlier.term, earlier.attempt):
        raise InvalidMessage(f"another commit before touched chunk {chunk} than the coordinator says")
    try:
        chunks = made_chunks(layout, earlier.fragment, before.made, chunk)
        _check_within(before.made.errors.after, chunks, chunk, given.before_hash, given.earlier_proof)
    except InvalidMessage as problem:
        raise Refuted(f"what was added is not what was left before: {problem}") from None


def _check_within(root: bytes, chunks: Sequence[int], chunk: int, hash: bytes, proof: bytes) -> None:
    check_proof(root, len(chunks), bisect_left(chunks, chunk), chunk, hash, proof)
