"""Audits where what codecs lose of averages is fed back: what a reducer signs, keeps and gives, and what is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.node.dataplane import false_payload
from atoll.node.dataplane.averages import recomputed
from atoll.node.dataplane.kept_contributions import KeptContributions
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.exchange import added_errors
from atoll.node.exchange.added_errors import Refuted
from atoll.node.exchange.auditing import Auditor
from atoll.node.exchange.catchup.expected_donors import ExpectedDonors
from atoll.node.exchange.peers.counters import Counters
from atoll.node.exchange.peers.dialer import Dialer
from atoll.node.exchange.peers.errors_given import Given
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.peers.progress import Pace
from atoll.node.exchange.sync.audited_errors import AuditedErrors
from atoll.node.exchange.sync.average_errors import AverageErrors
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol import messages as m
from atoll.protocol.audit_messages import NO_ERROR
from atoll.protocol.codecs import kernels
from atoll.protocol.codecs.arithmetic import NOTHING, Floats
from atoll.protocol.errors import AtollError, InvalidMessage, PeerError, StateError
from atoll.protocol.hash_tree import HashTree
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import KEPT_SYNCS, SyncSettings
from atoll.protocol.trust.words import of_contributions, of_payloads
from tests.harness.site_keys import SiteKeys
from tests.simulation.loop import InlineExecutor

LAYOUT = Layout(Manifest.canonical([TensorSpec(name="w", shape=(12,), dtype="F32", role=Role.TRAINABLE)]), 4, 1)
SETTINGS = RunSettings(run_id="r", sync=SyncSettings(audits=2, chunk_elements=4, error_feedback_down=0.5))
WAY = spec_of(SETTINGS.sync, 3, 0).trainable
BEFORE, NOW, CHUNK = AttemptKey(4, 1, 1), AttemptKey(5, 1, 2), 1
MADE = (1, 2)
MEMBERS = tuple(m.Member(site_id=i, incarnation=1, address=f"h:{i}", tokens=10 * i, name=f"s{i}") for i in (1, 2, 3))
KEYS = SiteKeys("r")
POOL = InlineExecutor()


def floats(*seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(4).astype(np.float32)


CONTRIBUTIONS = [(c.tokens, kernels.encode("int8", floats(c.site_id))) for c in MEMBERS]
KEPT = [HashTree((0, 1, 2), [payload_hash(data)] * 3) for _, data in CONTRIBUTIONS]


class Reducer:
    """Site 3, with the errors of two averages of chunk 1."""

    def __init__(self, added: Floats | None = None, *, left: Floats | None = None, signs: bool = True) -> None:
        """`added`: something else than what was left before; `left`: than the codec leaves."""
        self.errors = AverageErrors(POOL, audited=AuditedErrors())
        assert self.errors.audited is not None
        audited, self.error = self.errors.audited, floats(7)
        self.keep(BEFORE, None, NOTHING, self.error)
        self.before = audited.sign(BEFORE, MADE)
        self.added = self.error if added is None else added
        found = np.empty(4, np.float32)
        self.payload = recomputed(WAY, 4, CONTRIBUTIONS, self.added, found)
        self.keep(NOW, BEFORE, self.added, found if left is None else left)
        self.now = audited.sign(NOW, MADE) if signs else (b"", b"")

    def keep(self, attempt: AttemptKey, earlier: AttemptKey | None, added: Floats, left: Floats) -> None:
        assert self.errors.audited is not None
        self.errors.keep(attempt, CHUNK, left)
        self.errors.audited.note(attempt, CHUNK, earlier, added, left)

    def asked(self, **changes: Any) -> m.AuditChunk:
        made = m.Made(
            site_id=3,
            first_chunks=(1,),
            nums_chunks=(2,),
            root=HashTree(MADE, [payload_hash(self.payload)] * 2).root,
            errors=m.SignedErrors(before=self.now[0], after=self.now[1]),
        )
        before = m.ErrorsBefore(
            sync=4, term=1, attempt=1,
            made=replace(made, errors=m.SignedErrors(before=self.before[0], after=self.before[1])),
        )  # fmt: skip
        asked = m.AuditChunk(
            number=9, commit=4, sync=5, attempt=2, term=1, fragment=0, base_commit=3, contributors=MEMBERS,
            roots=tuple(tree.root for tree in KEPT), chunk=CHUNK, made=made, before=before,
        )  # fmt: skip
        return replace(asked, **changes)


def log_with(*in_force: AttemptKey) -> Any:
    return SimpleNamespace(attempts_in_force=lambda: set(in_force))


def test_what_a_reducer_gives_is_held_against_what_it_signed() -> None:
    reducer = Reducer()
    asked, given = reducer.asked(), reducer.errors.added(NOW, CHUNK)
    assert added_errors.checked(LAYOUT, asked, BEFORE, given).tobytes() == reducer.error.tobytes()
    other = floats(8)
    for wrong in (
        replace(given, error=other.tobytes()),
        replace(given, error=other.tobytes(), before_hash=payload_hash(other.tobytes())),
        replace(given, error=b""),
        replace(given, error=b"", before_hash=NO_ERROR),
        replace(given, after_hash=payload_hash(b"")),
        replace(given, earlier_proof=given.after_proof[:-1]),
        replace(given, earlier_proof=b""),
    ):
        with pytest.raises(Refuted):
            added_errors.checked(LAYOUT, asked, BEFORE, wrong)
    with pytest.raises(Refuted, match="another start of the coordinator"):
        added_errors.checked(LAYOUT, asked, replace(BEFORE, term=0), given)
    for unknown in (replace(asked, before=None), replace(asked, made=None)):
        with pytest.raises((StateError, InvalidMessage)) as problem:
            added_errors.checked(LAYOUT, unknown, BEFORE, given)
        assert not isinstance(problem.value, Refuted), "nobody can say"
    with pytest.raises(StateError, match="not in the log here"):
        added_errors.checked(LAYOUT, asked, None, given)
    with pytest.raises(InvalidMessage, match="than the coordinator says"):
        added_errors.checked(LAYOUT, asked, replace(BEFORE, attempt=9), given)


def test_an_error_that_was_made_up_is_not_what_was_left_before() -> None:
    reducer = Reducer(floats(9))
    reducer.errors.keep(BEFORE, CHUNK, floats(9))  # it gives what it says that it added
    with pytest.raises(Refuted, match="not what was left before"):
        added_errors.checked(LAYOUT, reducer.asked(), BEFORE, reducer.errors.added(NOW, CHUNK))


def test_an_average_without_an_error_needs_none() -> None:
    reducer = Reducer(NOTHING)
    given = reducer.errors.added(NOW, CHUNK)
    assert (given.error, given.before_hash) == (b"", NO_ERROR)
    assert not added_errors.checked(LAYOUT, reducer.asked(before=None), None, given).size


def test_an_error_counts_after_its_attempt_was_signed_and_under_one_start_of_the_coordinator() -> None:
    audited = Reducer(signs=False).errors.audited
    assert audited is not None
    assert audited.counting(BEFORE, 1) == BEFORE
    assert audited.counting(BEFORE, 2) is None
    assert audited.counting(NOW, 1) is None, "its exchange has not ended"
    assert audited.counting(None, 1) is None
    assert audited.whole(CHUNK, BEFORE, floats(7)).size
    assert not audited.whole(CHUNK, BEFORE, floats(8)).size, "a bit that flipped here is nobody's error"


def test_what_was_added_is_given_until_its_audits_are_over() -> None:
    reducer = Reducer()
    errors, step = reducer.errors, 4 * reducer.error.size
    errors.forget_void(log_with(BEFORE), in_flight={5})
    for newest in range(5, 5 + KEPT_SYNCS + 2):
        errors.forget_void(log_with(NOW, AttemptKey(newest, 1, 2)), in_flight=())
        assert errors.added(NOW, CHUNK).error == reducer.error.tobytes()
        assert not errors.of(CHUNK, BEFORE).size, "it counts no more"
        assert errors.num_bytes == 2 * step
    errors.forget_void(log_with(NOW, AttemptKey(newest + 1, 1, 2)), in_flight=())
    assert errors.num_bytes == step
    with pytest.raises(StateError, match=r"is gone|not known here any more"):
        errors.added(NOW, CHUNK)
    for key, chunk in ((AttemptKey(9, 1, 1), CHUNK), (NOW, 0)):
        with pytest.raises(StateError):
            errors.added(key, chunk)


class FromAll(Auditor):
    """What sites give is at hand."""

    gives: Callable[[], Given]

    async def _given(self, asked: m.AuditChunk, member: m.Member) -> Encoded:
        place = [c.site_id for c in MEMBERS].index(member.site_id)
        data = CONTRIBUTIONS[place][1]
        return Encoded(CHUNK, data, payload_hash(data), proof=KEPT[place].proof(CHUNK))

    async def _error_of(self, asked: m.AuditChunk, reducer: m.Member) -> Given:
        return self.gives()


def signed(asked: m.AuditChunk) -> m.AuditChunk:
    words, pairs = KEYS.words("s3"), zip(MEMBERS, asked.roots, strict=True)
    of = [KEYS.words(c.name).signed(of_contributions("r", 5, (c.site_id, 1), root)) for c, root in pairs]
    assert asked.made is not None
    assert asked.made.errors is not None
    made = replace(
        asked.made,
        signature=words.signed(of_payloads("r", asked, WAY, (3, 1), asked.made.root)),
        errors=words.signed_errors(asked, WAY, (3, 1), asked.made.errors),
    )
    assert asked.before is not None
    assert asked.before.made.errors is not None
    before = words.signed_errors(asked.before, WAY, (3, 1), asked.before.made.errors)
    said = replace(asked.before, made=replace(asked.before.made, errors=before))
    return replace(asked, signatures=tuple(of), made=made, before=said)


def audit(
    tmp_path: Path, reducer: Reducer, asked: m.AuditChunk, gives: Callable[[], Given] | None = None
) -> tuple[m.ChunkAudited, list[m.FalsePayload]]:
    """Of site 1, where all sign."""
    kept = list[m.FalsePayload]()
    held = SimpleNamespace(hash_of=lambda _: payload_hash(reducer.payload), read=lambda _: reducer.payload)
    log: Any = SimpleNamespace(held=lambda *key: held, attempt_of=lambda fragment, commit: BEFORE)

    async def run() -> m.ChunkAudited:
        with ThreadPoolExecutor(1) as pool:
            auditor = FromAll(
                settings=SETTINGS,
                layout=LAYOUT,
                log=log,
                kept=KeptContributions(tmp_path / "own"),
                errors=AverageErrors(pool),
                header=lambda: m.Header(protocol_version=PROTOCOL_VERSION, run_id="r", site_id=9, incarnation=1),
                dialer=Dialer(),
                expected=ExpectedDonors(),
                undialable=lambda: (),
                counters=Counters(),
                pace=Pace(stall_s=1, slowest_bytes_per_s=1),
                pool=pool,
                words=KEYS.words("s1"),
                keep_evidence=kept.append,
            )
            auditor.gives = gives or (lambda: reducer.errors.added(NOW, CHUNK))
            return await auditor.audit(asked)

    return asyncio.run(run()), kept


def test_an_auditor_finds_payload_and_error_to_the_bit(tmp_path: Path) -> None:
    reducer = Reducer()
    found, kept = audit(tmp_path, reducer, signed(reducer.asked()))
    assert (found.outcome, found.withheld, kept) == (m.AuditOutcome.RIGHT, False, [])


@pytest.mark.parametrize("what", ["payload", "left"])
def test_what_an_auditor_keeps_shows_what_a_reducer_made_of_its_error(tmp_path: Path, what: str) -> None:
    reducer = Reducer(left=floats(5) if what == "left" else None)
    if what == "payload":
        reducer.payload = CONTRIBUTIONS[0][1]
    found, (evidence,) = audit(tmp_path, reducer, signed(reducer.asked()))
    assert found.outcome is m.AuditOutcome.WRONG
    roots = [KEYS.root.certificate]
    assert "site s3 (key " in false_payload.check(evidence, roots)
    made = evidence.asked.made
    assert made is not None
    right = Reducer()
    for wrong in (
        replace(evidence, error_beta=0.25),
        replace(evidence, error=floats(8).tobytes()),
        replace(evidence, error=b""),
        replace(evidence, error=evidence.error[:-1]),
        replace(evidence, left_hash=payload_hash(b"")),
        replace(evidence, asked=replace(evidence.asked, made=replace(made, errors=None))),
        replace(evidence, asked=replace(evidence.asked, made=replace(made, errors=right.asked().made.errors))),  # type: ignore[union-attr]
    ):
        with pytest.raises(InvalidMessage):
            false_payload.check(wrong, roots)


def test_what_is_right_shows_nothing(tmp_path: Path) -> None:
    reducer = Reducer(left=floats(5))
    _, (evidence,) = audit(tmp_path, reducer, signed(reducer.asked()))
    right = Reducer()
    given = right.errors.added(NOW, CHUNK)
    of = replace(
        evidence, asked=signed(right.asked()), left_hash=given.after_hash, left_proof=given.after_proof,
        error_proof=given.before_proof,
    )  # fmt: skip
    with pytest.raises(InvalidMessage, match="is the average of what was contributed"):
        false_payload.check(of, [KEYS.root.certificate])


def _fails(error: AtollError) -> Callable[[], Given]:
    def gives() -> Given:
        raise error

    return gives


def test_a_reducer_that_gives_nothing_is_named_as_one_and_one_that_gives_something_else_is_refuted(
    tmp_path: Path,
) -> None:
    reducer = Reducer()
    asked = signed(reducer.asked())
    found, _ = audit(tmp_path, reducer, asked, _fails(StateError("gone")))
    assert (found.outcome, found.withheld, found.silent_site_ids) == (m.AuditOutcome.UNKNOWN, True, (3,))
    given = replace(reducer.errors.added(NOW, CHUNK), error=floats(8).tobytes())
    found, _ = audit(tmp_path, reducer, asked, lambda: given)
    assert (found.outcome, found.withheld, found.refuted_site_ids) == (m.AuditOutcome.UNKNOWN, False, (3,))
    assert reducer.asked().before is not None
    for forged in (replace(asked, before=reducer.asked().before), replace(asked, made=reducer.asked().made)):
        found, _ = audit(tmp_path, reducer, forged, _fails(PeerError("not asked")))
        assert (found.outcome, found.withheld, found.refuted_site_ids) == (m.AuditOutcome.UNKNOWN, False, ())
        assert "that is not signed" in found.text
