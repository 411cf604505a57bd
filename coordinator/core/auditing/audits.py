"""The audits of a run: what is asked, of whom, and what was found. Which ones are open is in the store, what was found
in them yet in memory alone: after a restart of the coordinator they begin anew. What is held against a site is in its
record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from atoll.coordinator.core.events import OpenAuditsRecord
from atoll.protocol.messages import AuditChunk, AuditOutcome, ChunkAudited, Commit, Made, Member
from atoll.protocol.sync_settings import KEPT_SYNCS, SyncSettings

MAX_OPEN = 256
"""Audits; a run whose sites do not answer begins no more."""
TERM_BITS = 32
"""The number of a question has the term of its coordinator above these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """To one site; its stream ends, or it answers in time, or it is passed over."""

    number: int
    site_id: int
    stream: int
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accused:
    """A site that two others have found out. It is asked itself before it is judged: what flipped a bit gives the
    right average the second time."""

    site_id: int
    why: str
    is_silent: bool = False
    """It gave nothing of what it had added to an average; nothing was found to be wrong."""
    owns_up_by: tuple[AuditOutcome, bytes | None] | None = None
    """What it finds then, with the payload's hash (None: any). None: it is not asked."""

    def owns_up(self, found: ChunkAudited) -> bool:
        """Whether that is what the others say."""
        if self.owns_up_by is None:
            return False
        outcome, payload_hash = self.owns_up_by
        return found.outcome is outcome and payload_hash in (None, found.payload_hash)


@dataclass(slots=True, kw_only=True)
class Audit:
    """Of one chunk of one commit."""

    asked: AuditChunk
    """Without a number."""
    reducer: Member
    payload_digest: bytes
    question: Question | None = None
    asked_site_ids: set[int] = field(default_factory=set)
    accusers: dict[int, bytes] = field(default_factory=dict)
    """Sites in whose computation another payload came out, and the hash of that."""
    refuted_by: dict[int, set[int]] = field(default_factory=dict)
    """By contributor, the sites to which it gave something else than its root is over."""
    withheld: Counter[int] = field(default_factory=Counter)
    """By site to which the reducer gave nothing of its error: in how many rounds."""
    rests: bool = False
    """Until the next commit, for another round."""
    accused: list[Accused] = field(default_factory=list)
    """Once it is known who is wrong: those that are not judged yet, the first of whom is asked."""
    advice: str = ""
    """For people, once all of them are judged."""

    def withhold(self, site_id: int) -> int:
        """The reducer gave that site nothing: in how many rounds by now."""
        self.withheld[site_id] += 1
        return self.withheld[site_id]

    def hear_again(self, but: int) -> None:
        """Sites to which the reducer gave nothing may hear more by now: they may be asked anew, but that one."""
        self.asked_site_ids -= self.withheld.keys() - {but}
        self.withheld.clear()

    def rest(self, rests: bool) -> None:
        """Until the next commit, or no more."""
        self.rests = rests


def audits_of(record: OpenAuditsRecord) -> list[Audit]:
    """As they were begun."""
    return [
        Audit(asked=asked, reducer=asked.contributors[place], payload_digest=record.payload_digest)
        for asked, place in zip(record.asked, record.reducers, strict=True)
    ]


class Audits:
    """Of a run."""

    def __init__(self, left_open: Sequence[OpenAuditsRecord]) -> None:
        """`left_open`: by the start before."""
        self.secret = b""
        """Of this start of the coordinator, by which is drawn."""
        self._left_open = [audit for record in left_open for audit in audits_of(record)]
        self.open: list[Audit] = []
        self.num_right = 0
        """Chunks whose payload came out again."""
        self.num_wrong = 0
        """Audits that ended with somebody judged."""
        self.num_unknown = 0
        """Audits that ended without an answer that counts."""
        self.silent: Counter[int] = Counter()
        """By site: times that it did not give, in a round of an audit, what it had contributed or found out."""
        self._errors: dict[int, tuple[Commit, dict[int, Made]]] = {}  # by commit, the newest at the end
        self._last_number = 0

    def draw_with(self, secret: bytes, term: int) -> None:
        """Before the first commit of this start. A site may yet answer what the start before has asked: questions of
        two terms have different numbers."""
        self.secret, self._last_number = secret, term << TERM_BITS

    def take_left_open(self) -> list[Audit]:
        """Once."""
        taken, self._left_open = self._left_open, []
        return taken

    def has_room(self, num: int) -> bool:
        """For so many more."""
        return len(self.open) + num <= MAX_OPEN

    def begin(self, audits: Sequence[Audit]) -> None:
        """Nobody is asked yet."""
        self.open += audits

    def ask(self, audit: Audit, *, site_id: int, stream: int, until: float) -> Question:
        """That site, and nobody else at the same time."""
        self._last_number += 1
        audit.question = Question(number=self._last_number, site_id=site_id, stream=stream, until=until)
        audit.asked_site_ids.add(site_id)
        return audit.question

    def answered(self, number: int, site_id: int) -> Audit | None:
        """The audit whose question it was; None if it is not open any more, or was another site's."""
        for audit in self.open:
            question = audit.question
            if question is not None and (question.number, question.site_id) == (number, site_id):
                audit.question = None
                return audit
        return None

    def end(self, audit: Audit) -> bool:
        """Nobody is asked about it any more. Whether it was the last one of its commit."""
        self.open.remove(audit)
        return all(other.asked.commit != audit.asked.commit for other in self.open)

    def void_after(self, commit: int) -> list[Audit]:
        """Those of later commits, which are open no more; what is known of these commits is forgotten."""
        void = [audit for audit in (*self.open, *self._left_open) if audit.asked.commit > commit]
        self.open = [audit for audit in self.open if audit.asked.commit <= commit]
        self._left_open = [audit for audit in self._left_open if audit.asked.commit <= commit]
        for number in [number for number in self._errors if number > commit]:
            del self._errors[number]
        return void

    def note_errors(self, commit: Commit, said: dict[int, Made], sync: SyncSettings) -> None:
        """What reducers of that commit have signed of their errors, by site; of the last ones, which a reducer keeps
        too."""
        self._errors[commit.commit] = commit, said
        for number in list(self._errors)[: -2 * KEPT_SYNCS - sync.fragments - sync.most_in_flight]:
            del self._errors[number]

    def errors_of(self, commit: int) -> tuple[Commit, dict[int, Made]] | None:
        """The same, of one commit; None if it is not known."""
        return self._errors.get(commit)

    def next_due(self) -> float:
        """When a site must have answered."""
        return min((audit.question.until for audit in self.open if audit.question is not None), default=inf)
