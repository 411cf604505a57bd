"""A worker's connection to its node: blocking calls, and one thread that reads. No torch, no numpy.

The thread also ends this process when the node's socket closes unexpectedly, so that no worker outlives its node.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from atoll.node import local_protocol
from atoll.node.core.events import Answer
from atoll.node.local_protocol import NO_CHECKPOINTS, NUM_BUFFERS, CheckpointCounts, CheckpointId, Piece
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol.errors import InvalidMessage, RefusedError, StaleError, WorkerError
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.messages import DataRange
from atoll.protocol.v1 import local_pb2

EXIT_NODE_GONE = 17
"""Exit code of a worker whose node went away."""
REFUSED_GRACE_S = 10.0
"""A worker that was refused has this long to end by itself."""


_Responses = queue.SimpleQueue[tuple[local_pb2.LocalResponse, list[int]] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Enough to build the model."""

    settings_json: str
    site_name: str
    data_paths: tuple[str, ...]
    """Empty: the default of the run's data set."""
    run_seed: int
    resumed: bool
    """The model's first values come from a saved state."""
    checkpoint_folder: str = ""
    """For checkpoints of the inner optimizer; empty: none are wanted."""
    crashed_from: tuple[CheckpointId, ...] = ()
    """Workers that went on from these crashed before their first step."""


@dataclass(frozen=True, kw_only=True)
class JoinedLayout:
    """What a rank needs to exchange parameters with its node. Both views are `layout.buffer_bytes` long.

    Ranks write only their owned pieces, into `snapshot`, and only read `publish`; when, the node's answers say.
    """

    layout: Layout
    snapshot: memoryview
    publish: memoryview
    snapshot_fd: int
    publish_fd: int
    owned_pieces: tuple[int, ...]
    """Indices into the pieces given to `join`: this rank writes them."""
    shared_pieces: tuple[int, ...]
    """Indices of pieces that other ranks hold too: hashed (`piece_hash`) for a SNAPSHOT with `hash_shared`."""
    site_id: int
    incarnation: int
    run_seed: int
    data_seed: int
    """Less than 2**63."""
    reader: int = 0
    """Place of this rank's data rank among the site's."""
    num_readers: int = 1
    checkpoint: CheckpointId | None = None
    """The newest that every rank offered."""


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
        self._refused: RefusedError | None = None
        self._maps: list[mmap.mmap] = []
        self._fds: list[int] = []
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
                f"start this script through `atoll node`, or unset {local_protocol.ENV_SOCKET} to train alone"
            ) from None
        return cls(sock, socket_path, generation, rank)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> LocalClient | None:
        """The client of this process's node; None if there is no node."""
        path = environ.get(local_protocol.ENV_SOCKET)
        if not path:
            return None
        return cls.connect(path, int(environ[local_protocol.ENV_GENERATION]), int(environ.get("RANK", "0")))

    # --- calls that wait for the node

    def hello(self, world_size: int, local_rank: int) -> WorkerSettings:
        body = local_pb2.LocalHello(
            world_size=world_size, local_rank=local_rank, pid=os.getpid(), protocol_version=PROTOCOL_VERSION
        )
        self._send(local_pb2.LocalRequest(hello=body))
        settings = self._receive("settings")[0].settings
        return WorkerSettings(
            settings_json=settings.settings_json,
            site_name=settings.site_name,
            data_paths=tuple(p for p in settings.data_path.split("\n") if p),
            run_seed=settings.run_seed,
            resumed=settings.resumed,
            checkpoint_folder=settings.checkpoint_folder,
            crashed_from=tuple(wire.from_proto(CheckpointId, c) for c in settings.crashed_from),
        )

    def join(
        self,
        manifest: Manifest,
        pieces: Sequence[Piece],
        fingerprint: bytes,
        data_rank: int,
        checkpoints: Sequence[CheckpointId] = (),
    ) -> JoinedLayout:
        """Offer this rank's tensors; returns when the site is admitted. `manifest` may lack other ranks' tensors.

        `checkpoints`: those of its optimizers that this rank could go on from.
        """
        body = local_pb2.LocalJoin(
            manifest=wire.to_proto(manifest),
            pieces=[wire.to_proto(p) for p in pieces],
            data_fingerprint=fingerprint,
            data_rank=data_rank,
            checkpoints=[wire.to_proto(c) for c in checkpoints],
        )
        self._send(local_pb2.LocalRequest(join=body))
        response, fds = self._receive("layout")
        self._fds += fds
        message = response.layout
        layout = Layout(wire.from_proto(Manifest, message.manifest), message.chunk_elements)
        if layout.buffer_bytes != message.buffer_bytes:
            raise InvalidMessage(
                f"the node's buffers have {message.buffer_bytes} bytes, this layout {layout.buffer_bytes}; "
                "node and worker run different versions of atoll"
            )
        if len(fds) != NUM_BUFFERS or any(os.fstat(fd).st_size < layout.buffer_bytes for fd in fds):
            raise InvalidMessage(f"the node passed {len(fds)} buffers for a layout of {layout.buffer_bytes} bytes")
        indices = (*message.owned_pieces, *message.shared_pieces)
        if any(i >= len(pieces) for i in indices):
            raise InvalidMessage(f"the node names piece {max(indices)} of {len(pieces)}")
        checkpoint = wire.from_proto(CheckpointId, message.checkpoint) if message.HasField("checkpoint") else None
        if checkpoint is not None and checkpoint not in checkpoints:
            raise InvalidMessage(f"the node names {checkpoint}, which this rank did not offer")
        views = []
        for fd in fds:
            mapped = mmap.mmap(fd, layout.buffer_bytes)
            self._maps.append(mapped)
            views.append(memoryview(mapped))
        return JoinedLayout(
            layout=layout,
            snapshot=views[0],
            publish=views[1],
            snapshot_fd=fds[0],
            publish_fd=fds[1],
            owned_pieces=tuple(message.owned_pieces),
            shared_pieces=tuple(message.shared_pieces),
            site_id=message.site_id,
            incarnation=message.incarnation,
            run_seed=message.run_seed,
            data_seed=message.data_seed,
            reader=message.reader,
            num_readers=message.num_readers,
            checkpoint=checkpoint,
        )

    def boundary(self, step: int, seq: int) -> Answer:
        """Ask what to do at `step`, where the last answer said to ask; `seq` counts the questions at one step.

        The node may hold the answer until a commit.
        """
        self._send(local_pb2.LocalRequest(boundary=local_pb2.Boundary(step=step, seq=seq)))
        answer = self._receive("answer")[0].answer
        if (answer.step, answer.seq) != (step, seq):
            raise InvalidMessage(f"asked at step {step}.{seq}, answered for {answer.step}.{answer.seq}")
        return wire.from_proto(Answer, answer)

    def draw(self, epoch: int, first: int, num_samples: int) -> tuple[DataRange, ...]:
        """Positions of the site's queue from place `first` on, at least so many; waits until they are leased.

        After `announce_data`. See local.proto for which of them are this rank's.
        """
        body = local_pb2.Draw(epoch=epoch, first=first, num_samples=num_samples)
        self._send(local_pb2.LocalRequest(draw=body))
        drawn = self._receive("drawn")[0].drawn
        ranges = tuple(wire.from_proto(DataRange, item) for item in drawn.ranges)
        if (drawn.epoch, drawn.first) != (epoch, first) or sum(r.num_samples for r in ranges) < num_samples:
            raise InvalidMessage(f"drew {num_samples} samples from place {first}, the node answered {drawn.first}")
        return ranges

    # --- reports

    def announce_data(self, num_samples: int, batch_size: int, batches_ahead: int) -> None:
        """This rank will draw from a data set; the same at all ranks that do. Once."""
        body = local_pb2.DataSet(num_samples=num_samples, batch_size=batch_size, batches_ahead=batches_ahead)
        self._send(local_pb2.LocalRequest(data_set=body))

    def sealed(
        self,
        *,
        step: int,
        seq: int,
        fragment: int,
        data_rank: int,
        tokens: int,
        loss_sum: float,
        num_steps: int,
        train_s: float,
        piece_hashes: Mapping[int, bytes] | None = None,
        num_samples_used: int = 0,
    ) -> None:
        """This rank's owned pieces are in SNAPSHOT (device copies synchronized).

        `tokens` are those of this rank's batches since the base; `loss_sum` is over the `num_steps` steps since the
        last report. A rank that has no loss (a pipeline stage before the last) reports num_steps = 0.
        `num_samples_used`: drawn by this rank and trained on, since the epoch began.
        `piece_hashes`: `piece_hash` of each of `shared_pieces`, if the SNAPSHOT says `hash_shared`.
        """
        body = local_pb2.Sealed(
            step=step,
            seq=seq,
            fragment=fragment,
            tokens=local_pb2.TokenCount(data_rank=data_rank, tokens=tokens),
            loss_sum=loss_sum,
            num_steps=num_steps,
            train_s=train_s,
            hashes=[local_pb2.PieceHash(piece=i, hash=h) for i, h in sorted((piece_hashes or {}).items())],
            num_samples_used=num_samples_used,
        )
        self._send(local_pb2.LocalRequest(sealed=body))

    def merged(self, *, version: int, step: int, wait_s: float) -> None:
        """This rank has taken `version` from PUBLISH and needs SNAPSHOT no more. `wait_s`: waited for this sync."""
        self._send(local_pb2.LocalRequest(merged=local_pb2.Merged(version=version, step=step, wait_s=wait_s)))

    def fatal(self, kind: str, text: str) -> None:
        """Before exiting for a reason that a restart does not cure. `kind`: config, non_finite or refused."""
        text = text[: local_protocol.MAX_TEXT_CHARACTERS]
        self._send(local_pb2.LocalRequest(fatal=local_pb2.Fatal(kind=kind, text=text)))

    def busy(self, what: str, limit_s: float) -> None:
        """This rank makes no steps for a good reason, for at most `limit_s`; `what` = "" ends it."""
        self._send(local_pb2.LocalRequest(busy=local_pb2.Busy(what=what, limit_s=limit_s)))

    def progress(self, step: int, steps_per_s: float, checkpoints: CheckpointCounts = NO_CHECKPOINTS) -> None:
        """From the training loop itself, about once a second: the node takes long silence for a hung worker."""
        counts = wire.to_proto(checkpoints)
        body = local_pb2.Progress(step=step, steps_per_s=steps_per_s, checkpoints=counts)
        self._send(local_pb2.LocalRequest(progress=body))

    def goodbye(self, reason: str, run_over: bool) -> None:
        """The loader ended, or (`run_over`) the node said STOP. The node's end still ends this process until close."""
        reason = reason[: local_protocol.MAX_TEXT_CHARACTERS]
        self._send(local_pb2.LocalRequest(goodbye=local_pb2.Goodbye(reason=reason, run_over=run_over)))

    def close(self) -> None:
        """Idempotent. The mappings stay valid as long as somebody holds a view of them."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
        except OSError:
            pass  # the node closed first
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _send(self, request: local_pb2.LocalRequest) -> None:
        if self._refused is not None:
            raise self._refused
        request.generation = self.generation
        request.rank = self.rank
        frame = local_protocol.encode_frame(request)
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError as error:
            # The reader sees the same end, and ends this process unless the node's last word was a refusal.
            self._read_ended.wait()
            raise self._refused or WorkerError(f"rank {self.rank}: the node went away ({error})") from None

    def _receive(self, expected: str) -> tuple[local_pb2.LocalResponse, list[int]]:
        item = (self._drawn if expected == "drawn" else self._responses).get()
        if item is None:
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
            line = f"atoll: rank {self.rank}: the node at {self._path} {reason}; this worker ends\n"
            try:
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
            except OSError:
                pass  # the node read our output; nobody is left to read this line
            os._exit(EXIT_NODE_GONE)  # before a caller wakes: this line is the reason, not what it would raise
        self._wake_callers()

    def _wake_callers(self) -> None:
        self._responses.put(None)
        self._drawn.put(None)
        self._read_ended.set()

    def _read_one(self) -> tuple[local_pb2.LocalResponse, list[int]] | None:
        """The next response and the descriptors beside it; None at the end of the stream."""
        fds: list[int] = []
        header = self._read_exactly(local_protocol.LENGTH_BYTES, fds)
        if header is None:
            return None
        body = self._read_exactly(local_protocol.frame_size(header), fds)
        if body is None:
            raise InvalidMessage("sent a truncated message")
        return local_protocol.decode(local_pb2.LocalResponse, body), fds

    def _read_exactly(self, num_bytes: int, fds: list[int]) -> bytearray | None:
        data = bytearray()
        while len(data) < num_bytes:
            wanted = min(num_bytes - len(data), 1 << 20)
            part, new_fds, _, _ = socket.recv_fds(self._socket, wanted, NUM_BUFFERS, socket.MSG_CMSG_CLOEXEC)
            fds += new_fds
            if not part:
                return None
            data += part
        return data
