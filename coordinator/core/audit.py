"""The audit log: what people asked of the run, who they were, what came of it. Each entry has the hash of the one
before it, so that none can be changed, left out or put in without all later ones: whoever has an entry's hash from
elsewhere (the coordinator's own log says it) finds out. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from atoll.coordinator.core.asked import Asked, AuditAsked, NoteAsked
from atoll.coordinator.core.events import AuditRecord
from atoll.coordinator.core.persisted import KEPT_AUDIT
from atoll.protocol.text import clean

COORDINATOR = "the coordinator"
"""Does by itself what nobody asked for."""
DONE = "done"
MAX_TEXT = 4096
MAX_VALUE = 512
"""Characters of one thing that was said."""
MOST_ASKED = 256
"""Entries in one answer."""


def digest_of(entry: AuditRecord) -> str:
    """SHA-256, in hex, of its other fields in their order, as a JSON list in UTF-8 without spaces."""
    said = [getattr(entry, field.name) for field in fields(entry) if field.name != "digest"]
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def words_of(asked: Asked) -> str:
    """`ban name="berlin" until_s=1764000000.0 reason="it lies"`: all that is not as it is without being said, the
    reason last, as it may be long."""
    said = {f.name: (getattr(asked, f.name), f.default) for f in fields(asked) if f.name not in ("by", "request")}
    verb = "".join("-" + c.lower() if c.isupper() else c for c in type(asked).__name__.removesuffix("Asked"))
    in_order = sorted(said.items(), key=lambda item: item[0] == "reason")
    shown = (f"{name}={_short(value)}" for name, (value, default) in in_order if value != default)
    return " ".join((verb[1:], *shown))


def words_of_line(line: bytes) -> str:
    """Of what is no command."""
    return f"line {_short(line.decode(errors='backslashreplace'))}"


def _short(value: object) -> str:
    if isinstance(value, str) and len(value) > MAX_VALUE:
        value = value[:MAX_VALUE] + "..."
    return json.dumps(value, ensure_ascii=False)


def in_one_line(text: str) -> str:
    """Nothing in it may look like another entry."""
    return clean(text).replace("\n", "\\n").replace("\t", "\\t")[:MAX_TEXT]


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
        if asked.by and asked.request and not isinstance(asked, AuditAsked | NoteAsked):
            self._asked[asked.request] = asked

    def answered(self, request: int) -> Asked | None:
        """What was asked for; None for what is not to be in the log. Once."""
        return self._asked.pop(request, None)

    def add(self, at_s: float, by: str, what: str, outcome: str) -> AuditRecord:
        """The new entry, to be kept."""
        number, previous = (self._records[-1].number + 1, self._records[-1].digest) if self._records else (1, "")
        entry = AuditRecord(
            number=number,
            at_s=at_s,
            by=in_one_line(by),
            what=in_one_line(what),
            outcome=in_one_line(outcome),
            previous=previous,
            digest="",
        )
        record = replace(entry, digest=digest_of(entry))
        self._records.append(record)
        del self._records[:-KEPT_AUDIT]
        return record

    def after(self, number: int) -> list[AuditRecord]:
        """The next entries after that one, bounded."""
        return [record for record in self._records if record.number > number][:MOST_ASKED]
