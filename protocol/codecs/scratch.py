"""Arrays that a thread uses again for each chunk: fresh ones of some megabytes cost more in page faults than the
arithmetic done in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
_local = threading.local()


def array(purpose: str, num_bytes: int) -> npt.NDArray[np.uint8]:
    """This thread's bytes for `purpose`, with any content. They are valid until the thread asks for them again."""
    arrays: dict[str, npt.NDArray[np.uint8]] = _local.__dict__.setdefault("arrays", {})
    found = arrays.get(purpose)
    if found is None or found.size < num_bytes:
        found = arrays[purpose] = np.empty(num_bytes, np.uint8)
    return found[:num_bytes]


def floats(purpose: str, num_elements: int) -> npt.NDArray[np.float32]:
    """The same, as fp32."""
    return array(purpose, 4 * num_elements).view(np.float32)


def freed(work: Callable[[], T]) -> T:
    """What `work` gives. This thread has no arrays after it: for a thread that seldom computes."""
    try:
        return work()
    finally:
        _local.__dict__.pop("arrays", None)
