"""The node's end of the local socket: connections of ranks, and the buffers that are passed to them.

Each message is one event of the core, and so is the end of a connection; the sense of them is in `node/core/ranks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.node import local_protocol
from atoll.node.core.events import LayoutSent, RankEvent, RankLost, RankSaid
from atoll.node.core.outputs import AnswerDraw, AnswerWorkers, RefuseRank, ToRanks
from atoll.node.daemon.local_socket import LocalSocket
from atoll.node.daemon.rank_connection import Connection
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.local_protocol import Greeting, LocalHello, LocalLayout, Said
from atoll.node.tasks import Tasks, end
from atoll.protocol import wire
from atoll.protocol.errors import InvalidMessage, RefusedError, StaleError
from atoll.protocol.layout import Layout
from atoll.protocol.threads import run_to_its_end
from atoll.protocol.v1 import local_pb2

MAX_CONNECTIONS = 4096


class LocalServer:
    """Serves one generation of workers at a time; what happens to them is given to `on_event`, in the event loop.

        server = LocalServer(on_event, on_failure)
        await server.start()
        server.begin(generation, greeting)                # then launch workers with ATOLL_SOCKET=server.path
        server.execute(output)                            # what the core says to ranks, as it follows from events
        await server.send_layout(...)
        await server.close()                              # workers that are still there end themselves

    `num_malformed` counts messages that were refused because they made no sense. What goes wrong in `on_event`, or in
    this server, is no rank's fault and no rank hears of it: `on_failure` does, and the server is of no use any more.
    """

    def __init__(self, on_event: Callable[[RankEvent], None], on_failure: Callable[[BaseException], None]) -> None:
        self.num_malformed = 0
        self._on_event = on_event
        self._on_failure = on_failure
        self._socket = LocalSocket(self.connected)
        self._tasks = Tasks(on_failure)
        self._open: set[Connection] = set()
        self._of_rank: dict[int, Connection] = {}
        self.generation = 0
        """The generation that is served; 0 before the first."""
        self._greeting: Greeting | None = None

    @property
    def path(self) -> str:
        """Of the socket; goes to workers as ATOLL_SOCKET."""
        return self._socket.path

    async def start(self) -> None:
        self._socket.open()

    async def close(self) -> None:
        """Idempotent."""
        if not self._socket.stop():
            return
        await asyncio.gather(*(c.flush() for c in self._open))
        await end(self._tasks)
        for connection in self._open:
            connection.close()  # its task had not begun
        self._socket.close()

    def begin(self, generation: int, greeting: Greeting) -> None:
        """Serve this generation from now on. Connections of the one before are closed, which ends its workers."""
        if generation <= self.generation:
            raise ValueError(f"generation {generation} after {self.generation}")
        previous = list(self._of_rank.values())
        self._of_rank.clear()
        self.generation = generation
        self._greeting = greeting
        for connection in previous:
            connection.shut()

    async def send_layout(
        self, generation: int, told: Callable[[int], LocalLayout], layout: Layout, *buffers: SharedBuffer
    ) -> None:
        """Admit the ranks: they map the buffers and ask for their first values. `told`: what each is told, asked for in
        a thread. `buffers`: SNAPSHOT, PUBLISH. Nothing is sent if their generation is over, or ends meanwhile."""
        if generation != self.generation:
            return
        ranks = list(self._of_rank)

        def encode() -> dict[int, bytes]:
            manifest = wire.to_proto(layout.manifest)
            frames = {}
            for rank in ranks:
                body = wire.to_proto(told(rank))
                body.manifest.CopyFrom(manifest)
                frames[rank] = local_protocol.encode_frame(local_pb2.LocalResponse(generation=generation, layout=body))
            return frames

        frames = await run_to_its_end(encode)
        if generation != self.generation:
            return
        for rank, frame in frames.items():
            if rank in self._of_rank:  # else it is lost, and the core has heard of that
                self._of_rank[rank].send_frame(frame, tuple(fd for buffer in buffers for fd in buffer.fds))
        self._tell(LayoutSent(generation))

    def execute(self, output: ToRanks) -> None:
        """To those of these ranks that are still connected."""
        if output.generation != self.generation:
            return
        ranks = output.ranks if isinstance(output, AnswerWorkers) else (output.rank,)
        for connection in (self._of_rank[rank] for rank in ranks if rank in self._of_rank):
            match output:
                case RefuseRank(text=text):
                    connection.refused = text
                case AnswerWorkers(step=step, seq=seq, answer=answer):
                    body = wire.to_proto(answer)
                    body.step, body.seq = step, seq
                    connection.send(self._response(answer=body))
                case AnswerDraw(epoch=epoch, first=first, ranges=ranges):
                    drawn = local_pb2.Drawn(epoch=epoch, first=first, ranges=[wire.to_proto(item) for item in ranges])
                    connection.send(self._response(drawn=drawn))

    def _response(self, **body: Any) -> local_pb2.LocalResponse:
        return local_pb2.LocalResponse(generation=self.generation, **body)

    def refuse(self, text: str) -> None:
        """Tell all ranks that they cannot go on, and why. They raise RefusedError and end."""
        for connection in self._of_rank.values():
            connection.send(self._refusal("refused", text))

    # --- connections

    def connected(self, connection: Connection) -> None:
        """A rank that has connected, here or on another host."""
        if len(self._open) >= MAX_CONNECTIONS:
            connection.close()
            return
        self._open.add(connection)
        self._tasks.spawn(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        writer = asyncio.get_running_loop().create_task(connection.write_all())
        why = "closed its connection without a word"
        try:
            while (frame := await connection.read_frame()) is not None:
                request = local_protocol.decode(local_pb2.LocalRequest, frame)
                unpack, is_large = partial(local_protocol.unpack, request), request.WhichOneof("body") == "join"
                self._hear(connection, request, await run_to_its_end(unpack) if is_large else unpack())
        except RefusedError as error:
            self.num_malformed += isinstance(error, InvalidMessage)
            why = f"was cut off: {error}"
            connection.send(self._refusal("stale" if isinstance(error, StaleError) else "refused", str(error)))
            await connection.flush()
        except OSError as error:
            why = f"lost its connection ({error.strerror})"
        finally:
            await end([writer])
            connection.close()
            self._open.discard(connection)
        rank = connection.rank
        if rank is not None and self._of_rank.get(rank) is connection:
            del self._of_rank[rank]
            self._tell(RankLost(generation=self.generation, rank=rank, text=why))

    def _refusal(self, kind: str, text: str) -> local_pb2.LocalResponse:
        refused = local_pb2.LocalRefused(kind=kind, text=text[: local_protocol.MAX_TEXT_CHARACTERS])
        return self._response(refused=refused)

    def _tell(self, event: RankEvent) -> None:
        try:
            self._on_event(event)
        except Exception as error:  # else it would be taken for an error of the connection that brought the event
            self._on_failure(error)

    def _hear(self, connection: Connection, request: local_pb2.LocalRequest, said: Said) -> None:
        """A connection speaks for the rank of its first hello. Raises what the rank is refused with."""
        rank = request.rank
        if self._greeting is None or request.generation != self.generation:
            raise StaleError(
                f"workers of generation {request.generation} are not wanted; generation {self.generation} is running"
            )
        is_hello = isinstance(said, LocalHello)
        if connection.rank is None and is_hello and rank not in self._of_rank and rank in connection.may_be:
            connection.rank = rank
            self._of_rank[rank] = connection
        elif connection.rank != rank:
            raise InvalidMessage(f"a message of rank {rank} on a connection of rank {connection.rank}")
        self._tell(RankSaid(generation=self.generation, rank=rank, said=said))
        if connection.refused:
            raise InvalidMessage(connection.refused)
        if is_hello:
            connection.send(self._response(greeting=wire.to_proto(self._greeting)))
