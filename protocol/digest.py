"""Digests over specified bytes: domain-tagged, length-prefixed, little-endian. BLAKE3, 32 bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Self

from blake3 import blake3

DIGEST_BYTES = 32


class Digest:
    """`Digest(domain).text("a").uint(3).data(b"...").finish()`; each field is prefixed with its length."""

    __slots__ = ("_hash",)

    def __init__(self, domain: str) -> None:
        self._hash = blake3()
        self.text(domain)

    def text(self, value: str) -> Self:
        return self.data(value.encode())

    def uint(self, value: int) -> Self:
        self._hash.update(value.to_bytes(8, "little"))
        return self

    def uints(self, values: Iterable[int]) -> Self:
        """As one `uint` after the other, and at once: a plan of a thousand sites has thousands."""
        numbers = tuple(values)
        self._hash.update(struct.pack(f"<{len(numbers)}Q", *numbers))
        return self

    def data(self, value: bytes | bytearray | memoryview) -> Self:
        size = value.nbytes if isinstance(value, memoryview) else len(value)
        self._hash.update(size.to_bytes(8, "little"))
        self._hash.update(value)
        return self

    def finish(self) -> bytes:
        return self._hash.digest()
