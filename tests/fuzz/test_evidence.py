"""A file that is to show a false payload, as anybody may have made or changed it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.dataplane import false_payload
from atoll.node.dataplane.averages import recomputed
from atoll.protocol import wire
from atoll.protocol.codecs import kernels
from atoll.protocol.codecs.table import TABLE
from atoll.protocol.errors import AtollError, InvalidMessage
from atoll.protocol.hash_tree import HashTree
from atoll.protocol.messages import AuditChunk, FalsePayload, Made, Member
from atoll.protocol.plans import payload_hash
from atoll.protocol.spec import Way, spec_of
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust.words import of_contributions, of_payloads
from atoll.protocol.v1 import session_pb2
from tests.harness.fuzzing import fuzz
from tests.harness.site_keys import SiteKeys

KEYS = SiteKeys("run")
ROOTS = [KEYS.root.certificate]
WAY = spec_of(SyncSettings(audits=1), 3, 0).trainable


MEMBERS = tuple(Member(site_id=i, incarnation=1, address="h:1", tokens=i, name=" ab"[i]) for i in (1, 2))
ENCODED = [kernels.encode(WAY.up, np.full(8, i, np.float32)) for i in (1, 2)]


def evidence(
    way: Way = WAY, members: tuple[Member, ...] = MEMBERS, made_of_chunk: bytes | bytearray | memoryview = ENCODED[0]
) -> FalsePayload:
    """Site b made the payload of chunk 1: of what a contributed alone, or another one."""
    encoded = ENCODED
    trees = [HashTree((0, 1), [payload_hash(data)] * 2) for data in encoded]
    false = payload_hash(made_of_chunk)
    made = HashTree((1,), [false])
    asked = AuditChunk(
        number=1, commit=4, sync=5, attempt=1, term=1, fragment=0, base_commit=3, contributors=members,
        roots=tuple(tree.root for tree in trees), chunk=1,
    )  # fmt: skip
    pairs = zip(members, trees, strict=True)
    signatures = [KEYS.words(m.name).signed(of_contributions("run", 5, (m.site_id, 1), tree.root)) for m, tree in pairs]
    word = of_payloads("run", asked, way, (2, 1), made.root)
    said = Made(site_id=2, first_chunks=(1,), nums_chunks=(1,), root=made.root, signature=KEYS.words("b").signed(word))
    return FalsePayload(
        run_id="run",
        asked=replace(asked, signatures=tuple(signatures), made=said),
        up=way.up,
        down=way.down,
        aggregation=way.aggregation.name,
        robust=way.robust,
        clip=way.clip,
        trim=way.trim,
        num_elements=8,
        place=1,
        num_chunks=2,
        contributions=tuple(encoded),
        proofs=tuple(tree.proof(1) for tree in trees),
        payload_hash=false,
        payload_place=0,
        num_payloads=1,
        payload_proof=b"",
        payload=bytes(made_of_chunk) if TABLE[way.down].zstd_level else b"",
    )


BEHIND_ZSTD = spec_of(SyncSettings(audits=1, down="bf16"), 3, 0).trainable
FILES = [wire.encode(evidence(way)) for way in (WAY, BEHIND_ZSTD)]
SHOWN = [false_payload.check(false_payload.read(data), ROOTS) for data in FILES]


def flipped(whole: bytes, bit: int) -> bytes:
    place, bit = divmod(bit % (8 * len(whole)), 8)
    return whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]


@fuzz(150)
@given(
    st.one_of(
        st.binary(max_size=256),
        st.builds(flipped, st.sampled_from(FILES), st.integers(0)),
        st.builds(lambda whole, n: whole[: n % len(whole)], st.sampled_from(FILES), st.integers(0)),
        st.builds(
            lambda n, name: session_pb2.FalsePayload(run_id=name, num_elements=n).SerializeToString(),
            st.integers(0, 1 << 63), st.text(max_size=8),
        ),
    )
)  # fmt: skip
def test_any_file_shows_what_its_reducer_signed_or_nothing(data: bytes) -> None:
    try:
        shown = false_payload.check(false_payload.read(data), ROOTS)
    except AtollError:
        return
    assert shown in SHOWN


def test_of_averages_by_influence_it_is_what_each_contribution_counts() -> None:
    """Not the tokens, by which other runs average; and it is signed."""
    way = spec_of(SyncSettings(audits=1, robust="gram"), 3, 0).trainable
    members = tuple(replace(member, influence=3 - member.site_id) for member in MEMBERS)
    by_tokens, by_influence = (
        recomputed(way, 8, list(zip(weights, ENCODED, strict=True))) for weights in ((1, 2), (2, 1))
    )
    shown = evidence(way, members, by_tokens)
    assert "site b (key " in false_payload.check(shown, ROOTS)
    with pytest.raises(InvalidMessage, match="is the average"):
        false_payload.check(evidence(way, members, by_influence), ROOTS)
    others = replace(shown.asked, contributors=tuple(replace(member, influence=1) for member in MEMBERS))
    with pytest.raises(InvalidMessage, match="has not signed"):
        false_payload.check(replace(shown, asked=others), ROOTS)
