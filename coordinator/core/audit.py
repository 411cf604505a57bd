"""The audit log: what people asked of the run, who they were, what came of it. Each entry has the hash of the one
before it, so that none can be changed, left out or put in without all later ones: whoever has an entry's hash from
elsewhere (the coordinator's own log says it) finds out. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from atoll.coordinator.core.asked import Asked, AuditAsked
from atoll.coordinator.core.events import AuditRecord

COORDINATOR = "the coordinator"
"""Does by itself what nobody asked for."""
DONE = "done"
MAX_TEXT = 1024
MOST_ASKED = 256
"""Entries in one answer."""


def digest_of(entry: AuditRecord) -> str:
    """SHA-256, in hex, of its other fields in their order, as a JSON list in UTF-8 without spaces."""
    said = [getattr(entry, field.name) for field in fields(entry) if field.name != "digest"]
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def words_of(asked: Asked) -> str:
    """`ban name="berlin" reason="it lies"`: what is not as it is without being said."""
    said = {f.name: getattr(asked, f.name) for f in fields(asked) if f.name not in ("by", "request")}
    verb = "".join("-" + c.lower() if c.isupper() else c for c in type(asked).__name__.removesuffix("Asked"))
    shown = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in said.items() if value)
    return " ".join((verb[1:], *shown))[:MAX_TEXT]


def break_in(records: Sequence[AuditRecord]) -> str:
    """Where the entries do not follow from each other, the first of them being taken as it is; empty if they do."""
    for before, record in zip((None, *records), records, strict=False):
        if digest_of(record) != record.digest:
            return f"entry {record.number} is not what its hash says"
        if before is not None and (before.number + 1, before.digest) != (record.number, record.previous):
            return f"entry {record.number} does not follow entry {before.number}"
    return ""


class Audit:
    """The log as it is, and what is asked and not answered yet."""

    def __init__(self, records: Iterable[AuditRecord]) -> None:
        self._records = list(records)
        self._asked: dict[int, Asked] = {}

    def asks(self, asked: Asked) -> None:
        """It is to be in the log, with its answer."""
        if asked.by and asked.request and not isinstance(asked, AuditAsked):
            self._asked[asked.request] = asked

    def answered(self, request: int) -> Asked | None:
        """What was asked for; None for what is not to be in the log. Once."""
        return self._asked.pop(request, None)

    def add(self, at_s: float, by: str, what: str, outcome: str) -> AuditRecord:
        """The new entry, to be kept."""
        number, previous = (self._records[-1].number + 1, self._records[-1].digest) if self._records else (1, "")
        entry = AuditRecord(
            number=number, at_s=at_s, by=by, what=what, outcome=outcome[:MAX_TEXT], previous=previous, digest=""
        )
        record = replace(entry, digest=digest_of(entry))
        self._records.append(record)
        return record

    def after(self, number: int) -> list[AuditRecord]:
        """The next entries after that one, bounded."""
        return [record for record in self._records if record.number > number][:MOST_ASKED]
