"""A worker's connection to its node: blocking calls, and one thread that reads. No torch, no numpy.

The thread also ends this process when the node's socket closes unexpectedly, so that no worker outlives its node:
`node_gone.py`.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.node import local_protocol as local
from atoll.node.core.events import Answer, AnswerKind
from atoll.node.local_protocol import (
    NO_CHECKPOINTS,
    NO_READINGS,
    CheckpointCounts,
    DataSet,
    Greeting,
    LocalJoin,
    LocalLayout,
    RankReadings,
)
from atoll.node.worker.in_place import PublishInPlace
from atoll.node.worker.node_gone import NodeGone, end_process, prepare
from atoll.protocol import wire
from atoll.protocol.errors import InvalidMessage, RefusedError, StaleError, WorkerError
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.messages import DataRange, Logged, LoggedValue
from atoll.protocol.v1 import local_pb2

REFUSED_GRACE_S = 10.0
"""A worker that was refused has this long to end by itself."""


_Responses = queue.SimpleQueue[tuple[local_pb2.LocalResponse, list[int]] | None]


@dataclass(frozen=True, kw_only=True)
class JoinedLayout:
    """What a rank needs to exchange parameters with its node. The two views are `layout.buffer_bytes` long.

    Ranks write only their owned pieces, into `snapshot`, and only read the others; when, the node's answers say.
    """

    told: LocalLayout
    layout: Layout
    snapshot: memoryview
    publish: memoryview
    in_place: PublishInPlace | None = None
    """Where PUBLISH is read, if it is the outer file."""
    moments: tuple[memoryview, ...] = ()
    """Of the trainable values in `publish`: momentum and variance, where ranks do steps by themselves. Each is
    `layout.moment_bytes` long."""


class LocalClient:
    """One rank's side of protocol/v1/local.proto.

    Calls that wait for an answer (`hello`, `join`, `boundary`) belong to one thread, `draw` to one that may be another;
    the others may come from any.
    All raise RefusedError with the node's text (StaleError for an older generation) if the node refused this rank.
    """

    def __init__(self, sock: socket.socket, path: str, generation: int, rank: int) -> None:
        self.generation = generation
        self.rank = rank
        self._socket = sock
        self._path = path
        self._send_lock = threading.Lock()
        self._responses: _Responses = queue.SimpleQueue()
        self._drawn: _Responses = queue.SimpleQueue()
        self._closing = threading.Event()
        self._read_ended = threading.Event()
        self._is_gone = False  # the node; this process ends
        self._refused: RefusedError | None = None
        self._in_place: PublishInPlace | None = None
        self._reader = threading.Thread(target=self._read_all, name="atoll-node-socket", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, socket_path: str, generation: int, rank: int) -> LocalClient:
        """Raises WorkerError if no node listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(socket_path)
        except OSError as error:
            sock.close()
            raise WorkerError(
                f"rank {rank}: no node listens at {socket_path} ({error.strerror}); "
                f"start this script through `atoll node`, or unset {local.ENV_SOCKET} to train alone"
            ) from None
        return cls(sock, socket_path, generation, rank)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LocalClient | None:
        """The client of this process's node; None if there is no node."""
        path = environ.get(local.ENV_SOCKET)
        if not path:
            return None
        prepare()
        return cls.connect(path, int(environ[local.ENV_GENERATION]), int(environ.get("RANK", "0")))

    # --- calls that wait for the node

    def hello(self, world_size: int) -> Greeting:
        self._send(local.LocalHello(world_size=world_size, pid=os.getpid(), protocol_version=local.LOCAL_VERSION))
        return wire.from_proto(Greeting, self._receive("greeting")[0].greeting)

    def join(self, offered: LocalJoin, num_moments: int = 0) -> JoinedLayout:
        """Returns when the site is admitted. `num_moments`: in PUBLISH, behind the values."""
        self._send(offered)
        response, fds = self._receive("layout")
        told = wire.from_proto(LocalLayout, response.layout)
        layout = Layout(wire.from_proto(Manifest, response.layout.manifest), told.chunk_elements)
        size, moment_bytes = layout.buffer_bytes, layout.moment_bytes
        wanted = [size, size + num_moments * moment_bytes]
        folder = fds.pop() if len(fds) > local.NUM_BUFFERS else -1
        if len(fds) != local.NUM_BUFFERS or any(os.fstat(fd).st_size < n for fd, n in zip(fds, wanted, strict=True)):
            raise InvalidMessage(f"the node passed {len(fds)} buffers, for a layout that needs {wanted} bytes")
        indices = (*told.owned_pieces, *told.shared_pieces, *told.kept_pieces)
        if any(i >= len(offered.pieces) for i in indices):
            raise InvalidMessage(f"the node names piece {max(indices)} of {len(offered.pieces)}")
        if told.checkpoint is not None and told.checkpoint not in offered.checkpoints:
            raise InvalidMessage(f"the node names {told.checkpoint}, which this rank did not offer")
        if folder >= 0 and told.outer_name:
            self._in_place = PublishInPlace(fds.pop(), folder, layout, told.outer_name)
        snapshot, *others = (memoryview(mmap.mmap(fd, num_bytes)) for fd, num_bytes in zip(fds, wanted, strict=False))
        for fd in (*fds, *([folder] if folder >= 0 and self._in_place is None else [])):
            os.close(fd)  # the mappings last as long as their views
        publish = others[0] if self._in_place is None else self._in_place.view
        return JoinedLayout(
            told=told,
            layout=layout,
            snapshot=snapshot,
            publish=publish[:size],
            in_place=self._in_place,
            moments=tuple(publish[size + n * moment_bytes :][:moment_bytes] for n in range(num_moments)),
        )

    def boundary(self, step: int, seq: int) -> Answer:
        """Ask what to do at `step`, where the last answer said to ask; `seq` counts the questions at one step.

        The node may hold the answer until a commit.
        """
        self._send(local.Boundary(step=step, seq=seq))
        answer = self._receive("answer")[0].answer
        if (answer.step, answer.seq) != (step, seq):
            raise InvalidMessage(f"asked at step {step}.{seq}, answered for {answer.step}.{answer.seq}")
        found = wire.from_proto(Answer, answer)
        if self._in_place is not None and found.kind is AnswerKind.APPLY:
            self._in_place.refresh()  # it does not change until all ranks have taken it
        return found

    def draw(self, epoch: int, first: int, num_samples: int) -> tuple[DataRange, ...]:
        """Positions of the site's queue from place `first` on, at least so many; waits until they are leased.

        After `announce_data`. See local.proto for which of them are this rank's.
        """
        self._send(local.Draw(epoch=epoch, first=first, num_samples=num_samples))
        drawn = self._receive("drawn")[0].drawn
        ranges = tuple(wire.from_proto(DataRange, item) for item in drawn.ranges)
        if (drawn.epoch, drawn.first) != (epoch, first) or sum(r.num_samples for r in ranges) < num_samples:
            raise InvalidMessage(f"drew {num_samples} samples from place {first}, the node answered {drawn.first}")
        return ranges

    # --- reports

    def announce_data(self, data: DataSet) -> None:
        """Once, before the first `draw`."""
        self._send(data)

    def sealed(self, report: local.SealedReport) -> None:
        self._send(report)

    def merged(self, *, version: int, step: int, wait_s: float) -> None:
        """This rank has taken `version` from PUBLISH and needs SNAPSHOT no more. `wait_s`: waited for this sync."""
        self._send(local.MergedReport(version=version, step=step, wait_s=wait_s))

    def fatal(self, kind: str, text: str) -> None:
        """Before exiting for a reason that a restart does not cure. `kind`: one of FATAL_KINDS."""
        self._send(local.Fatal(kind=kind, text=text[: local.MAX_TEXT_CHARACTERS]))

    def busy(self, what: str, limit_s: float) -> None:
        """This rank makes no steps for a good reason, for at most `limit_s`; `what` = "" ends it."""
        self._send(local.Busy(what=what[: local.MAX_TEXT_CHARACTERS], limit_s=limit_s))

    def progress(
        self,
        step: int,
        steps_per_s: float,
        checkpoints: CheckpointCounts = NO_CHECKPOINTS,
        readings: RankReadings = NO_READINGS,
    ) -> None:
        """From the training loop itself, about once a second: the node takes long silence for a hung worker."""
        self._send(local.Progress(step=step, steps_per_s=steps_per_s, checkpoints=checkpoints, readings=readings))

    def logged(self, values: tuple[LoggedValue, ...]) -> None:
        """What the script logs."""
        self._send(Logged(values=values))

    def goodbye(self, reason: str, run_over: bool) -> None:
        """The loader ended, or (`run_over`) the node said STOP. The node's end still ends this process until close."""
        self._send(local.Goodbye(reason=reason[: local.MAX_TEXT_CHARACTERS], run_over=run_over))

    def close(self) -> None:
        """Idempotent. The mappings stay valid as long as somebody holds a view of them."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
        except OSError:
            pass  # the node closed first
        if threading.current_thread() is not self._reader and not self._is_gone:
            self._reader.join()
        self._socket.close()

    # --- inside

    def _send(self, said: local.Said) -> None:
        if self._refused is not None:
            raise self._refused
        frame = local.encode_frame(local.pack(self.generation, self.rank, said))
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError as error:
            # The reader sees the same end, and ends this process unless the node's last word was a refusal.
            self._read_ended.wait()
            if self._is_gone:
                raise NodeGone from None
            raise self._refused or WorkerError(f"rank {self.rank}: the node went away ({error})") from None

    def _receive(self, expected: str) -> tuple[local_pb2.LocalResponse, list[int]]:
        item = (self._drawn if expected == "drawn" else self._responses).get()
        if item is None:
            if self._is_gone:
                raise NodeGone
            raise self._refused or WorkerError(f"rank {self.rank}: the connection to the node is closed")
        response = item[0]
        got = response.WhichOneof("body")
        if got != expected or response.generation != self.generation:
            raise InvalidMessage(
                f"rank {self.rank}: expected {expected} of generation {self.generation}, "
                f"the node sent {got} of {response.generation}"
            )
        return item

    def _read_all(self) -> None:
        reason = "closed the connection"
        try:
            while self._refused is None:
                item = self._read_one()
                if item is None:
                    break
                response = item[0]
                body = response.WhichOneof("body")
                if body == "refused":
                    kind = StaleError if response.refused.kind == "stale" else RefusedError
                    self._refused = kind(response.refused.text)
                else:
                    (self._drawn if body == "drawn" else self._responses).put(item)
        except (OSError, InvalidMessage) as error:
            reason = str(error)
        if self._refused is not None:
            # The caller raises the refusal; a script that is stuck elsewhere ends here.
            self._wake_callers()
            self._closing.wait(REFUSED_GRACE_S)
            reason = f"refused this rank: {self._refused}"
        if not self._closing.is_set():
            self._is_gone = True
            line = f"atoll: rank {self.rank}: the node at {self._path} {reason}; this worker ends\n"
            end_process(line, self._wake_callers)
        self._wake_callers()

    def _wake_callers(self) -> None:
        self._responses.put(None)
        self._drawn.put(None)
        self._read_ended.set()

    def _read_one(self) -> tuple[local_pb2.LocalResponse, list[int]] | None:
        """The next response and the descriptors beside it; None at the end of the stream."""
        fds: list[int] = []
        header = self._read_exactly(local.LENGTH_BYTES, fds)
        if header is None:
            return None
        body = self._read_exactly(local.frame_size(header), fds)
        if body is None:
            raise InvalidMessage("sent a truncated message")
        return local.decode(local_pb2.LocalResponse, body), fds

    def _read_exactly(self, num_bytes: int, fds: list[int]) -> bytearray | None:
        data = bytearray()
        while len(data) < num_bytes:
            wanted = min(num_bytes - len(data), 1 << 20)
            part, new_fds, _, _ = socket.recv_fds(self._socket, wanted, local.MOST_FDS, socket.MSG_CMSG_CLOEXEC)
            fds += new_fds
            if not part:
                return None
            data += part
        return data
