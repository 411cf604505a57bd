"""Exchanges of a host of several exchange processes, as its node sees them: a process puts the payloads of its chunks
into the node's file, and says where; the exchange of the node is complete when it has those of all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from atoll.node import host_protocol as hosts
from atoll.node import process_protocol as processes
from atoll.node.daemon.exchange_processes.attached import AttachedProcess, Processes
from atoll.node.daemon.plane import DataPlane
from atoll.node.daemon.shared_exchanges import SharedExchanges, key_of
from atoll.node.dataplane import payload_part
from atoll.node.dataplane.payload_file import PayloadFile
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.sync_data import SyncData
from atoll.node.tasks import Tasks
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, InvalidMessage, StateError
from atoll.protocol.threads import run_to_its_end

REGION_FACTOR = 2
"""A payload that comes twice at once may be put twice. What is not used is a hole in the file."""
InLog = tuple[processes.AttemptInLog, ...]


@dataclass(slots=True, kw_only=True)
class _Collected:
    """Of the newest attempt at a sync."""

    plan: m.Plan
    data: SyncData
    file: PayloadFile
    regions: dict[int, list[range]]
    """By process, of each time that this attempt was begun."""


@dataclass(eq=False, kw_only=True)
class ProcessExchanges(SharedExchanges[AttachedProcess]):
    attached: Processes
    tasks: Tasks
    _collected: dict[int, _Collected] = field(default_factory=dict, init=False)
    """By sync."""
    _log: PayloadLog | None = field(default=None, init=False)

    async def wait_for(self, plan: m.Plan) -> bool:
        """A process that is started anew; whether there was one. Raises StateError naming it, if it takes a stall's
        time."""
        if not self.attached.not_ready:
            return False
        try:
            async with asyncio.timeout(plan.stall_limit_s):
                await self.attached.until(lambda: not self.attached.not_ready)
        except TimeoutError:
            numbers = ", ".join(map(str, self.attached.not_ready))
            raise StateError(f"exchange process {numbers} of this host is not ready: see the log for why") from None
        return True

    async def begin(self, word: hosts.BeginAtHost, plane: DataPlane, data: SyncData) -> None:
        """Before the node begins: if `data` is of a part of its chunks, processes have the others. They are ready."""
        plan = word.plan
        for sync in self._collected.keys() - {plan.sync, *word.in_flight}:
            self.drop(sync)  # of a site that was evicted, and never heard how it ended
        self.replace(plan)
        if not self.attached.numbers or data.own is None:
            return
        self._log, taking_part = plane.log, list(self.attached.values())
        collected, said = await run_to_its_end(lambda: self._prepared(word, plane, data))
        self._collected[plan.sync] = collected
        self.take_part(plan, taking_part)
        for process in taking_part:
            if self.attached.is_here(process):
                process.say(said[process.number])
            else:
                self.lost(process)
        if lacking := self.attached.not_ready:
            raise StateError(f"exchange process {', '.join(map(str, lacking))} of this host has ended just now")

    def _prepared(
        self, word: hosts.BeginAtHost, plane: DataPlane, data: SyncData
    ) -> tuple[_Collected, dict[int, processes.BeginInProcess]]:
        """In a thread."""
        plan, own_of = word.plan, plane.parts
        file = plane.log.begin(plan.sync, plan.term, plan.attempt, plan.fragment)
        before = self._collected.get(plan.sync)
        regions = before.regions if before is not None and key_of(before.plan) == key_of(plan) else {}
        collected = _Collected(plan=plan, data=data, file=file, regions=regions)
        last, left_errors, in_force = _of_base(plane, data), _left_errors(plane, data), _in_force(plane.log)
        said = {}
        for number in self.attached.numbers:
            chunks = [chunk for chunk in data.chunks if chunk in own_of[number]]
            num_bytes = sum(data.payload_bytes(chunk, len(plan.contributors)) for chunk in chunks)
            region = file.set_aside(REGION_FACTOR * num_bytes)
            regions.setdefault(number, []).append(region)
            held = payload_part.stored(file, chunks)
            said[number] = processes.BeginInProcess(
                begun=word,
                region_start=region.start,
                region_end=region.stop,
                held=held if len(held) <= processes.MAX_ENTRIES_BYTES else b"",
                last=last,
                left_errors=left_errors,
                in_force=in_force,
                kept="" if data.kept is None else data.kept.file.path.name,
            )
        return collected, said

    def _fail(self, plan: m.Plan, error: AtollError) -> None:
        super()._fail(plan, error)
        self.cancel(plan.sync, plan.attempt)

    def drop(self, sync: int) -> None:
        """It is over. A process drops errors of averages that are not in force then."""
        self._forget(sync)
        self._collected.pop(sync, None)
        for process in self.attached.values():
            for key in [key for key in process.done if key[0] == sync]:
                del process.done[key]
        if self.attached.numbers:
            self.tasks.spawn(self._drop(sync))

    async def _drop(self, sync: int) -> None:
        log = self._log
        in_force = () if log is None else await run_to_its_end(lambda: _in_force(log))
        for process in self.attached.values():
            process.say(processes.DropInProcess(sync=sync, in_force=in_force))

    def abandon(self) -> None:
        """All of them: this host has lost the one that leads it."""
        for sync in list(self._shared):
            self._forget(sync)
        self._collected.clear()
        for process in self.attached.values():
            process.done.clear()
            process.say(processes.AbandonAll())

    def stored(self, process: AttachedProcess, said: processes.PayloadsStored) -> None:
        """Raises InvalidMessage for what cannot lie there, DigestMismatch for other bytes than the file has."""
        found = self._collected.get(said.sync)
        if found is None or key_of(found.plan) != (said.sync, said.term, said.attempt):
            return  # it is over
        data, own, num = found.data, self.own_of(process.number), len(found.plan.contributors)

        def max_bytes(chunk: int) -> int:
            if chunk not in own or not data.layout.travels(chunk, data.fragment):
                raise InvalidMessage(f"{process.words} has the payload of chunk {chunk}, which is not its own")
            return data.payload_bytes(chunk, num)

        regions = found.regions[process.number]
        self.hub.have_payloads(found.plan, payload_part.adopt(found.file, said.entries, regions, max_bytes))


def _of_base(plane: DataPlane, data: SyncData) -> tuple[processes.LastCommit, ...]:
    """Of each fragment that travels, the commit that led to the base, if the log has it."""
    found = []
    for fragment in _fragments(data):
        try:
            commit = plane.log.history.touch(fragment, data.base_commit)
            if commit:
                found.append(processes.LastCommit(fragment=fragment, commit=plane.log.record(commit)))
        except StateError:
            continue
    return tuple(found)


def _left_errors(plane: DataPlane, data: SyncData) -> InLog:
    found = ((fragment, plane.log.attempt_of(fragment, data.base_commit)) for fragment in _fragments(data))
    return tuple(processes.AttemptInLog.of(key, fragment) for fragment, key in found if key is not None)


def _fragments(data: SyncData) -> range:
    num = len(data.layout.fragments)
    return range(data.fragment, data.fragment + 1) if data.fragment < num else range(num)


def _in_force(log: PayloadLog) -> InLog:
    return tuple(map(processes.AttemptInLog.of, sorted(log.attempts_in_force())))
