"""Reports of workers that make no sense. Each of these was found by tests/fuzz."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from atoll.node import local_protocol
from atoll.node.core.events import Answer, AnswerKind, SnapshotSealed
from atoll.node.core.outputs import MergePieces
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.local_protocol import LOCAL_VERSION, Greeting, Piece, SealedReport
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.v1 import local_pb2
from tests.harness.failures import unexpected
from tests.harness.ranks import Ranks, ServedRanks, offer

MANIFEST = Manifest.canonical([TensorSpec(name="a", shape=(4,), dtype="F32", role=Role.TRAINABLE)])
PIECES = (Piece(name="a", offsets=(0,), sizes=(4,), dtype="F32"),)
REPORT = SealedReport(step=0, seq=0, fragment=0, data_rank=0, tokens=5, loss_sum=1.0, num_steps=1, train_s=1.0)


def asked(answer: Answer, num_ranks: int = 1) -> Ranks:
    """Ranks that were given this answer at step 0."""
    group = Ranks(1, num_ranks, 0.0)
    for rank in range(num_ranks):
        group.hello(rank, 1, 0.0)
        outcome = group.join(rank, offer(MANIFEST, PIECES, data_rank=rank), 0.0)
    assert isinstance(outcome[0], MergePieces)
    group.put_together(site_pieces(outcome[0].ranks))
    group.layout_sent(0.0)
    for rank in range(num_ranks):
        group.boundary(rank, 0, 0, 0.0)
    group.answer(0, 0, answer, 0.0)
    return group


@pytest.mark.parametrize("train_s", [math.nan, math.inf, -1.0])
def test_a_training_time_that_is_no_time_is_refused(train_s: float) -> None:
    """The coordinator would refuse it, and the site would end."""
    with pytest.raises(InvalidMessage, match=r"trained for|train_s: not a finite number"):
        asked(Answer(kind=AnswerKind.SNAPSHOT)).sealed(0, replace(REPORT, train_s=train_s), 0.0)


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, -1.0])
def test_a_waiting_time_that_is_no_time_is_refused(wait_s: float) -> None:
    with pytest.raises(InvalidMessage, match=r"waited for|wait_s: not a finite number"):
        asked(Answer(kind=AnswerKind.APPLY, version=1, next_step=1)).merged(0, 1, wait_s, 0.0)


def test_impossible_counts_are_refused() -> None:
    group = asked(Answer(kind=AnswerKind.SNAPSHOT))
    with pytest.raises(InvalidMessage, match="tokens, which is impossible"):
        group.sealed(0, replace(REPORT, tokens=(1 << 64) - 1), 0.0)
    with pytest.raises(InvalidMessage, match="steps, which is impossible"):
        group.progress(0, (1 << 64) - 1, 1.0, 0.0)


def test_losses_near_the_end_of_the_numbers_have_a_mean() -> None:
    group = asked(Answer(kind=AnswerKind.SNAPSHOT), num_ranks=2)
    group.sealed(0, replace(REPORT, loss_sum=1.5e308), 0.0)
    (sealed,) = group.sealed(1, replace(REPORT, loss_sum=1.5e308, data_rank=1), 0.0)
    assert isinstance(sealed, SnapshotSealed)
    assert sealed.mean_loss == 1.5e308


def test_a_connection_speaks_for_one_rank() -> None:
    async def main() -> None:
        server = ServedRanks(lambda _: None, unexpected)
        await server.start()
        group = server.serve(1, 2, Greeting(settings_json="{}", data_paths=()))
        reader, writer = await asyncio.open_unix_connection(server.path)
        for rank in (0, 1):
            hello = local_pb2.LocalHello(world_size=2, protocol_version=LOCAL_VERSION)
            request = local_pb2.LocalRequest(generation=1, rank=rank, hello=hello)
            writer.write(local_protocol.encode_frame(request))
        await reader.read()  # until the server closes
        assert server.num_malformed == 1
        assert [status.pid for status in group.ranks] == [0, 0]
        assert group.ranks[1].due.name == "HELLO"
        writer.close()
        await writer.wait_closed()
        await server.close()

    asyncio.run(main())
