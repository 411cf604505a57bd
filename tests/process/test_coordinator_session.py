"""The coordinator's sessions over real gRPC on loopback, in this process; and as a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.cli.client import local_status
from atoll.coordinator import admin, commands, limits, service
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core import events as e
from atoll.coordinator.core.events import Record, StopAsked
from atoll.coordinator.core.sites import manifests
from atoll.coordinator.main import serve
from atoll.coordinator.service import SERVICE, CoordinatorServer
from atoll.protocol import PROTOCOL_VERSION, differences, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.messages import Deposit
from atoll.protocol.pace import Pace
from atoll.protocol.settings import RunSettings
from atoll.protocol.v1 import session_pb2, session_pb2_grpc
from tests.harness.calls import ENDED, done_writing, write
from tests.harness.coordinator_story import a_hash, a_manifest, some_settings
from tests.harness.memory_store import MemoryStore

SETTINGS = some_settings(run_id="run", min_sites=2, steps=10)
LIMIT_S = 90.0
FIRST_BYTES, OFFER_BYTES, MOST_BYTES = 1 << 14, 1 << 16, 1 << 20
"""What a stranger, a newcomer and a site may say at once, as docs/protocol.md has it."""


class Client:
    """One session, spoken by hand."""

    def __init__(self, address: str, name: str, incarnation: int = 1, channel: grpc.aio.Channel | None = None) -> None:
        self.channel = channel or transport.open_channel(
            address, handshake=None, max_message_bytes=transport.MAX_SESSION_MESSAGE_BYTES
        )
        self.name = name
        self.incarnation = incarnation
        self.site_id = 0
        self.seq = self.ack = 0
        self.told = differences.NOTHING
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        # Bytes out, so that a test can send anything.
        self.call: Any = self.channel.stream_stream(
            f"/{SERVICE}/Session", response_deserializer=lambda data: wire.parse(session_pb2.SessionResponse, data)
        )()
        self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        with suppress(*ENDED):  # `hear` says of it
            while (data := await self._outgoing.get()) is not None:
                await write(self.call, data)
            await done_writing(self.call)

    def raw(self, data: bytes) -> None:
        self._outgoing.put_nowait(data)

    def say(self, message: m.SiteMessage) -> None:
        self.seq += 1
        header = m.Header(
            protocol_version=PROTOCOL_VERSION, run_id="run", site_id=self.site_id, incarnation=self.incarnation
        )
        self.raw(wire.to_bytes(wire.request(message, header, self.seq, self.ack)))

    async def hear(self, *kinds: type[Any]) -> Any:
        """The next message of one of these kinds; others are passed over."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                envelope = await self.call.read()
                assert envelope is not grpc.aio.EOF, f"the stream ended before {kinds}"
                self.ack = envelope.seq
                header, short = wire.unpack(envelope)
                message = differences.complete(short, wire.left_out(envelope), self.told)
                self.told = differences.after(message, self.told)
                assert header.run_id == "run"
                if isinstance(message, m.Admitted):
                    self.site_id = message.site_id
                if isinstance(message, kinds):
                    return message

    async def ended(self) -> bool:
        async with asyncio.timeout(LIMIT_S):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
        return True

    def hello(self, state: tuple[int, bytes] | None = None) -> None:
        self.say(
            m.Hello(
                name=self.name,
                key=a_hash(self.name),
                address="127.0.0.1:1",
                has_state=state is not None,
                last_commit=state[0] if state else 0,
                state_hash=state[1] if state else b"",
            )
        )

    async def join(self) -> m.Admitted:
        self.hello()
        await self.hear(m.Welcome)
        self.say(
            m.Offer(manifest_digest=a_manifest().digest, data_fingerprint=a_hash("data"), max_retained_bytes=1 << 30)
        )
        admitted = await self.hear(m.Admitted, m.SendManifest)
        if isinstance(admitted, m.SendManifest):
            for part in wire.manifest_parts(wire.encode(a_manifest())):
                self.say(part)
            admitted = await self.hear(m.Admitted)
        assert isinstance(admitted, m.Admitted)
        return admitted

    async def close(self) -> None:
        self._outgoing.put_nowait(None)
        await self.channel.close()
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)


def serving(
    test: Callable[[CoordinatorServer], Awaitable[None]], tmp_path: Path, settings: RunSettings = SETTINGS
) -> None:
    async def main() -> None:
        config = CoordinatorConfig(store_path=tmp_path / "run.db", listen="127.0.0.1:0", http_listen="")
        server = CoordinatorServer(config, settings, MemoryStore())
        await server.start()
        running = asyncio.create_task(server.run())
        try:
            await test(server)
        finally:
            await server.stop()
            await running

    asyncio.run(main())


async def both_at_commit_0(server: CoordinatorServer) -> tuple[Client, Client]:
    a, b = Client(server.address, "a"), Client(server.address, "b")
    assert (await a.join()).admitted_as is m.AdmittedAs.SEEDER
    assert (await b.join()).admitted_as is m.AdmittedAs.JOINER
    return a, b


def test_a_run_from_hello_to_finished(tmp_path: Path) -> None:
    async def test(server: CoordinatorServer) -> None:
        a, b = Client(server.address, "a"), Client(server.address, "b")
        await a.join()
        await b.join()
        a.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        b.say(m.FindSources(has_state=False, after_commit=0))
        sources = await b.hear(m.Sources)
        while not sources.donors:
            sources = await b.hear(m.Sources)
        assert [d.site_id for d in sources.donors] == [a.site_id]
        b.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        await a.hear(m.Open)
        await b.hear(m.Open)
        for client in (a, b):
            client.say(m.Ready(sync=1, tokens=10, num_steps=10, mean_loss=3.0))
        for client in (a, b):
            plan = await client.hear(m.Plan)
            assert [c.site_id for c in plan.contributors] == [1, 2]
            client.say(
                m.Done(
                    sync=1,
                    attempt=1,
                    term=plan.term,
                    payload_digest=a_hash("p"),
                    last_commit=0,
                    state_hash=a_hash("s0"),
                    tokens=(10, 10),
                )
            )
        for client in (a, b):
            assert (await client.hear(m.Commit)).final
            client.say(m.Applied(commit=1, state_hash=a_hash("s1")))
            await client.hear(m.Finished)
        document = await server.document()
        assert document["finished"]
        assert document["state_hash"] == a_hash("s1").hex()
        assert document["commits"][0]["time"] > 0
        stub = session_pb2_grpc.CoordinatorServiceStub(a.channel)
        reply = await stub.Status(session_pb2.StatusRequest())
        assert json.loads(reply.json)["settings"]["run_id"] == "run"
        await a.close()
        await b.close()

    serving(test, tmp_path)


HEADER = m.Header(protocol_version=PROTOCOL_VERSION, run_id="run")
WHOLE = wire.to_bytes(wire.request(m.Leave(reason="a long reason"), HEADER, 1, 0))
FLIPPED = WHOLE[:-20] + bytes([WHOLE[-20] ^ 1]) + WHOLE[-19:]
TOO_LARGE = bytes(FIRST_BYTES + 1)
OVER_A_BOUND = wire.to_bytes(wire.request(m.Heartbeat(phase="x" * 65), HEADER, 1, 0))
EMPTY = wire.to_bytes(session_pb2.SessionRequest())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (TOO_LARGE, "at most 16384 are due"),
        (OVER_A_BOUND, "Heartbeat.phase"),
        (EMPTY, "without a known body"),
    ],
    ids=["too large", "over a bound", "empty"],
)
def test_malformed_messages_cost_one_stream_and_are_counted(data: bytes, says: str, tmp_path: Path) -> None:
    async def test(server: CoordinatorServer) -> None:
        a, b = await both_at_commit_0(server)
        bad = Client(server.address, "bad")
        bad.raw(data)
        refused = await bad.hear(m.Refused)
        assert refused.kind is m.RefusedKind.INVALID
        assert says in refused.text
        assert await bad.ended()
        assert (await server.document())["num_malformed"] == 1
        a.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        b.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        await a.hear(m.Open)
        await b.hear(m.Open)
        for client in (a, b, bad):
            await client.close()

    serving(test, tmp_path)


class SlowStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.writes, self.may_write = threading.Event(), threading.Event()

    def persist(self, term: int, records: Sequence[Record], wall_time_s: float) -> tuple[Deposit, ...]:
        self.writes.set()
        assert self.may_write.wait(LIMIT_S)
        return super().persist(term, records, wall_time_s)


def test_5_while_the_store_is_stuck_people_see_what_was_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STORE_PATIENCE_S", 0.05)
    store = SlowStore()

    async def main() -> None:
        config = CoordinatorConfig(store_path=tmp_path / "run.db", listen="127.0.0.1:0", http_listen="")
        server = CoordinatorServer(config, SETTINGS, store)
        running = asyncio.create_task(server.run())
        stopping = asyncio.create_task(server.ask(StopAsked("enough")))
        assert await asyncio.to_thread(store.writes.wait, LIMIT_S)
        document = await server.document(data_ranges=True)
        assert document["state"] == "waiting for sites 0 of 2"
        assert document["store_stuck_s"] > 0
        store.may_write.set()
        monkeypatch.setattr(service, "STORE_PATIENCE_S", LIMIT_S)
        document = await server.document()
        assert (document["state"], document["store_stuck_s"]) == ("finished: enough", 0.0)
        assert (await stopping).problem == ""
        await server.stop()
        await running

    asyncio.run(main())


def test_a_node_of_a_version_without_checksums_is_refused_by_that_name(tmp_path: Path) -> None:
    """It would dial for ever if its stream just ended."""

    async def test(server: CoordinatorServer) -> None:
        old = Client(server.address, "old")
        header = replace(HEADER, protocol_version=PROTOCOL_VERSION - 1, incarnation=1)
        hello = m.Hello(name="old", key=a_hash("old"), address="127.0.0.1:1", atoll_version="0.0.1")
        old.raw(wire.request(hello, header, 1, 0).SerializeToString())
        refused = await old.hear(m.Refused)
        assert refused.kind is m.RefusedKind.PROTOCOL
        assert f"old speaks protocol version {PROTOCOL_VERSION - 1}" in refused.text
        assert await old.ended()
        await old.close()

    serving(test, tmp_path)


def test_5_people_see_a_decision_when_it_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        config = CoordinatorConfig(store_path=tmp_path / "run.db", listen="127.0.0.1:0", http_listen="")
        store = SlowStore()
        server = CoordinatorServer(config, SETTINGS, store)
        running = asyncio.create_task(server.run())
        stopping = asyncio.create_task(server.ask(StopAsked("enough")))
        assert await asyncio.to_thread(store.writes.wait, LIMIT_S)
        asked = asyncio.create_task(server.document())
        await asyncio.sleep(0)
        assert not asked.done()
        store.may_write.set()
        assert (await asked)["state"] == "finished: enough"
        assert (await stopping).problem == ""
        await server.stop()
        await running

    asyncio.run(main())


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 100, WHOLE[:-4], FLIPPED], ids=["nothing", "noise", "truncated", "flipped"]
)
def test_bytes_that_are_no_message_cost_one_stream_and_nobody_is_refused(data: bytes, tmp_path: Path) -> None:
    async def test(server: CoordinatorServer) -> None:
        a, b = await both_at_commit_0(server)
        a.raw(data)
        assert await a.ended()
        document = await server.document()
        assert (document["num_malformed"], document["num_refused"]) == (1, 0)
        b.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        await b.hear(m.Pulse)
        for client in (a, b):
            await client.close()

    serving(test, tmp_path)


def test_a_message_over_the_transports_bound_ends_that_stream_alone(tmp_path: Path) -> None:
    async def test(server: CoordinatorServer) -> None:
        a = Client(server.address, "a")
        await a.join()
        channel = grpc.aio.insecure_channel(server.address)
        call: Any = channel.stream_stream(f"/{SERVICE}/Session")()
        with suppress(*ENDED):  # the rest of it is not taken
            await write(call, b"\0" * (MOST_BYTES + 1))
        async with asyncio.timeout(LIMIT_S):
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await channel.close()
        a.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        await a.hear(m.Pulse)
        await a.close()

    serving(test, tmp_path)


def test_a_connection_has_few_calls_at_once_and_the_next_when_one_ends(tmp_path: Path) -> None:
    """Whatever each says is read by gRPC before anybody knows who says it."""
    most, num = 4, 10

    async def test(server: CoordinatorServer) -> None:
        channel = transport.open_channel(server.address, handshake=None, max_message_bytes=MOST_BYTES)
        clients = [Client(server.address, f"many-{i}", channel=channel) for i in range(num)]
        for client in clients:
            client.hello()
        welcomed = {asyncio.create_task(client.hear(m.Welcome)): client for client in clients}
        waiting = set(welcomed)
        while num - len(waiting) < most:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        a = Client(server.address, "a")
        await a.join()
        known = (await server.document())["sites"]
        assert sum(site["name"].startswith("many") for site in known) == most
        next(client for task, client in welcomed.items() if task not in waiting).call.cancel()
        async with asyncio.timeout(LIMIT_S):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await channel.close()
        await a.close()

    serving(test, tmp_path)


def test_a_stranger_may_say_little_until_more_is_due(tmp_path: Path) -> None:
    """Nothing of a larger message is parsed: its stream alone is refused."""
    text = "x" * FIRST_BYTES

    async def test(server: CoordinatorServer) -> None:
        stranger = Client(server.address, "stranger")
        stranger.say(m.Leave(reason=text))
        assert f"at most {FIRST_BYTES} are due" in (await stranger.hear(m.Refused)).text
        newcomer = Client(server.address, "newcomer")
        newcomer.hello()
        await newcomer.hear(m.Welcome)
        newcomer.say(m.PayloadList(sync=1, attempt=1, term=1, hashes=bytes(OFFER_BYTES)))
        assert f"at most {OFFER_BYTES} are due" in (await newcomer.hear(m.Refused)).text
        a = Client(server.address, "a")
        await a.join()
        a.say(m.PayloadList(sync=1, attempt=1, term=1, hashes=bytes(OFFER_BYTES)))
        a.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        await a.hear(m.Pulse)
        assert (await server.document())["num_malformed"] == 2
        for client in (stranger, newcomer, a):
            await client.close()

    serving(test, tmp_path)


def test_the_event_loop_answers_while_a_large_manifest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, may_go_on = threading.Event(), threading.Event()
    read = manifests.read

    def slow(asked: e.ReadManifest) -> e.ManifestRead:
        reading.set()
        assert may_go_on.wait(LIMIT_S)
        return read(asked)

    monkeypatch.setattr(manifests, "read", slow)

    async def test(server: CoordinatorServer) -> None:
        a, b = Client(server.address, "a"), Client(server.address, "b")
        joining = asyncio.create_task(a.join())
        assert await asyncio.to_thread(reading.wait, LIMIT_S)
        b.hello()
        await b.hear(m.Welcome)
        assert not joining.done()
        may_go_on.set()
        assert (await joining).site_id == 1
        for client in (a, b):
            await client.close()

    serving(test, tmp_path)


def test_a_site_that_does_not_read_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_SENDS", 8)
    monkeypatch.setattr(limits, "PACE_OF_MESSAGES", Pace(at_once=2_000_000, per_s=1.0))

    async def test(server: CoordinatorServer) -> None:
        narrow = grpc.aio.insecure_channel(
            server.address, options=[("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 12)]
        )
        a, deaf = Client(server.address, "a"), Client(server.address, "deaf", channel=narrow)
        await a.join()
        await deaf.join()
        a.say(m.Applied(commit=0, state_hash=a_hash("s0")))
        # Nobody takes the answers: the transport's window fills up, which does not grow here, then the queue.
        sent = 0
        while (await server.document())["sites"][1]["connected"]:
            deaf.say(m.FindSources(has_state=False, after_commit=0))
            sent += 1
            await asyncio.sleep(0)
            assert sent < 1_000_000
        a.say(m.FindSources(has_state=False, after_commit=0))
        await a.hear(m.Sources)
        with pytest.raises(grpc.aio.AioRpcError, match="8 messages wait for a site that does not read"):
            await deaf.hear()  # all that was said before, and then why there is no more
        await a.close()
        await deaf.close()

    # Its lease is not what ends it.
    serving(test, tmp_path, replace(SETTINGS, time_limits="wan"))
    assert "is cut off: 8 messages wait for a site that does not read" in caplog.text


def test_a_site_that_floods_one_kind_of_message_waits_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read no faster than a site has to say; nothing that it said is lost, and it is not cut off."""
    monkeypatch.setattr(limits, "PACE_OF_MESSAGES", Pace(at_once=3, per_s=1e-6))
    monkeypatch.setattr(limits, "PACES_OF_MESSAGES", {})

    async def test(server: CoordinatorServer) -> None:
        a, b = Client(server.address, "a"), Client(server.address, "b")
        await a.join()
        await b.join()
        for _ in range(20):
            a.say(m.FindSources(has_state=False, after_commit=0))
        for _ in range(3):
            await a.hear(m.Sources)
        while not (await server.document())["delayed_messages"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(3):
            b.say(m.FindSources(has_state=False, after_commit=0))
            await b.hear(m.Sources)
        assert (await server.document())["delayed_messages"] == {"FindSources": 1}, "the next one is not read yet"
        assert all(site["connected"] for site in (await server.document())["sites"])
        for client in (a, b):
            await client.close()

    serving(test, tmp_path)


def test_streams_end_cleanly_when_the_coordinator_stops(tmp_path: Path) -> None:
    clients: list[Client] = []

    async def main() -> None:
        config = CoordinatorConfig(store_path=tmp_path / "run.db", listen="127.0.0.1:0", http_listen="")
        server = CoordinatorServer(config, SETTINGS, MemoryStore())
        await server.start()
        running = asyncio.create_task(server.run())
        client = Client(server.address, "a")
        clients.append(client)
        await client.join()
        await server.stop()
        await running
        assert await client.ended()
        await client.close()

    asyncio.run(main())


def test_many_who_ask_for_the_status_share_one_and_a_decision_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STATUS_AGE_S", 3600.0)

    async def test(server: CoordinatorServer) -> None:
        num_made, make = 0, server._document

        def counted(*args: Any, **more: Any) -> dict[str, Any]:
            nonlocal num_made
            num_made += 1
            return make(*args, **more)

        monkeypatch.setattr(server, "_document", counted)
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = session_pb2_grpc.CoordinatorServiceStub(channel)

            async def states(num: int, *, data_ranges: bool = False) -> set[str]:
                request = session_pb2.StatusRequest(data_ranges=data_ranges)
                said = [await stub.Status(request, timeout=LIMIT_S) for _ in range(num)]
                return {json.loads(one.json)["state"] for one in said}

            assert await states(50) == {"waiting for sites 0 of 2"}
            assert num_made == 1
            assert (await server.ask(StopAsked("enough"))).problem == ""
            assert await states(50) == {"finished: enough"}
            assert num_made == 2
            await states(2, data_ranges=True)
            assert num_made == 4, "the account of samples is asked for by few"

    serving(test, tmp_path)


def test_in_plain_text_nobody_commands_from_elsewhere(tmp_path: Path) -> None:
    async def test(server: CoordinatorServer) -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = session_pb2_grpc.CoordinatorServiceStub(channel)
            line = commands.line_of("stop", reason="?").decode()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Operate(session_pb2.OperateRequest(line=line), timeout=LIMIT_S)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "commands are for its own machine" in str(refused.value.details())
        assert (await server.document())["state"] == "waiting for sites 0 of 2"

    serving(test, tmp_path)


def test_a_taken_port_is_an_error_that_says_so(tmp_path: Path) -> None:
    async def test(server: CoordinatorServer) -> None:
        config = replace(server.config, listen=server.address)
        with pytest.raises(HostError, match="another process has that port"):
            await CoordinatorServer(config, SETTINGS, MemoryStore()).start()

    serving(test, tmp_path)


def test_an_open_address_in_plain_text_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        config = CoordinatorConfig(store_path=tmp_path / "run.db", listen="0.0.0.0:0")
        server = CoordinatorServer(config, SETTINGS, MemoryStore())
        await server.start()
        await server.stop()

    asyncio.run(main())
    assert "is in plain text" in caplog.text


# --- the process

COORDINATOR = """
import asyncio, sys
from pathlib import Path
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import manifests
from atoll.coordinator.core.events import Record
from atoll.coordinator.main import serve
from atoll.protocol.errors import AtollError
from atoll.protocol.pace import Pace
from atoll.protocol.settings import RunSettings
from atoll.protocol.settings import RunSettings
config = CoordinatorConfig(store_path=Path(sys.argv[1]), listen="127.0.0.1:0", http_listen="127.0.0.1:0")
try:
    asyncio.run(serve(config, RunSettings(run_id="run", min_sites=2)))
except AtollError as error:
    print(f"{type(error).__name__}: {error}")
    raise SystemExit(error.exit_code)
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def a_coordinator(store: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(store)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[str], how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(how)
    _, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, errors


@pytest.mark.parametrize("folder", ["short", "x" * 100], ids=["short path", "path too long for a socket"])
def test_a_coordinator_process_from_start_to_stop(tmp_path: Path, folder: str) -> None:
    store = tmp_path / folder / "run.db"
    store.parent.mkdir()
    process = a_coordinator(store)
    try:
        line = first_line(process)
        assert line.startswith("run run: listening on 127.0.0.1:")
        assert "status page http://127.0.0.1:" in line
        assert admin.socket_path(store).stat().st_mode & 0o777 == 0o600
        assert local_status(store)["state"] == "waiting for sites 0 of 2"
        second = a_coordinator(store)
        output, errors = second.communicate(timeout=LIMIT_S)
        assert second.returncode == HostError.exit_code, errors
        assert "another coordinator has it open" in output
        assert admin.ask(store, "stop", reason="atoll stop") == ""
        assert local_status(store)["state"] == "finished: atoll stop"
        assert admin.ask(store, "stop", reason="again") == "finished: atoll stop"
        code, errors = end(process)
        assert (code, errors) == (0, "")
        assert not admin.socket_path(store).exists()
    finally:
        process.kill()
        process.communicate()


def test_after_kill_9_the_store_is_free_and_the_term_is_higher(tmp_path: Path) -> None:
    store = tmp_path / "run.db"
    for term in (1, 2):
        process = a_coordinator(store)
        try:
            first_line(process)
            assert local_status(store)["term"] == term
        finally:
            end(process, signal.SIGKILL)


def test_stopping_where_nothing_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"no coordinator answers at .*run.db.sock .*: is it running on this machine"):
        admin.ask(tmp_path / "run.db", "stop", reason="atoll stop")


def test_serving_another_run_from_the_store_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "run.db"
    process = a_coordinator(store)
    first_line(process)
    end(process)
    config = CoordinatorConfig(store_path=store, listen="127.0.0.1:0", http_listen="")
    with pytest.raises(ConfigError, match="holds run 'run', the settings name run 'other'"):
        asyncio.run(serve(config, some_settings(run_id="other")))
