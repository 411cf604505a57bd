"""In a run with audits: what a reducer takes, what is kept and given, and what an auditor finds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.cli.main import main
from atoll.node.dataplane import false_payload
from atoll.node.dataplane.averages import recomputed, recomputed_buffer
from atoll.node.dataplane.kept_contributions import Kept, KeptContributions, kept_by_node
from atoll.node.exchange.auditing import Auditor
from atoll.node.exchange.catchup.expected_donors import ExpectedDonors
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.frames import Encoded, PartAssembler, pack_frames
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.reduction import share_of
from atoll.node.exchange.sync.roots import Roots
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.codecs import kernels, unchanged
from atoll.protocol.codecs.compression import compressed
from atoll.protocol.disk import Disk
from atoll.protocol.errors import AtollError, ConfigError, InvalidMessage, RefusedError, StateError
from atoll.protocol.hash_tree import HashTree
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import (
    AuditChunk,
    AuditOutcome,
    ChunkAudited,
    FalsePayload,
    Header,
    Made,
    Member,
    Tree,
)
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import KEPT_STEPS, KEPT_SYNCS, SyncSettings, check_sync
from atoll.protocol.trust import certificates
from atoll.protocol.trust.words import Words, of_contributions, of_payloads
from atoll.protocol.v1 import peer_pb2
from tests.harness.site_keys import SiteKeys

CHUNKS = (0, 1, 2)
LAYOUT = Layout(Manifest.canonical([TensorSpec(name="w", shape=(12,), dtype="F32", role=Role.TRAINABLE)]), 4, 1)
SETTINGS = RunSettings(run_id="r", sync=SyncSettings(audits=2, chunk_elements=4))
MEMBERS = tuple(Member(site_id=i, incarnation=1, address=f"h:{i}", tokens=10 * i, name=f"s{i}") for i in (1, 2, 3))
KEYS = SiteKeys("r")


def contribution(site_id: int, chunk: int) -> bytes:
    values = np.random.default_rng([site_id, chunk]).standard_normal(4).astype(np.float32)
    return kernels.encode("int8", values)


def kept_of(folder: Path, site_id: int) -> Kept:
    kept = KeptContributions(folder / str(site_id))
    return kept.keep(5, CHUNKS, lambda chunk: contribution(site_id, chunk), None)


def item_of(kept: Kept, chunk: int) -> Encoded:
    data = kept.read(chunk)
    return Encoded(chunk, data, payload_hash(data), proof=kept.proof(chunk))


def roots_at(kept: Kept | None, told: tuple[bytes, ...] = ()) -> Roots:
    data = SimpleNamespace(is_audited=True, kept=kept, chunks=CHUNKS, all_chunks=CHUNKS)
    attempt: Any = SimpleNamespace(
        data=data,
        plan=SimpleNamespace(contributors=MEMBERS),
        me=MEMBERS[0],
        contributes=kept is not None,
        where="sync 5",
    )
    return Roots(attempt, told, {})


def test_an_exchange_process_proves_what_its_node_kept_and_all_of_a_sites_chunks_are_under_its_root(
    tmp_path: Path,
) -> None:
    kept = kept_of(tmp_path, 2)
    read = kept_by_node(kept.file.path, 5, CHUNKS)
    assert read.root == kept.root
    assert [item_of(read, chunk) for chunk in CHUNKS] == [item_of(kept, chunk) for chunk in CHUNKS]
    with pytest.raises(StateError, match="of another run"):
        kept_by_node(kept.file.path, 6, CHUNKS)
    kept.file.remove()
    with pytest.raises(StateError):
        kept_by_node(kept.file.path, 5, CHUNKS)
    plan: Any = SimpleNamespace(
        contributors=MEMBERS,
        receivers=(),
        trees=[
            Tree(first_chunk=0, num_chunks=2, parents=(-1, 0, 0)),
            Tree(first_chunk=2, num_chunks=1, parents=(1, -1, 1)),
        ],
    )
    for own in (range(0, 1), range(1, 3)):
        data: Any = SimpleNamespace(
            layout=SimpleNamespace(num_sync_chunks=3),
            chunks=[chunk for chunk in CHUNKS if chunk in own],
            all_chunks=CHUNKS,
            is_own=own.__contains__,
            max_bytes=lambda chunk: 8,
            payload_bytes=lambda chunk, num: 8,
        )
        share = share_of(plan, data, 1, (), None)
        assert share.own.chunks == [own.start], "of this process"
        assert share.made == (0, 1), "of the site"


def test_a_reducer_takes_what_the_root_of_its_site_is_over_and_nothing_else(tmp_path: Path) -> None:
    roots, theirs, others = roots_at(None), kept_of(tmp_path, 2), kept_of(tmp_path, 3)
    with pytest.raises(RefusedError, match="says no root"):
        roots.hear(MEMBERS[1], b"")
    roots.hear(MEMBERS[1], theirs.root)
    roots.hear(MEMBERS[1], theirs.root)
    with pytest.raises(RefusedError, match="another root than before"):
        roots.hear(MEMBERS[1], others.root)
    roots.check(MEMBERS[1], [item_of(theirs, chunk) for chunk in CHUNKS])
    for wrong in (item_of(others, 1), replace(item_of(theirs, 1), chunk=2), replace(item_of(theirs, 1), proof=b"")):
        with pytest.raises(InvalidMessage, match="none of those that its site's root is over"):
            roots.check(MEMBERS[1], [wrong])


def test_an_exchange_waits_until_the_coordinator_has_said_all_roots(tmp_path: Path) -> None:
    mine, theirs = kept_of(tmp_path, 1), kept_of(tmp_path, 2)
    begun = roots_at(mine)
    assert begun.own == mine.root
    assert not begun.are_told
    begun.all_told()
    assert begun.are_told
    told = roots_at(mine, (mine.root, theirs.root, b"x" * 32))
    assert told.are_told
    with pytest.raises(RefusedError):
        told.hear(MEMBERS[2], theirs.root)
    assert roots_at(None).own == b"", "a receiver has none"


def test_a_proof_travels_with_the_last_part_of_its_contribution(tmp_path: Path) -> None:
    item = replace(item_of(kept_of(tmp_path, 1), 1), data=bytes(9000), proof=b"p" * 320)
    assembler = PartAssembler(lambda chunk: 9000)
    found = []
    for frame in pack_frames([item, item], 16 << 10):
        parts = peer_pb2.ExchangeRequest.FromString(frame).contribution.parts
        assert parts
        found += [done for part in parts if (done := assembler.add(part)) is not None]
    assert found == [item, item]
    early = peer_pb2.Part(chunk=1, total_bytes=9000, data=bytes(4096), proof=b"p" * 32)
    with pytest.raises(InvalidMessage, match="a proof of 32 bytes"):
        assembler.add(early)


def test_the_last_syncs_are_kept_and_nothing_of_an_earlier_start(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        kept = KeptContributions(tmp_path)
        roots = [kept.keep(n, CHUNKS, partial(contribution, n), pool).root for n in range(12)]
    assert len(set(roots)) == 12
    assert [n for n in range(12) if kept.of(n) is not None] == list(range(12 - KEPT_SYNCS - 1, 12)), (
        "with one under way"
    )
    assert len(list(tmp_path.iterdir())) == KEPT_SYNCS + 1
    assert (SyncSettings(audits=1).num_kept_syncs, kept.num_syncs) == (KEPT_SYNCS + 1,) * 2
    gradients = SyncSettings(audits=1, strategy="gradient", every=1)
    assert gradients.num_kept_syncs == KEPT_STEPS + 1, "where an audit takes as long as several syncs"
    again = kept.keep(11, CHUNKS, lambda chunk: contribution(11, chunk), None)
    assert again.root == roots[11]
    assert kept.of(11) is again
    with pytest.raises(StateError):
        again.proof(7)
    assert KeptContributions(tmp_path).of(11) is None
    assert not list(tmp_path.iterdir())


class Given(Auditor):
    """What contributors give is at hand."""

    given: dict[int, Encoded | AtollError]

    async def _given(self, asked: AuditChunk, member: Member) -> Encoded:
        found = self.given[member.site_id]
        if isinstance(found, AtollError):
            raise found
        return found


def made_of(payload: bytes) -> HashTree:
    """Chunks 1 and 2, which site 3 makes; the other payload is the same."""
    return HashTree((1, 2), [payload_hash(payload)] * 2)


def signed(asked: AuditChunk, signers: dict[int, str] | None = None, settings: RunSettings = SETTINGS) -> AuditChunk:
    """By each of whom it is, or by another one."""
    names = {i: f"s{i}" for i in (1, 2, 3)} | (signers or {})
    words = {i: KEYS.words(name) for i, name in names.items()}
    of = zip((1, 2, 3), asked.roots, strict=True)
    signatures = tuple(words[i].signed(of_contributions("r", 5, (i, 1), root)) for i, root in of)
    assert asked.made is not None
    way = spec_of(settings.sync, 3, 0).trainable
    signature = words[3].signed(of_payloads("r", asked, way, (3, 1), asked.made.root))
    return replace(asked, signatures=signatures, made=replace(asked.made, signature=signature))


def audit(
    tmp_path: Path,
    payload: bytes,
    given: dict[int, Encoded | AtollError],
    *,
    words: Words | None = None,
    signers: dict[int, str] | None = None,
    kept_evidence: list[FalsePayload] | None = None,
    dialer: Dialer | None = None,
    **changes: Any,
) -> ChunkAudited:
    """`words`: of the auditor, where all sign."""
    keep: Any = None if kept_evidence is None else kept_evidence.append

    async def run() -> ChunkAudited:
        with auditing(tmp_path, payload, given, words=words, keep_evidence=keep, dialer=dialer or Dialer()) as auditor:
            asked = asked_of(tmp_path, payload)
            if words is not None:
                asked = signed(asked, signers)
            return await auditor.audit(replace(asked, **changes))

    return asyncio.run(run())


def asked_of(tmp_path: Path, payload: bytes) -> AuditChunk:
    return AuditChunk(
        number=9,
        commit=4,
        sync=5,
        attempt=1,
        term=1,
        fragment=0,
        base_commit=3,
        contributors=MEMBERS,
        roots=tuple(kept_of(tmp_path, i).root for i in (1, 2, 3)),
        chunk=1,
        made=Made(site_id=3, first_chunks=(1,), nums_chunks=(2,), root=made_of(payload).root),
    )


@contextmanager
def auditing(
    tmp_path: Path,
    payload: bytes,
    given: dict[int, Encoded | AtollError],
    *,
    dialer: Dialer,
    settings: RunSettings = SETTINGS,
    layout: Layout = LAYOUT,
    commits: Mapping[int, bytes] | None = None,
    **options: Any,
) -> Iterator[Given]:
    """An auditor to which all give what they contributed, or this. `commits`: of the chunk, the payloads in its log."""

    def read(commit: int, chunk: int) -> bytes:
        if commit not in (commits or {}):
            raise StateError(f"commit {commit} is not in the log")
        return (commits or {})[commit]

    held: Any = SimpleNamespace(hash_of=lambda chunk: payload_hash(payload), read=lambda chunk: payload)
    history = SimpleNamespace(touch=lambda fragment, commit: commit)
    payload_log: Any = SimpleNamespace(held=lambda sync, term, attempt: held, history=history, read=read)
    with ThreadPoolExecutor(1) as pool:
        auditor = Given(
            settings=settings,
            layout=layout,
            log=payload_log,
            kept=KeptContributions(tmp_path / "own"),
            errors=AverageErrors(pool),
            header=lambda: Header(protocol_version=PROTOCOL_VERSION, run_id="r", site_id=9, incarnation=1),
            dialer=dialer,
            expected=ExpectedDonors(),
            undialable=lambda: (),
            counters=Counters(),
            pace=Pace(stall_s=1, slowest_bytes_per_s=1),
            pool=pool,
            **options,
        )
        honest: dict[int, Encoded | AtollError] = {i: item_of(kept_of(tmp_path, i), 1) for i in (1, 2, 3)}
        auditor.given = honest | given
        yield auditor


TRUE = recomputed(spec_of(SETTINGS.sync, 3, 0).trainable, 4, [(10 * i, contribution(i, 1)) for i in (1, 2, 3)])


def test_what_is_encoded_of_a_snapshot_that_was_given_up_takes_the_place_of_no_later_one(tmp_path: Path) -> None:
    """The site has said the root of the later one: by the other its auditors would find it out."""
    kept = KeptContributions(tmp_path)

    def slowly(chunk: int) -> bytes:
        if kept.of(3) is None:  # the next snapshot is encoded while this one is
            kept.keep(3, (0, 1), lambda of: b"said %d" % of, None)
        return b"given up %d" % chunk

    with pytest.raises(StateError, match="sync 3 was encoded anew meanwhile"):
        kept.keep(3, (0, 1), slowly, None)
    found = kept.of(3)
    assert found is not None
    assert found.read(1) == b"said 1"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("level", "at"), [(0, 1), (1, 1), (2, 0)])
def test_a_bit_that_flips_in_the_tree_of_what_is_kept_makes_no_wrong_proof(tmp_path: Path, level: int, at: int) -> None:
    """It is the same wrong one for all auditors, who would find an honest site out."""
    kept = KeptContributions(tmp_path).keep(3, (0, 1, 2, 3), lambda of: b"of %d" % of, None)
    right = kept.tree._levels[level][at]
    assert right is not None
    assert kept.proof(0)
    kept.tree._levels[level][at] = bytes([right[0] ^ 1]) + right[1:]
    with pytest.raises(StateError, match="chunk 0 is not given: its tree of hashes"):
        kept.proof(0)


def test_an_auditor_finds_the_payload_to_the_bit(tmp_path: Path) -> None:
    found = audit(tmp_path, TRUE, {})
    assert found == ChunkAudited(number=9, outcome=AuditOutcome.RIGHT, payload_hash=payload_hash(TRUE))


BUFFERS = Layout(
    Manifest.canonical(
        [
            TensorSpec(name="w", shape=(4,), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="running_mean", shape=(4,), dtype="F32", role=Role.BUFFER_MEAN),
            TensorSpec(name="steps", shape=(1,), dtype="I64", role=Role.BUFFER_LOWEST),
        ]
    ),
    4,
    1,
)
HELD = kernels.encode("fp32", np.array([1, -2, 3, 0.5], np.float32))
SAME = unchanged(4, "F32")
UNLIKE = [kernels.encode("fp32", np.array([i, 2, i, 0], np.float32)) for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("parts", "commits", "outcome"),
    [
        pytest.param(UNLIKE, {}, AuditOutcome.RIGHT, id="all have changed it"),
        pytest.param([SAME] * 3, {}, AuditOutcome.RIGHT, id="none has"),
        pytest.param([UNLIKE[0], SAME, UNLIKE[2]], {3: SAME, 2: SAME, 1: HELD}, AuditOutcome.RIGHT, id="one has not"),
        pytest.param([UNLIKE[0], SAME, UNLIKE[2]], {3: UNLIKE[1], 2: HELD}, AuditOutcome.WRONG, id="of another base"),
        pytest.param([UNLIKE[0], SAME, UNLIKE[2]], {3: SAME}, AuditOutcome.UNKNOWN, id="its base is gone"),
        pytest.param([UNLIKE[0], UNLIKE[2], SAME], {1: HELD}, AuditOutcome.UNKNOWN, id="the log has gaps"),
    ],
)
def test_an_auditor_averages_a_buffer_too(
    tmp_path: Path, parts: list[bytes], commits: dict[int, bytes], outcome: AuditOutcome
) -> None:
    """Who has not changed it counts with what the sites held, which the last payload before it says."""
    base = np.empty(4, np.float32)
    kernels.decode(HELD, "fp32", 4, base)
    way = spec_of(SETTINGS.sync, 3, 0).of(Role.BUFFER_MEAN)
    payload = recomputed_buffer(way, 4, "F32", [(10 * i, parts[i - 1]) for i in (1, 2, 3)], lambda: base)
    found, asked = audit_of_parts(tmp_path, parts, payload, layout=BUFFERS, commits=commits)
    assert found.outcome is outcome, found.text
    assert ("not in the log" in found.text) == (outcome is AuditOutcome.UNKNOWN)
    if outcome is AuditOutcome.RIGHT:
        false, _ = audit_of_parts(tmp_path, parts, UNLIKE[1], layout=BUFFERS, commits=commits, chunk=asked.chunk)
        assert (false.outcome, false.payload_hash) == (AuditOutcome.WRONG, payload_hash(payload))


def _same(part: bytes, chunk: int) -> bytes:
    return part


def audit_of_parts(
    tmp_path: Path, parts: list[bytes], payload: bytes, *, chunk: int = 1, is_signed: bool = False, **options: Any
) -> tuple[ChunkAudited, AuditChunk]:
    """Of that chunk each contributed its part."""
    kept = [
        KeptContributions(tmp_path / f"parts-{i}").keep(5, CHUNKS, partial(_same, part), None)
        for i, part in enumerate(parts)
    ]
    given: dict[int, Encoded | AtollError] = {i: item_of(kept[i - 1], chunk) for i in (1, 2, 3)}
    asked = replace(asked_of(tmp_path, payload), roots=tuple(of.root for of in kept), chunk=chunk)
    if is_signed:
        asked, options["words"] = signed(asked, settings=options["settings"]), KEYS.words("s1")

    async def run() -> ChunkAudited:
        with auditing(tmp_path, payload, given, dialer=Dialer(), **options) as auditor:
            return await auditor.audit(asked)

    return asyncio.run(run()), asked


def test_of_a_buffer_of_integers_an_auditor_takes_what_the_first_contributor_says(tmp_path: Path) -> None:
    parts = [kernels.encode("raw", np.array([i], "<i8").view(np.uint8), dtype="I64") for i in (5, 6, 7)]
    for payload, outcome in ((parts[0], AuditOutcome.RIGHT), (parts[1], AuditOutcome.WRONG)):
        found, _ = audit_of_parts(tmp_path, parts, payload, layout=BUFFERS, chunk=2)
        assert found.outcome is outcome, found.text


def wide_parts(codec: str) -> list[bytes]:
    """Few different values, which zstd makes small."""
    values = [np.random.default_rng(i).integers(-3, 4, WIDE).astype(np.float32) for i in (1, 2, 3)]
    return [kernels.encode(codec, of) for of in values]


WIDE = 4096
WIDE_BUFFERS = Layout(
    Manifest.canonical(
        [
            TensorSpec(name="w", shape=(WIDE,), dtype="F32", role=Role.TRAINABLE),
            TensorSpec(name="running_mean", shape=(WIDE,), dtype="F32", role=Role.BUFFER_MEAN),
            TensorSpec(name="steps", shape=(1,), dtype="I64", role=Role.BUFFER_LOWEST),
        ]
    ),
    WIDE,
    1,
)
WIDE_TENSOR = TensorSpec(name="w", shape=(3 * WIDE,), dtype="F32", role=Role.TRAINABLE)
WIDE_LAYOUT = Layout(Manifest.canonical([WIDE_TENSOR]), WIDE, 1)


@pytest.mark.parametrize(
    ("codec", "role"),
    [
        ("int4", Role.TRAINABLE),
        ("e3m0", Role.TRAINABLE),
        ("bf16", Role.TRAINABLE),
        ("fp32", Role.TRAINABLE),
        ("int4", Role.BUFFER_MEAN),
    ],
)
def test_a_payload_that_another_zstd_made_small_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, role: Role
) -> None:
    """Versions of libzstd make other bytes of one body: as other levels do."""
    settings = RunSettings(run_id="r", sync=SyncSettings(audits=2, chunk_elements=WIDE, codec=codec))
    way = spec_of(settings.sync, 3, 0).of(role)
    is_buffer, parts = role is Role.BUFFER_MEAN, wide_parts(way.up)
    weighed, changed = [[(10 * i, of[i - 1]) for i in (1, 2, 3)] for of in (parts, [parts[0], *parts[:2]])]

    def averaged(contributions: list[tuple[int, bytes]]) -> bytes:
        if is_buffer:
            return recomputed_buffer(way, WIDE, "F32", contributions, lambda: np.empty(0, np.float32))
        return recomputed(way, WIDE, contributions)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kernels, "compressed", lambda body, level: compressed(body, 9))
        payload, false = averaged(weighed), averaged(changed)
    assert payload != averaged(weighed)
    kept = list[FalsePayload]()
    find = partial(
        audit_of_parts, tmp_path, parts, settings=settings, layout=WIDE_BUFFERS if is_buffer else WIDE_LAYOUT,
        is_signed=not is_buffer, keep_evidence=kept.append,
    )  # fmt: skip
    found, asked = find(payload)
    assert (found.outcome, kept) == (AuditOutcome.RIGHT, [])
    answers = [find(of)[0] for of in (false, averaged(changed), false[:-1])]
    assert [found.outcome for found in answers] == [AuditOutcome.WRONG] * 3
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kernels, "compressed", lambda body, level: compressed(body, 9))
        answers.append(find(false)[0])
    assert len({found.payload_hash for found in answers}) == 1, "auditors agree on what it comes out as"
    assert len(kept) == (0 if is_buffer else 4)
    for evidence in kept:
        shown = partial(false_payload.check, roots=[KEYS.root.certificate])
        assert "site s3 (key " in shown(evidence)
        with pytest.raises(InvalidMessage, match="it lacks the payload"):
            shown(replace(evidence, payload=b""))
        with pytest.raises(InvalidMessage, match="is the average of what was contributed"):
            shown(replace(evidence, asked=asked, payload=payload, payload_hash=payload_hash(payload),
                          payload_proof=made_of(payload).proof(0)))  # fmt: skip


def test_an_auditor_finds_a_payload_that_is_another_one(tmp_path: Path) -> None:
    false = recomputed(spec_of(SETTINGS.sync, 3, 0).trainable, 4, [(10, contribution(3, 1))])
    found = audit(tmp_path, false, {})
    assert (found.outcome, found.payload_hash) == (AuditOutcome.WRONG, payload_hash(TRUE))


def test_what_is_not_given_or_not_what_was_said_accuses_no_reducer(tmp_path: Path) -> None:
    other = contribution(7, 1)
    given: dict[int, Encoded | AtollError] = {
        1: StateError("what this site contributed to sync 5 is not kept here"),
        3: Encoded(1, other, payload_hash(other), proof=kept_of(tmp_path / "x", 3).proof(1)),
    }
    found = audit(tmp_path, b"whatever", given)
    assert found.outcome is AuditOutcome.UNKNOWN
    assert (found.silent_site_ids, found.refuted_site_ids) == ((1,), (3,))
    assert "not all contributions are to be had" in found.text


def test_connections_to_contributors_end_with_the_audit(tmp_path: Path) -> None:
    """Also of one that finds nothing."""
    for given in ({}, {1: StateError("gone")}):
        ended, dialer = list[tuple[int, Purpose]](), Dialer()
        dialer.disconnect = lambda callee, purpose, ended=ended: ended.append((callee.site_id, purpose))  # type: ignore
        audit(tmp_path, TRUE, dict(given), dialer=dialer)
        assert ended == [(member.site_id, Purpose.AUDIT) for member in MEMBERS]


def test_an_audit_that_is_cancelled_before_its_turn_leaves_the_connections_of_the_one_under_way(tmp_path: Path) -> None:
    async def main() -> None:
        ended, dialer = list[int](), Dialer()
        dialer.disconnect = lambda callee, purpose: ended.append(callee.site_id)  # type: ignore[method-assign]
        with auditing(tmp_path, TRUE, {}, dialer=dialer) as auditor:
            asks, answers, given = asyncio.Event(), asyncio.Event(), auditor._given

            async def later(asked: AuditChunk, member: Member) -> Encoded:
                asks.set()
                await answers.wait()
                return await given(asked, member)

            auditor._given = later  # type: ignore[method-assign]
            asked = asked_of(tmp_path, TRUE)
            under_way = asyncio.create_task(auditor.audit(asked))
            await asks.wait()
            queued = asyncio.create_task(auditor.audit(replace(asked, number=10)))
            await asyncio.sleep(0)  # it begins, and waits for its turn
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            assert not ended
            answers.set()
            assert (await under_way).outcome is AuditOutcome.RIGHT
            assert ended == [1, 2, 3]

    asyncio.run(main())


def test_who_has_signed_is_known_without_the_coordinator(tmp_path: Path) -> None:
    """A word that another site has signed, or nobody, accuses nobody: it is the coordinator that says it."""
    found = audit(tmp_path, TRUE, {}, words=KEYS.words("s1"))
    assert found.outcome is AuditOutcome.RIGHT
    for changes in ({"signers": {2: "s1"}}, {"signers": {3: "s1"}}, {"signatures": ()}):
        found = audit(tmp_path, b"whatever", {}, words=KEYS.words("s1"), **changes)
        assert (found.outcome, found.refuted_site_ids) == (AuditOutcome.UNKNOWN, ())
        assert "cannot be computed here" in found.text
    unsigned = Made(site_id=3, first_chunks=(1,), nums_chunks=(2,), root=made_of(TRUE).root)
    found = audit(tmp_path, TRUE, {}, words=KEYS.words("s1"), made=unsigned)
    assert "site s3 that is not signed" in found.text
    assert audit(tmp_path, TRUE, {}, words=KEYS.words("s1"), made=None).outcome is AuditOutcome.RIGHT


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_reducer_that_signed_other_payloads_than_all_have_is_refuted(tmp_path: Path, has_keys: bool) -> None:
    made = Made(site_id=3, first_chunks=(1,), nums_chunks=(2,), root=made_of(b"other").root)
    way = spec_of(SETTINGS.sync, 3, 0).trainable
    asked = AuditChunk(
        number=9, commit=4, sync=5, attempt=1, term=1, fragment=0, base_commit=3, contributors=MEMBERS, roots=(),
        chunk=1,
    )  # fmt: skip
    words = KEYS.words("s1") if has_keys else None
    if has_keys:
        made = replace(made, signature=KEYS.words("s3").signed(of_payloads("r", asked, way, (3, 1), made.root)))
    found = audit(tmp_path, TRUE, {}, words=words, made=made)
    assert (found.outcome, found.refuted_site_ids) == (AuditOutcome.UNKNOWN, (3,))


def test_what_an_auditor_keeps_shows_a_false_payload_to_whoever_has_the_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    false, roots, kept = contribution(3, 1), [KEYS.root.certificate], list[FalsePayload]()
    audit(tmp_path, false, {}, words=KEYS.words("s1"), kept_evidence=kept)
    (evidence,) = kept
    assert "site s3 (key " in false_payload.check(evidence, roots)
    asked, made = evidence.asked, evidence.asked.made
    assert made is not None
    lighter = tuple(replace(c, tokens=1) for c in asked.contributors)
    true_tree = made_of(TRUE)
    for wrong in (
        replace(evidence, asked=replace(asked, contributors=lighter)),
        replace(evidence, asked=replace(asked, made=replace(made, site_id=1))),
        replace(evidence, asked=replace(asked, made=None)),
        replace(evidence, asked=replace(asked, sync=6)),
        replace(evidence, contributions=evidence.contributions[::-1]),
        replace(evidence, down="bf16"),
        replace(evidence, robust="trim", trim=1),
        replace(evidence, payload_hash=payload_hash(TRUE)),
        replace(evidence, payload_hash=payload_hash(TRUE), payload_proof=true_tree.proof(0)),
        replace(evidence, run_id="other"),
    ):
        with pytest.raises(InvalidMessage):
            false_payload.check(wrong, roots)
    with pytest.raises(InvalidMessage, match="no root of the run has signed"):
        false_payload.check(evidence, [SiteKeys("r").root.certificate])
    path = false_payload.keep(tmp_path / "evidence", evidence, Disk())
    assert path is not None
    pem = tmp_path / "root.pem"
    pem.write_bytes(certificates.to_pem(*roots))
    assert main(["evidence", str(path), "--root", str(pem)]) == 0
    assert "of what s1, s2, s3 signed that they contributed comes" in capsys.readouterr().out
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["evidence", str(path), "--root", str(pem)]) == StateError.exit_code
    for chunk in range(20):
        false_payload.keep(tmp_path / "evidence", replace(evidence, asked=replace(asked, chunk=chunk)), Disk())
    assert len(list((tmp_path / "evidence").iterdir())) == false_payload.MAX_FILES


def test_a_payload_that_is_right_shows_nothing(tmp_path: Path) -> None:
    kept = list[FalsePayload]()
    audit(tmp_path, TRUE, {}, words=KEYS.words("s1"), kept_evidence=kept)
    assert not kept
    audit(tmp_path, contribution(3, 1), {}, words=KEYS.words("s1"), kept_evidence=kept)
    asked = signed(
        replace(kept[0].asked, made=Made(site_id=3, first_chunks=(1,), nums_chunks=(2,), root=made_of(TRUE).root))
    )
    right = replace(kept[0], asked=asked, payload_hash=payload_hash(TRUE), payload_proof=made_of(TRUE).proof(0))
    with pytest.raises(InvalidMessage, match="is the average of what was contributed"):
        false_payload.check(right, [KEYS.root.certificate])
    audit(tmp_path, contribution(3, 1), {}, kept_evidence=(none := list[FalsePayload]()))
    assert not none, "nobody has signed it"


@pytest.mark.parametrize("changes", [{"chunk": 3}, {"roots": ()}, {"chunk": 1 << 30}])
def test_an_audit_that_fits_no_sync_is_unknown(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert audit(tmp_path, TRUE, {}, **changes).outcome is AuditOutcome.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"robust": "clip"}, '"clip" with codec int8, whose norms may differ in their last bits by machine'),
        ({"robust": "trim"}, '"trim" with codec int8, whose norms may differ in their last bits by machine'),
        ({"error_feedback_down": 0.5, "log_commits": 8}, "needs payloads of 9 commits"),
        (
            {"strategy": "gradient", "every": 1, "overlap_steps": 0, "error_feedback_down": 0.5},
            "faster than it is known whether a reducer keeps silent",
        ),
        (
            {"strategy": "gradient", "every": 1, "overlap_steps": 0, "log_commits": 15},
            "computes from payloads of 16 commits",
        ),
    ],
)
def test_averages_that_nobody_else_can_compute_are_refused(changes: dict[str, Any], problem: str) -> None:
    sync = replace(SyncSettings(), **changes)
    check_sync(sync)
    with pytest.raises(ConfigError, match=problem):
        check_sync(replace(sync, audits=1))
    check_sync(SyncSettings(audits=1, codec="topk2", robust="clip"))
    check_sync(SyncSettings(audits=1, strategy="momentum", every=1, overlap_steps=0, warmup_commits=9))
