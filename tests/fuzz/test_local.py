"""What workers send over the local socket: frames, and any reports in any order of any ranks."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.node import local_protocol
from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import Answer, AnswerKind
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.daemon.local_server import LocalServer
from atoll.node.daemon.rank_connection import ANY_RANK
from atoll.node.local_protocol import LOCAL_VERSION, Greeting, LocalLayout
from atoll.protocol import PROTOCOL_VERSION, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, InvalidMessage, RefusedError
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.v1 import local_pb2
from tests.harness.failures import unexpected
from tests.harness.fuzzing import damaged, fuzz, peak_bytes, protos
from tests.harness.ranks import ServedRanks
from tests.harness.site_questions import a_node_core, without_fault

MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(4,), dtype="F32", role=Role.TRAINABLE)])
GREETING = Greeting(settings_json="{}", data_paths=())
SETTINGS = RunSettings(run_id="run", steps=40, time_limits="local")
GENERATION = 3


@fuzz(200)
@given(protos(local_pb2.LocalRequest), st.data())
def test_any_frame_is_a_request_or_refused(request: local_pb2.LocalRequest, data: st.DataObject) -> None:
    frame = data.draw(damaged(local_protocol.encode_frame(request)))
    try:
        size = local_protocol.frame_size(frame[: local_protocol.LENGTH_BYTES])
        assert size <= local_protocol.MAX_FRAME_BYTES
        local_protocol.decode(local_pb2.LocalRequest, frame[local_protocol.LENGTH_BYTES :][:size])
    except InvalidMessage:
        pass


@fuzz(200)
@given(protos(local_pb2.LocalResponse), st.data())
def test_any_frame_to_a_worker_is_understood_or_refused(response: local_pb2.LocalResponse, data: st.DataObject) -> None:
    frame = local_protocol.encode_frame(response)[local_protocol.LENGTH_BYTES :]
    understood: dict[str, type[Any]] = {"greeting": Greeting, "layout": LocalLayout, "answer": Answer}
    try:
        heard = local_protocol.decode(local_pb2.LocalResponse, data.draw(st.just(frame) | damaged(frame)))
        body = heard.WhichOneof("body")
        if body in understood:
            value = wire.from_proto(understood[body], getattr(heard, body))
            assert wire.from_proto(understood[body], wire.to_proto(value)) == value
    except InvalidMessage:
        pass


def test_a_promised_length_takes_no_memory() -> None:
    """The bytes must come first: 64 MiB may be announced by four of them."""

    async def main() -> None:
        server = LocalServer(lambda _: None, unexpected)
        await server.start()
        server.begin(GENERATION, GREETING)
        reader, writer = await asyncio.open_unix_connection(server.path)
        writer.write(local_protocol.MAX_FRAME_BYTES.to_bytes(4, "little") + b"x")
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        await server.close()

    assert peak_bytes(lambda: asyncio.run(main())) < 4 << 20


class FakeConnection:
    """Where a rank's messages come from."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.may_be = ANY_RANK
        self.refused = ""
        self.sent: list[local_pb2.LocalResponse] = []

    def send(self, response: local_pb2.LocalResponse) -> None:
        local_protocol.encode_frame(response)
        self.sent.append(response)


class Site:
    """A server and the connections of its ranks, without sockets."""

    def __init__(self, data: st.DataObject, num_ranks: int) -> None:
        self.data = data
        self.num_ranks = num_ranks
        self.events: list[e.Event] = []
        server: Any = ServedRanks(self._happened, unexpected)
        self.server = server
        server.now = lambda: 100.0
        server._merge = self._merge
        server.serve(GENERATION, num_ranks, GREETING)
        self.connections: list[Any] = [FakeConnection() for _ in range(num_ranks + 1)]
        self.asked: list[e.BoundaryAsked] = []

    def _merge(self, output: out.MergePieces) -> None:
        self.server._heard(e.PiecesMerged(generation=output.generation, pieces=site_pieces(output.ranks)))

    def _happened(self, event: Any) -> None:
        self.events.append(event)
        for value in [getattr(event, name) for name in getattr(event, "__slots__", ())]:
            if isinstance(value, float):
                assert math.isfinite(value), event
        if isinstance(event, e.BoundaryAsked):
            self.asked.append(event)
        if isinstance(event, e.SnapshotSealed):  # as the core says it to the coordinator
            ready = m.Ready(
                sync=1, tokens=event.tokens, num_steps=event.num_steps, mean_loss=event.mean_loss, train_s=event.train_s
            )
            header = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run")
            wire.unpack(wire.request(ready, header, 1, 0))

    def say(self, connection: Any, request: local_pb2.LocalRequest) -> None:
        server = self.server
        try:
            server._hear(connection, request, local_protocol.unpack(request))
        except (RefusedError, ConfigError):
            if connection.rank is not None and server._of_rank.get(connection.rank) is connection:
                del server._of_rank[connection.rank]
                server._heard(e.RankLost(generation=GENERATION, rank=connection.rank, text="was cut off"))
            self.connections[self.connections.index(connection)] = FakeConnection()

    # --- ranks that do as they should

    def request(self, rank: int, **body: Any) -> local_pb2.LocalRequest:
        return local_pb2.LocalRequest(generation=GENERATION, rank=rank, **body)

    def behave(self) -> None:
        rank = self.data.draw(st.integers(0, self.num_ranks - 1))
        group: Any = self.server.group
        status = group.ranks[rank]
        connection = self.connections[rank]
        due = status.due.name
        if due != "HELLO" and connection.rank != rank:
            return
        point = None if group.failed or due not in ("BOUNDARY", "SEALED", "MERGED") else group._point_of(status)
        match due:
            case "HELLO":
                hello = local_pb2.LocalHello(world_size=self.num_ranks, pid=7, protocol_version=LOCAL_VERSION)
                self.say(connection, self.request(rank, hello=hello))
            case "JOIN":
                piece = local_pb2.Piece(name="w", offsets=[0], sizes=[4], dtype="F32")
                join = local_pb2.LocalJoin(manifest=wire.to_proto(MANIFEST), pieces=[piece])
                self.say(connection, self.request(rank, join=join))
            case "LAYOUT" if group.pieces is not None:  # the node sends it after WorkersJoined
                self.server._heard(e.LayoutSent(GENERATION))
            case "BOUNDARY" if point is not None:
                self.say(connection, self.request(rank, boundary=local_pb2.Boundary(step=point.step, seq=point.seq)))
            case "SEALED" if point is not None:
                tokens = self.data.draw(st.sampled_from([5, (1 << 64) - 1]))
                numbers = st.sampled_from([1.0, 1e308, float("nan")])
                sealed = local_pb2.SealedReport(
                    step=point.step, seq=point.seq, tokens=tokens, num_steps=1,
                    loss_sum=self.data.draw(numbers), train_s=self.data.draw(numbers),
                )  # fmt: skip
                self.say(connection, self.request(rank, sealed=sealed))
            case "MERGED" if point is not None:
                wait_s = self.data.draw(st.sampled_from([0.0, float("inf"), float("nan")]))
                merged = local_pb2.MergedReport(version=point.answer.version, step=point.step, wait_s=wait_s)
                self.say(connection, self.request(rank, merged=merged))
            case "GOODBYE":
                self.say(connection, self.request(rank, goodbye=local_pb2.Goodbye(run_over=True)))

    def answer(self) -> None:
        if not self.asked:
            return
        asked = self.asked.pop()
        kind = self.data.draw(st.sampled_from(AnswerKind))
        answer = Answer(kind=kind, next_step=asked.step + self.data.draw(st.integers(0, 1)))
        self.server.answer(asked.generation, asked.step, asked.seq, answer)

    def say_anything(self) -> None:
        request = self.data.draw(protos(local_pb2.LocalRequest))
        connection = self.data.draw(st.sampled_from(self.connections))
        if self.data.draw(st.booleans()):
            request.generation = GENERATION
            request.rank = connection.rank or 0
        if request.WhichOneof("body") == "hello" and self.data.draw(st.booleans()):
            request.hello.world_size = self.num_ranks
            request.hello.protocol_version = PROTOCOL_VERSION
        self.say(connection, request)


@fuzz(150)
@given(st.data())
def test_any_reports_of_ranks_are_followed_or_refused(data: st.DataObject) -> None:
    site = Site(data, data.draw(st.integers(1, 2)))
    for _ in range(data.draw(st.integers(5, 40))):
        match data.draw(st.integers(0, 9)):
            case 0 | 1:
                site.say_anything()
            case 2:
                site.answer()
            case _:
                site.behave()
    server: Any = site.server
    for rank, connection in server._of_rank.items():
        assert connection.rank == rank, "a connection speaks for one rank"
    failures = [event for event in site.events if isinstance(event, e.WorkersFailed)]
    assert len(failures) <= 1


class Node:
    """A node's core with its ranks. What it asks for is done when the test says so."""

    def __init__(self, data: st.DataObject, num_ranks: int) -> None:
        self.data = data
        self.num_ranks = num_ranks
        self.now = 100.0
        self.core = a_node_core(SETTINGS, self.now, num_ranks)
        self.due: list[e.Event] = []
        self.happens(e.SessionOpened())
        self.happens(e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS))))

    def happens(self, event: e.Event) -> None:
        for output in without_fault(self.core.handle(event, self.now)):
            match output:
                case out.Send(message):
                    wire.request(message, m.Header(protocol_version=PROTOCOL_VERSION, run_id="run"), 1, 0)
                    if isinstance(message, m.Offer):
                        self.due.append(
                            e.Received(1, m.Admitted(site_id=1, admitted_as=m.AdmittedAs.SEEDER, run_seed=1))
                        )
                case out.MergePieces(generation, ranks):
                    self.due.append(e.PiecesMerged(generation=generation, pieces=site_pieces(ranks)))
                case out.SendLayout(generation=generation):
                    self.due.append(e.LayoutSent(generation))
                case out.RefuseRank(generation, rank, text):
                    self.due.append(e.RankLost(generation=generation, rank=rank, text=text))
                case out.DescribeCrash(generation=generation, text=text):
                    crashed = e.FailureKind.CRASHED
                    self.due.append(e.WorkersFailed(generation=generation, kind=crashed, text=text))
                case out.AnswerWorkers(ranks=ranks):
                    assert len(set(ranks)) == len(ranks) <= self.num_ranks
        self.core.next_deadline()

    def said(self, request: local_pb2.LocalRequest) -> None:
        group: Any = self.core.ranks.group
        if request.rank >= self.num_ranks and request.WhichOneof("body") != "hello":
            return  # it has no connection
        try:
            heard = local_protocol.unpack(request)
        except InvalidMessage as error:
            if request.rank < self.num_ranks:
                self.happens(e.RankLost(generation=group.generation, rank=request.rank, text=str(error)))
            return
        self.happens(e.RankSaid(generation=group.generation, rank=request.rank, said=heard))

    def behave(self) -> None:
        group: Any = self.core.ranks.group
        rank = self.data.draw(st.integers(0, self.num_ranks - 1))
        status = group.ranks[rank]
        point = None if group.failed else group._point_of(status)
        body: dict[str, Any] = {}
        match status.due.name:
            case "HELLO":
                body["hello"] = local_pb2.LocalHello(world_size=self.num_ranks, protocol_version=LOCAL_VERSION)
            case "JOIN":
                piece = local_pb2.Piece(name="w", offsets=[0], sizes=[4], dtype="F32")
                body["join"] = local_pb2.LocalJoin(manifest=wire.to_proto(MANIFEST), pieces=[piece])
            case "BOUNDARY" if point is not None:
                body["boundary"] = local_pb2.Boundary(step=point.step, seq=point.seq)
            case "SEALED" if point is not None:
                report = {"step": point.step, "seq": point.seq, "fragment": point.answer.fragment}
                body["sealed"] = local_pb2.SealedReport(**report, tokens=5, num_steps=1, loss_sum=1.0, train_s=1.0)
        if body:
            self.said(local_pb2.LocalRequest(rank=rank, **body))

    def say_anything(self) -> None:
        request = self.data.draw(protos(local_pb2.LocalRequest))
        request.rank = self.data.draw(st.integers(0, self.num_ranks))
        self.said(request)


@fuzz(120)
@given(st.data())
def test_whatever_ranks_say_the_core_of_their_node_follows_or_refuses(data: st.DataObject) -> None:
    node = Node(data, data.draw(st.integers(1, 2)))
    for _ in range(data.draw(st.integers(5, 40))):
        match data.draw(st.integers(0, 9)):
            case 0:
                node.say_anything()
            case 1:
                node.now += data.draw(st.sampled_from([0.1, 2.0, 100.0]))
                node.happens(e.Tick())
            case 2 | 3 | 4 if node.due:
                node.happens(node.due.pop(0))
            case _:
                node.behave()
