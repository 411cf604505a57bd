"""Numbers on which a host tries its arithmetic before it takes part: drawn by digests, in the place of tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from atoll.protocol.digest import DIGEST_BYTES, Digest
from atoll.protocol.errors import SelfTestFailed

KEPT_BITS = {
    "ordinary": 0x83FFFFFF, "halfway": 0x83FF8000, "faint": 0x87FFFFFF, "small": 0x83FFFFFF, "subnormal": 0x807FFFFF
}  # fmt: skip
"""Of random words. Halfway numbers lie between two of bf16 or are one, and mostly so do their differences."""
SET_BITS = {"ordinary": 0x3C000000, "halfway": 0x3C000000, "faint": 0x30000000}
"""From 2^-7 to 2, of either sign. Faint ones are from 2^-31 to 2^-15, half of them subnormal in binary16. Small numbers
are below 2^-118, and some of them subnormal."""


def numbers(kind: str, rows: int, num_elements: int) -> npt.NDArray[np.float32]:
    """(rows, num_elements) of one kind, the same on every host."""
    count = -(-rows * num_elements * 4 // DIGEST_BYTES)
    drawn = b"".join(Digest("atoll/outer-vectors/v1").uint(i).finish() for i in range(count))
    words = np.frombuffer(drawn, np.uint32, rows * num_elements).reshape(rows, num_elements)
    return (words & np.uint32(KEPT_BITS[kind]) | np.uint32(SET_BITS.get(kind, 0))).view(np.float32)


def compare(what: str, found: Digest, expected: str) -> None:
    """Raises SelfTestFailed unless the digest of all results is the one expected."""
    if found.finish().hex() != expected:
        raise SelfTestFailed(
            f"{what}: this host computes other bits than the protocol asks for; it cannot take part in a run. "
            "Look for a library that turns subnormal numbers off (flush to zero), or another numba or LLVM"
        )
