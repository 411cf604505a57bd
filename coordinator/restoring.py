"""Before a coordinator starts whose store is an old copy: sites say what they have kept of the time since, until enough
of them have, and nothing is missing. Then the copy is brought up to that, in one transaction, and sites are let in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from atoll.coordinator import calls, limits, rows
from atoll.coordinator.core import restored
from atoll.coordinator.core.core import Core
from atoll.coordinator.core.events import Answer, CommitRecord, Record
from atoll.coordinator.core.persisted import Persisted, Row
from atoll.coordinator.core.sites import invites, membership
from atoll.coordinator.enrolment import KINDS
from atoll.coordinator.store import Store
from atoll.coordinator.streams import parse
from atoll.protocol import PROTOCOL_VERSION, addresses, descriptors, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.deposits import Seal
from atoll.protocol.errors import DigestMismatch, InvalidMessage, PeerError, RefusedError
from atoll.protocol.machine import Machine
from atoll.protocol.messages import Deposit
from atoll.protocol.settings import RunSettings, settings_from_json, settings_to_json
from atoll.protocol.status import abort
from atoll.protocol.trust.access import COORDINATOR, guarded
from atoll.protocol.trust.security import Caller, Security
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


@dataclass(frozen=True, slots=True)
class _Heard:
    """A site that has told all that it keeps, as its Hello says."""

    key_digest: bytes
    """Of its certificate; in plain text of what it says as its key."""
    deposits_to: int
    held: tuple[int, int] | None
    """Branch and commit of the state on its disk."""

    @property
    def has_told(self) -> bool:
        """One that holds a state and keeps nothing for the coordinator has not (an older version does not)."""
        return bool(self.deposits_to) or self.held is None


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
        self._kept: list[tuple[Deposit, Row]] = []  # of these, in order, what counts
        self._rows: list[Row] = []
        self._heard: dict[tuple[str, bytes], _Heard] = {}  # by site and certified key: none takes another one's place
        self._told: set[str] = set()  # those of them that have told, and whose key counts
        self._calls = calls.Paced()
        self._is_plain = security.of_server() is None
        self._reported: set[str] = set()
        self._server: grpc.aio.Server | None = None
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
        handlers = calls.all_put_off(self._put_off) | {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Status": grpc.unary_unary_rpc_method_handler(
                self._status,
                request_deserializer=session_pb2.StatusRequest.FromString,
                response_serializer=session_pb2.StatusResponse.SerializeToString,
            ),
        }
        allowed = guarded(COORDINATOR, handlers, self._security, self._refusal, self._let_in)
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
                self._look()  # a ban may be over
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
        deposits = [deposit for deposit, _ in self._kept]
        voided = self._voided()
        term = max([self._copy.term, *(seq >> rows.TERM_BITS for seq in self._found)]) + restored.PASSED_OVER
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

    def _lacks(self, known: frozenset[str]) -> str:
        """Of what there must have been, what nobody has shown; empty if nothing. Of what they hold sites that are
        `known` can say what they like: a person who has said how many sites are to be enough goes on from what there
        is, and what sites hold beyond it is void."""
        if missing := restored.missing(self._last(), self._rows):
            return restored.in_words(self._copy, missing, self._rows)
        claims: dict[tuple[int, int], list[str]] = defaultdict(list)  # many say the same
        for (name, _), heard in sorted(self._heard.items()) if self._num_sites is None else ():
            if heard.held is not None and name in known and self._counts(name, heard.key_digest):
                claims[heard.held].append(name)
        for (branch, commit), names in claims.items():
            who, otherwise = ", ".join(names), "where that is not so, say how many sites are to be enough (--restore N)"
            if restored.is_unknown(self._copy, self._rows, branch):
                what = f"to have gone back to an earlier commit with others (branch {branch}), of which nobody tells"
                return f"said {what}, by {who}: {otherwise}"
            held = restored.held(self._copy, self._rows, branch, commit)
            if missing := restored.missing(self._last(), self._rows, held):
                what = restored.in_words(self._copy, missing, self._rows)
                return f"said to hold commit {held}, by {who}: {otherwise}; {what}"
        return ""

    def _counts(self, name: str, key_digest: bytes) -> bool:
        """Whether the run has that site, with that key, as far as is known by now."""
        return not self._why_not(name, key_digest)

    def _why_not(self, name: str, key_digest: bytes) -> str:
        """In plain text a ban alone."""
        return invites.refusal(self._known, "site", name, key_digest, is_new=self._is_plain)

    def _look(self) -> None:
        """Whether that is enough; in words, too."""
        found = [self._found[seq] for seq in sorted(self._found)]
        given_up = restored.given_up([row for _, row in found])
        self._kept = [one for place, one in enumerate(found) if place not in given_up]
        self._rows = [row for _, row in self._kept]
        self._known = restored.members(self._settings, self._copy, self._rows, self._machine.wall_time())
        has_told = [(name, heard.key_digest) for (name, _), heard in self._heard.items() if heard.has_told]
        self._told = {name for name, key_digest in has_told if self._counts(name, key_digest)}
        (needed, known), told = self._needed(), ", ".join(sorted(self._told))
        lacks = self._lacks(known)
        is_enough = len(self._told & known if known else self._told) >= needed and not lacks
        (self._is_enough.set if is_enough else self._is_enough.clear)()
        self._words = f"{told} told what they kept" if told else "no site has come yet"
        self._words += f"; {lacks}" if lacks else ""
        away = ", ".join(sorted(known - self._told)) or "none beside these"
        self._words += f"; {needed} sites have to, and these were in the run: {away}"
        if others := ", ".join(sorted({name for name, _ in has_told} - self._told)):
            self._words += f"; nobody has told of {others} with that key, who count for nothing"

    # --- what sites say

    def _refusal(self, caller: Caller) -> str:
        """As far as is known by now."""
        role = KINDS.get(caller.subject.kind, "")
        return restored.refusal(self._known, role, caller.subject.name, caller.key_digest) if role else ""

    def _let_in(self, caller: Caller, method: str, context: Any) -> AbstractContextManager[None]:
        """Raises PeerError for somebody who calls too often."""
        self._calls.take(caller, method, asyncio.get_running_loop().time())
        return nullcontext()

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        who = "a site"
        try:
            name, heard = await self._hello(requests, context)
            who = f"site {name}"
            if self._heard.get(self._place(name, heard)) != heard:  # it may have come back with another home
                await self._ask(name, heard, requests, context)
        except (InvalidMessage, DigestMismatch, LookupError, ValueError, TypeError) as error:
            self._report(f"restoring: what {who} said does not count: {error}")
            await abort(context, InvalidMessage(f"this coordinator is being restored: {error}"))
        except RefusedError as error:
            await abort(context, error)
        await abort(context, PeerError(self._put_off(context)))

    def _place(self, name: str, heard: _Heard) -> tuple[str, bytes]:
        """In plain text a key is what anybody says."""
        return name, b"" if self._is_plain else heard.key_digest

    def _put_off(self, context: Any) -> str:
        """How far it is, for those alone whom the run knows."""
        caller = self._security.caller(context)
        words = f": {self._words}" if caller is None or self._knows(caller) else ""
        return f"the coordinator is being restored from a copy of its store{words}"

    def _knows(self, caller: Caller) -> bool:
        """By now."""
        role = KINDS.get(caller.subject.kind, "")
        return not invites.refusal(self._known, role, caller.subject.name, caller.key_digest)

    def _report(self, text: str) -> None:
        """Once, however often it comes."""
        if text not in self._reported and len(self._reported) < MAX_REPORTED:
            self._reported.add(text)
            log.warning("%s", text)

    async def _hello(self, requests: AsyncIterator[bytes], context: Any) -> tuple[str, _Heard]:
        """Of which site, and what counts once it has told."""
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
        key_digest = caller.key_digest if caller is not None else membership.key_digest(message.key)
        if caller is None and (banned := self._why_not(message.name, key_digest)):
            raise RefusedError(banned)
        held = (message.branch, message.last_commit) if message.has_state else None
        return message.name, _Heard(key_digest, message.deposits_to, held)

    async def _next(self, requests: AsyncIterator[bytes]) -> bytes:
        """Raises InvalidMessage if the site says no more."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidMessage("it does not answer") from None

    async def _ask(self, name: str, heard: _Heard, requests: AsyncIterator[bytes], context: Any) -> None:
        """Part by part: a stream on which nothing is said ends. What one says counts as a whole, or not at all."""
        found: dict[int, tuple[Deposit, Row]] = {}
        after, num_bytes, is_last = self._last_seq, 0, not heard.deposits_to
        own = m.Header(protocol_version=PROTOCOL_VERSION, run_id=self._settings.run_id)
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
        self._heard[self._place(name, heard)] = heard
        if heard.has_told:
            log.info("restoring: %s has kept %d records of the time since the copy", name, len(found))
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
        """Enough for a node to start, and for people whom the run knows."""
        caller = self._security.caller(context)
        document = self._shown | {"state": f"being restored: {self._words}"}
        if caller is not None and not self._knows(caller):
            if KINDS.get(caller.subject.kind, "") not in invites.OF_SITES:
                await abort(context, PeerError(f"{self._put_off(context)}; nobody has told of {caller.subject}"))
            document = {"settings": self._shown["settings"], "state": "being restored"}
        return session_pb2.StatusResponse(json=json.dumps(document))
