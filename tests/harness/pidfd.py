"""Waiting for processes that are no children of the tests."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress


def still_there(pids: Sequence[int], limit_s: float) -> list[int]:
    """Those of `pids` that do not end within the limit; a zombie has ended. All are opened first: a number may be given
    to another process later. `select.select` cannot watch descriptors above 1,023."""
    deadline, there = time.monotonic() + limit_s, []
    with ExitStack() as stack:
        descriptors = {}
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptors[pid] = os.pidfd_open(pid)
                stack.callback(os.close, descriptors[pid])
        for pid, descriptor in descriptors.items():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                there.append(pid)
    return there
