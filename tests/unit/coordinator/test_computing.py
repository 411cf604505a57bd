"""What the coordinator computes beside its event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.coordinator.computing import Computing
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core import events as e
from atoll.coordinator.core.sites import manifests
from atoll.coordinator.service import CoordinatorServer
from tests.harness.coordinator_story import some_settings
from tests.harness.memory_store import MemoryStore

LIMIT_S = 60.0
ASKED = e.ReadManifest(stream=1, data=b"", settings=some_settings(min_sites=2), known=None)


def test_a_fault_in_what_is_computed_beside_ends_the_coordinator_and_does_not_leave_it_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(asked: e.ReadManifest) -> e.ManifestRead:
        raise LookupError("a fault of this program")

    monkeypatch.setattr(manifests, "read", fails)

    async def main() -> None:
        config = CoordinatorConfig(listen="127.0.0.1:0", store_path=tmp_path / "run.db", insecure=True)
        server = CoordinatorServer(config, some_settings(min_sites=2), MemoryStore())
        await server._execute([ASKED])
        async with asyncio.timeout(LIMIT_S):
            await server.run()

    with pytest.raises(LookupError, match="a fault of this program"):
        asyncio.run(main())


def test_a_manifest_on_which_reading_fails_in_a_way_that_nobody_foresaw_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nobody else could offer a model, and whoever sent it could end the coordinator. The log has where it was."""

    def fails(data: bytes, limit: int | None) -> None:
        raise RecursionError

    monkeypatch.setattr("atoll.protocol.wire.decode_manifest", fails)

    async def main() -> e.ManifestRead:
        heard: asyncio.Future[e.Event] = asyncio.get_running_loop().create_future()
        ended = AssertionError("it ends the coordinator")
        Computing(heard.set_result, lambda: heard.set_exception(ended)).begin(ASKED)
        async with asyncio.timeout(LIMIT_S):
            found = await heard
        assert isinstance(found, e.ManifestRead)
        return found

    found = asyncio.run(main())
    assert (found.stream, found.problem, found.manifest) == (1, "RecursionError()", None)
    assert "in fails\n    raise RecursionError" in caplog.text
