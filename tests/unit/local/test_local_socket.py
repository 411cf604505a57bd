"""The local socket with both its ends in one process: frames, bounds, descriptors, generations."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from atoll.node import local_protocol
from atoll.node.core.events import (
    Answer,
    AnswerKind,
    BoundaryAsked,
    DataAnnounced,
    DrawAsked,
    FailureKind,
    MergeMode,
    RankLost,
    SnapshotSealed,
    WorkersFailed,
    WorkersJoined,
    WorkersLeft,
)
from atoll.node.core.outputs import AnswerDraw
from atoll.node.daemon.local_server import LocalServer
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.local_protocol import (
    LOCAL_VERSION,
    MAX_FRAME_BYTES,
    CheckpointCounts,
    CheckpointId,
    DataSet,
    Greeting,
    LocalHello,
    LocalJoin,
    Piece,
    PieceHash,
    Said,
    SealedReport,
)
from atoll.node.worker.client import JoinedLayout, LocalClient
from atoll.protocol import wire
from atoll.protocol.errors import HostError, InvalidMessage, RefusedError, StaleError, WorkerError
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import DataRange
from atoll.protocol.v1 import common_pb2, local_pb2
from tests.harness.failures import unexpected
from tests.harness.ranks import Happened, ServedRanks

SPECS = [TensorSpec(name=n, shape=(4, 2), dtype="F32", role=Role.TRAINABLE) for n in ("a", "b")]
MANIFEST = Manifest.canonical(SPECS)
GREETING = Greeting(settings_json='{"x": 1}', data_paths=("/a", "/b c\nd"))
SNAPSHOT = Answer(kind=AnswerKind.SNAPSHOT)


class Site:
    """A server, its events and its clients; clients are closed first, because a server's end is their end."""

    def __init__(self, num_ranks: int, generation: int) -> None:
        self.num_ranks = num_ranks
        self.generation = generation
        self.events: asyncio.Queue[Happened] = asyncio.Queue()
        self.server = ServedRanks(self.events.put_nowait, unexpected)
        self.clients: list[LocalClient] = []

    async def event(self) -> Happened:
        return await self.events.get()

    async def client(self, rank: int, generation: int | None = None) -> LocalClient:
        found = await asyncio.to_thread(
            LocalClient.connect, self.server.path, self.generation if generation is None else generation, rank
        )
        self.clients.append(found)
        return found

    async def greeted(self, rank: int) -> LocalClient:
        client = await self.client(rank)
        await asyncio.to_thread(client.hello, self.num_ranks)
        return client

    async def send_layout(self, buffers: tuple[SharedBuffer, SharedBuffer], layout: Layout) -> None:
        await self.server.admit(layout, *buffers, site_id=9, incarnation=2, run_seed=7)


@asynccontextmanager
async def running(num_ranks: int = 1, generation: int = 3) -> AsyncIterator[Site]:
    site = Site(num_ranks, generation)
    await site.server.start()
    site.server.serve(generation, num_ranks, GREETING)
    try:
        yield site
    finally:
        for client in site.clients:
            await asyncio.to_thread(client.close)
        await site.server.close()


def in_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def half(rank: int) -> list[Piece]:
    """Rows of a, and all of b."""
    return [
        Piece(name="a", offsets=(2 * rank, 0), sizes=(2, 2), dtype="F32"),
        Piece(name="b", offsets=(0, 0), sizes=(4, 2), dtype="BF16"),
    ]


def offer(
    pieces: list[Piece], fingerprint: bytes = b"", data_rank: int = 0, checkpoints: tuple[CheckpointId, ...] = ()
) -> LocalJoin:
    return LocalJoin(
        manifest=MANIFEST, pieces=tuple(pieces), data_fingerprint=fingerprint, data_rank=data_rank,
        checkpoints=checkpoints,
    )  # fmt: skip


def test_two_ranks_from_hello_to_goodbye() -> None:
    async def main() -> None:
        async with running(2) as site:
            clients = [await site.client(rank) for rank in range(2)]
            for client in clients:
                assert await asyncio.to_thread(client.hello, 2) == GREETING
            joins = [
                asyncio.create_task(asyncio.to_thread(c.join, offer(half(r), b"print", r)))
                for r, c in enumerate(clients)
            ]
            assert await site.event() == WorkersJoined(generation=3, manifest=MANIFEST, data_fingerprint=b"print")
            assert site.server.group.pieces is not None
            assert site.server.group.pieces.dtypes == {"a": "F32", "b": "BF16"}
            layout = Layout(MANIFEST, 4)
            buffers = SharedBuffer(layout.buffer_bytes, "SNAPSHOT"), SharedBuffer(layout.buffer_bytes, "PUBLISH")
            await site.send_layout(buffers, layout)
            joined: list[JoinedLayout] = await asyncio.gather(*joins)
            assert [(j.told.owned_pieces, j.told.shared_pieces) for j in joined] == [((0, 1), (1,)), ((0,), (1,))]
            assert {(t.site_id, t.incarnation, t.run_seed, t.data_seed) for t in (j.told for j in joined)} == {
                (9, 2, 7, local_protocol.data_seed(7, 9, 2, 3))
            }
            # The memory is the same, in both directions and between ranks.
            buffers[1].view[10] = 77
            joined[0].snapshot[20] = 88
            assert joined[0].publish[10] == joined[1].publish[10] == 77
            assert buffers[0].view[20] == joined[1].snapshot[20] == 88
            assert joined[0].layout.chunks == layout.chunks

            first = asyncio.create_task(asyncio.to_thread(clients[1].boundary, 0, 0))
            assert await site.event() == BoundaryAsked(generation=3, step=0, seq=0)
            site.server.answer(2, 0, 0, Answer(kind=AnswerKind.STOP))  # of an older generation: dropped
            site.server.answer(3, 0, 0, SNAPSHOT)
            assert await first == SNAPSHOT
            assert await asyncio.to_thread(clients[0].boundary, 0, 0) == SNAPSHOT
            for rank, client in enumerate(clients):
                report = SealedReport(
                    step=0, seq=0, fragment=0, data_rank=rank, tokens=5, loss_sum=6.0, num_steps=2, train_s=0.5
                )
                client.sealed(report)
            sealed = SnapshotSealed(generation=3, step=0, tokens=10, num_steps=2, mean_loss=3.0, train_s=0.5)
            assert await site.event() == sealed

            held = [asyncio.create_task(asyncio.to_thread(c.boundary, 0, 1)) for c in clients]
            assert await site.event() == BoundaryAsked(generation=3, step=0, seq=1)
            apply = Answer(
                kind=AnswerKind.APPLY,
                next_step=20,
                version=4,
                mode=MergeMode.MERGE,
                run_step=80,
                run_tokens=9,
                fresh=True,
            )
            site.server.answer(3, 0, 1, apply)
            assert await asyncio.gather(*held) == [apply, apply]
            assert [(j.told.reader, j.told.num_readers) for j in joined] == [(0, 2), (1, 2)]
            for client in clients:
                client.announce_data(DataSet(num_samples=100, batch_size=4, batches_ahead=2))
            announced = DataAnnounced(generation=3, num_samples=100, round_samples=8, rounds_ahead=2)
            assert await site.event() == announced
            waiting = asyncio.create_task(asyncio.to_thread(clients[1].draw, 5, 16, 8))
            asked = DrawAsked(generation=3, rank=1, epoch=5, first=16, num_samples=8)
            assert await site.event() == asked
            ranges = (DataRange(first=90, num_samples=20), DataRange(first=3, num_samples=1))
            site.server.answer_draw(AnswerDraw(generation=2, rank=1, epoch=5, first=16, ranges=()))  # dropped
            site.server.answer_draw(AnswerDraw(generation=3, rank=1, epoch=5, first=16, ranges=ranges))
            assert await waiting == ranges
            for client in clients:
                client.busy("evaluation", 5.0)
                client.merged(version=4, step=0, wait_s=0.25)
                client.goodbye("done", False)
            assert (await site.event()).generation == 3  # Merged
            assert await site.event() == WorkersLeft(generation=3, reason="done")
            assert site.server.num_malformed == 0
            for buffer in buffers:
                buffer.close()

    in_loop(main)


def test_the_socket_is_private_and_gone_afterwards() -> None:
    async def main() -> None:
        async with running() as site:
            path = Path(site.server.path)
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert len(str(path)) <= 107
        assert not path.parent.exists()
        with pytest.raises(WorkerError, match="no node listens at"):
            LocalClient.connect(str(path), 1, 0)

    in_loop(main)


def test_a_folder_whose_name_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))

    async def main() -> None:
        with pytest.raises(HostError, match="set TMPDIR"):
            await LocalServer(lambda event: None, unexpected).start()

    in_loop(main)
    assert not list(long.iterdir())


def test_another_generation_is_refused() -> None:
    async def main() -> None:
        async with running(generation=3) as site:
            for generation in (2, 4):
                client = await site.client(0, generation)
                with pytest.raises(StaleError, match=f"generation {generation} are not wanted; generation 3 is"):
                    await asyncio.to_thread(client.hello, 1)
            assert site.server.num_malformed == 0
            assert site.events.empty()
            with pytest.raises(ValueError, match="generation 3 after 3"):
                site.server.begin(3, GREETING)

    in_loop(main)


def test_the_wrong_number_of_ranks() -> None:
    async def main() -> None:
        async with running(2) as site:
            client = await site.client(0)
            with pytest.raises(RefusedError, match="rank 0 of 1 asks to join; this site has 2 ranks"):
                await asyncio.to_thread(client.hello, 1)
            event = await site.event()
            assert isinstance(event, WorkersFailed)
            assert event.kind is FailureKind.FATAL

    in_loop(main)


def test_the_nodes_refusal_reaches_a_rank_that_waits() -> None:
    async def main() -> None:
        async with running() as site:
            client = await site.greeted(0)
            pieces = [Piece(name=s.name, offsets=(0, 0), sizes=(4, 2), dtype="F32") for s in SPECS]
            join = asyncio.create_task(asyncio.to_thread(client.join, offer(pieces)))
            await site.event()
            site.server.refuse("this run trains another model")
            with pytest.raises(RefusedError, match="this run trains another model"):
                await join
            with pytest.raises(RefusedError, match="another model"):
                client.busy("x", 1.0)

    in_loop(main)


def test_a_rank_that_goes_without_a_word() -> None:
    async def main() -> None:
        async with running() as site:
            client = await site.greeted(0)
            await asyncio.to_thread(client.close)
            event = await site.event()
            assert event == RankLost(generation=3, rank=0, text="closed its connection without a word")
            assert site.server.group.ranks[0].pid == os.getpid()

    in_loop(main)


def test_checkpoints_are_offered_counted_and_passed_over() -> None:
    offered, crashed = (CheckpointId(incarnation=1, generation=2, step=step) for step in (100, 50))
    layout = Layout(MANIFEST)

    async def main() -> None:
        async with running() as site:
            group = site.server.serve(4, 1, replace(GREETING, crashed_from=(crashed,)))
            client = await site.client(0, 4)
            settings = await asyncio.to_thread(client.hello, 1)
            assert settings.crashed_from == (crashed,)
            pieces = [Piece(name=s.name, offsets=(0, 0), sizes=(4, 2), dtype="F32") for s in SPECS]
            join = asyncio.create_task(asyncio.to_thread(client.join, offer(pieces, checkpoints=(offered,))))
            await site.event()
            buffers = SharedBuffer(layout.buffer_bytes, "SNAPSHOT"), SharedBuffer(layout.buffer_bytes, "PUBLISH")
            site.generation = 4
            await site.send_layout(buffers, layout)
            assert (await join).told.checkpoint == offered == group.went_on_from
            for _ in range(2):  # each time all of them since its start
                client.progress(0, math.nan, CheckpointCounts(written=3, skipped=1, failed=2))
            client.goodbye("done", run_over=False)
            assert await site.event() == WorkersLeft(generation=4, reason="done")
            assert group.ranks[0].checkpoints == CheckpointCounts(written=3, skipped=1, failed=2)

    in_loop(main)


def hello_frame(rank: int = 0) -> bytes:
    hello = local_pb2.LocalHello(world_size=1, pid=1, protocol_version=LOCAL_VERSION)
    return local_protocol.encode_frame(local_pb2.LocalRequest(generation=3, rank=rank, hello=hello))


OVERSIZED = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
BOUNDARY = local_protocol.encode_frame(local_pb2.LocalRequest(generation=3, boundary=local_pb2.Boundary()))
NO_BODY = local_protocol.encode_frame(local_pb2.LocalRequest(generation=3))


@pytest.mark.parametrize(
    ("sent", "bound", "words"),
    [
        (OVERSIZED, False, f"{MAX_FRAME_BYTES + 1} bytes, at most {MAX_FRAME_BYTES}"),
        (b"\x03\0\0\0\xff\xff\xff", False, "local message of 3 bytes"),
        (b"\x09\0\0\0abc", False, "ended after 3 of 9 bytes"),
        (b"\x09\0", False, "ended after 0 of 1 bytes"),
        (BOUNDARY, False, "on a connection of rank None"),
        (hello_frame() + OVERSIZED, True, "at most"),
        (hello_frame() + hello_frame(), True, "may not say that"),
        (hello_frame() + BOUNDARY, True, "may not say that while it is building its model"),
        (hello_frame() + NO_BODY, True, "unknown kind"),
    ],
)
def test_malformed_messages_are_refused_and_counted(sent: bytes, bound: bool, words: str) -> None:
    async def main() -> None:
        async with running() as site:
            reader, writer = await asyncio.open_unix_connection(site.server.path)
            writer.write(sent)
            writer.write_eof()
            data = await reader.read()  # until the server closes
            writer.close()
            await writer.wait_closed()
            responses = []
            while data:
                size = local_protocol.frame_size(data[:4])
                responses.append(local_protocol.decode(local_pb2.LocalResponse, data[4 : 4 + size]))
                data = data[4 + size :]
            assert [r.WhichOneof("body") for r in responses] == ["greeting"] * bound + ["refused"]
            assert words in responses[-1].refused.text
            assert site.server.num_malformed == 1
            if bound:
                event = await site.event()
                assert isinstance(event, RankLost)
                assert "was cut off" in event.text
            # The next one is served.
            if not bound:
                await site.greeted(0)

    in_loop(main)


def test_the_client_checks_bounds_too() -> None:
    with pytest.raises(InvalidMessage):
        local_protocol.frame_size(OVERSIZED)
    ours, theirs = socket.socketpair()
    client = LocalClient(ours, "test", 3, 0)
    message = local_pb2.LocalResponse(
        generation=3,
        answer=local_pb2.Answer(step=8, seq=0, kind=local_pb2.ANSWER_KIND_STOP, mode=local_pb2.MERGE_MODE_REPLACE),
    )
    theirs.sendall(local_protocol.encode_frame(message))
    with pytest.raises(InvalidMessage, match=r"asked at step 7.0, answered for 8.0"):
        client.boundary(7, 0)
    theirs.sendall(local_protocol.encode_frame(message))
    with pytest.raises(InvalidMessage, match="expected greeting of generation 3, the node sent answer of 3"):
        client.hello(1)
    client.close()
    theirs.close()


def test_answers_keep_their_fields() -> None:
    answer = Answer(
        kind=AnswerKind.APPLY, next_step=1, fragment=2, version=3, mode=MergeMode.SHIFT, run_step=4, run_tokens=5,
        reason="six", fresh=True,
    )  # fmt: skip
    assert wire.from_proto(Answer, wire.to_proto(answer)) == answer


@pytest.mark.parametrize(
    "cls",
    [Greeting, *get_args(Said), PieceHash, Piece, CheckpointId, CheckpointCounts],
    ids=lambda c: c.__name__,
)
def test_fields_are_those_of_the_proto_message(cls: type) -> None:
    proto = getattr(local_pb2, cls.__name__, None) or getattr(common_pb2, cls.__name__)
    assert sorted(f.name for f in fields(cls)) == sorted(f.name for f in proto.DESCRIPTOR.fields)


def test_a_loss_that_is_no_number_arrives_and_a_time_that_is_none_does_not() -> None:
    """The loss ends the site with its own exit code; the time is a fault of the rank."""
    report = SealedReport(
        step=2, seq=1, fragment=3, data_rank=4, tokens=5, loss_sum=math.inf, num_steps=6, train_s=7.0,
        hashes=(PieceHash(piece=8, hash=b"h" * 32),), num_samples_used=9,
    )  # fmt: skip
    assert wire.from_proto(SealedReport, wire.to_proto(report)) == report
    with pytest.raises(InvalidMessage, match=r"SealedReport\.train_s: not a finite number"):
        wire.from_proto(SealedReport, wire.to_proto(replace(report, train_s=math.inf)))


def test_no_node_in_the_environment() -> None:
    assert LocalClient.from_environment({}) is None


def test_neither_end_needs_torch_or_numpy() -> None:
    modules = "atoll.node.worker.client, atoll.node.daemon.local_server, atoll.node.daemon.launcher"
    code = f"import sys, {modules}; print({{'torch', 'numpy'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout == b"set()\n"


def test_a_hello_before_the_first_generation_is_refused_and_ends_no_node() -> None:
    async def main() -> None:
        failures: list[BaseException] = []
        events: list[Any] = []
        server = LocalServer(events.append, failures.append)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(server.path)
        hello = LocalHello(world_size=1, pid=1, protocol_version=LOCAL_VERSION)
        writer.write(local_protocol.encode_frame(local_protocol.pack(0, 0, hello)))
        answered = await reader.read()
        writer.close()
        await server.close()
        assert (failures, events) == ([], [])
        response = local_protocol.decode(local_pb2.LocalResponse, answered[local_protocol.LENGTH_BYTES :])
        assert response.refused.kind == "stale"

    in_loop(main)
