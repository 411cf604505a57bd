"""How a process loads large libraries as it starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_is_garbage() -> Iterator[None]:
    """Around imports. To look for garbage among what they make, which is all in use, takes as long again: a part of it
    while they load, the larger one as the process ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
