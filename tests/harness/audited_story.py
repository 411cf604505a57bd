"""A coordinator in a run with audits, and sites that say what they find."""

from __future__ import annotations

from typing import Any

from atoll.protocol import messages as m
from atoll.protocol.messages import AuditOutcome
from atoll.protocol.plans import reducers
from tests.harness.coordinator_story import Story, a_hash, some_settings

RIGHT, WRONG, UNKNOWN = AuditOutcome.RIGHT, AuditOutcome.WRONG, AuditOutcome.UNKNOWN
NAMES = ("a", "b", "c", "d", "e")
TRUTH, FALSE = a_hash("what comes out"), a_hash("what the reducer made")


class Audited(Story):
    """One audit a commit, of five sites that reduce."""

    def __init__(self, names: tuple[str, ...] = NAMES, audits: int = 1, **settings: Any) -> None:
        super().__init__(some_settings(min_sites=len(names), quorum=2, audits=audits, steps=4000, **settings))
        self.names = names
        self.num_read = 0
        self.start(*names)
        self.next_commit()

    def next_commit(self) -> None:
        self.live = [name for name in self.names if self.is_live(name)]
        number = self.last_commit()
        for name in self.live:
            self.ready(name)
        for name in [self._name(member.site_id) for member in self.plan().contributors]:
            self.done(name, f"s{number}", payloads=f"p{number}", commit=number)
        for name in self.live:
            self.applied(name, number + 1, f"s{number + 1}")

    def question(self) -> tuple[str, m.AuditChunk] | None:
        """The newest one, once: who is asked, and what."""
        asked = [(who, message) for who, message in self.sent if isinstance(message, m.AuditChunk)]
        found = asked[self.num_read :]
        self.num_read = len(asked)
        return found[-1] if found else None

    def reducer_of(self, asked: m.AuditChunk) -> str:
        plan = self.plan_named(f"{asked.sync}.{asked.attempt}")
        return self._name(reducers(plan, self.num_chunks())[asked.chunk].site_id)

    def audit(self, *found: tuple[AuditOutcome, bytes]) -> tuple[str, list[str]]:
        """One after the other who is asked finds this. Who reduced the chunk, and who was asked."""
        asked_names: list[str] = []
        reducer = ""
        for outcome, payload_hash in found:
            question = self.question()
            assert question is not None, f"nobody is asked after {asked_names}"
            name, asked = question
            reducer = self.reducer_of(asked)
            asked_names.append(name)
            word = m.ChunkAudited(number=asked.number, outcome=outcome, payload_hash=payload_hash)
            self.says(name, word)
        return reducer, asked_names

    def asked_itself(self, name: str, outcome: AuditOutcome = RIGHT, payload_hash: bytes = FALSE) -> None:
        """Two others have found that site out; what it finds. If it says nothing else, it denies."""
        question = self.question()
        assert question is not None
        assert question[0] == name
        self.says(name, m.ChunkAudited(number=question[1].number, outcome=outcome, payload_hash=payload_hash))

    def wrong_once_more(self, reducer: str, num_found: int = 2) -> None:
        """Commits until a chunk of that site is audited, and is wrong, as so many sites have found by now."""
        self.back(reducer)
        for _ in range(200):
            self.next_commit()
            question = self.question()
            assert question is not None
            if self.reducer_of(question[1]) == reducer:
                break
            self.says(question[0], m.ChunkAudited(number=question[1].number, outcome=RIGHT, payload_hash=TRUTH))
        self.num_read -= 1
        assert self.audit(*[(WRONG, TRUTH)] * num_found)[0] == reducer

    def banned(self) -> list[str]:
        return [text.split(":")[0] for text in self.view.banned]

    def by_cause(self) -> dict[str, int]:
        return {cause: times for cause, times in self.view.evictions if times}

    def evicted(self) -> list[str]:
        return [name for name in self.names if self.num(name, m.Evicted)]

    def back(self, name: str) -> None:
        """Started again after an eviction, with the run's state."""
        self.connect(name, incarnation=self.sites[name].incarnation + 1)
        self.offer(name)
        self.applied(name, self.last_commit(), f"s{self.last_commit()}")
