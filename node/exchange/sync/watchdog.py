"""Peers of one attempt that make no progress, and the attempt's deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.node.exchange.sync.attempt import Attempt
from atoll.node.exchange.sync.reducer import Reducer
from atoll.node.exchange.sync.upstream import Upstream
from atoll.node.exchange.sync.weights import Weights
from atoll.protocol.errors import PeerError


@dataclass(eq=False, kw_only=True)
class Watchdog:
    attempt: Attempt
    weights: Weights
    reducer: Reducer
    upstreams: Sequence[Upstream]

    async def run(self) -> None:
        """Raises PeerError naming whoever holds up this site."""
        loop, deadline_s, stall_s = self.attempt.loop, self.attempt.plan.deadline_s, self.attempt.pace.stall_s
        self._restart_clocks()
        looked_at = loop.time()
        deadline = looked_at + deadline_s
        while True:
            await asyncio.sleep(stall_s / 8)
            now = loop.time()
            if not self.weights.all_ready:
                self._restart_clocks()  # the coordinator decides how long those who still train are waited for
                deadline = now + deadline_s
            elif now - looked_at > stall_s / 2:
                self._restart_clocks()  # it was this process that stood still
                deadline += now - looked_at
            looked_at = now
            self.reducer.check(now)
            for upstream in self.upstreams:
                upstream.check(now)
            if now >= deadline and (error := self._overdue(is_last=now >= deadline + stall_s)) is not None:
                raise error

    def _restart_clocks(self) -> None:
        now = self.attempt.loop.time()
        self.reducer.restart_clocks(now)
        for upstream in self.upstreams:
            upstream.restart_clocks(now)

    def _overdue(self, *, is_last: bool) -> PeerError | None:
        """Names whom this site waits for in the end. None before `is_last` if that is a reducer that says that it waits
        itself: it has one more stall to name the others, which ends the attempt. Its word alone blames nobody else."""
        attempt = self.attempt
        text = f"the attempt is not complete after {attempt.plan.deadline_s:.0f} s"
        if (error := self.reducer.overdue(text)) is not None:
            return error
        late = [upstream for upstream in self.upstreams if not upstream.is_done]
        if not late:
            return PeerError(f"{attempt.where}: {text}; this site lacks nothing of others", phase="local")
        blamed = next((upstream for upstream in late if not upstream.waits_for), None)
        if blamed is None:
            if not is_last:
                return None
            blamed = late[0]
            text += f"; it says that it waits for sites {', '.join(map(str, blamed.waits_for))}, and names none of them"
        return attempt.peer_error(blamed.parent, text, sending=not blamed.all_sent, phase=blamed.phase)
