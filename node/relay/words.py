"""What a relay and a site say to each other over TLS: lines of ASCII, each a word and at most one thing. Pure.

A connection without TLS begins with a ticket: one byte, and the 32 that the relay gave.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from atoll.protocol.errors import InvalidMessage
from atoll.protocol.settings import SITE_NAME
from atoll.protocol.text import clean

MAX_LINE_BYTES = 512
TICKET_BYTES = 32
TLS_MARK, TICKET_MARK = b"\x16", b"T"
"""First bytes of a connection: a TLS handshake is a record of type 22."""
MAX_START = 1 << 63


@dataclass(frozen=True, slots=True)
class Attach:
    """A site is here to be called; its first word."""

    start: int
    """Of its node, from 1."""


@dataclass(frozen=True, slots=True)
class Call:
    """A site wants a connection to another; its only word."""

    name: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Of an attached site, now and then."""


@dataclass(frozen=True, slots=True)
class Pong:
    pass


@dataclass(frozen=True, slots=True)
class Attached:
    pass


@dataclass(frozen=True, slots=True)
class Ticket:
    """Of the relay to whoever called, or to the site that is called: what to come back with."""

    ticket: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The relay's last word: why."""

    text: str


@dataclass(frozen=True, slots=True)
class Told:
    """For the site's log."""

    text: str


Word = Attach | Call | Ping | Pong | Attached | Ticket | Refused | Told
_KINDS: dict[str, type[Word]] = {
    "attach": Attach,
    "call": Call,
    "ping": Ping,
    "pong": Pong,
    "attached": Attached,
    "ticket": Ticket,
    "refused": Refused,
    "told": Told,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(word: Word) -> bytes:
    rest = [_text(getattr(word, field.name)) for field in fields(word)]
    line = " ".join([_NAMES[type(word)], *rest]).encode("ascii", "replace")
    return line[: MAX_LINE_BYTES - 1] + b"\n"


def _text(value: int | str | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else clean(str(value)).replace("\n", " ")


def from_line(line: bytes) -> Word:
    """Raises InvalidMessage for what is none, cut off, or empty at the end of a connection."""
    if not line.endswith(b"\n") or len(line) > MAX_LINE_BYTES or not line.isascii():
        raise InvalidMessage("a line that is cut off, or none" if line else "the connection ended")
    name, _, rest = line[:-1].decode("ascii").partition(" ")
    kind = _KINDS.get(name)
    if kind is Attach and rest.isdigit() and len(rest) < 20 and 0 < int(rest) < MAX_START:
        return Attach(int(rest))
    if kind is Call and SITE_NAME.fullmatch(rest):
        return Call(rest)
    if kind is Ticket and (ticket := _ticket(rest)):
        return Ticket(ticket)
    if kind is Refused or kind is Told:
        return kind(clean(rest))
    if (kind is Ping or kind is Pong or kind is Attached) and not rest:
        return kind()
    raise InvalidMessage(f"not a word of a relay or a site: {clean(line[:40].decode('ascii'))!r}")


def _ticket(text: str) -> bytes:
    """Empty if it is none."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return b""
    return found if len(found) == TICKET_BYTES and found.hex() == text else b""
