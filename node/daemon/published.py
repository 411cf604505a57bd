"""PUBLISH of a host: its buffer, what that holds of each fragment, and where ranks that read in place find the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from atoll.node.core.events import Content, Difference, Values
from atoll.node.daemon.home import Home
from atoll.node.daemon.publish_file import PublishFile
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.dataplane import publish
from atoll.node.dataplane.in_place import InPlace
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.pages import can_read_in_place
from atoll.protocol import file_systems
from atoll.protocol.errors import StateError
from atoll.protocol.layout import Layout
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings

log = logging.getLogger("atoll.node")


def gains_in_place(layout: Layout, sync: SyncSettings, folder: Path) -> bool:
    """Whether ranks that can are to read the outer values in place: run and model let them, and the disk is of this
    machine, as what a late rank still reads is written there at each commit."""
    return can_read_in_place(layout, sync) and file_systems.kind_of(folder) not in file_systems.NETWORK


class Published:
    """Methods come one at a time, in a thread."""

    def __init__(
        self, layout: Layout, settings: RunSettings, home: Home, shared_buffer: Callable[[int, str], SharedBuffer]
    ) -> None:
        self._layout, self._sync, self._home, self._shared_buffer = layout, settings.sync, home, shared_buffer
        self.buffer: SharedBuffer | None = None
        self.content: dict[int, Content] = {}  # of each fragment
        self._has_frozen = False
        self._in_place: InPlace | None = None  # if the buffer is a file
        self._reads_in_place = False  # the workers that are attached

    def attach(self, *, read_in_place: bool) -> None:
        """To workers that can take outer values from the outer file, if run and model let them, or cannot. The buffer
        is allocated once. Raises HostError."""
        read_in_place = read_in_place and gains_in_place(self._layout, self._sync, self._home.folder)
        if self.buffer is None and read_in_place:
            home, folder = self._home, self._home.state_folder
            self.buffer = PublishFile(self._layout, home.folder, folder, home.disk)
            self._in_place = InPlace(self._layout, self.buffer.view, OuterState.path(folder))
            log.info("the workers read the outer values where they lie, and PUBLISH holds no copy of them")
        elif self.buffer is None:
            moment_bytes = self._sync.num_shared_moments * self._layout.moment_bytes
            self.buffer = self._shared_buffer(self._layout.buffer_bytes + moment_bytes, "publish")
        self._reads_in_place = read_in_place and self._in_place is not None
        if not self._reads_in_place:
            self.keep()

    @property
    def outer_name(self) -> str:
        """For ranks that read there; empty if these do not."""
        return OuterState.path(self._home.state_folder).name if self._reads_in_place else ""

    def fill(self, content: Content, outer: OuterState, dtypes: Mapping[str, str], pool: Executor | None) -> None:
        """Raises StateError if the outer state is not at that version, or if PUBLISH does not hold the values that a
        difference starts from."""
        assert self.buffer is not None
        held, chunks = self.content.pop(content.fragment, None), self._layout.fragments[content.fragment]
        if outer.commit != content.version:
            raise StateError(f"{content} cannot be published: the outer state is at commit {outer.commit}")
        if isinstance(content, Difference):
            if held != Values(content.base, content.fragment):
                raise StateError(f"{content} cannot be made of what the shared buffer holds, {held}; start again")
            self.keep()
            publish.publish_shift(outer, self.buffer.view, chunks, dtypes, pool)
        else:
            frozen = () if self._has_frozen else self._layout.frozen_chunks
            if self._in_place is not None and self._reads_in_place:
                chunks = tuple(self._in_place.publish(outer, chunks))
            else:
                self.keep()  # of ranks that read in place, if there were any until now
            num_moments = self._sync.moments_at(content.version)
            publish.publish_replace(outer, self.buffer.view, [*chunks, *frozen], pool, num_moments)
            self._has_frozen = True
        if self._in_place is not None:
            self._in_place.unmap()
        self.content[content.fragment] = content

    def keep(self) -> None:
        """The buffer holds all of it from now on, whatever becomes of the outer state."""
        if self._in_place is not None:
            self._in_place.move_all()

    def let_go(self) -> None:
        """No rank reads it before it is filled again: what is read in place is not kept."""
        if self._in_place is not None:
            self.content = {}
            self._in_place.let_go()

    def mended(self, outer: OuterState, chunks: Sequence[int], pool: Executor | None) -> None:
        """Records that were damaged, perhaps before they were moved here, are whole again."""
        held = {f for f, content in self.content.items() if (content.version, f) == (outer.commit, content.fragment)}
        again = [chunk for chunk in chunks if self._layout.fragment_of[chunk] in held]
        if self._in_place is not None and self.buffer is not None:
            publish.publish_replace(outer, self.buffer.view, again, pool)

    def leave(self) -> None:
        """The outer state, which is discarded."""
        if self._in_place is not None:
            self._in_place.leave()

    def roll_back(self, commit: int) -> None:
        """What it holds of later commits does not count."""
        self.content = {f: content for f, content in self.content.items() if content.version <= commit}

    def distrust(self) -> None:
        """It may have been made of a wrong state."""
        self._has_frozen, self.content = False, {}

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()
