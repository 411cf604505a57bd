"""A site that is banned while it has calls of other sites open: in the middle of an exchange, and of a state that it
fetches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.coordinator import admin
from atoll.node.exchange.peers.rpc import FETCH_STATE_METHOD
from atoll.protocol import PROTOCOL_VERSION, transport
from atoll.protocol.errors import RefusedError
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust import enrolled
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls
from atoll.protocol.v1 import common_pb2, peer_pb2
from tests.harness.local_run import LocalRun
from tests.process.test_secured_runs import FOREVER, LIMIT_S, WORKER

pytestmark = pytest.mark.timeout(400)

CHUNK_ELEMENTS, NUM_CHUNKS = 1 << 18, 16
MODEL = [*WORKER, "--tensors", "a=2048x2048"]
SETTINGS = replace(FOREVER, time_limits="wan", sync=SyncSettings(every=15, chunk_elements=CHUNK_ELEMENTS, codec="fp32"))
BEGUN_BYTES = 1 << 19
"""Of a contribution of some 16 MB, which at 2 Mbit/s takes a minute."""


@contextmanager
def fetching_state(run: LocalRun, by: str, site_id: int, of: str, address: str) -> Iterator[Any]:
    """The call, by the certificate of that site, which nobody reads but for what is asked of it."""
    found = enrolled.load(run.home(by) / enrolled.FOLDER)
    assert found is not None
    run_id = SETTINGS.run_id
    shown = asyncio.run(renew(MutualTls(run_id, found.shown), [run.address], Subject(run_id, Kind.SITE, by)))
    handshake = MutualTls(run_id, shown).towards(Kind.SITE, of)
    header = common_pb2.Header(protocol_version=PROTOCOL_VERSION, run_id=run_id, site_id=site_id)
    request = peer_pb2.FetchStateRequest(header=header, chunks=range(NUM_CHUNKS))
    options = [transport.expects(handshake), ("grpc.max_receive_message_length", transport.MAX_FRAME_BYTES)]
    with grpc.secure_channel(address, handshake.credentials, options=options) as channel:
        fetch: Any = channel.unary_stream(FETCH_STATE_METHOD)
        yield fetch(request.SerializeToString(), timeout=LIMIT_S)


def test_a_ban_ends_what_a_site_has_open_in_the_middle_of_it(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS, secured=True) as run:
        run.start_coordinator()
        for name in "ab":
            run.start_node(name, MODEL)
        run.wait(lambda s: s["last_commit"] >= 1, LIMIT_S)
        run.start_node("c", MODEL, extra=("--max-upload-mbit", "2"))

        def sends(status: dict[str, Any]) -> bool:
            return any(s["name"] == "c" and s["sent_bytes"] > BEGUN_BYTES for s in status["sites"])

        status = run.wait(sends, LIMIT_S, "c is in the middle of an exchange")
        before, sites = status["last_commit"], {site["name"]: site for site in status["sites"]}
        with fetching_state(run, "c", sites["c"]["site_id"], "a", sites["a"]["address"]) as state:
            num_bytes = len(next(state))
            admin.ask(run.store_path, "ban", name="c", reason="it lies")
            with pytest.raises(grpc.RpcError) as ended:
                num_bytes += sum(map(len, state))
        assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED, ended.value
        assert "site c of run secret-run is banned" in str(ended.value.details())
        assert num_bytes < 4 * CHUNK_ELEMENTS * NUM_CHUNKS, "it did not get the whole state"
        assert run.wait_all(LIMIT_S, ["c"]) == {"c": RefusedError.exit_code}
        status = run.wait(lambda s: s["last_commit"] > before + 1, LIMIT_S, "the others go on")
        assert all("c" not in commit["contributors"] for commit in status["commits"])
        assert status["num_evicted"] <= 1, "of whom c may be"
