"""A chunk of a commit, averaged once more: from what its contributors have kept, by a site that did not reduce it.

What a contributor gives has to be what the root in its Ready is over. The average is the reducer's own code, so another
payload means that one of the two is wrong; the coordinator has a third site compute it. See
docs/decisions/0069-audited-reducers.md.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from atoll.node.dataplane.averages import recomputed, recomputed_buffer
from atoll.node.dataplane.kept_contributions import KeptContributions
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.exchange.added_errors import Refuted, checked, found_hash, made_chunks, signed_errors
from atoll.node.exchange.catchup.donor_client import DonorClient, dialled
from atoll.node.exchange.catchup.expected_donors import ExpectedDonors
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer, Purpose
from atoll.node.exchange.peers.errors_given import Given
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.sync.audited_errors import hash_of
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.node.exchange.sync.roots import made_tree
from atoll.protocol.codecs import kernels, peek_codec
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.codecs.table import TABLE, UNCHANGED
from atoll.protocol.errors import AtollError, HostError, InvalidMessage, NotYetError, PeerError, StateError
from atoll.protocol.hash_tree import check_proof
from atoll.protocol.layout import DTYPE_BYTES, Layout, Role
from atoll.protocol.messages import (
    AuditChunk,
    AuditOutcome,
    ChunkAudited,
    Donor,
    ErrorsBefore,
    FalsePayload,
    Header,
    Made,
    Member,
    SignedErrors,
)
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import Spec, Way, spec_of
from atoll.protocol.trust.words import Words, of_contributions, of_errors, of_payloads

log = logging.getLogger("atoll.node")

AT_ONCE = 4
"""Contributors that are asked: their links serve the next sync too."""
TRIES = 3
RETRY_S = 0.5
"""A contributor serves few at once, and others may be asking it."""


_T = TypeVar("_T")


class _Withheld(PeerError):
    """A reducer does not give its own error."""


@dataclass(eq=False, kw_only=True)
class Auditor:
    """Of one node, in its event loop; one audit after the other."""

    settings: RunSettings
    layout: Layout
    log: PayloadLog
    kept: KeptContributions
    elsewhere: Callable[[int], DonorClient | None] = lambda chunk: None
    """See `DonorServer`: of this site's own contributions."""
    errors: AverageErrors
    header: Callable[[], Header]
    dialer: Dialer
    expected: ExpectedDonors
    """Contributors that this site cannot dial: the coordinator has them dial this site."""
    undialable: Callable[[], Collection[int]]
    counters: Counters
    pace: Pace
    pool: Executor
    words: Words | None = None
    """Where sites have keys: what others have signed counts, and nothing else."""
    keep_evidence: Callable[[FalsePayload], Path | None] | None = None
    """In a thread; in a file, for people."""
    num_audited: int = field(default=0, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def audit(self, asked: AuditChunk) -> ChunkAudited:
        """What is found. Raises nothing of what others did, or of what is not here: that is an answer too."""
        far = [(c.site_id, c.incarnation) for c in asked.contributors if c.site_id in self.undialable()]
        self.expected.expect_too(far)  # before they come
        try:
            async with self._turn:
                self.num_audited += 1
                try:
                    return await self._audit(asked)
                finally:  # an audit that ends before its turn leaves the connections of the one that has it
                    for member in asked.contributors:
                        self.dialer.disconnect(member, Purpose.AUDIT)
        except (AtollError, OSError) as error:
            return _unknown(asked, f"it cannot be computed here: {error}")
        finally:
            self.expected.forget(far)

    async def _audit(self, asked: AuditChunk) -> ChunkAudited:
        way = self._way(asked)
        loop = asyncio.get_running_loop()
        if refuted := await loop.run_in_executor(self.pool, self._check_words, asked):
            return _unknown(asked, "what its reducer signed is not over the payloads of it", refuted=refuted)
        spec = self.layout.chunks[asked.chunk]
        num_elements, dtype = spec.num_elements, self.layout.manifest.tensors[spec.tensor].dtype

        def hashed(payload: bytes) -> bytes:
            return payload_hash(kernels.without_zstd(payload, way.down, num_elements))

        payload = await loop.run_in_executor(self.pool, self._payload, asked)
        expected = await loop.run_in_executor(self.pool, hashed, payload)
        error, given = NOTHING, None
        if way.error_beta_down:
            reducer, _ = signed_errors(asked)
            try:
                error, given = await self._added(asked)
            except Refuted as problem:
                return _unknown(asked, str(problem), refuted=[reducer.site_id])
            except AtollError as problem:
                return _unknown(asked, str(problem), silent=[reducer.site_id], withheld=isinstance(problem, _Withheld))
            expected = found_hash(expected, given.after_hash)
        found: list[Encoded | AtollError] = []
        for first in range(0, len(asked.contributors), AT_ONCE):
            places = range(first, min(first + AT_ONCE, len(asked.contributors)))
            found += await asyncio.gather(*(self._contribution(asked, place, way) for place in places))
        refuted = [c.site_id for c, of in zip(asked.contributors, found, strict=True) if isinstance(of, Refuted)]
        silent = [c.site_id for c, of in zip(asked.contributors, found, strict=True) if isinstance(of, AtollError)]
        if silent:
            why = next(str(of) for of in found if isinstance(of, AtollError))
            silent = [site_id for site_id in silent if site_id not in refuted]
            return _unknown(asked, f"not all contributions are to be had: {why}", silent=silent, refuted=refuted)
        weights = [c.influence if way.by_influence else c.tokens for c in asked.contributors]
        contributions = [(w, of.data) for w, of in zip(weights, found, strict=True) if isinstance(of, Encoded)]

        def compute() -> bytes:
            if spec.role is not Role.TRAINABLE:
                buffer = recomputed_buffer(way, num_elements, dtype, contributions, lambda: self._base(asked))
                return hashed(buffer)
            if not way.error_beta_down:
                return hashed(recomputed(way, num_elements, contributions))
            left = np.empty(num_elements, np.float32)
            average = hashed(recomputed(way, num_elements, contributions, error, left))
            return found_hash(average, hash_of(left))

        def work() -> bytes:
            computed = compute()
            if computed != expected:  # a bit that flipped here is found, before another site is blamed for it
                computed = compute()
            return computed

        computed = await loop.run_in_executor(self.pool, work)
        outcome = AuditOutcome.RIGHT if computed == expected else AuditOutcome.WRONG
        if outcome is AuditOutcome.WRONG:
            log.warning(
                "audit: the payload of chunk %d in commit %d is %s, and comes out as %s here",
                asked.chunk, asked.commit, expected.hex()[:12], computed.hex()[:12],
            )  # fmt: skip
            items = [of for of in found if isinstance(of, Encoded)]
            await loop.run_in_executor(self.pool, self._keep_evidence, asked, way, items, payload, given)
        return ChunkAudited(number=asked.number, outcome=outcome, payload_hash=computed)

    def _keep_evidence(
        self, asked: AuditChunk, way: Way, items: list[Encoded], payload: bytes, given: Given | None
    ) -> None:
        """In a thread. Without signed words it would show nothing. A disk that is full does not hinder the audit."""
        if self.words is None or self.keep_evidence is None or asked.made is None:
            return
        if self.layout.chunks[asked.chunk].role is not Role.TRAINABLE:
            log.info("audit: of a buffer nothing is kept that shows it to others")
            return
        chunks, made = self.layout.chunks_of(asked.fragment), self._made(asked, asked.made)
        payloads = self.log.held(asked.sync, asked.term, asked.attempt)
        place = bisect_left(made, asked.chunk)
        evidence = FalsePayload(
            run_id=self.words.run_id,
            asked=asked,
            up=way.up,
            down=way.down,
            aggregation=way.aggregation.name,
            robust=way.robust,
            clip=way.clip,
            trim=way.trim,
            num_elements=self.layout.chunks[asked.chunk].num_elements,
            place=bisect_left(chunks, asked.chunk),
            num_chunks=len(chunks),
            contributions=tuple(bytes(item.data) for item in items),
            proofs=tuple(item.proof for item in items),
            payload_hash=payload_hash(payload),
            payload=payload if TABLE[way.down].zstd_level else b"",
            payload_place=place,
            num_payloads=len(made),
            payload_proof=made_tree(payloads, made).proof(place),
        )
        if given is not None:
            evidence = replace(
                evidence,
                error_beta=way.error_beta_down,
                error=given.error,
                error_proof=given.before_proof,
                left_hash=given.after_hash,
                left_proof=given.after_proof,
            )
        try:
            path = self.keep_evidence(evidence)
        except (HostError, OSError) as error:
            log.warning("audit: what shows that the payload is wrong is not kept: %s", error)
            return
        if path is None:
            log.info("audit: there are enough files that show wrong payloads; no more are kept")
        else:
            log.warning("audit: %s shows it to others: atoll evidence %s", path, path)

    def _way(self, asked: AuditChunk) -> Way:
        """Raises InvalidMessage for what is no chunk to be audited."""
        num_signatures = len(asked.contributors) if self.words is not None else 0
        if len(asked.roots) != len(asked.contributors) or len(asked.signatures) != num_signatures:
            raise InvalidMessage(f"an audit of {len(asked.contributors)} contributors, without the words of each")
        if not self.layout.travels(asked.chunk, asked.fragment):
            raise InvalidMessage(f"an audit of chunk {asked.chunk}, which does not fit its sync {asked.sync}")
        return self._spec(asked).of(self.layout.chunks[asked.chunk].role)

    def _spec(self, asked: AuditChunk) -> Spec:
        return spec_of(self.settings.sync, asked.base_commit, asked.fragment)

    def _base(self, asked: AuditChunk) -> Floats:
        """Of a buffer: what the last payload before left it at. Raises StateError if that is not here any more."""
        values = np.empty(self.layout.chunks[asked.chunk].num_elements, np.float32)
        fragment, commit = self.layout.fragment_of[asked.chunk], asked.base_commit
        while True:
            commit = self.log.history.touch(fragment, commit)
            payload = self.log.read(commit, asked.chunk)
            if peek_codec(payload) != UNCHANGED:
                kernels.decode(payload, "fp32", values.size, values)
                return values
            commit -= 1

    def _check_words(self, asked: AuditChunk) -> list[int]:
        """In a thread: the reducer, if it has signed that it made something else than all sites have. Raises
        InvalidMessage for what the coordinator has not from whom it says."""
        if self.words is not None:
            run_id = self.words.run_id
            for member, root, signature in zip(asked.contributors, asked.roots, asked.signatures, strict=True):
                word = of_contributions(run_id, asked.sync, (member.site_id, member.incarnation), root)
                self.words.check(member, word, signature)
        made = asked.made
        if made is None:
            log.info("the reducer of chunk %d in commit %d has said nothing of it", asked.chunk, asked.commit)
            return []
        reducer = next((c for c in asked.contributors if c.site_id == made.site_id), None)
        if reducer is None:
            raise InvalidMessage(f"site {made.site_id} has made chunk {asked.chunk}, and did not contribute")
        if self.words is not None:
            start = reducer.site_id, reducer.incarnation
            word = of_payloads(self.words.run_id, asked, self._spec(asked).trainable, start, made.root)
            self.words.check(reducer, word, made.signature)
            self._check_errors(asked, made, reducer)
        payloads = self.log.held(asked.sync, asked.term, asked.attempt)
        return [] if made_tree(payloads, self._made(asked, made)).root == made.root else [made.site_id]

    def _check_errors(self, asked: AuditChunk, made: Made, reducer: Member) -> None:
        """What it has signed of its errors, in this attempt and before."""
        beta = self._spec(asked).trainable.error_beta_down
        said: list[tuple[AuditChunk | ErrorsBefore, SignedErrors | None]] = [(asked, made.errors)]
        if not beta or self.words is None:
            return
        if asked.before is not None:
            said.append((asked.before, asked.before.made.errors))
        start = reducer.site_id, reducer.incarnation
        for of, errors in said:
            if errors is not None:
                word = of_errors(self.words.run_id, of, start, beta, errors)
                self.words.check(reducer, word, errors.signature)

    def _made(self, asked: AuditChunk, made: Made) -> list[int]:
        """Chunks, ascending."""
        return made_chunks(self.layout, asked.fragment, made, asked.chunk)

    def _payload(self, asked: AuditChunk) -> bytes:
        """What all sites have applied. Raises StateError if that is not here any more."""
        return self.log.held(asked.sync, asked.term, asked.attempt).read(asked.chunk)

    async def _contribution(self, asked: AuditChunk, place: int, way: Way) -> Encoded | AtollError:
        """Or why it is not to be had."""
        member, root = asked.contributors[place], asked.roots[place]
        try:
            item = await self._given(asked, member)
            await asyncio.get_running_loop().run_in_executor(self.pool, self._check, asked, root, way, item)
        except AtollError as error:
            return error
        return item

    async def _added(self, asked: AuditChunk) -> tuple[Floats, Given]:
        """What the reducer added to its average, and all that it gave to show that. Raises Refuted; _Withheld if it
        gives nothing."""
        made, _ = signed_errors(asked)
        reducer = next(c for c in asked.contributors if c.site_id == made.site_id)
        try:
            given = await self._tried(lambda: self._error_of(asked, reducer))
        except AtollError as problem:
            raise _Withheld(f"the reducer does not give its own error: {problem}") from None
        fragment = self.layout.fragment_of[asked.chunk]

        def check() -> Floats:
            return checked(self.layout, asked, self.log.attempt_of(fragment, asked.base_commit), given)

        return await asyncio.get_running_loop().run_in_executor(self.pool, check), given

    async def _error_of(self, asked: AuditChunk, reducer: Member) -> Given:
        attempt = AttemptKey(asked.sync, asked.term, asked.attempt, asked.fragment)
        if self._is_own(reducer):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.pool, self.errors.added, attempt, asked.chunk)
        num_bytes = 4 * self.layout.chunks[asked.chunk].num_elements
        return await self._client(asked, reducer).error(attempt, asked.chunk, num_bytes)

    def _is_own(self, member: Member) -> bool:
        me = self.header()
        return (member.site_id, member.incarnation) == (me.site_id, me.incarnation)

    async def _tried(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Some times, as whoever gives may be busy, or a link down."""
        for attempt in range(1, TRIES + 1):
            try:
                return await ask()
            except (NotYetError, PeerError):
                if attempt == TRIES:
                    raise
            await asyncio.sleep(RETRY_S)
        raise AssertionError("the last try returns or raises")

    async def _given(self, asked: AuditChunk, member: Member) -> Encoded:
        async def given() -> Encoded:
            client = self.elsewhere(asked.chunk) if self._is_own(member) else self._client(asked, member)
            if client is None:
                return await asyncio.get_running_loop().run_in_executor(self.pool, self._own, asked)
            return await self._fetched(asked, client)

        return await self._tried(given)

    def _own(self, asked: AuditChunk) -> Encoded:
        kept = self.kept.of(asked.sync)
        if kept is None:
            raise StateError(f"what this site contributed to sync {asked.sync} is not kept any more")
        data = kept.read(asked.chunk)
        return Encoded(asked.chunk, data, payload_hash(data), proof=kept.proof(asked.chunk))

    async def _fetched(self, asked: AuditChunk, client: DonorClient) -> Encoded:
        spec = self.layout.chunks[asked.chunk]
        itemsize = DTYPE_BYTES[self.layout.wire_dtype(spec)]
        most = self._spec(asked).max_bytes(spec.role, spec.num_elements, itemsize)
        return await client.contribution(asked.sync, asked.chunk, most)

    def _client(self, asked: AuditChunk, member: Member) -> DonorClient:
        donor = Donor(
            site_id=member.site_id,
            incarnation=member.incarnation,
            address=member.address,
            commit=asked.commit,
            name=member.name,
        )
        ask = self.expected.ask if member.site_id in self.undialable() else dialled(self.dialer, Purpose.AUDIT)
        return DonorClient(
            donor=donor, ask=ask, header=self.header(), counters=self.counters, pace=self.pace, share=AT_ONCE
        )

    def _check(self, asked: AuditChunk, root: bytes, way: Way, item: Encoded) -> None:
        """In a thread. Raises Refuted."""
        chunks = self.layout.chunks_of(asked.fragment)
        try:
            if payload_hash(item.data) != item.hash:
                raise InvalidMessage(f"chunk {asked.chunk}: a contribution that does not have its hash")
            place = bisect_left(chunks, asked.chunk)
            check_proof(root, len(chunks), place, asked.chunk, item.hash, item.proof)
            spec = self.layout.chunks[asked.chunk]
            codec = way.codec_in(item.data, way.up)
            dtype, width = self.layout.wire_dtype(spec), spec.row_elements
            kernels.check(item.data, codec, spec.num_elements, dtype, width=width)
        except InvalidMessage as error:
            raise Refuted(str(error)) from None


def _unknown(
    asked: AuditChunk,
    text: str,
    *,
    silent: list[int] | None = None,
    refuted: list[int] | None = None,
    withheld: bool = False,
) -> ChunkAudited:
    log.info("audit of chunk %d in commit %d: %s", asked.chunk, asked.commit, text)
    return ChunkAudited(
        number=asked.number,
        outcome=AuditOutcome.UNKNOWN,
        silent_site_ids=tuple(silent or ()),
        refuted_site_ids=tuple(refuted or ()),
        text=text[:1024],
        withheld=withheld,
    )
