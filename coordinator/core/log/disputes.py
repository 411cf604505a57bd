"""Sites that hold different states of one commit: what is claimed, what was asked for and what is known of it.

Whose state is right is found out in `evidence.py`; see docs/decisions/0020-disputes.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.coordinator.core.events import Recompute, Recomputed
from atoll.coordinator.core.log.hash_lists import ListCheck, first_difference
from atoll.coordinator.core.sites.membership import Site
from atoll.protocol.digest import Digest
from atoll.protocol.messages import Evidence

Holders = Mapping[bytes, Sequence[Site]]
"""State hash -> who claims it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A part of the evidence, and the hash that it must have."""

    evidence: Evidence
    commit: int
    chunk: int = 0
    expected: bytes
    most_bytes: int

    def in_words(self) -> str:
        """What a site is asked for."""
        match self.evidence:
            case Evidence.CHUNK_HASHES:
                return f"the hashes of the chunks after commit {self.commit}"
            case Evidence.RECORD:
                return f"chunk {self.chunk} as it was after commit {self.commit}"
            case Evidence.PAYLOAD_HASHES:
                return f"the hashes of the payloads of commit {self.commit}"
            case _:
                return f"the payload of chunk {self.chunk} in commit {self.commit}"


@dataclass(slots=True, kw_only=True)
class Asked:
    """One site, for one part after the other."""

    need: Need
    site_id: int
    stream: int
    since: float
    until: float  # of the whole of it, through all streams of the site
    check: Digest | ListCheck | None = None  # since its first part is here
    data: bytearray = field(default_factory=bytearray)
    total_bytes: int = 0


@dataclass(slots=True)
class Dispute:
    commit: int
    claims: tuple[bytes, ...]  # state hashes; the first two that sites show are compared
    until: float  # a run that is told to stop does not wait for evidence any longer
    doubted: list[int] = field(default_factory=list)  # commits: it, and later ones, of which something is attested
    asked: Asked | None = None
    found: dict[Need, bytes | bytearray] = field(default_factory=dict)
    tried: dict[tuple[Need, int], int] = field(default_factory=dict)  # site id -> stream, on which it was in vain
    due: dict[tuple[Need, int], float] = field(default_factory=dict)  # site id -> when it must have answered
    took_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # by site id, to answer in all
    told: dict[int, tuple[int, int, bool]] = field(default_factory=dict)  # site id -> stream, commit, if it is over
    pair: tuple[bytes, ...] = ()  # which two; of them is what follows
    computing: Recompute | None = None  # that is under way
    chunk: int = 0  # the first one in which the two differ
    computed: bytes | None = None  # its hash
    problem: str = ""  # why it cannot be computed here
    undecided: str = ""  # why nobody can find out, as things stand
    words: str = ""  # who holds what, and what is done about it; empty while that is looked at

    def look_anew(self) -> None:
        """Nothing is said of it until it is known what is claimed now."""
        self.words = ""

    def compare(self, opened: Mapping[bytes, bytes | bytearray]) -> int:
        """The first chunk in which two states differ, of whose chunks these are the hashes. What was found out of two
        others is void."""
        pair = tuple(opened)
        if pair == self.pair:
            return self.chunk
        chunk = first_difference(*opened.values())
        assert chunk is not None, "lists with different hashes differ"
        self.pair, self.computing, self.chunk, self.computed, self.problem = pair, None, chunk, None, ""
        others = [n for n in self.found if n.commit != self.commit or n.expected in pair]
        self.found = {need: self.found[need] for need in others}
        return chunk

    def begin_sum(self, asked: Recompute) -> None:
        """The chunk is computed; what that needs is on its way, and not kept."""
        self.computing = asked
        self.found = {n: data for n, data in self.found.items() if n.evidence is Evidence.CHUNK_HASHES}

    def take_sum(self, event: Recomputed) -> None:
        """What came out; nothing if another computation was asked for since."""
        if event.of is self.computing:
            self.computing, self.problem = None, event.problem
            self.computed = None if event.problem else event.chunk_hash

    def ask(self, asked: Asked) -> None:
        """One site, for one part; nobody else meanwhile."""
        self.asked = asked
        self.due[asked.need, asked.site_id] = asked.until

    def answered(self, asked: Asked, now: float) -> None:
        """Nobody is asked any more."""
        self.asked = None
        self.took_s[asked.site_id] += now - asked.since

    def shown(self, asked: Asked, now: float) -> None:
        """The whole of what was asked for, with the right hash."""
        self.answered(asked, now)
        self.found[asked.need] = asked.data

    def in_vain(self, asked: Asked, now: float) -> None:
        """Whoever was asked does not have it, or has gone."""
        self.answered(asked, now)
        self.tried[asked.need, asked.site_id] = asked.stream

    def is_over(self, now: float) -> bool:
        """Whether no answer can decide it as things stand, or none came in time."""
        return bool(self.undecided) or now >= self.until

    def say(self, holders: Holders) -> None:
        """Says in words who holds what."""
        sides = {claim: " and ".join(site.label for site in sites) for claim, sites in holders.items()}
        hold = ", ".join(f"{names} {claim.hex()[:12]}" for claim, names in sides.items())
        text = f"sites hold different states of commit {self.commit} ({hold})"
        todo = "ban those that you do not trust (atoll ban NAME)"
        rest = f", and {self.undecided}: {todo}" if self.undecided else "; their states are being checked"
        self.words = text + rest
