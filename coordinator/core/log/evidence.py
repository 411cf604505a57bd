"""Rule 22: whose state of a commit is right is computed of one chunk, from what the commit log names by hashes.

Nobody is believed: each part that a site shows must have the hash which the part before it gives, and the sum is the
coordinator's own. Who is asked for it therefore does not matter. See docs/decisions/0020-disputes.md.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from atoll.coordinator.core.events import Recompute, Recomputed
from atoll.coordinator.core.log.disputes import Asked, Dispute, Holders, Need
from atoll.coordinator.core.log.hash_lists import ListCheck, hash_at
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites import liveness
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.decision import Wait
from atoll.protocol import messages as m
from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.layout import Role, chunk_digest, chunk_hash, state_digest
from atoll.protocol.messages import Evidence
from atoll.protocol.outer import outer_at
from atoll.protocol.plans import encoded_digest, payloads_digest, weights
from atoll.protocol.recompute import recomputed, record_bytes, slots_of
from atoll.protocol.spec import spec_of


class _Stops(Exception):
    """Until an answer is here. `step`: what is to be done for it; None: that is under way."""

    def __init__(self, step: Asked | Recompute | None = None) -> None:
        self.step = step


class _Undecided(Exception):
    """Nobody here can find out; why."""


def look_into(run: Run, dispute: Dispute, holders: Holders) -> dict[bytes, str] | Asked | Recompute | str | None:
    """The state hashes that are wrong, and why; or who is to be asked for what is needed next, the chunk that is to be
    computed, or why nobody can find out. None: an answer is waited for."""
    try:
        return _compare(run, dispute, holders)
    except _Stops as stops:
        return stops.step
    except _Undecided as why:
        return str(why)


def _compare(run: Run, dispute: Dispute, holders: Holders) -> dict[bytes, str]:
    opened: dict[bytes, bytes | bytearray] = {}
    closed: list[bytes] = []  # and somebody has that state now, or made it
    for claim in dispute.claims:
        if len(opened) == 2:
            break
        hashes = _opened(run, dispute, claim, holders[claim])
        if hashes is not None:
            opened[claim] = hashes
        elif _have_made(run, holders[claim], dispute.commit):
            closed.append(claim)
    if opened and closed:
        return dict.fromkeys(closed, f"nobody shows what that hash of commit {dispute.commit} is made of")
    if len(opened) < 2:
        raise _Undecided("not every side shows what its hash is made of")
    chunk = dispute.compare(opened)
    right = _hash_of(run, dispute, chunk, holders)
    found = {claim: hash_at(hashes, chunk) for claim, hashes in opened.items()}
    spec, _ = run.chunk_sizes.at(chunk)
    name = f"chunk {chunk} of commit {dispute.commit}, in {spec.name!r},"
    wrong = {
        claim: f"{name} has hash {value.hex()[:12]} there, and comes out as {right.hex()[:12]}"
        for claim, value in found.items()
        if value != right
    }
    if len(wrong) == len(dispute.claims):
        raise _Undecided(f"none of them has {name} as it comes out here, {right.hex()[:12]}")
    return wrong


def _have_made(run: Run, sites: Sequence[Site], commit: int) -> bool:
    """Whether one of them holds that commit now, or said what it has made of it: it has the hashes of its chunks."""
    return any(site.applied == commit or run.log.is_heard(commit, site.site_id) for site in sites)


def _opened(run: Run, dispute: Dispute, claim: bytes, sites: Sequence[Site]) -> bytes | bytearray | None:
    """The hashes of chunks that `claim` is made of; None if nobody shows them."""
    who = sites if _have_made(run, sites, dispute.commit) else [*sites, *run.members.live()]
    try:
        return _evidence(run, dispute, _hashes_of(run, dispute.commit, claim), who)
    except _Undecided:
        if any(site.live and site.stream is None for site in sites):
            raise _Stops from None  # it comes back, or is lost
        return None


def _hash_of(run: Run, dispute: Dispute, chunk: int, holders: Holders) -> bytes:
    """The right one after the commit that is disputed."""
    if dispute.computed is not None:
        return dispute.computed
    if dispute.problem:
        raise _Undecided(f"chunk {chunk} of commit {dispute.commit} cannot be computed here ({dispute.problem})")
    if dispute.computing is not None:
        raise _Stops
    outer = run.settings.outer
    spec, num_elements = run.chunk_sizes.at(chunk)
    if not num_elements:
        return chunk_hash(b"")
    parties = {site.site_id: site for sites in holders.values() for site in sites}
    before, now = _base(run, dispute.commit, chunk, parties)
    state, record = _state_of(run, before, parties), run.log.record(now)
    if state is None or record is None:
        raise _Undecided(f"what commit {before if state is None else now} was is not known here any more")
    everybody = [*parties.values(), *(s for s in run.members.live() if s.site_id not in parties)]
    everybody.sort(key=lambda site: dispute.took_s[site.site_id])  # who took all its time for one part is the last

    def show(evidence: Evidence, commit: int, expected: bytes, most_bytes: int) -> bytes | bytearray:
        of = chunk if evidence in (Evidence.RECORD, Evidence.PAYLOAD) else 0
        need = Need(evidence=evidence, commit=commit, chunk=of, expected=expected, most_bytes=most_bytes)
        return _evidence(run, dispute, need, everybody)

    hashes = _evidence(run, dispute, _hashes_of(run, before, state), everybody)
    old = hash_at(hashes, chunk)
    sizes = run.chunk_sizes.of_sync(record.commit.fragment)
    if spec.role is Role.FROZEN or not sizes.has_payload(chunk):
        return old
    size = record_bytes(spec.role, spec.dtype, num_elements, outer)
    values = show(Evidence.RECORD, before, old, size)
    size = DIGEST_BYTES * len(sizes)
    payloads = show(Evidence.PAYLOAD_HASHES, now, record.commit.payload_digest, size)
    travels = spec_of(run.settings.sync, before, record.commit.fragment)
    tokens = weights(record.commit)
    size = travels.payload_bytes(spec.role, num_elements, spec.carried_itemsize, len(tokens))
    payload = show(Evidence.PAYLOAD, now, hash_at(payloads, chunk), size)
    raise _Stops(
        Recompute(
            role=spec.role,
            dtype=spec.dtype,
            num_elements=num_elements,
            outer=outer_at(run.settings, record.commit, spec.group),
            record=values,
            payload=payload,
            tokens=tokens,
        )
    )


def _base(run: Run, commit: int, chunk: int, parties: Collection[int]) -> tuple[int, int]:
    """From which state the chunk is computed, and the one commit after it that may have changed the chunk.

    It is the state before the commit that is disputed; where others were in flight, an older one, as long as not all
    parties have said what that state is: a word that nobody could contradict yet is nothing to compute from.
    """
    base, now, oldest = commit - 1, commit, max(0, commit - run.settings.sync.most_in_flight)
    while base > oldest and not all(run.log.is_heard(base, site_id) for site_id in parties):
        if _changes(run, base, chunk):
            if _changes(run, now, chunk):
                break
            now = base
        base -= 1
    return base, now


def _state_of(run: Run, commit: int, parties: Collection[int]) -> bytes | None:
    """The hash that all parties have said of it: what is attested may be the word of a site that is no party. Else
    what is attested."""
    said = {run.log.said(commit, site_id) for site_id in parties}
    return (said.pop() if len(said) == 1 else None) or run.log.attested.get(commit)


def _changes(run: Run, commit: int, chunk: int) -> bool:
    record = run.log.record(commit)
    return record is None or run.chunk_sizes.of_sync(record.commit.fragment).has_payload(chunk)


def _hashes_of(run: Run, commit: int, state: bytes) -> Need:
    size = DIGEST_BYTES * run.chunk_sizes.num_chunks
    return Need(evidence=Evidence.CHUNK_HASHES, commit=commit, expected=state, most_bytes=size)


# --- the sum


def recompute(asked: Recompute) -> Recomputed:
    """Pure, and slow for a large chunk."""
    try:
        record = recomputed(
            role=asked.role,
            dtype=asked.dtype,
            num_elements=asked.num_elements,
            step=asked.outer,
            record=bytes(asked.record),
            payload=bytes(asked.payload),
            tokens=asked.tokens,
        )
    except Exception as error:  # whatever sites have agreed on: a dispute that nothing answers would last for ever
        return Recomputed(of=asked, chunk_hash=b"", problem=str(error) or repr(error))
    return Recomputed(of=asked, chunk_hash=chunk_hash(record))


# --- what sites show


def _evidence(run: Run, dispute: Dispute, need: Need, sites: Sequence[Site]) -> bytes | bytearray:
    if need in dispute.found:
        return dispute.found[need]
    if dispute.asked is not None:
        raise _Stops
    for site in sites:
        if not site.live or site.applied is None or site.fetches or site.stream is None:
            continue
        if dispute.tried.get((need, site.site_id)) != site.stream:
            # Once, for all parts and streams: who sends a byte now and then, or comes anew, does not hold up the run.
            until = dispute.due.get((need, site.site_id), run.now + limit_s(run, need))
            raise _Stops(Asked(need=need, site_id=site.site_id, stream=site.stream, since=run.now, until=until))
    raise _Undecided(f"nobody here can show {need.in_words()}")


def limit_s(run: Run, need: Need) -> float:
    """To find it, whatever else the site's disk does, and to send it: a chunk or a list, however large the model is."""
    read_bytes = need.most_bytes
    if need.evidence is Evidence.RECORD:  # a snapshot, then the log
        role = run.chunk_sizes.at(need.chunk)[0].role
        read_bytes += run.log.most_read_bytes(need.most_bytes, role)
    disk_s = read_bytes / liveness.SLOWEST_DISK_BYTES_PER_S
    send_s = need.most_bytes / run.limits.slowest_bytes_per_s
    return liveness.IDLE_STALLS * run.limits.stall_s + disk_s + send_s


def ask(run: Run, asked: Asked) -> None:
    """For the next part, or the first one."""
    need = asked.need
    show = m.Show(commit=need.commit, evidence=need.evidence, chunk=need.chunk, first_byte=len(asked.data))
    run.send_on(asked.stream, show)


def wait(run: Run, dispute: Dispute) -> Wait:
    """Until whoever is asked must have answered, or a run that is to stop ends without that."""
    times = [dispute.asked.until] if dispute.asked is not None else []
    if run.stop_reason and run.now < dispute.until:
        times.append(dispute.until)
    return Wait(dispute.words, min(times, default=None), is_pause=True)


def shown(run: Run, site: Site, message: m.Shown) -> None:
    """A part of what the site was asked for; the next one is asked for, or the hash of the whole decides."""
    dispute = run.dispute
    asked = dispute.asked if dispute is not None else None
    if dispute is None or asked is None or site.stream != asked.stream:
        return
    need, received = asked.need, len(asked.data)
    if (message.commit, message.evidence, message.chunk, message.first_byte) != (
        need.commit, need.evidence, need.chunk, received,
    ):  # fmt: skip
        return  # of another question
    problem = message.text or "it has nothing"
    if message.total_bytes:
        end = received + len(message.data)
        total = asked.total_bytes or message.total_bytes
        if message.total_bytes != total or total > need.most_bytes or not message.data or end > total:
            problem = f"bytes {received} to {end} of {message.total_bytes}, at most {need.most_bytes} are expected"
        else:
            asked.total_bytes = total
            asked.check = asked.check or _check(run, need, total)
            asked.check.more(message.data)
            asked.data += message.data
            if end < total:
                ask(run, asked)
                return
            if asked.check.finish() == need.expected:
                dispute.shown(asked, run.now)
                return
            problem = f"what it shows does not have the hash {need.expected.hex()[:12]}"
    run.report(logging.WARNING, f"{site.label} cannot show {need.in_words()}: {problem}")
    dispute.in_vain(asked, run.now)


def _check(run: Run, need: Need, total_bytes: int) -> Digest | ListCheck:
    """For what has so many bytes."""
    sizes = run.chunk_sizes
    match need.evidence:
        case Evidence.CHUNK_HASHES:
            assert run.manifest is not None, "commits have a model"
            slots, num_chunks = slots_of(run.settings.outer), sizes.num_chunks
            return ListCheck(state_digest(run.manifest.manifest, slots, num_chunks), num_chunks)
        case Evidence.RECORD:
            return chunk_digest(total_bytes)
        case Evidence.PAYLOAD_HASHES if record := run.log.record(need.commit):
            sizes = sizes.of_sync(record.commit.fragment)
            digest = payloads_digest(run.run_id, record.commit, sizes.num_payloads)
            return ListCheck(digest, len(sizes), sizes)
        case _:
            return encoded_digest(total_bytes)
