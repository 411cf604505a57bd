"""What an auditor keeps of a payload that is not the average, for people: the signed words of all and what was
contributed. Whoever has the run's root, and nothing else of the run, can find the same (`atoll evidence`).

See docs/decisions/0069-audited-reducers.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from atoll.node.dataplane.averages import recomputed
from atoll.protocol import wire
from atoll.protocol.audit_messages import NO_ERROR
from atoll.protocol.codecs import kernels
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.codecs.table import BUNDLE, CODECS, TABLE
from atoll.protocol.disk import Disk, make_folder
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.hash_tree import check_proof
from atoll.protocol.messages import FalsePayload, Made, Member, Signature, SignedErrors
from atoll.protocol.plans import payload_hash
from atoll.protocol.spec import Aggregation, Contribution, Way
from atoll.protocol.sync_settings import MAX_CHUNK_ELEMENTS
from atoll.protocol.trust import words
from atoll.protocol.trust.certificates import Certificate

MAX_FILES = 8
MAX_FILE_BYTES = 1 << 30


def keep(folder: Path, found: FalsePayload, disk: Disk) -> Path | None:
    """The file; None if there are enough of them. Raises HostError, OSError."""
    make_folder(folder)
    path = folder / f"commit-{found.asked.commit}-chunk-{found.asked.chunk}.pb"
    if len(list(folder.glob("*.pb"))) >= MAX_FILES:
        return None
    disk.write_whole(path, wire.encode(found), fsync=True)
    return path


def read(data: bytes) -> FalsePayload:
    """Raises InvalidMessage."""
    return wire.decode(FalsePayload, data)


def check(found: FalsePayload, roots: Sequence[Certificate]) -> str:
    """Who made what, in words. Raises InvalidMessage where it shows nothing against the reducer: somebody has not
    signed what is said, or the payload is the average."""
    asked, made, way = found.asked, found.asked.made, _way(found)
    lists = asked.roots, asked.signatures, found.contributions, found.proofs
    if made is None or made.signature is None or any(len(one) != len(asked.contributors) for one in lists):
        raise InvalidMessage("it lacks words of its reducer or its contributors")
    if not 0 < found.num_elements <= MAX_CHUNK_ELEMENTS:
        raise InvalidMessage(f"a chunk of {found.num_elements} elements")
    contributions = []
    for member, root, signature, data, proof in zip(asked.contributors, *lists, strict=True):
        start = member.site_id, member.incarnation
        _check_signed(found, roots, member, words.of_contributions(found.run_id, asked.sync, start, root), signature)
        check_proof(root, found.num_chunks, found.place, asked.chunk, payload_hash(data), proof)
        kernels.check(data, way.up, found.num_elements)
        contributions.append((member.influence if way.by_influence else member.tokens, data))
    reducer = next((c for c in asked.contributors if c.site_id == made.site_id), None)
    if reducer is None:
        raise InvalidMessage("its reducer is no contributor")
    start = reducer.site_id, reducer.incarnation
    word = words.of_payloads(found.run_id, asked, way, start, made.root)
    key = _check_signed(found, roots, reducer, word, made.signature)
    check_proof(
        made.root, found.num_payloads, found.payload_place, asked.chunk, found.payload_hash, found.payload_proof
    )
    error, left = NOTHING, NOTHING
    if way.error_beta_down:
        word = words.of_errors(found.run_id, asked, start, way.error_beta_down, _errors(made))
        _check_signed(found, roots, reducer, word, _errors(made).signature)
        error, left = _error(found, _errors(made)), np.empty(found.num_elements, np.float32)
    average = recomputed(way, found.num_elements, contributions, error, left)
    if _is_made(found, average) and (not left.size or payload_hash(left.tobytes()) == found.left_hash):
        raise InvalidMessage("the payload is the average of what was contributed")
    names = ", ".join(member.name for member in asked.contributors)
    return (
        f"run {found.run_id}, sync {asked.sync}, attempt {asked.attempt} of term {asked.term}: "
        f"site {reducer.name} (key {key.hex()[:16]}) signed that it made the payload {found.payload_hash.hex()[:16]} "
        f"of chunk {asked.chunk}; of what {names} signed that they contributed comes {payload_hash(average).hex()[:16]}"
    )


def _is_made(found: FalsePayload, average: bytes) -> bool:
    """Whether it is what the reducer made, whichever zstd made bytes of either."""
    if not TABLE[found.down].zstd_level:
        return payload_hash(average) == found.payload_hash
    if payload_hash(found.payload) != found.payload_hash:
        raise InvalidMessage(f"it lacks the payload: of {found.down} another zstd makes other bytes")
    mine, made = (kernels.without_zstd(data, found.down, found.num_elements) for data in (average, found.payload))
    return mine == made


def _errors(made: Made) -> SignedErrors:
    if made.errors is None:
        raise InvalidMessage("its reducer signed nothing of its errors")
    return made.errors


def _error(found: FalsePayload, errors: SignedErrors) -> Floats:
    """What its reducer signed that it added; what it left is as it signed too."""
    if len(found.error) not in (0, 4 * found.num_elements):
        raise InvalidMessage(f"an error of {len(found.error)} bytes, of {found.num_elements} elements")
    for root, hash, proof in (
        (errors.before, payload_hash(found.error) if found.error else NO_ERROR, found.error_proof),
        (errors.after, found.left_hash, found.left_proof),
    ):
        check_proof(root, found.num_payloads, found.payload_place, found.asked.chunk, hash, proof)
    return np.frombuffer(found.error, np.float32) if found.error else NOTHING


def _check_signed(
    found: FalsePayload, roots: Sequence[Certificate], member: Member, word: bytes, signature: Signature | None
) -> bytes:
    if signature is None:
        raise InvalidMessage(f"a word of site {member.name} that is not signed")
    return words.check(found.run_id, member.name, word, signature, roots)


def _way(found: FalsePayload) -> Way:
    """How its reducer signed that it averaged."""
    downs, aggregations = (*CODECS, BUNDLE), Aggregation.__members__
    if found.up not in CODECS or found.down not in downs or found.aggregation not in aggregations:
        raise InvalidMessage("it names no way to average")
    return Way(
        up=found.up,
        down=found.down,
        contribution=Contribution.DELTA,  # whatever it is of, it is averaged alike
        aggregation=Aggregation[found.aggregation],
        robust=found.robust,
        clip=found.clip,
        trim=found.trim,
        error_beta_down=found.error_beta,
    )
