"""Followers of `tests.harness.hosts` that run, without processes, and ends of local sockets in the place of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.node import local_protocol as local
from atoll.node.daemon.home import Home
from atoll.node.daemon.hosts import follower as follower_module
from atoll.node.daemon.hosts import leader as leader_module
from atoll.node.daemon.hosts.follower import Follower
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.rank_commands import Meeting
from atoll.node.local_protocol import LOCAL_VERSION, Greeting
from atoll.node.tasks import end
from atoll.protocol import wire
from atoll.protocol.errors import AtollError
from atoll.protocol.layout import Manifest
from atoll.protocol.time_limits import PRESETS
from atoll.protocol.v1 import local_pb2
from tests.harness.data_plane import filled
from tests.harness.hosts import LIMITS, MEETING, Led, config_of
from tests.harness.model_on_hosts import MANIFEST, SETTINGS, pieces_of_site

GREETING = Greeting(settings_json="{}", data_paths=("/of/host/0",), checkpoint_folder="/home/of/host/0")


class FakeLauncher:
    """In the place of a follower's: a test is the ranks."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[tuple[int, str, Meeting | None]] = asyncio.Queue()
        self.stopped: asyncio.Queue[None] = asyncio.Queue()
        self.error: AtollError | None = None
        self.script_s = 0.0
        """That its scripts go on, of the time for which they are waited for."""

    async def start(self, generation: int, socket_path: str, meeting: Meeting | None = None) -> None:
        if self.error is not None:
            raise self.error
        self.started.put_nowait((generation, socket_path, meeting))

    async def stop(self) -> None:
        self.stopped.put_nowait(None)

    async def wait(self, limit_s: float) -> bool:
        self.script_s -= limit_s
        return self.script_s < 0


class Following:
    """A follower that runs, without processes."""

    def __init__(self, address: str, folder: Path, stack: AsyncExitStack, **config: Any) -> None:
        values: dict[str, Any] = {"home": folder / "host1", "data_paths": (folder / "texts",)}
        self.config = config_of(1, address, **values | config)
        self.follower = Follower(self.config, stack)
        self.launcher = FakeLauncher()
        self.follower._launcher = self.launcher  # type: ignore[assignment]
        self.task: asyncio.Task[tuple[int, str]] = asyncio.create_task(self.follower.run())

    @property
    def plane(self) -> DataPlane:
        """Once it has one."""
        endpoint = self.follower._endpoint
        assert endpoint is not None
        assert endpoint.plane is not None
        return endpoint.plane

    async def starts_ranks(self, generation: int) -> str:
        """The path of the socket at which these find it."""
        started, path, meeting = await self.launcher.started.get()
        assert (started, meeting) == (generation, MEETING)
        return path


@asynccontextmanager
async def following(address: str, folder: Path, **config: Any) -> AsyncIterator[Following]:
    async with AsyncExitStack() as stack:
        host = Following(address, folder, stack, **config)
        try:
            yield host
        finally:
            await end([host.task])


class Rank:
    """One end of a local socket. It does not map buffers."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, rank: int, generation: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self._rank, self._generation = rank, generation

    @classmethod
    async def connect(cls, path: str, rank: int, generation: int) -> Rank:
        reader, writer = await asyncio.open_unix_connection(path)
        return cls(reader, writer, rank=rank, generation=generation)

    async def says(self, said: local.Said) -> None:
        self._writer.write(local.encode_frame(local.pack(self._generation, self._rank, said)))
        await self._writer.drain()

    async def says_hello(self) -> None:
        await self.says(local.LocalHello(world_size=2, pid=7, protocol_version=LOCAL_VERSION))

    async def hears(self) -> local_pb2.LocalResponse | None:
        """None at the end of the stream."""
        try:
            size = local.frame_size(await self._reader.readexactly(local.LENGTH_BYTES))
            return local.decode(local_pb2.LocalResponse, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None

    async def is_greeted(self) -> Greeting:
        await self.says_hello()
        response = await self.hears()
        assert response is not None
        return wire.from_proto(Greeting, response.greeting)

    def close(self) -> None:
        self._writer.close()


class TwoHosts:
    """Both hosts of a site, and a rank on each."""

    def __init__(self, site: Led, path: str) -> None:
        self.site = site
        self.path = path

    async def rank(self, rank: int = 1, generation: int = 1) -> Rank:
        """One that has connected."""
        return await self.connects(self.path if rank else self.site.server.path, rank, generation)

    async def connects(self, path: str, rank: int, generation: int = 1) -> Rank:
        """At that socket, whichever rank it is."""
        found = await Rank.connect(path, rank, generation)
        self.site.ranks.append(found)
        return found


async def attached(site: Led, host: Following, *, generation: int = 1, greeting: Greeting = GREETING) -> TwoHosts:
    """The follower is in the site, and was told to start ranks."""
    await site.hosts_changed()
    site.server.serve(generation, 2, greeting)
    site.starts(generation)
    return TwoHosts(site, await host.starts_ranks(generation))


async def seeded(plane: DataPlane, *, seed: int) -> None:
    """Commit 0, of what its SNAPSHOT is given."""
    assert plane.snapshot is not None
    plane.snapshot.view[:] = filled(plane.layout, seed)
    await plane.seed(None)


def an_older_state(folder: Path, *, seed: int, branch: int = 0, manifest: Manifest = MANIFEST) -> None:
    """On the disk of host 1, of an earlier start."""
    home = Home(folder / "host1")
    home.keep_branch(branch)
    plane = DataPlane(home, SETTINGS, manifest, 1)
    plane.attach_workers(pieces_of_site().dtypes)
    asyncio.run(seeded(plane, seed=seed))
    plane.close()
    home.close()


def hosts_meet_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that lost its leader comes back soon, and a leader ends without waiting for those that hear nothing any
    more. Silence ends nothing where no test wants it to, and kernels are compiled where they are used."""
    monkeypatch.setitem(PRESETS, SETTINGS.time_limits, LIMITS)
    monkeypatch.setattr(follower_module, "RETRY_S", 0.05)
    monkeypatch.setattr(follower_module, "prepare_kernels", lambda: None)
    monkeypatch.setattr(leader_module, "CLOSE_LIMIT_S", 0.0)
    monkeypatch.setattr(leader_module, "STOP_S", 0.0)
