"""Who may dial this site to give it state, and what its streams bring."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from atoll.node.exchange.catchup import expected_donors
from atoll.node.exchange.catchup.expected_donors import STREAMS_PER_DONOR, DonorStream, ExpectedDonors
from atoll.node.exchange.peers.rpc import FETCH_PAYLOADS_METHOD, FETCH_STATE_METHOD
from atoll.protocol.errors import InvalidMessage, NotYetError, PeerError, RefusedError, StaleError, StateError
from atoll.protocol.messages import Donor
from atoll.protocol.v1 import common_pb2, peer_pb2
from tests.harness.peer_streams import HEADER, FakeContext

DONOR = Donor(site_id=2, incarnation=4, address="127.0.0.1:1", commit=0)


def opened(site: tuple[int, int] = (2, 4), to: tuple[int, int] = (1, 1)) -> peer_pb2.DonateOpen:
    header = common_pb2.Header(site_id=site[0], incarnation=site[1])
    return peer_pb2.DonateOpen(header=header, to_site_id=to[0], to_incarnation=to[1])


class Context(FakeContext):
    """The stream ends after what was received."""

    async def read(self) -> Any:
        return self.received.popleft() if self.received else grpc.aio.EOF


def accept(expected: ExpectedDonors, *frames: peer_pb2.DonateRequest) -> tuple[DonorStream, Context]:
    context = Context([frame.SerializeToString() for frame in frames])
    stream: Any = context
    return expected.accept(opened(), HEADER, stream), context


def test_only_the_site_and_start_that_is_expected_comes_in() -> None:
    async def main() -> None:
        expected = ExpectedDonors()
        context: Any = Context([])
        for site in [(2, 4), (3, 1)]:
            with pytest.raises(StaleError, match="not asked to dial this site"):
                expected.accept(opened(site), HEADER, context)
        expected.expect([(2, 4)])
        for site in [(2, 3), (2, 5), (3, 4)]:
            with pytest.raises(StaleError, match="not asked to dial this site"):
                expected.accept(opened(site), HEADER, context)
        for to in [(2, 1), (1, 2), (0, 0)]:
            with pytest.raises(RefusedError, match="this is start 1 of site 1"):
                expected.accept(opened(to=to), HEADER, context)
        assert not expected.is_here(DONOR)
        accept(expected)
        assert expected.is_here(DONOR)
        expected.expect([(3, 4)])  # one that is here stays, one that is not does not
        accept(expected)
        expected.expect([])
        with pytest.raises(StaleError):
            expected.accept(opened((3, 4)), HEADER, context)

    asyncio.run(main())


def test_a_donor_is_expected_until_all_audits_and_the_catching_up_are_done_with_it() -> None:
    async def main() -> None:
        expected = ExpectedDonors()
        for _ in range(2):  # two audits, of which one waits for the other
            expected.expect_too([(2, 4)])
        stream, _ = accept(expected)
        expected.forget([(2, 4)])
        assert not stream.over.done(), "the other audit has asked nothing yet"
        expected.gone(stream)
        expected.expect([(3, 4)])
        expected.dismiss()  # catching up is over
        stream, _ = accept(expected)
        expected.forget([(2, 4)])
        assert stream.over.done()
        with pytest.raises(StaleError):
            accept(expected)
        expected.expect([(2, 4)])
        expected.expect_too([(2, 4)])
        expected.forget([(2, 4)])
        accept(expected)  # it is to give its state
        expected.expect([])
        expected.dismiss()
        with pytest.raises(StaleError):
            accept(expected)

    asyncio.run(main())


def test_a_donor_has_few_streams_and_places_come_free() -> None:
    async def main() -> None:
        expected = ExpectedDonors()
        expected.expect([(2, 4)])
        streams = [accept(expected)[0] for _ in range(STREAMS_PER_DONOR)]
        with pytest.raises(RefusedError, match="3 streams of site 2 are here already"):
            accept(expected)
        expected.gone(streams[0])
        streams[0], _ = accept(expected)
        expected.dismiss()
        assert all(stream.over.done() for stream in streams)
        with pytest.raises(StaleError, match="not any more"):
            accept(expected)
        expected.gone(streams[1])  # its call ends later

    asyncio.run(main())


def test_each_request_takes_a_stream_and_reads_its_frames() -> None:
    async def main() -> None:
        expected = ExpectedDonors()
        expected.expect([(2, 4)])
        end = peer_pb2.DonateRequest(end=peer_pb2.DonateEnd())
        first, context = accept(expected, peer_pb2.DonateRequest(frame=b"a"), peer_pb2.DonateRequest(frame=b""), end)
        _, other = accept(expected, end)
        answer = await expected.ask(
            DONOR, FETCH_STATE_METHOD, peer_pb2.FetchStateRequest(chunks=[3]).SerializeToString()
        )
        assert [await answer.read() for _ in range(3)] == [b"a", b"", None]
        assert not first.over.done()
        answer.cancel()
        assert first.over.done()
        asked = [peer_pb2.DonateResponse.FromString(frame) for frame in context.sent]
        assert asked == [peer_pb2.DonateResponse(state=peer_pb2.FetchStateRequest(chunks=[3]))]
        answer = await expected.ask(DONOR, FETCH_PAYLOADS_METHOD, peer_pb2.FetchPayloadsRequest().SerializeToString())
        assert await answer.read() is None
        assert peer_pb2.DonateResponse.FromString(other.sent[0]).WhichOneof("body") == "payloads"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (None, PeerError),
        (peer_pb2.DonateRequest(end=peer_pb2.DonateEnd(code=grpc.StatusCode.ABORTED.value[0])), NotYetError),
        (peer_pb2.DonateRequest(end=peer_pb2.DonateEnd(code=grpc.StatusCode.NOT_FOUND.value[0])), StateError),
        (peer_pb2.DonateRequest(end=peer_pb2.DonateEnd(code=1 << 31)), PeerError),
        (peer_pb2.DonateRequest(open=opened()), InvalidMessage),
        (peer_pb2.DonateRequest(), InvalidMessage),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(last: peer_pb2.DonateRequest | None, error: type[Exception]) -> None:
    async def main() -> None:
        expected = ExpectedDonors()
        expected.expect([(2, 4)])
        accept(expected, peer_pb2.DonateRequest(frame=b"a"), *([last] if last is not None else []))
        answer = await expected.ask(DONOR, FETCH_STATE_METHOD, b"")
        assert await answer.read() == b"a"
        with pytest.raises(error):
            await answer.read()

    asyncio.run(main())


def test_a_donor_that_has_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_donors, "REOPEN_S", 0.0)

    async def main() -> None:
        expected = ExpectedDonors()
        expected.expect([(2, 4)])
        stream, _ = accept(expected)
        expected.gone(stream)
        answer = await expected.ask(DONOR, FETCH_STATE_METHOD, b"")
        with pytest.raises(PeerError, match="its connections are gone"):
            await answer.read()
        expected.dismiss()
        answer = await expected.ask(DONOR, FETCH_STATE_METHOD, b"")
        with pytest.raises(PeerError, match="its connections are gone"):
            await answer.read()

    asyncio.run(main())


def test_a_request_waits_for_the_next_stream_while_others_are_in_use() -> None:
    async def main() -> None:
        expected = ExpectedDonors()
        expected.expect([(2, 4)])
        busy, _ = accept(expected, peer_pb2.DonateRequest(frame=b"a"))
        first = await expected.ask(DONOR, FETCH_STATE_METHOD, b"")
        assert await first.read() == b"a"
        second = await expected.ask(DONOR, FETCH_STATE_METHOD, b"")
        reading = asyncio.create_task(second.read())
        await asyncio.sleep(0)
        first.cancel()
        expected.gone(busy)
        accept(expected, peer_pb2.DonateRequest(frame=b"b"))
        assert await reading == b"b"

    asyncio.run(main())
