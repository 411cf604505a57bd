"""Digests over specified bytes: domain-tagged, length-prefixed, little-endian. BLAKE3, 32 bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Self

from blake3 import blake3

DIGEST_BYTES = 32
_WORDS = DIGEST_BYTES // 8
_AT_ONCE = 4096
"""Digests that are prefixed with their length together: what that takes stays in a processor's cache."""
_LENGTHS = memoryview(DIGEST_BYTES.to_bytes(8, "little") * _AT_ONCE).cast("Q")


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

    def more(self, value: bytes | bytearray | memoryview) -> Self:
        """A part of a field whose length was said by `uint`."""
        self._hash.update(value)
        return self

    def digests(self, values: bytes | bytearray | memoryview) -> Self:
        """As one `data` of `DIGEST_BYTES` after the other, and without a step for each: a model has a million
        chunks. Raises ValueError for another length."""
        if len(values) % DIGEST_BYTES:
            raise ValueError(f"{len(values)} bytes are no digests of {DIGEST_BYTES} bytes each")
        words = memoryview(values).cast("B").cast("Q")
        prefixed = bytearray((8 + DIGEST_BYTES) * min(_AT_ONCE, len(words) // _WORDS))
        for first in range(0, len(words), _WORDS * _AT_ONCE):
            part = words[first : first + _WORDS * _AT_ONCE]
            count = len(part) // _WORDS
            with memoryview(prefixed)[: (8 + DIGEST_BYTES) * count].cast("Q") as out:
                out[:: 1 + _WORDS] = _LENGTHS[:count]
                for word in range(_WORDS):
                    out[1 + word :: 1 + _WORDS] = part[word::_WORDS]
                self._hash.update(out.cast("B"))
        return self

    def finish(self) -> bytes:
        return self._hash.digest()
