"""The node's end of the local socket: connections of ranks, and the buffers that are passed to them.

The sense of what ranks say is in `node/core/ranks`; here are connections only.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from atoll.node import local_protocol
from atoll.node.core.events import Answer
from atoll.node.core.outputs import AnswerDraw
from atoll.node.core.ranks.group import WorkerGroup
from atoll.node.core.ranks.outcomes import AllJoined, GroupEvent, Outcome, Reply, site_pieces
from atoll.node.core.ranks.pieces import RankTensors, SitePieces
from atoll.node.core.ranks.said import DataSet, SealedReport
from atoll.node.daemon.home import SOCKET_FOLDER_PREFIX
from atoll.node.daemon.rank_connection import RankConnection
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.local_protocol import CheckpointCounts, Greeting, LocalJoin, LocalLayout
from atoll.node.threads import run_to_its_end
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol.errors import HostError, InvalidMessage, RefusedError, StaleError
from atoll.protocol.layout import Layout
from atoll.protocol.text import clean
from atoll.protocol.v1 import local_pb2

MAX_CONNECTIONS = 4096
MAX_SOCKET_PATH_BYTES = 107


class LocalServer:
    """Serves one generation of workers at a time; what happens to them is given to `on_event`, in the event loop.

        server = LocalServer(on_event, on_failure)
        await server.start()
        server.begin(group, greeting)                     # then launch workers with ATOLL_SOCKET=server.path
        await server.send_layout(...)                     # after WorkersJoined
        server.answer(generation, step, seq, answer)      # after BoundaryAsked
        await server.close()                              # workers that are still there end themselves

    `num_malformed` counts messages that were refused because they made no sense. What goes wrong in `on_event`, or in
    this server, is no rank's fault and no rank hears of it: `on_failure` does, and the server is of no use any more.
    """

    def __init__(self, on_event: Callable[[GroupEvent], None], on_failure: Callable[[BaseException], None]) -> None:
        self.num_malformed = 0
        self._on_event = on_event
        self._on_failure = on_failure
        self._folder: Path | None = None
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[RankConnection] = set()
        self._of_rank: dict[int, RankConnection] = {}
        self._group: WorkerGroup | None = None
        self._greeting: Greeting | None = None

    @property
    def path(self) -> str:
        """Of the socket; goes to workers as ATOLL_SOCKET."""
        if self._folder is None:
            raise RuntimeError("the local server is not started")
        return str(self._folder / "node.sock")

    @property
    def generation(self) -> int:
        """The generation that is served; 0 before the first."""
        return self._group.generation if self._group else 0

    @property
    def pieces(self) -> SitePieces | None:
        """What the ranks hold together; known from WorkersJoined on."""
        return self._group.pieces if self._group else None

    async def start(self) -> None:
        # In a folder of its own, open to this user only, and short: a socket's path has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix=SOCKET_FOLDER_PREFIX))
        if len(self.path.encode()) > MAX_SOCKET_PATH_BYTES:
            path = self.path
            self._folder.rmdir()
            self._folder = None
            raise HostError(f"{path} is too long for a socket's path; set TMPDIR to a shorter folder")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.path)
        self._listener.listen(128)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def close(self) -> None:
        """Idempotent."""
        if self._folder is None:
            return
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await asyncio.gather(*(c.flush() for c in self._open))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._open:
            connection.socket.close()  # its task had not begun
        shutil.rmtree(self._folder)
        self._folder = None

    def begin(self, group: WorkerGroup, greeting: Greeting) -> None:
        """Serve this generation from now on. Connections of the one before are closed, which ends its workers."""
        if group.generation <= self.generation:
            raise ValueError(f"generation {group.generation} after {self.generation}")
        previous = list(self._of_rank.values())
        self._of_rank.clear()
        self._group = group
        self._greeting = greeting
        for connection in previous:
            connection.shut()

    async def send_layout(
        self,
        *,
        generation: int,
        site_id: int,
        incarnation: int,
        run_seed: int,
        layout: Layout,
        snapshot: SharedBuffer,
        publish: SharedBuffer,
    ) -> None:
        """Admit the ranks: they map the buffers and ask for their first values. `layout` is of `pieces.manifest`.
        Nothing is sent if their generation is over, or ends meanwhile."""
        group = self._group
        if group is None or group.generation != generation or group.failed:
            return
        pieces, checkpoint = group.pieces, group.checkpoint
        assert pieces is not None
        readers = {rank: group.reader_of(rank) for rank in self._of_rank}

        def encode() -> dict[int, bytes]:
            manifest = wire.to_proto(layout.manifest)
            frames = {}
            for rank, (reader, num_readers) in readers.items():
                told = LocalLayout(
                    site_id=site_id,
                    incarnation=incarnation,
                    run_seed=run_seed,
                    chunk_elements=layout.chunk_elements,
                    owned_pieces=pieces.owned[rank],
                    data_seed=local_protocol.data_seed(run_seed, site_id, incarnation, generation),
                    shared_pieces=pieces.shared_of(rank),
                    reader=reader,
                    num_readers=num_readers,
                    checkpoint=checkpoint,
                )
                body = wire.to_proto(told)
                body.manifest.CopyFrom(manifest)
                frames[rank] = local_protocol.encode_frame(local_pb2.LocalResponse(generation=generation, layout=body))
            return frames

        frames = await run_to_its_end(encode)
        if self._group is not group or group.failed:
            return
        for rank, frame in frames.items():
            if rank in self._of_rank:  # else it is lost, and the core hears of that next
                self._of_rank[rank].send_frame(frame, (snapshot.fd, publish.fd))
        group.layout_sent(self._now())

    def answer(self, generation: int, step: int, seq: int, answer: Answer) -> None:
        """Fix what all ranks do at (step, seq). Raises ValueError if that is not the open question."""
        if self._group is not None and self._group.generation == generation:
            self._deliver(self._group.answer(step, seq, answer, self._now()))

    def answer_draw(self, output: AnswerDraw) -> None:
        """Samples for one rank."""
        connection = self._of_rank.get(output.rank)
        if self._group is None or self._group.generation != output.generation or connection is None:
            return
        ranges = [wire.to_proto(item) for item in output.ranges]
        body = local_pb2.Drawn(epoch=output.epoch, first=output.first, ranges=ranges)
        connection.send(local_pb2.LocalResponse(generation=output.generation, drawn=body))
        end = output.first + sum(item.num_samples for item in output.ranges)
        self._group.drawn(output.rank, output.epoch, end, self._now())

    def refuse(self, text: str) -> None:
        """Tell all ranks that they cannot go on, and why. They raise RefusedError and end."""
        for connection in self._of_rank.values():
            connection.send(self._refusal("refused", text))

    # --- connections

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    def _accept(self, listener: socket.socket) -> None:
        # Not by a task: a cancelled `sock_accept` may drop a connection that it has.
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if len(self._open) >= MAX_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        connection = RankConnection(sock)
        self._open.add(connection)
        self._spawn(self._serve(connection))

    async def _serve(self, connection: RankConnection) -> None:
        writer = asyncio.get_running_loop().create_task(connection.write_all())
        end = "closed its connection without a word"
        try:
            while (frame := await connection.read_frame()) is not None:
                request = local_protocol.decode(local_pb2.LocalRequest, frame)
                join = None
                if request.WhichOneof("body") == "join":  # a large one takes a while
                    join = await run_to_its_end(partial(wire.from_proto, LocalJoin, request.join))
                self._handle(connection, request, join)
        except RefusedError as error:
            self.num_malformed += isinstance(error, InvalidMessage)
            end = f"was cut off: {error}"
            connection.send(self._refusal("stale" if isinstance(error, StaleError) else "refused", str(error)))
            await connection.flush()
        except OSError as error:
            end = f"lost its connection ({error.strerror})"
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            connection.socket.close()
            self._open.discard(connection)
        rank = connection.rank
        if rank is not None and self._group is not None and self._of_rank.get(rank) is connection:
            del self._of_rank[rank]
            self._deliver(self._group.lost(rank, end))

    def _refusal(self, kind: str, text: str) -> local_pb2.LocalResponse:
        refused = local_pb2.LocalRefused(kind=kind, text=text[: local_protocol.MAX_TEXT_CHARACTERS])
        return local_pb2.LocalResponse(generation=self.generation, refused=refused)

    def _deliver(self, outcome: Outcome | list[Reply]) -> None:
        for item in outcome:
            if isinstance(item, Reply):
                body = wire.to_proto(item.answer)
                body.step, body.seq = item.step, item.seq
                response = local_pb2.LocalResponse(generation=self.generation, answer=body)
                if item.rank in self._of_rank:  # else it is lost, and the core hears of that next
                    self._of_rank[item.rank].send(response)
            elif isinstance(item, AllJoined):
                assert self._group is not None, "its ranks have joined"
                self._spawn(self._put_together(self._group, item))
            else:
                self._tell(item)

    def _tell(self, event: GroupEvent) -> None:
        try:
            self._on_event(event)
        except Exception as error:  # else it would be taken for an error of the connection that brought the event
            self._on_failure(error)

    def _handle(
        self, connection: RankConnection, request: local_pb2.LocalRequest, join: LocalJoin | None = None
    ) -> None:
        """`join`: what it says, if it is one."""
        group = self._group
        if group is None or request.generation != group.generation:
            raise StaleError(
                f"workers of generation {request.generation} are not wanted; generation {self.generation} is running"
            )
        if request.WhichOneof("body") == "hello" and connection.rank in (None, request.rank):
            self._hello(connection, group, request)
        elif connection.rank is None or request.rank != connection.rank:
            raise InvalidMessage(f"a message of rank {request.rank} on a connection of rank {connection.rank}")
        else:
            self._deliver(_said(group, request, join, self._now()))

    async def _put_together(self, group: WorkerGroup, joined: AllJoined) -> None:
        pieces = await run_to_its_end(partial(site_pieces, joined))
        if self._group is group:
            self._deliver(group.put_together(pieces))

    def _hello(self, connection: RankConnection, group: WorkerGroup, request: local_pb2.LocalRequest) -> None:
        hello, rank = request.hello, request.rank
        wrong = ""
        if hello.protocol_version != PROTOCOL_VERSION:
            wrong = (
                f"the worker speaks version {hello.protocol_version} of the protocol, this node {PROTOCOL_VERSION}; "
                "run both from one installation of atoll"
            )
        elif hello.world_size != group.world_size or rank >= group.world_size:
            wrong = f"rank {rank} of {hello.world_size} asks to join; this site has {group.world_size} ranks (--ranks)"
        if wrong:
            self._deliver(group.fail(wrong))  # a restart would not cure it
            raise RefusedError(wrong)
        group.hello(rank, hello.pid, self._now())
        connection.rank = rank
        self._of_rank[rank] = connection
        connection.send(local_pb2.LocalResponse(generation=group.generation, greeting=wire.to_proto(self._greeting)))


def _said(group: WorkerGroup, request: local_pb2.LocalRequest, join: LocalJoin | None, now: float) -> Outcome:
    """What follows from one request of a known rank. Raises InvalidMessage."""
    rank = request.rank
    match request.WhichOneof("body"):
        case "join":
            assert join is not None, "it was read before"
            tensors = RankTensors(join.manifest, join.pieces)
            checkpoints = frozenset(join.checkpoints)
            return group.join(rank, tensors, join.data_fingerprint, join.data_rank, now, checkpoints=checkpoints)
        case "boundary":
            return group.boundary(rank, request.boundary.step, request.boundary.seq, now)
        case "sealed":
            return group.sealed(rank, wire.from_proto(SealedReport, request.sealed), now)
        case "merged":
            return group.merged(rank, request.merged.version, request.merged.wait_s, now)
        case "fatal":
            return group.fatal(rank, _short(request.fatal.kind), _short(request.fatal.text))
        case "busy":
            return group.busy(rank, _short(request.busy.what), request.busy.limit_s, now)
        case "progress":
            progress = request.progress
            counts = wire.from_proto(CheckpointCounts, progress.checkpoints)
            return group.progress(rank, progress.step, progress.steps_per_s, now, checkpoints=counts)
        case "data_set":
            return group.data_set(rank, wire.from_proto(DataSet, request.data_set))
        case "draw":
            draw = request.draw
            return group.draw(rank, draw.epoch, draw.first, draw.num_samples, now)
        case "goodbye":
            return group.goodbye(rank, _short(request.goodbye.reason), request.goodbye.run_over)
        case unknown:
            raise InvalidMessage(f"rank {rank} sent a message of unknown kind ({unknown})")


def _short(text: str) -> str:
    return clean(text)[: local_protocol.MAX_TEXT_CHARACTERS]
