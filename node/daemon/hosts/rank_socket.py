"""The local socket of a host that does not lead: what its ranks say goes to the leader, and what they are told comes
from there. The buffers, the data and the folder of checkpoints are this host's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from atoll.node import host_protocol as hosts
from atoll.node import local_protocol
from atoll.node.core.events import AnswerKind
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.local_socket import LocalSocket
from atoll.node.daemon.rank_connection import RankConnection
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.dataplane.slices import Items, Wanted, views
from atoll.node.local_protocol import Greeting, LocalJoin, LocalLayout, Piece, SealedReport
from atoll.node.tasks import Tasks, end
from atoll.protocol import wire
from atoll.protocol.errors import ConfigError, InvalidMessage, StaleError
from atoll.protocol.layout import Layout
from atoll.protocol.threads import run_to_its_end
from atoll.protocol.v1 import local_pb2

LARGE_FRAME_BYTES = 1 << 20
"""A larger one is read in a thread."""
APPLY = int(AnswerKind.APPLY)
_M = TypeVar("_M")


@dataclass(slots=True)
class _Rank:
    connection: RankConnection
    rank: int = 0
    pieces: tuple[Piece, ...] = ()
    owned: tuple[int, ...] = ()  # indices into them
    has_applied: bool = False  # it was told to take a version: what it seals next has no frozen tensors
    sealed: dict[int, tuple[int, int]] = field(default_factory=dict)  # by fragment: step and seq of the last

    @property
    def owned_pieces(self) -> tuple[Piece, ...]:
        return tuple(self.pieces[index] for index in self.owned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """What a rank has sealed, to be put into the site's SNAPSHOT."""

    generation: int
    rank: int
    report: SealedReport
    pieces: tuple[Piece, ...]
    with_frozen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the ranks of this host share with it."""

    layout: Layout
    snapshot: SharedBuffer
    publish: SharedBuffer
    tensors_of: tuple[frozenset[str], ...]
    """Whose chunks each host of the site has."""
    key: bytes
    """With which other hosts ask for what these ranks wrote."""


class RankSocket:
    """`say` and `sealed` are called in the event loop, in the order of what ranks say."""

    def __init__(
        self,
        config: NodeConfig,
        say: Callable[[hosts.HostSaid], None],
        sealed: Callable[[Sealed], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._say = say
        self._sealed = sealed
        self.socket = LocalSocket(self._connected)
        self._tasks = Tasks(on_failure)
        self._ranks: dict[int, _Rank] = {}
        self._num_connected = 0
        self._checkpoint_folder = Path()
        self._shared: Shared | None = None

    def keep_checkpoints(self, folder: Path) -> None:
        """Of ranks of this host."""
        self._checkpoint_folder = folder

    def share(self, shared: Shared) -> None:
        """What the ranks of this host are given next."""
        self._shared = shared

    def drop(self) -> None:
        """The leader does not hear these ranks any more: they end."""
        for rank in self._ranks.values():
            rank.connection.shut()
        self._ranks.clear()

    async def close(self) -> None:
        self.socket.stop()
        left = list(self._ranks.values())
        self.drop()
        await end(self._tasks)
        for rank in left:
            rank.connection.close()  # its task had not begun
        self.socket.close()

    # --- from ranks

    def _connected(self, connection: RankConnection) -> None:
        self._num_connected += 1
        self._ranks[self._num_connected] = rank = _Rank(connection)
        self._tasks.spawn(self._pass_on(self._num_connected, rank))

    async def _pass_on(self, number: int, rank: _Rank) -> None:
        writer = asyncio.get_running_loop().create_task(rank.connection.write_all())
        why = ""
        try:
            while (frame := await rank.connection.read_frame()) is not None:
                await self._heard(number, rank, bytes(frame))
        except InvalidMessage as error:
            why = str(error)
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            try:
                await end([writer])
            finally:  # this task may be cancelled meanwhile
                rank.connection.close()
            if self._ranks.pop(number, None) is not None:
                self._say(hosts.RankClosed(connection=number, text=why))

    async def _heard(self, number: int, rank: _Rank, frame: bytes) -> None:
        request = await _in_thread_if_large(frame, partial(local_protocol.decode, local_pb2.LocalRequest, frame))
        if number not in self._ranks:
            return  # dropped
        body = request.WhichOneof("body")
        if body == "join":
            joined = await run_to_its_end(partial(wire.from_proto, LocalJoin, request.join))
            if number not in self._ranks:
                return  # dropped meanwhile
            rank.rank, rank.pieces = request.rank, joined.pieces
        self._say(hosts.RankFrame(connection=number, data=frame))
        if body == "sealed":
            report = wire.from_proto(SealedReport, request.sealed)
            rank.sealed[report.fragment] = report.step, report.seq
            self._sealed(
                Sealed(
                    generation=request.generation,
                    rank=rank.rank,
                    report=report,
                    pieces=rank.owned_pieces,
                    with_frozen=not rank.has_applied,
                )
            )

    # --- to ranks

    async def tell(self, number: int, data: bytes) -> None:
        """A LocalResponse for that rank. Raises ConfigError, InvalidMessage or HostError for a host that cannot go on
        with it."""
        response = await _in_thread_if_large(data, partial(local_protocol.decode, local_pb2.LocalResponse, data))
        if (rank := self._ranks.get(number)) is None:
            return  # it is gone, which is said
        fds: tuple[int, ...] = ()
        match response.WhichOneof("body"):
            case "greeting":
                response.greeting.CopyFrom(wire.to_proto(self._own(wire.from_proto(Greeting, response.greeting))))
                data = response.SerializeToString()
            case "layout":
                told = wire.from_proto(LocalLayout, response.layout)
                if any(index >= len(rank.pieces) for index in told.owned_pieces):
                    raise InvalidMessage("the leader names a piece that the rank does not have")
                if (shared := self._shared) is None:
                    raise InvalidMessage("the leader lets ranks map buffers that it has not laid out")
                rank.owned = told.owned_pieces
                fds = shared.snapshot.fd, shared.publish.fd
            case "answer":
                rank.has_applied |= response.answer.kind == APPLY
        rank.connection.send_frame(len(data).to_bytes(local_protocol.LENGTH_BYTES, "little") + data, fds)

    def hang_up(self, number: int) -> None:
        """The leader has closed its end."""
        if (rank := self._ranks.pop(number, None)) is not None:
            rank.connection.shut()

    def _own(self, greeting: Greeting) -> Greeting:
        """With what is this host's own. Raises ConfigError if the hosts were told different things."""
        config = self._config
        if config.parallel and config.parallel != greeting.parallel:
            raise ConfigError(f"--parallel {config.parallel} here, {greeting.parallel or 'none'} on host 0: say one")
        folder = str(self._checkpoint_folder) if greeting.checkpoint_folder else ""
        return replace(
            greeting,
            data_paths=tuple(str(path) for path in config.data_paths),
            checkpoint_folder=folder,
        )

    # --- slices

    def sealed_views(self, sealed: Sealed) -> list[Items]:
        """Of this host's SNAPSHOT, what host 0 needs: where it makes the state of it, all tensors."""
        shared = self._shared
        assert shared is not None
        wanted = Wanted(fragment=sealed.report.fragment, with_frozen=sealed.with_frozen)
        pieces = [p for p in sealed.pieces if sealed.with_frozen or p.name in shared.tensors_of[0]]
        return list(views(shared.layout, shared.snapshot.view, pieces, wanted))

    def written_for(self, asked: hosts.TakeFromHostRequest) -> list[Items]:
        """Of this host's SNAPSHOT, what its ranks wrote of the tensors of the host that asks. They write there again
        only under another number, by which the host that asks knows that what it has is nothing.

        Raises StaleError unless it is what they have sealed last.
        """
        shared, of = self._shared, (asked.step, asked.seq)
        sealed = [rank for rank in self._ranks.values() if rank.sealed.get(asked.fragment) == of]
        if shared is None or asked.key != shared.key or len(sealed) < self._config.num_ranks:
            raise StaleError("what these ranks wrote is not there, or not any more")
        if not 0 < asked.host < self._config.site_hosts:
            raise InvalidMessage(f"host {asked.host} of a site of {self._config.site_hosts} asks for slices")
        listed = (piece for rank in sorted(sealed, key=lambda rank: rank.rank) for piece in rank.owned_pieces)
        pieces = [piece for piece in listed if piece.name in shared.tensors_of[asked.host]]
        wanted = Wanted(fragment=asked.fragment, with_frozen=False)
        return list(views(shared.layout, shared.snapshot.view, pieces, wanted))


async def _in_thread_if_large(frame: bytes, read: Callable[[], _M]) -> _M:
    return await run_to_its_end(read) if len(frame) > LARGE_FRAME_BYTES else read()
