"""Before a coordinator starts whose store is an old copy: sites say what they have kept of the time since, until enough
of them have, and nothing is missing. Then the copy is brought up to that, in one transaction, and sites are let in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import grpc

from atoll.coordinator import calls, limits, rows
from atoll.coordinator.core import restored
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.events import Answer, CommitRecord, Record
from atoll.coordinator.core.persisted import Persisted, Row
from atoll.coordinator.store import Store
from atoll.coordinator.streams import parse
from atoll.protocol import PROTOCOL_VERSION, addresses, descriptors, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.deposits import Seal
from atoll.protocol.errors import DigestMismatch, InvalidMessage
from atoll.protocol.machine import Machine
from atoll.protocol.messages import Deposit
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json
from atoll.protocol.trust.access import COORDINATOR, guarded
from atoll.protocol.trust.security import Security
from atoll.protocol.v1 import session_pb2

log = logging.getLogger("atoll.coordinator")

ANSWER_LIMIT_S = 60.0
"""Of a site, for each part of what it has kept."""
MAX_BYTES = 2 << 30
"""That one site says; it keeps half as much."""
SAY_EVERY_S = 30.0
OTHERS_S = 2.0
"""Once sites enough have told: others may be on their way."""
MAX_REPORTED = 256
"""Reasons for which what a site says does not count."""


class Restoring:
    """`start`, wait for `restored`, `stop`; then the store is as if it had been here all the time.

    `num_sites`: how many have to tell, see `Restore`.
    """

    def __init__(
        self,
        settings: RunSettings,
        store: Store,
        machine: Machine,
        *,
        security: Security,
        seal: Seal,
        num_sites: int | None = None,
    ) -> None:
        self._store = store
        self._copy: Persisted = store.begin(settings)
        self._last_seq = store.last_seq()
        self._settings = settings_from_json(self._copy.run.settings_json)
        self._machine = machine
        self._security = security
        self._seal = seal
        self._num_sites = num_sites
        self._found: dict[int, tuple[Deposit, Row]] = {}
        self._rows: list[Row] = []  # of these, in order
        self._told: dict[str, int] = {}  # by site: up to which record
        self._reported: set[str] = set()
        self._server: grpc.aio.Server | None = None
        self._held: dict[str, tuple[int, int]] = {}  # by site: branch and commit of the state on its disk
        self._is_enough = asyncio.Event()
        self.is_keeping = False
        view = Core(self._settings, self._copy, 0.0, machine.wall_time()).view(0.0)
        self._shown = asdict(view) | {"settings": json.loads(settings_to_json(self._settings))}
        self._look()

    async def start(self, listen: str) -> str:
        """Listens; at which address. Raises HostError or ConfigError."""
        server = self._machine.network.create_server(
            max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES,
            max_calls_each=limits.MAX_CALLS_EACH,
            max_connections=descriptors.for_connections(
                descriptors.raise_limit(),
                2 * self._settings.max_sites + limits.MORE_CONNECTIONS,
                f"run.max_sites = {self._settings.max_sites}",
            ),
        )
        handlers = calls.all_put_off(lambda: self._put_off) | {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Status": grpc.unary_unary_rpc_method_handler(
                self._status,
                request_deserializer=session_pb2.StatusRequest.FromString,
                response_serializer=session_pb2.StatusResponse.SerializeToString,
            ),
        }
        allowed = guarded(COORDINATOR, handlers, self._security)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(COORDINATOR, allowed),))
        port = transport.bind(server, listen, self._security.of_server())
        await server.start()
        self._server = server
        return addresses.join_address(addresses.parse_address(listen)[0], port)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.5)

    async def restored(self) -> None:
        """Once the store has everything. Raises StateError or HostError: then nothing was changed."""
        log.warning("restoring from an old copy of the store, of commit %d: %s", self._last(), self._words)
        while not self._is_enough.is_set():
            try:
                async with asyncio.timeout(SAY_EVERY_S):
                    await self._is_enough.wait()
            except TimeoutError:
                log.warning("restoring: %s", self._words)
            else:
                await asyncio.sleep(OTHERS_S)  # who is on the way is heard as well
        self.is_keeping = True
        log.warning("%s", await asyncio.to_thread(self._keep))

    async def command(self, line: bytes, by: str) -> Answer:
        """What is said on the admin socket."""
        return Answer(0, f"it is being restored from an old copy of its store: {self._words}")

    def _keep(self) -> str:
        """In a thread. What came of it, in words."""
        deposits = [self._found[seq][0] for seq in sorted(self._found)]
        voided = self._voided()
        term = max([self._copy.term, *(d.seq >> rows.TERM_BITS for d in deposits)]) + restored.PASSED_OVER
        wall_s = self._machine.wall_time()

        def settle(folded: Persisted) -> tuple[Record, ...]:
            return restored.settled(self._settings, folded, voided, self._rows, wall_s)

        self._store.restore(term, deposits, settle)
        last = restored.newest(self._last(), self._rows)
        return (
            f"restored from what {len(self._told)} sites had kept ({', '.join(sorted(self._told))}): the copy was of "
            f"commit {self._last()}, the run goes on from commit {last}"
        )

    def _voided(self) -> dict[int, CommitRecord]:
        left = restored.left_of_copy(self._last(), self._rows)
        if left == self._last():
            return {}
        commits, _ = self._store.read_commits(left + 1, self._last())
        return {record.commit.commit: record for record in commits}

    def _last(self) -> int:
        """The newest commit of the copy."""
        commits = self._copy.all(CommitRecord)
        return commits[-1].commit.commit if commits else 0

    def _needed(self) -> tuple[int, frozenset[str]]:
        """How many sites have to tell, and which ones count."""
        if self._num_sites is not None:
            return self._num_sites, restored.known_sites(self._copy, self._rows)
        known = restored.sites_in_the_run(self._copy, self._rows)
        return len(known) // 2 + 1, known or restored.known_sites(self._copy, self._rows)

    def _lacks(self) -> str:
        """Of what there must have been, what nobody has shown; empty if nothing. A person who has said how many sites
        are to be enough goes on from what there is: what sites hold beyond it is void."""
        if missing := restored.missing(self._last(), self._rows):
            return restored.in_words(self._copy, missing, self._rows)
        for name, (branch, commit) in sorted(self._held.items()) if self._num_sites is None else ():
            if restored.is_unknown(self._copy, self._rows, branch):
                return f"{name} has gone back to an earlier commit with others (branch {branch}), of which nobody tells"
            held = restored.held(self._copy, self._rows, branch, commit)
            if missing := restored.missing(self._last(), self._rows, held):
                return f"{name} holds commit {held}; {restored.in_words(self._copy, missing, self._rows)}"
        return ""

    def _look(self) -> None:
        """Whether that is enough; in words, too."""
        self._rows = [self._found[seq][1] for seq in sorted(self._found)]
        (needed, known), told = self._needed(), ", ".join(sorted(self._told))
        lacks = self._lacks()
        is_enough = len(self._told.keys() & known if known else self._told) >= needed and not lacks
        (self._is_enough.set if is_enough else self._is_enough.clear)()
        self._words = f"{told} told what they kept" if told else "no site has come yet"
        self._words += f"; {lacks}" if lacks else ""
        away = ", ".join(sorted(known - self._told.keys())) or "none beside these"
        self._words += f"; {needed} sites have to, and these were in the run: {away}"

    # --- what sites say

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        who = "a site"
        try:
            hello, header = await self._hello(requests, context)
            who = f"site {hello.name}"
            if self._told.get(hello.name) != hello.deposits_to:  # it may have come back with another home
                await self._ask(hello, header, requests, context)
        except (InvalidMessage, DigestMismatch, LookupError, ValueError, TypeError) as error:
            self._report(f"restoring: what {who} said does not count: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this coordinator is being restored: {error}")
        await context.abort(grpc.StatusCode.UNAVAILABLE, self._put_off)

    @property
    def _put_off(self) -> str:
        return f"the coordinator is being restored from a copy of its store: {self._words}"

    def _report(self, text: str) -> None:
        """Once, however often it comes."""
        if text not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(text)
            log.warning("%s", text)

    async def _hello(self, requests: AsyncIterator[bytes], context: Any) -> tuple[m.Hello, m.Header]:
        data = await self._next(requests)
        if len(data) > limits.MAX_FIRST_MESSAGE_BYTES:
            raise InvalidMessage(f"a first message of {len(data)} bytes")
        _, header, message = parse(data)
        if not isinstance(message, m.Hello) or header.protocol_version != PROTOCOL_VERSION:
            raise InvalidMessage(f"{type(message).__name__} of protocol version {header.protocol_version}")
        if header.run_id != self._settings.run_id:
            raise InvalidMessage(f"{message.name} is of run {header.run_id!r}")
        caller = self._security.caller(context)
        if caller is not None and caller.subject.name != message.name:
            raise InvalidMessage(f"the certificate of {caller.subject.name} says Hello as {message.name}")
        return message, header

    async def _next(self, requests: AsyncIterator[bytes]) -> bytes:
        """Raises InvalidMessage if the site says no more."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidMessage("it does not answer") from None

    async def _ask(self, hello: m.Hello, header: m.Header, requests: AsyncIterator[bytes], context: Any) -> None:
        """Part by part: a stream on which nothing is said ends. What one says counts as a whole, or not at all; a site
        that holds a state and keeps nothing for the coordinator (an older version does not) has not told."""
        found: dict[int, tuple[Deposit, Row]] = {}
        after, num_bytes, is_last = self._last_seq, 0, not hello.deposits_to
        own = m.Header(protocol_version=PROTOCOL_VERSION, run_id=header.run_id)
        while not is_last:
            body = wire.response_body(m.ReturnDeposits(after_seq=after))
            await context.write(wire.response_around(body, own, 1, 1))
            data = await self._next(requests)
            num_bytes += len(data)
            if num_bytes > MAX_BYTES:
                raise InvalidMessage(f"it shows more than {MAX_BYTES} bytes")
            part, is_last = await asyncio.to_thread(self._read, data, after)
            found |= part
            after = max(part, default=after)
        if self.is_keeping:
            return  # too late: what is kept is what had been told when it began
        self._found |= found
        if hello.has_state:
            self._held[hello.name] = hello.branch, hello.last_commit
        if hello.deposits_to or not hello.has_state:
            self._told[hello.name] = hello.deposits_to
            log.info("restoring: %s has kept %d records of the time since the copy", hello.name, len(found))
        self._look()

    def _read(self, data: bytes, after: int) -> tuple[dict[int, tuple[Deposit, Row]], bool]:
        """In a thread: of what a site says, and whether that is all. Raises as `parse` and `rows.decode` do."""
        _, _, message = parse(data)
        if not isinstance(message, m.DepositsReturned):
            return {}, False  # said before it heard; it is asked again
        found: dict[int, tuple[Deposit, Row]] = {}
        for deposit in message.deposits:
            if not self._seal.is_whole(deposit) or deposit.seq <= after:
                raise InvalidMessage("a record that no coordinator of this run has made, or has made since the copy")
            found[deposit.seq] = deposit, rows.decode(deposit.record, deposit.body)
        return found, message.is_last

    async def _status(self, request: session_pb2.StatusRequest, context: Any) -> session_pb2.StatusResponse:
        """Enough for a node to start, and for people."""
        document = self._shown | {"state": f"being restored: {self._words}"}
        return session_pb2.StatusResponse(json=json.dumps(document))
