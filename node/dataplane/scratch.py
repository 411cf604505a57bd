"""Arrays that a thread uses again for each chunk: fresh ones of some megabytes cost more in page faults than the
arithmetic done in them."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

_local = threading.local()


def floats(purpose: str, num_elements: int) -> npt.NDArray[np.float32]:
    """This thread's fp32 array for `purpose`, with any content. It is valid until the thread asks for it again."""
    arrays: dict[str, npt.NDArray[np.float32]] = _local.__dict__.setdefault("arrays", {})
    found = arrays.get(purpose)
    if found is None or found.size < num_elements:
        found = arrays[purpose] = np.empty(num_elements, np.float32)
    return found[:num_elements]
