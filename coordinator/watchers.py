"""Who hears which roots are in force, who is banned, where coordinators are, and which tokens of viewers count: each
process of a site or a relay, at once and whenever that changes, and says which roots it trusts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import grpc

from atoll.coordinator.paces import Paces
from atoll.protocol.errors import AtollError, RefusedError
from atoll.protocol.status import abort, cut_off
from atoll.protocol.trust.names import Subject
from atoll.protocol.trust.security import Caller, Security
from atoll.protocol.trust.watching import roots_digest
from atoll.protocol.v1 import session_pb2


@dataclass(eq=False)
class _Watcher:
    caller: Caller
    refused: asyncio.Future[str]
    """Why it may call no more."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    trusts: bytes = b""
    """The digest of the roots that it has said last."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is said."""

    roots: list[bytes]
    """Those that are in force, DER; the first one signs."""
    banned: tuple[str, ...]
    """Names of sites that others are to have nothing to do with."""
    coordinators: tuple[str, ...]
    """Addresses of all that may serve the run; empty if there is this one alone."""
    tokens: tuple[str, ...] = ()
    """Ids of those of viewers."""


class Watchers:
    def __init__(
        self, security: Security, known: Callable[[], Known], refusal: Callable[[Caller], str], paces: Paces
    ) -> None:
        """`refusal`: why somebody may call no more; empty if it may."""
        self._security = security
        self._refusal = refusal
        self._paces = paces
        self._read = known
        self._known = known()
        self._here: set[_Watcher] = set()
        self._is_closed = False

    @property
    def handler(self) -> Any:
        return grpc.stream_stream_rpc_method_handler(
            self.watch,
            request_deserializer=session_pb2.WatchRequest.FromString,
            response_serializer=session_pb2.WatchResponse.SerializeToString,
        )

    def changed(self) -> None:
        """Perhaps: what is as it was is not said again."""
        if (known := self._read()) != self._known:
            self._known = known
            for watcher in self._here:
                watcher.changed.set()

    def end_refused(self, names: Collection[str] | None) -> None:
        """Calls of those who may call no more, of these names or of all, end before anything else is said on them."""
        for watcher in tuple(self._here):
            is_concerned = names is None or watcher.caller.subject.name in names
            if is_concerned and (reason := self._refusal(watcher.caller)):
                self._here.discard(watcher)
                watcher.refused.set_result(reason)

    def close(self) -> None:
        """Nobody is told any more: all streams end."""
        self._is_closed = True
        for watcher in self._here:
            watcher.changed.set()

    def behind(self, expected: set[Subject]) -> list[str]:
        """Who does not trust the roots that are in force: of those that watch, and of those that are expected to."""
        digest = roots_digest(self._known.roots)
        up_to_date = {watcher.caller.subject for watcher in self._here if watcher.trusts == digest}
        here = {watcher.caller.subject for watcher in self._here}
        return sorted(str(subject) for subject in (expected | here) - up_to_date)

    async def watch(self, requests: Any, context: Any) -> None:
        try:
            caller = self._security.caller(context)
        except AtollError as error:
            await abort(context, error)
        assert caller is not None  # in plain text there is no such method
        watcher = _Watcher(caller, asyncio.get_running_loop().create_future())
        self._here.add(watcher)

        async def hear() -> None:
            async for request in requests:
                watcher.trusts = request.roots_digest[:32]
                await self._paces.in_its_time(str(caller.subject), session_pb2.WatchRequest)

        async def say() -> None:
            while not self._is_closed:
                watcher.changed.clear()
                known = self._known
                said = session_pb2.WatchResponse(
                    roots=known.roots,
                    banned=known.banned,
                    coordinators=known.coordinators,
                    tokens=session_pb2.KnownTokens(ids=known.tokens),
                )
                await context.write(said)
                await watcher.changed.wait()

        tasks = [asyncio.create_task(hear()), asyncio.create_task(say())]
        ends: list[asyncio.Future[Any]] = [*tasks, watcher.refused]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done:
                    task.result()
        finally:
            self._here.discard(watcher)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if watcher.refused.done():
            await cut_off(context, RefusedError(watcher.refused.result()))
