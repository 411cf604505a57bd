"""The data plane of one site behind async calls: one lock around the outer state, the work itself in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from atoll.node.computing import compute
from atoll.node.core.events import Content
from atoll.node.daemon.home import Home
from atoll.node.daemon.published import Published
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.dataplane import publish, saved_model
from atoll.node.dataplane.bases import check_base_dtypes
from atoll.node.dataplane.error_feedback import ErrorFeedback
from atoll.node.dataplane.frozen_state import FrozenState
from atoll.node.dataplane.optim import OuterOptimizer, OuterUpdate
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.places import spares_for
from atoll.node.dataplane.rebuild import Rebuilder
from atoll.node.dataplane.snapshot import Snapshots
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.threads import each
from atoll.protocol.endpoints import Places
from atoll.protocol.errors import ConfigError, HostError, StateError
from atoll.protocol.layout import Layout, Manifest
from atoll.protocol.messages import Commit, Evidence
from atoll.protocol.plans import weights
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of

log = logging.getLogger("atoll.node")


class DataPlane:
    """Outer state, payload log and the two shared buffers of one site. `dtypes`: the workers' own, by tensor."""

    def __init__(self, home: Home, settings: RunSettings, manifest: Manifest, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="apply") if num_threads > 1 else None
        self._on_disk = home.disk, spares_for(num_threads)
        self._is_distrusted = False  # until it is fetched or seeded anew
        self.own: range | None = None  # chunks that this host exchanges; None: all of them
        self.own_part: range | None = None  # the same of this process
        self.of_hosts: list[range] = [range(0)]  # of each host of the site
        self.parts: list[range] = [range(0)]  # of each process of this host
        self.home, self.settings = home, settings
        self.layout = Layout(manifest, settings.sync.chunk_elements, settings.sync.fragments)
        self.optimizer = OuterOptimizer(settings)
        self._of_run = self.layout, self.optimizer.slots, settings.run_id
        self._history = lambda: self.log.history
        found = OuterState.found(home.state_folder, *self._of_run, num_threads=num_threads, history=self._history)
        self.outer = found  # a folder of another run was refused before anything is removed there
        self.snapshots = Snapshots(home.snapshot_folder, *self._of_run, self.log.sync)
        self._snapshot: asyncio.Future[None] | None = None  # being written
        self._snapshot_began = 0  # at this commit
        self._shown: tuple[tuple[Evidence, int, int, int], bytes] | None = None  # for the next part
        self._num_changes = 0  # of the state, but for those by commits: what was shown before is another one's
        self._num_rebuilding = 0  # older commits are put together: no snapshot takes away what they are made of
        self._spared_until = 0  # the run has not gone back if a commit after this one is applied
        self._rebuild()
        self.snapshot: SharedBuffer | None = None
        self.published = Published(self.layout, settings, home, self._shared_buffer)
        self.errors = ErrorFeedback.found(home.error_folder, self.layout, settings, home.disk, num_threads)
        self.dtypes: Mapping[str, str] = {}
        self.lock = asyncio.Lock()
        """Around what changes or copies the whole outer state. The core begins one job at a time; what runs beside it
        is kept apart here: the end of a fetch that was cancelled, and a state that is frozen for a model, put aside for
        a rollback, or mended after a snapshot."""

    def divide(self, host: int, num_hosts: int, num_processes: int = 1) -> None:
        """Among the hosts of the site, each of which has error feedback of its `own` chunks alone; and among the
        processes of this host, of which this one exchanges `own_part` where all take part."""
        places = Places.of(self.layout.manifest, self.layout.chunk_elements, num_hosts, num_processes)
        self.of_hosts = [places.of_host(number) for number in range(num_hosts)]
        self.own = self.of_hosts[host] if num_hosts > 1 else None
        self.parts = [places.of_process(host, process) for process in range(num_processes)]
        self.own_part = self.own if num_processes == 1 else self.parts[0]

    @cached_property
    def log(self) -> PayloadLog:
        """Read when the outer state asks for its history: its folder is seen to be of this run then, and held."""
        return PayloadLog(self.home.payload_folder, self.layout, self.settings, disk=self.home.disk)

    @classmethod
    def load(cls, home: Home, settings: RunSettings, num_threads: int) -> Self | None:
        """What an earlier start of this node left on disk, if it holds a whole state."""
        manifest = home.read_manifest()
        return None if manifest is None else cls(home, settings, manifest, num_threads)

    def attach_workers(self, dtypes: Mapping[str, str], *, read_in_place: bool = False) -> None:
        """In a thread: allocate the shared buffers (once) and note what the workers receive, and whether they can read
        the outer values in place.

        Raises ConfigError for a dtype that has no base, HostError for the memory or the disk.
        """
        check_base_dtypes(self.layout.manifest, dtypes)
        self.dtypes, sync = dict(dtypes), self.settings.sync
        self.published.attach(read_in_place=read_in_place)
        if self.snapshot is None:
            self.snapshot = self._shared_buffer(self.layout.buffer_bytes, "snapshot")
            if sync.error_feedback and self.errors is None:
                self.errors = ErrorFeedback.create(self.home.error_folder, self.layout, self.settings, *self._on_disk)
            self.home.keep_manifest(self.layout.manifest)

    def _shared_buffer(self, num_bytes: int, name: str) -> SharedBuffer:
        return SharedBuffer(num_bytes, name)

    def held(self) -> tuple[int, bytes] | None:
        """Commit and state hash of a whole outer state."""
        if self.outer is None or self.outer.commit is None:
            return None
        return self.outer.commit, self.outer.state_hash()

    def fresh_outer(self) -> OuterState:
        """In a thread: an empty outer state to seed or fetch into; one that is partly fetched is kept."""
        self._is_distrusted = False
        if self.outer is None:
            self.outer = OuterState.create(self.home.state_folder, *self._of_run, *self._on_disk)
            self.outer.history = self._history
        return self.outer

    @asynccontextmanager
    async def fetching(self) -> AsyncIterator[OuterState]:
        """What is to be fetched into; nobody else works on it."""
        async with self._changing():
            self.snapshots.void()  # one with chunks from before and after would need commits that no log here has
            try:
                yield await compute(self.fresh_outer)
            finally:
                self.snapshots.void()

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Another state may be at the same commit then."""
        async with self.lock:
            try:
                yield
            finally:
                self._num_changes += 1

    def _rebuild(self) -> None:
        """The newest whole state that this disk gives, if any."""
        if self.outer is None and self.snapshots.files:
            self.outer = self.fresh_outer()
        if self.outer is not None:
            self._rebuilder(self.outer).rebuild()

    def _rebuilder(self, outer: OuterState) -> Rebuilder:
        return Rebuilder(outer, self.log, self.snapshots, self.optimizer)

    async def roll_back(self, commit: int) -> tuple[int, bytes] | None:
        """Removes everything of later commits, whose numbers others have soon; what is held then, up to `commit`."""

        def work() -> tuple[int, bytes] | None:
            if self.errors is not None:
                self.errors.roll_back(commit)
            self.log.roll_back(commit)
            self.published.roll_back(commit)
            is_void = self.outer is not None and any((version or 0) > commit for version in self.outer.versions)
            if is_void:
                self.published.leave()
                self.outer = None
                OuterState.discard(self.home.state_folder)
            self.snapshots.roll_back(commit)  # after it: a snapshot that begins now is not of a void state
            if is_void:
                self._rebuild()
            return self.held()

        async with self._changing():
            return await compute(work)

    async def put_aside(self, commit: int, expected: bytes, last_commit: int) -> bytes:
        """The state at an older commit, as a snapshot beside the one that is held; its hash.

        Raises StateError if it cannot be put together here, or does not have the hash `expected` (if that is known),
        HostError for the disk.
        """

        def work() -> bytes:
            if self.outer is None or self.outer.commit is None or self._is_distrusted:
                raise StateError("this site holds no whole state")
            found = self._rebuilder(self.outer).put_aside(commit, expected)
            self._spared_until = last_commit
            return found

        self._num_rebuilding += 1
        try:
            if self._snapshot is not None:
                await asyncio.shield(self._snapshot)
            async with self.lock:
                return await compute(work)
        finally:
            self._num_rebuilding -= 1

    def oldest(self) -> int | None:
        """The oldest commit that `put_aside` may give."""
        return None if self.outer is None else self._rebuilder(self.outer).oldest()

    async def show(self, evidence: Evidence, commit: int, chunk: int) -> bytes:
        """What settles a dispute over `commit` or the one after it. It is asked for in parts, so the last one is kept.
        Without the lock: who asks checks what comes. Raises StateError if it is not here."""
        asked = evidence, commit, chunk, self._num_changes
        if self._shown is not None and self._shown[0] == asked:
            return self._shown[1]
        self._shown = None
        found = await compute(partial(self._evidence, evidence, commit, chunk))
        self._shown = asked, found
        return found

    def _evidence(self, evidence: Evidence, commit: int, chunk: int) -> bytes:
        if (outer := self.outer) is None:
            raise StateError("this site holds no state")
        match evidence:
            case Evidence.CHUNK_HASHES:
                if (hashes := outer.chunk_hashes(commit)) is None:
                    raise StateError(f"the hashes of the chunks after commit {commit} are not here any more")
                return b"".join(hashes)
            case Evidence.RECORD if chunk < self.layout.num_sync_chunks:
                return self._rebuilder(outer).record_at(chunk, commit).data
            case Evidence.PAYLOAD_HASHES:
                return self.log.hashes_of(commit)
            case Evidence.PAYLOAD:
                return self.log.read(commit, chunk)
        raise StateError(f"{evidence.name.lower()} of chunk {chunk} cannot be shown")

    async def distrust(self) -> list[int]:
        """Drops chunks that are damaged, and all snapshots and errors: they may have been made of a wrong state, and no
        other is made of it."""
        self._is_distrusted = True

        def work() -> list[int]:
            self.snapshots.clear()
            self.published.distrust()
            if self.errors is not None:
                self.errors.roll_back(-1)
            damaged = self.outer.damaged() if self.outer is not None else []
            for chunk in damaged:
                assert self.outer is not None
                self.outer.forget(chunk)
            return damaged

        async with self.lock:
            return await compute(work)

    def _apply_chunk(self, outer: OuterState, chunk: int, update: OuterUpdate) -> None:
        outer.apply(chunk, self.log.read(update.commit, chunk), update)

    async def seed(self, saved: Path | None) -> bytes:
        """Commit 0 from SNAPSHOT, from a saved model or from a folder of Hugging Face's; the state hash."""

        def work() -> bytes:
            outer = self.fresh_outer()
            if saved is not None:
                saved_model.begin_from(saved, self.settings.model, outer)
            else:
                assert self.snapshot is not None
                publish.seed_from_snapshot(outer, self.snapshot.view)
            return outer.state_hash()

        async with self.lock:
            return await compute(work)

    def sync_data(
        self, base_commit: int, fragment: int, error_commits: tuple[int, ...], own: range | None = None
    ) -> SyncData:
        """Raises StateError if a rollback has left no outer state, InvalidMessage if there is no such fragment."""
        assert self.snapshot is not None
        return SyncData(
            self.layout,
            spec_of(self.settings.sync, base_commit, fragment),
            self._present_outer(),
            self.snapshot.view,
            self.dtypes,
            last_payload=partial(self._payload_of, base_commit),
            fragment=fragment,
            base_commit=base_commit,
            errors=self.errors,
            error_commits=error_commits,
            beta1=self.settings.outer.momentum,
            own=own,
        )

    async def advance_errors(self, commit: int, data: SyncData) -> float:
        """What `commit`, which holds this site's contribution, leaves of it; its norm, see `ErrorFeedback.advance`."""
        assert self.errors is not None
        async with self.lock:
            return await compute(
                partial(self.errors.advance, filter(data.is_own, data.chunks), commit, data.left_over, self._pool)
            )

    def _present_outer(self) -> OuterState:
        """Under the lock it stays so. Raises StateError if a rollback has left none."""
        if (outer := self.outer) is None:
            raise StateError(f"{self.home.state_folder}: the outer state is gone, as the run has gone back")
        return outer

    def _payload_of(self, base_commit: int, chunk: int) -> tuple[bytes, tuple[int, ...]] | None:
        """That led to the base."""
        try:
            commit = self.log.history.touch(self.layout.fragment_of[chunk], base_commit)
            return (self.log.read(commit, chunk), weights(self.log.record(commit))) if commit else None
        except StateError:
            return None  # fetched as a state, or damaged

    async def apply(self, commit: Commit, *, lets_go: bool = False) -> bytes:
        """The state hash after `commit`. `lets_go`: no rank reads PUBLISH before the next publish. Raises StateError if
        its payloads are not in the log or not its own."""

        def work() -> bytes:
            outer = self._present_outer()
            if lets_go:
                self.published.let_go()
            if commit.commit > self._spared_until:
                self.snapshots.spared = None
            self._shown = None
            self.log.commit(commit)
            chunks, update = self.layout.chunks_of(commit.fragment), self.optimizer.at(commit)
            each(lambda chunk: self._apply_chunk(outer, chunk, update), chunks, self._pool)
            if outer.commit != commit.commit:
                raise StateError(f"after commit {commit.commit} the outer state is at {outer.commit}")
            return outer.state_hash()

        await self._keep_log_for_snapshot(commit)  # without the lock, which `_mend` takes
        async with self.lock:
            return await compute(work)

    # --- snapshots

    @property
    def snapshot_is_due(self) -> bool:
        commit = self.outer.commit if self.outer is not None else None
        if commit is None or self._snapshot is not None or self._num_rebuilding:
            return False
        num_kept, files = self.settings.sync.snapshots, self.snapshots.files  # a thread may put others in their place
        every = max(1, self.log.num_kept // (num_kept + 1))
        return num_kept > 0 and (not files or commit >= files[0].newest + every)

    async def write_snapshot(self) -> None:
        """Commits go on meanwhile. If chunks turn out to be damaged, they are put together again instead.

        Raises StateError if that cannot be done here, HostError for the disk.
        """
        num_cleared, outer = self.snapshots.num_cleared, self.outer  # a rollback in a thread takes `outer` away first
        if outer is None or self._is_distrusted:
            return  # since it was due
        keep, done = self.settings.sync.snapshots, asyncio.get_running_loop().create_future()
        self._snapshot, self._snapshot_began = done, outer.commit or 0
        try:
            await compute(partial(self.snapshots.write, outer, keep, num_cleared))
        except StateError as error:
            log.error("%s", error)
            await self._mend()
        finally:
            self._snapshot = None
            done.set_result(None)

    async def _mend(self) -> None:
        """Damaged chunks anew, from an older snapshot and the log."""
        if (outer := self.outer) is None:
            return  # discarded, or rolled back, since the snapshot was begun

        def work() -> None:
            before, damaged = self.held(), outer.damaged()
            for chunk in damaged:
                outer.forget(chunk)
            if damaged:
                self._rebuilder(outer).rebuild()
                self.published.mended(outer, damaged, self._pool)
            if before is not None and self.held() != before:
                raise StateError(
                    f"{outer.folder}: {len(damaged)} chunks are damaged and cannot be put together here; start this "
                    "node again, and it fetches them"
                )

        async with self.lock:
            await compute(work)

    async def _keep_log_for_snapshot(self, commit: Commit) -> None:
        """The log drops what is too old at each commit: never what the newest snapshot still needs."""
        if self._snapshot is None:
            return
        history, began, first = self.log.history, self.log.history.touched(self._snapshot_began), commit.commit
        for oldest in (*(file.oldest for file in self.snapshots.files[:1]), began or ()):
            with suppress(StateError):  # the log does not lead on from it any more
                first = min((history.following(f, version) for f, version in enumerate(oldest)), default=first)
                break
        if first + self.log.num_kept_after(commit) <= commit.commit:
            await asyncio.shield(self._snapshot)  # who waits for it may be cancelled, it may not

    async def publish(self, content: Content) -> None:
        """Fill PUBLISH for a fragment; see `Published.fill`."""

        def work() -> None:
            self.published.fill(content, self._present_outer(), self.dtypes, self._pool)

        async with self.lock:
            await compute(work)

    @asynccontextmanager
    async def frozen(self, commit: int) -> AsyncIterator[FrozenState]:
        """The outer state, which is at `commit`. Commits go on meanwhile. Raises StateError if it has gone on
        already."""
        async with self.lock:
            frozen = await compute(self._present_outer().freeze)
        try:
            if frozen.commit != commit:
                raise StateError(f"the model of commit {commit} is to be saved, the outer state is at {frozen.commit}")
            yield frozen
        finally:
            await compute(frozen.close)

    async def save(
        self, frozen: FrozenState, folder: Path, info: Mapping[str, Any], instead: Path | None = None
    ) -> Exception | None:
        """Write the model beside `folder`. If it cannot be written there it is beside `instead`; then the reason is
        returned."""
        try:
            await self._write_model(folder, frozen, info)
        except (HostError, ConfigError, OSError) as error:
            if instead is None:
                raise
            await self._write_model(instead, frozen, info)
            return error
        return None

    async def _write_model(self, folder: Path, frozen: FrozenState, info: Mapping[str, Any]) -> None:
        slots = self.optimizer.slots
        write = partial(saved_model.write_aside, folder, frozen, self.layout, slots, info, disk=self.home.disk)
        await compute(write)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self.log.close()
        self.published.close()
        if self.snapshot is not None:
            self.snapshot.close()
