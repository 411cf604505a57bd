"""Buffers that training never changes, such as attention masks. Their values are in no contribution
(`SyncData.contribution`: unchanged); they are copied and compared at every sync nevertheless."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atoll.node.worker.tensors import Held
from atoll.protocol.layout import Role

MIN_BYTES = 1 << 20
"""In fp32, together; fewer are not worth a word."""


class ConstantBuffers:
    """Of one rank: says once which averaged buffers are as they were when the last update came."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = [item for item in held if item.spec.role is Role.BUFFER_MEAN]
        self._at_update: list[tuple[int, int]] | None = None

    def taken(self) -> None:
        """An update was taken, which wrote them."""
        if self._held:
            self._at_update = self._state()

    def look(self, num_steps: int) -> None:
        """Before a snapshot, of so many steps of the site."""
        if self._at_update is None or not num_steps:
            return
        pairs = zip(self._held, self._at_update, self._state(), strict=True)
        same = [item for item, before, now in pairs if before == now]
        num_bytes = sum(4 * item.spec.num_elements for item in same)
        self._held, self._at_update = [], None
        if num_bytes >= MIN_BYTES:
            largest = max(same, key=lambda item: item.spec.num_elements).spec.name
            sys.stderr.write(
                f"atoll: {len(same)} buffers that training does not change: no sync sends their values, but each "
                f"copies and compares them, {num_bytes / 2**20:.0f} MiB in fp32; the largest is {largest!r}. "
                f'If no site ever changes it, that is spared by atoll.join(..., buffers={{"{largest}": "constant"}})\n'
            )

    def _state(self) -> list[tuple[int, int]]:
        """Which tensor it is, and how often it was written in place."""
        return [(item.local().data_ptr(), item.local()._version) for item in self._held]
