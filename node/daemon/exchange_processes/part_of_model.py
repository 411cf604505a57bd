"""What an exchange process has of the site's model, and its part of an exchange."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.node import process_protocol as processes
from atoll.node.daemon.followed_exchanges import FollowedExchanges
from atoll.node.daemon.home import HomeFolders
from atoll.node.dataplane import error_feedback, outer_state, payload_part
from atoll.node.dataplane.kept_contributions import kept_by_node
from atoll.node.dataplane.optim import OuterOptimizer
from atoll.node.dataplane.payload_part import LastPayloads, PartLog
from atoll.node.dataplane.shared_records import SharedErrors, SharedOuter, SharedRecords
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.exchange.sync.exchange import Exchange
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Layout
from atoll.protocol.settings import RunSettings
from atoll.protocol.spec import spec_of

ENTRIES_AT_ONCE = 4096
"""Payloads of which it is said in one message where they lie."""


@dataclass(eq=False, kw_only=True)
class PartExchanges(FollowedExchanges):
    """Of this process: payloads are in the node's file where they are put, and the node hears where that is."""

    say_stored: Callable[[processes.PayloadsStored], None]

    async def move(self, exchange: Exchange) -> None:
        plan, collection = exchange.plan, exchange.collection
        num_seen, num_all = 0, len(exchange.attempt.data.chunks)
        while num_seen < num_all:
            fresh = await collection.arrived(num_seen)
            num_seen += len(fresh)
            for start in range(0, len(fresh), ENTRIES_AT_ONCE):
                entries = payload_part.stored(collection.file, fresh[start : start + ENTRIES_AT_ONCE])
                self.say_stored(
                    processes.PayloadsStored(sync=plan.sync, term=plan.term, attempt=plan.attempt, entries=entries)
                )


class PartOfModel:
    """What this process exchanges, from a layout on."""

    def __init__(self, folders: HomeFolders, settings: RunSettings, told: processes.ProcessLayout, fd: int) -> None:
        """In a thread. `fd`: of SNAPSHOT, which it takes. Raises InvalidMessage, OSError."""
        with os.fdopen(fd, "r+b", buffering=0) as shared:
            self.layout = layout = Layout(told.manifest, told.chunk_elements, settings.sync.fragments)
            if (size := os.fstat(fd).st_size) < layout.buffer_bytes:
                raise InvalidMessage(f"SNAPSHOT has {size} bytes, the model {layout.buffer_bytes}")
            self._snapshot = memoryview(mmap.mmap(shared.fileno(), layout.buffer_bytes))
        if len(told.dtypes) != len(told.manifest.tensors):
            raise InvalidMessage(f"{len(told.dtypes)} dtypes of {len(told.manifest.tensors)} tensors")
        names = (spec.name for spec in told.manifest.tensors)
        self._dtypes = dict(zip(names, told.dtypes, strict=True))
        self._settings = settings
        self._folders = folders
        self._own = range(told.first_chunk, told.end_chunk)
        slots = OuterOptimizer(settings).slots
        self._outer = SharedRecords(folders.state_folder, outer_state.kind_of(layout, slots, settings.run_id))
        self._errors: SharedRecords | None = None
        if settings.sync.error_feedback:
            self._errors = SharedRecords(folders.error_folder, error_feedback.kind_of(layout, settings))
        self.log = PartLog(folders.payload_folder, layout, settings.run_id)

    def data_of(self, told: processes.BeginInProcess) -> SyncData:
        """In a thread. Raises StateError if the node has no state, or lets go of it now; so of what it
        kept of this site's contributions."""
        begun, plan = told.begun, told.begun.plan
        self._outer.look_anew()
        errors: SharedErrors | None = None
        if self._errors is not None:
            self._errors.look_anew()
            errors = SharedErrors(self.layout, np.float32(self._settings.sync.error_feedback), self._errors)
        commits = {last.fragment: last.commit for last in told.last}
        data = SyncData(
            self.layout,
            spec_of(self._settings.sync, plan.base_commit, plan.fragment),
            SharedOuter(self.layout, self._outer),
            self._snapshot,
            self._dtypes,
            last_payload=LastPayloads(self._folders.payload_folder, self.layout, self._settings.run_id, commits),
            fragment=plan.fragment,
            base_commit=plan.base_commit,
            errors=errors,
            error_commits=begun.error_commits,
            beta1=self._settings.outer.momentum,
            own=self._own,
            keeps_own_alone=True,
        )
        data.is_audited = self._settings.sync.audits > 0
        if told.kept:
            data.kept = kept_by_node(self._folders.kept_folder / Path(told.kept).name, plan.sync, data.all_chunks)
        return data
