"""Machines and the links between them: grpc.aio's channels, servers and calls on simulated time.

Only what atoll uses of grpc.aio is here, with the same behaviour: order within a stream, none across streams; a write
waits while the window is full; a broken connection ends calls on both sides, each when it learns of it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from tests.simulation.loop import Process, here

WINDOW_MESSAGES = 16
"""Written and not read yet, of one direction of one call."""
CONNECT_LIMIT_S = 20.0
KEEPALIVE_S = 30.0
"""After so long without a way through, a connection is given up."""
RETRY_S = 0.3
MOST_DELAY_S = 0.01
"""Where nothing else is said."""


def error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@dataclass
class Weather:
    """What the links do of themselves. Times in seconds, the rest is probability a message."""

    least_delay_s: float = 0.0005
    most_delay_s: float = MOST_DELAY_S
    duplicate: float = 0.0
    """Of session messages."""
    corrupt: float = 0.0
    """One bit of a message, between nodes or on a session."""


class Network:
    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int) -> None:
        self.loop = loop
        self.random = random.Random(f"network {seed}")
        self.weather = Weather()
        self.servers: dict[str, SimServer] = {}
        self._calls: dict[str, dict[int, Call]] = {}  # of each machine, by number, as they began
        self.num_messages = 0
        self.num_corrupted = 0
        self.on_message: Callable[[str, str, Any], None] = lambda source, target, item: None
        self.undialable: set[str] = set()
        """Machines that nothing connects to; what they dial themselves gets through, both ways."""
        self.thin: dict[str, float] = {}
        """Bytes a second of machines with a thin link, in each direction, to and from all other sites together."""
        self._busy_until: dict[tuple[str, str], float] = {}  # of these links: machine and direction
        self._blocked: dict[tuple[str, str], list[Callable[[], None]]] = {}  # held back until it is open again
        self._context = contextvars.Context()  # of no process: what is under way arrives whatever becomes of its sender
        self._numbers = itertools.count(1)
        self._ports = itertools.count(7000)

    # --- faults

    def block(self, source: str, target: str) -> None:
        """No message gets from one machine to the other, until `open`."""
        if (source, target) in self._blocked:
            return
        held = self._blocked[source, target] = []
        self.loop.call_later(KEEPALIVE_S, self._give_up, source, target, held, context=self._context)

    def open(self, source: str, target: str) -> None:
        for go_on in self._blocked.pop((source, target), []):
            go_on()

    def _give_up(self, source: str, target: str, held: list[Callable[[], None]]) -> None:
        if self._blocked.get((source, target)) is held:
            self.reset(source, target)

    def reset(self, a: str, b: str) -> None:
        """Every connection between the two breaks; both sides notice."""
        for call in [c for c in self.calls_of(a) if {c.client.machine, c.server.machine} == {a, b}]:
            call.broken("connection reset")

    def kill(self, process: Process) -> None:
        """The process says nothing more. Its peers see closed connections once that gets through to them."""
        process.dead = True
        for address in [a for a, s in self.servers.items() if s.process is process]:
            del self.servers[address]
        for call in [c for c in self.calls_of(process.machine) if process in (c.client, c.server)]:
            self.forget(call)
            if call.client is process:
                self.send(process.machine, call.server.machine, call.server_lost)
            else:
                self.send(process.machine, call.client.machine, partial(call.client_lost, "socket closed"))

    # --- calls under way

    def calls_of(self, machine: str) -> Iterable[Call]:
        return self._calls.get(machine, {}).values()

    def note(self, call: Call) -> None:
        for machine in (call.client.machine, call.server.machine):
            self._calls.setdefault(machine, {})[call.number] = call

    def forget(self, call: Call) -> bool:
        """Whether it was under way."""
        was = [
            self._calls.get(machine, {}).pop(call.number, None)
            for machine in (call.client.machine, call.server.machine)
        ]
        return any(was)

    # --- moving

    def is_open(self, a: str, b: str) -> bool:
        return (a, b) not in self._blocked and (b, a) not in self._blocked

    def delay_s(self) -> float:
        return self.random.uniform(self.weather.least_delay_s, self.weather.most_delay_s)

    def send(self, source: str, target: str, arrive: Callable[[], None], not_before: float = 0.0) -> float:
        """When it arrives, as far as is known now."""
        held = self._blocked.get((source, target))
        if held is not None:
            held.append(lambda: void(self.send(source, target, arrive, not_before)))
            return not_before
        at = max(self.loop.time() + self.delay_s(), not_before + 1e-6)  # one after the other
        self.loop.call_at(at, arrive, context=self._context)
        return at

    def is_through_at(self, source: str, target: str, num_bytes: int) -> float:
        """When the last of these bytes has left the thin links on its way, if there are any."""
        at = self.loop.time()
        for way in (("from", source), ("to", target)):
            if (bytes_per_s := self.thin.get(way[1])) is not None:
                at = self._busy_until[way] = max(at, self._busy_until.get(way, 0.0)) + num_bytes / bytes_per_s
        return at

    # --- in place of protocol/transport.py

    def open_channel(self, address: str, *, handshake: Any, max_message_bytes: int) -> Any:
        return SimChannel(self, address, max_message_bytes)

    def create_server(self, **_: Any) -> Any:
        return SimServer(self)

    def next_number(self) -> int:
        return next(self._numbers)

    def next_port(self) -> int:
        return next(self._ports)


def void(_: object) -> None:
    pass


class Pipe:
    """One direction of one call."""

    def __init__(self, network: Network, call: Call, source: str, target: str) -> None:
        self._network = network
        self._call = call
        self._source = source
        self._target = target
        self._arrived: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._num_unread = 0
        self._last_at = 0.0
        self._order: deque[Any] = deque()
        self.ended = False  # nothing comes after what has arrived

    async def write(self, item: Any, from_process: Process) -> None:
        while self._num_unread >= WINDOW_MESSAGES and not self._call.over:
            self._writer = self._network.loop.create_future()
            await self._writer
        self.put(item, from_process)

    def put(self, item: Any, from_process: Process) -> None:
        network, weather = self._network, self._network.weather
        if from_process.dead or self._call.over:
            return
        network.num_messages += 1
        network.on_message(self._source, self._target, item)
        between_nodes = isinstance(item, bytes) and "coordinator" not in (self._source, self._target)
        if isinstance(item, bytes) and weather.corrupt and item and network.random.random() < weather.corrupt:
            network.num_corrupted += 1
            spoiled = bytearray(item)
            spoiled[network.random.randrange(len(item))] ^= 1 << network.random.randrange(8)
            item = bytes(spoiled)
        copies = 1
        if weather.duplicate and not between_nodes and item is not None and network.random.random() < weather.duplicate:
            copies = 2
        through_at = self._last_at
        if between_nodes:  # sessions have few bytes
            through_at = max(through_at, network.is_through_at(self._source, self._target, len(item)))
        for _ in range(copies):
            self._num_unread += 1
            self._order.append(item)
            self._last_at = network.send(self._source, self._target, self._arrive, through_at)

    def _arrive(self) -> None:
        item = self._order.popleft()
        if item is None:
            self.ended = True
        else:
            self._arrived.append(item)
        self.wake()

    def wake(self) -> None:
        for waiting in (self._reader, self._writer):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def read(self) -> Any:
        """The next item; None at the end. The call may be over before: the caller asks."""
        while not self._arrived and not self.ended and not self._call.over:
            self._reader = self._network.loop.create_future()
            await self._reader
        if self._arrived:
            self._num_unread -= 1
            if self._writer is not None and not self._writer.done():
                self._writer.set_result(None)
            return self._arrived.popleft()
        return None


class Call:
    """A stream, seen from the client: what grpc.aio calls StreamStreamCall and UnaryStreamCall."""

    def __init__(self, channel: SimChannel, method: str, serialize: Any, deserialize: Any) -> None:
        self.network = network = channel.network
        self.number = network.next_number()
        self.client = here()
        self.server = self.client  # until it is known
        self._method = method
        self._serialize = serialize or bytes
        self._deserialize = deserialize or bytes
        self._channel = channel
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._done: asyncio.Future[None] = network.loop.create_future()
        self._started: asyncio.Future[None] = network.loop.create_future()
        self._cancelled = False
        self._half_closed = False
        self._handler: asyncio.Task[Any] | None = None
        self._feeder: asyncio.Task[Any] | None = None
        self.up: Pipe | None = None
        self.down: Pipe | None = None
        self._starter = network.loop.create_task(self._start())

    @property
    def over(self) -> bool:
        return self._status is not None

    async def _start(self) -> None:
        network, me = self.network, self.client
        deadline = network.loop.time() + CONNECT_LIMIT_S
        machine = self._channel.machine
        while True:
            await asyncio.sleep(2 * network.delay_s())
            if network.is_open(me.machine, machine):
                break
            if network.loop.time() > deadline:
                self.client_lost(f"failed to connect to {self._channel.address}: timeout")
                return
            await asyncio.sleep(RETRY_S)
        server = network.servers.get(self._channel.address)
        if self.over:
            return
        if server is None or not server.started or machine in network.undialable:
            self.client_lost(f"failed to connect to {self._channel.address}: connection refused")
            return
        self.server = server.process
        self.up = Pipe(network, self, me.machine, machine)
        self.down = Pipe(network, self, machine, me.machine)
        network.note(self)
        self._handler = server.handle(self, self._method)
        self._started.set_result(None)

    def feed(self, requests: AsyncIterator[Any]) -> None:
        async def run() -> None:
            async for request in requests:
                await self.write(request)
            await self.done_writing()

        self._feeder = self.network.loop.create_task(run())
        self._feeder.add_done_callback(lambda t: t.cancelled() or t.exception())

    # --- the client's side

    async def _wait_started(self) -> None:
        if not self._started.done():
            await asyncio.wait((self._started, self._done), return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if self._status is not None and self._status[0] is not grpc.StatusCode.OK:
            raise error(*self._status)

    async def write(self, message: Any) -> None:
        if self._half_closed or self._done.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._wait_started()
        assert self.up is not None
        await self.up.write(self._serialize(message), self.client)
        self._raise_if_failed()

    async def done_writing(self) -> None:
        if self._half_closed or self._done.done():
            return
        self._half_closed = True
        await self._wait_started()
        assert self.up is not None
        self.up.put(None, self.client)

    async def read(self) -> Any:
        await self._wait_started()
        assert self.down is not None
        data = await self.down.read()
        if data is not None:
            return self._deserialize(data)
        self._raise_if_failed()
        return grpc.aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def cancel(self) -> bool:
        if self.over:
            return False
        self._cancelled = True
        if self.network.forget(self) and not self.client.dead:
            self.network.send(self.client.machine, self.server.machine, self.server_lost)
        self._end(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    async def code(self) -> grpc.StatusCode:
        await asyncio.wait((self._done,))
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        await asyncio.wait((self._done,))
        assert self._status is not None
        return self._status[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    # --- how it ends

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        if self._status is not None:
            return
        self._status = (code, details)
        self._starter.cancel()
        if self._feeder is not None:
            self._feeder.cancel()
        if not self._done.done():
            self._done.set_result(None)
        for pipe in (self.up, self.down):
            if pipe is not None:
                pipe.wake()

    def client_lost(self, why: str) -> None:
        """The client's side of the connection is gone."""
        self.network.forget(self)
        self._end(grpc.StatusCode.UNAVAILABLE, why)

    def server_lost(self) -> None:
        """The server's side of the connection is gone."""
        if self._handler is not None and not self.server.dead:
            self._handler.cancel()

    def broken(self, why: str) -> None:
        self.server_lost()
        self.client_lost(why)

    def answered(self, code: grpc.StatusCode, details: str) -> None:
        """The server has ended it; the client hears that after everything that was written."""
        if self.server.dead or self.over or not self.network.forget(self):
            return
        assert self.down is not None
        self.network.send(
            self.server.machine, self.client.machine, lambda: self._end(code, details), self.down._last_at
        )


class SimContext:
    """A handler's side of a call: what grpc.aio calls ServicerContext."""

    def __init__(self, call: Call, handler: grpc.RpcMethodHandler[Any, Any]) -> None:
        self._call = call
        self._deserialize = handler.request_deserializer or bytes
        self._serialize = handler.response_serializer or bytes
        self.status = (grpc.StatusCode.OK, "")

    async def read(self) -> Any:
        assert self._call.up is not None
        data = await self._call.up.read()
        return grpc.aio.EOF if data is None else self._deserialize(data)

    async def write(self, message: Any) -> None:
        assert self._call.down is not None
        await self._call.down.write(self._serialize(message), self._call.server)

    async def requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def peer(self) -> str:
        return f"ipv4:{self._call.client.machine}:{self._call.client.start}"

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = (code, details)
        raise grpc.aio.AbortError


class SimServer:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.process = here()
        self.started = False
        self._context = contextvars.copy_context()
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._tasks: dict[asyncio.Task[Any], Call] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        pass  # the generic ones are there as well

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or self.network.next_port()
        if f"{host}:{number}" in self.network.servers:
            return 0
        self.network.servers[f"{host}:{number}"] = self
        return number

    async def start(self) -> None:
        self.started = True

    async def stop(self, grace: float | None) -> None:
        self.started = False
        for address in [a for a, s in self.network.servers.items() if s is self]:
            del self.network.servers[address]
        tasks = list(self._tasks)
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for task in [t for t in tasks if not t.done()]:
            self._tasks[task].answered(grpc.StatusCode.UNAVAILABLE, "GOAWAY received")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def handle(self, call: Call, method: str) -> asyncio.Task[Any]:
        task = self.network.loop.create_task(self._serve(call, method), context=self._context.copy())
        self._tasks[task] = call
        task.add_done_callback(self._tasks.pop)
        return task

    async def _serve(self, call: Call, method: str) -> None:
        found = (h.service(SimpleNamespace(method=method, invocation_metadata=())) for h in self._handlers)
        handler = next((h for h in found if h is not None), None)
        if handler is None:
            call.answered(grpc.StatusCode.UNIMPLEMENTED, f"no method {method}")
            return
        context, is_silent = SimContext(call, handler), False
        try:
            await self._run(handler, context)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            is_silent = True  # as with grpcio 1.85, where the other side hears nothing of it
            raise
        except Exception as problem:
            context.status = (grpc.StatusCode.UNKNOWN, f"Unexpected {type(problem)}: {problem}")
            self.network.loop.call_exception_handler({"message": f"handler of {method}", "exception": problem})
        finally:
            if not is_silent:
                call.answered(*context.status)

    async def _run(self, handler: grpc.RpcMethodHandler[Any, Any], context: SimContext) -> None:
        function: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
        request = context.requests() if handler.request_streaming else await context.read()
        if request is grpc.aio.EOF:
            return  # its caller has gone
        result = function(request, context)
        if inspect.isasyncgen(result):
            async for message in result:
                await context.write(message)
        else:
            response = await result
            if not handler.response_streaming:
                await context.write(response)


@dataclass
class SimChannel:
    network: Network
    address: str
    max_message_bytes: int
    calls: list[Call] = field(default_factory=list)
    closed: bool = False
    _state: grpc.ChannelConnectivity = grpc.ChannelConnectivity.IDLE

    @property
    def machine(self) -> str:
        return self.address.rpartition(":")[0]

    def _call(self, method: str, serialize: Any, deserialize: Any) -> Call:
        if self.closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = Call(self, method, serialize, deserialize)
        self.calls = [c for c in self.calls if not c.over]
        self.calls.append(call)
        return call

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., Call]:
        def begin(requests: AsyncIterator[Any] | None = None, **_: Any) -> Call:
            call = self._call(method, request_serializer, response_deserializer)
            if requests is not None:
                call.feed(requests)
            return call

        return begin

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[[Any], Call]:
        def begin(request: Any) -> Call:
            call = self._call(method, request_serializer, response_deserializer)

            async def only() -> AsyncIterator[Any]:
                yield request

            call.feed(only())
            return call

        return begin

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[[Any], Awaitable[Any]]:
        begin = self.unary_stream(method, request_serializer, response_deserializer)

        async def ask(request: Any) -> Any:
            call = begin(request)
            try:
                response = await call.read()
                if response is grpc.aio.EOF:
                    raise error(grpc.StatusCode.INTERNAL, "no response")
                return response
            finally:
                call.cancel()

        return ask

    async def channel_ready(self) -> None:
        me = here()
        while True:
            await asyncio.sleep(2 * self.network.delay_s())
            server = self.network.servers.get(self.address)
            if server is not None and server.started and self.network.is_open(me.machine, self.machine):
                return
            await asyncio.sleep(RETRY_S)

    def get_state(self, *, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        me = here()
        while True:
            await asyncio.sleep(2 * self.network.delay_s())
            if self.network.is_open(me.machine, self.machine):
                break
            await asyncio.sleep(RETRY_S)
        server = self.network.servers.get(self.address)
        is_there = server is not None and server.started
        self._state = grpc.ChannelConnectivity.READY if is_there else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def close(self, grace: float | None = None) -> None:
        self.closed = True
        for call in self.calls:
            call.cancel()
