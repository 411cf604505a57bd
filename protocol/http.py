"""A request and an answer of HTTP/1.1, as far as pages need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

PLAIN = "text/plain; charset=utf-8"
MAX_BODY_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without what is asked behind a `?`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in small letters; of several of one name the first."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        headers = {
            "Content-Type": self.kind,
            "Content-Length": str(len(self.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Connection": "close",
            **self.headers,
        }
        lines = [
            f"HTTP/1.1 {self.code} {HTTPStatus(self.code).phrase}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


def plain_text(code: int, line: str, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(code, PLAIN, line.encode() + b"\n", headers or {})


def read_head(head: bytes) -> Request | None:
    """All before the body; None for what is no request."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    return Request(words[0], words[1].partition("?")[0], headers)


def body_bytes(request: Request) -> int:
    """How many follow the head; -1 for what cannot be taken."""
    said = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not said.isascii() or not said.isdigit() or len(said) > 9:
        return -1
    return int(said) if int(said) <= MAX_BODY_BYTES else -1
