"""A relay's port: sites that attach, sites that call others, connections with tickets, which are joined, and those that
are for the coordinator."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from atoll.node.relay import accepting, greeting, outgoing, words
from atoll.node.relay.pairing import Control, Pair, Pairing, SessionCertificate
from atoll.node.relay.quota import Quotas
from atoll.node.relay.splice import Splice
from atoll.protocol import addresses
from atoll.protocol.errors import HostError, InvalidMessage, RefusedError
from atoll.protocol.handshakes import Handshakes
from atoll.protocol.machine import Machine
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.security import MutualTls

log = logging.getLogger("atoll.relay")

MAX_STRANGERS = 256
"""Connections that have not said yet what they are for; beyond that the address with the most loses its oldest."""
MAX_TO_COORDINATOR = 1024
CONTROL_LIMIT_S = 60.0
"""An attached site says something in that time, or is gone."""
MAX_UNREAD_BYTES = 1 << 16
"""Words to an attached site that it does not read."""
IDLE_LIMIT_S = 120.0
"""Of a pair; gRPC looks after its own connections every ten seconds."""
LOOK_EVERY_S = 1.0


class RelayServer:
    """`start` and `close`; lives in one event loop."""

    def __init__(
        self,
        run_id: str,
        tls: MutualTls,
        quotas: Quotas,
        machine: Machine,
        *,
        coordinators: Callable[[], Sequence[str]],
        max_pairs: int,
        idle_limit_s: float = IDLE_LIMIT_S,
    ) -> None:
        """`coordinators`: addresses of those of this run, to which the port leads, too."""
        self.address = ""
        self.quotas = quotas
        self.pairing = Pairing(quotas, max_pairs)
        self.num_strangers = 0
        """Connections that came to nothing, since the start."""
        self._run_id = run_id
        self._tls = tls
        self._machine = machine
        self._coordinators = coordinators
        self.to_coordinator: set[Splice] = set()
        self._num_led = 0  # that will be among these, if a coordinator answers
        self._banned: frozenset[str] = frozenset()
        self._idle_limit_s = idle_limit_s
        self._controls: dict[int, asyncio.StreamWriter] = {}  # by the number of Control
        self._waiting: dict[Pair, socket.socket] = {}  # the side that came first
        self._splices: dict[Pair, Splice] = {}
        self._handshakes = Handshakes()
        self._strangers: dict[asyncio.Task[None], str] = {}  # their addresses; the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def start(self, listen: str) -> None:
        """Raises HostError, ConfigError."""
        host, port = addresses.parse_address(listen)
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listening.setblocking(False)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(MAX_STRANGERS)
        except OSError as error:
            listening.close()
            raise HostError(f"cannot listen on {listen}: {error.strerror}; choose another --listen") from None
        self.address = addresses.join_address(host, listening.getsockname()[1])
        self._keep(accepting.begin(self._accept, listening))
        self._keep(self._loop.create_task(self._look()))

    async def close(self) -> None:
        for splice in self._all_splices():
            splice.abort()
        for connection in self._waiting.values():
            connection.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ban(self, names: Collection[str]) -> None:
        """Sites of these names, and no others, are not attached and not joined with others from now on."""
        self._banned = frozenset(names)
        for name in self._banned:
            for pair in self.pairing.of_site(name):
                if pair in self._splices:
                    self._splices[pair].abort()
                if (waiting := self._waiting.pop(pair, None)) is not None:
                    waiting.close()
                self.pairing.end(pair)
            if (control := self.pairing.control_of(name)) is not None:
                self._controls[control.number].close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a fault of the relay's own", exc_info=error)

    async def _accept(self, listening: socket.socket) -> None:
        with listening:
            async for connection in accepting.connections(listening):
                source = _source_of(connection)
                task = accepting.begin(partial(self._greet, source), connection)
                self._keep(task)
                self._strangers[task] = source
                if len(self._strangers) > MAX_STRANGERS:
                    ((most, _),) = Counter(self._strangers.values()).most_common(1)
                    oldest = next(task for task, source in self._strangers.items() if source == most)
                    del self._strangers[oldest]
                    oldest.cancel()

    async def _greet(self, source: str, connection: socket.socket) -> None:
        """Until it is known what the connection is for, and as long as that is."""
        task = asyncio.current_task()
        assert task is not None
        is_ours = True
        try:
            async with asyncio.timeout(greeting.HANDSHAKE_LIMIT_S):
                first = await greeting.first_record(connection)
                if first.startswith(words.TICKET_MARK):
                    self._come(await greeting.read_ticket(connection), connection)
                    is_ours = False
                    return
                if not first.startswith(words.TLS_MARK):
                    raise InvalidMessage("neither TLS nor a ticket")
                if self._tls.towards(Kind.COORDINATOR).expected.encode() in first:
                    self._strangers.pop(task, None)  # in a crowd the coordinator takes seconds to answer
                    await self._lead_to_coordinator(connection, first)
                    is_ours = False
                    return
                if (crowd := self._handshakes.begin(source, self._loop.time())) is None:
                    raise InvalidMessage(f"too many handshakes, of {source} or of all")
                is_ours = False  # asyncio closes it from here on
                reader, writer = await greeting.accepted(connection, self._tls)

            def is_welcome() -> None:
                self._handshakes.let_in(source)
                self._handshakes.give_back(source, crowd, self._loop.time())

            await self._speak(reader, writer, task, is_welcome)
        except (OSError, InvalidMessage) as error:
            self.num_strangers += 1
            log.debug("a connection came to nothing: %s", error)
        finally:
            self._strangers.pop(task, None)
            if is_ours:
                connection.close()

    async def _lead_to_coordinator(self, connection: socket.socket, hello: bytes) -> None:
        """Whoever expects the coordinator at the other end of TLS, by that `hello`, which is still to be read. Takes
        the connection. Raises OSError, and InvalidMessage where there are too many."""
        if len(self.to_coordinator) + self._num_led >= MAX_TO_COORDINATOR:
            raise InvalidMessage(f"{MAX_TO_COORDINATOR} connections to the coordinator are open")
        self._num_led += 1
        try:
            other = await outgoing.connect_first(self._coordinators(), hello)
        finally:
            self._num_led -= 1
        connection.recv(len(hello))  # it is said
        splice = Splice(connection, other, ended=lambda: self.to_coordinator.discard(splice))
        self.to_coordinator.add(splice)

    # --- over TLS

    async def _speak(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[None],
        is_welcome: Callable[[], None],
    ) -> None:
        """`is_welcome` is called once it is a site that is not banned. Raises InvalidMessage, OSError, TimeoutError."""
        try:
            subject, certificate = greeting.site_of(writer, self._run_id)
            name = subject.site
            if name in self._banned:
                raise InvalidMessage(f"{subject} is banned")
            is_welcome()
            async with asyncio.timeout(greeting.HANDSHAKE_LIMIT_S):
                word = await greeting.read_word(reader)
                self._strangers.pop(task, None)
                if isinstance(word, words.Call):
                    writer.write(words.to_line(self._called(name, word.name)))
                    await writer.drain()
            if isinstance(word, words.Attach) and subject.kind is Kind.SITE:
                left_s = certificate.until_s - self._machine.wall_time()
                async with asyncio.timeout(left_s):  # it comes with a renewed one
                    await self._attached(name, certificate, word.start, reader, writer)
            elif not isinstance(word, words.Call):
                raise InvalidMessage(f"site {name} begins with {type(word).__name__}")
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()

    def _called(self, caller: str, name: str) -> words.Word:
        """The answer to the site that calls."""
        if name in self._banned:
            return words.Refused(f"site {name} is banned")
        tickets = self._machine.token_bytes(words.TICKET_BYTES), self._machine.token_bytes(words.TICKET_BYTES)
        try:
            control = self.pairing.call(caller, name, tickets, self._loop.time())
        except RefusedError as error:
            log.debug("%s calls %s: %s", caller, name, error)  # whoever calls says it in its own log
            return words.Refused(str(error))
        self._say(control, words.Ticket(tickets[1]))
        return words.Ticket(tickets[0])

    def _say(self, control: Control, word: words.Word) -> None:
        writer = self._controls[control.number]
        writer.write(words.to_line(word))
        if writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            writer.transport.abort()

    async def _attached(
        self,
        name: str,
        certificate: SessionCertificate,
        start: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Until the connection ends, or another one takes its place."""
        try:
            control, before = self.pairing.attach(name, certificate, start)
        except RefusedError as error:
            log.warning("%s", error)
            writer.write(words.to_line(words.Refused(str(error))))
            return
        self._controls[control.number] = writer
        if before is not None:
            self._say(before, words.Refused(f"another connection of site {name} has taken the place of this one"))
            self._controls[before.number].close()
        log.info("site %s is attached, start %d", name, start)
        try:
            self._say(control, words.Attached())
            while True:
                async with asyncio.timeout(CONTROL_LIMIT_S):
                    if not isinstance(await greeting.read_word(reader), words.Ping):
                        raise InvalidMessage(f"site {name} says what an attached site does not")
                    self._say(control, words.Pong())
                    await writer.drain()
        except (OSError, InvalidMessage) as error:
            log.info("site %s is gone: %s", name, error or "it says nothing any more")
        finally:
            del self._controls[control.number]
            self.pairing.detach(name, control)

    # --- with tickets

    def _come(self, ticket: bytes, connection: socket.socket) -> None:
        """Takes the connection. Raises InvalidMessage, of one that it does not take, and OSError."""
        pair = self.pairing.come(ticket, self._loop.time())
        if pair is None:
            raise InvalidMessage("no ticket that is good")
        if not pair.is_whole:
            self._waiting[pair] = connection
            return
        other = self._waiting.pop(pair)
        if problem := self.quotas.refusal(pair.caller, self._loop.time()):
            other.close()
            self.pairing.end(pair)
            raise InvalidMessage(problem)
        try:
            moved, ended = partial(self._moved, pair), partial(self._ended, pair)
            self._splices[pair] = Splice(other, connection, moved=moved, ended=ended)
        except OSError:
            self.pairing.end(pair)
            raise
        log.debug("%s: joined", pair)

    def _moved(self, pair: Pair, num_bytes: int) -> None:
        if not self.quotas.charge(pair.caller, num_bytes, self._loop.time()):
            return
        text = self.quotas.refusal(pair.caller, self._loop.time())
        log.warning("%s", text)
        if (control := self.pairing.control_of(pair.caller)) is not None:
            self._say(control, words.Told(text))
        for other in self.pairing.of_caller(pair.caller):
            if other in self._splices:
                self._splices[other].abort()

    def _ended(self, pair: Pair) -> None:
        self._splices.pop(pair, None)
        self.pairing.end(pair)

    def _all_splices(self) -> list[Splice]:
        return [*self._splices.values(), *self.to_coordinator]

    async def _look(self) -> None:
        """For pairs that nobody comes to, and those over which nothing goes."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = self._loop.time()
            for pair in self.pairing.late(now):
                log.info("%s: one of them did not come in time", pair)
                self.pairing.end(pair)
                if (waiting := self._waiting.pop(pair, None)) is not None:
                    waiting.close()
            for splice in self._all_splices():
                if now - splice.moved_at > self._idle_limit_s:
                    splice.abort()


def _source_of(connection: socket.socket) -> str:
    """Whose address is at the other end; empty if it has gone."""
    try:
        return addresses.source_of(connection.getpeername()[0])
    except OSError:
        return ""
