"""One exchange process. Its one argument is a descriptor, its end of a socket pair with its node.

It ends with its node: by the end of that connection, or by the kernel.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from atoll.node import process_protocol as processes
from atoll.node.daemon.exchange_processes.node_connection import LinesToNode, NodeConnection
from atoll.node.daemon.exchange_processes.part_of_model import PartExchanges, PartOfModel
from atoll.node.daemon.followed_exchanges import beat_of
from atoll.node.daemon.home import HomeFolders
from atoll.node.daemon.peers import listen_for_peers, make_hub, prepare_kernels, relay_client
from atoll.node.daemon.processes import die_with_parent
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.exchange.hub import Hub
from atoll.node.host_protocol import CancelAtHost, HurryAtHost
from atoll.node.local_protocol import MAX_TEXT_CHARACTERS
from atoll.node.tasks import together
from atoll.node.threads import giving_way
from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.errors import AtollError, InvalidMessage
from atoll.protocol.exit_codes import exit_code_of
from atoll.protocol.machine import REAL, Machine
from atoll.protocol.settings import settings_from_json
from atoll.protocol.threads import run_to_its_end
from atoll.protocol.trust.security import PLAIN, MutualTls, Security, Shown


class ExchangeProcess:
    """Follows its node, word by word."""

    def __init__(
        self, connection: NodeConnection, start: processes.ProcessStart, hub: Hub, security: Security = PLAIN
    ) -> None:
        self._connection = connection
        self._start = start
        self._hub = hub
        self._security = security
        self._folders = HomeFolders(Path(os.fsdecode(start.home)))
        self._settings = settings = settings_from_json(start.settings_json)
        self._model: PartOfModel | None = None
        self._exchanges = PartExchanges(
            hub=hub,
            say=self._say,
            say_stored=self._say,
            level=logging.DEBUG if settings.sync.steps_at_nodes else logging.INFO,
            failed=self._failed,
        )

    def _say(self, message: processes.ProcessSaid) -> None:
        self._connection.send_frame(processes.said(message))

    def _failed(self, error: BaseException) -> None:
        text = str(error)[:MAX_TEXT_CHARACTERS]
        self._say(processes.ProcessFailed(text=text, exit_code=exit_code_of(error)))

    async def run(self, stack: AsyncExitStack) -> None:
        """Until the node closes the connection, which ends it. `stack` ends what talks to peers."""
        try:
            port = await listen_for_peers(self._hub, self._start.listen_on, REAL, self._security, stack)
            self._say(processes.ProcessReady(port=port))
            await together([self._beat(), self._follow()])
        except (AtollError, OSError) as error:
            self._failed(error)
            await self._connection.flush()
            raise

    async def _beat(self) -> None:
        while True:
            self._say(beat_of(self._hub.counters))
            await asyncio.sleep(self._start.beat_s)

    async def _follow(self) -> None:
        while (frame := await self._connection.read_frame()) is not None:
            await self._do(processes.heard_of_node(frame))
        raise asyncio.CancelledError  # the node has ended

    async def _do(self, told: processes.ProcessTold) -> None:
        match told:
            case processes.ProcessIdentity(site_id=site_id, incarnation=incarnation):
                self._hub.site_id, self._hub.incarnation = site_id, incarnation
            case processes.ProcessShown():
                if not isinstance(self._security, MutualTls):
                    raise InvalidMessage("a certificate to be shown in plain text")
                self._security.show(_shown(told))
            case m.Banned(names=names):
                self._hub.ban(names)
            case processes.ProcessLayout():
                await self._lay_out(told)
            case processes.BeginInProcess():
                await self._begin(told)
            case m.Weights() | m.Influences() | HurryAtHost() | CancelAtHost():
                self._exchanges.tell(told)
            case processes.DropInProcess(sync=sync, in_force=in_force):
                if self._model is not None:
                    self._model.log.in_force = frozenset(attempt.key for attempt in in_force)
                    self._model.log.drop(sync)
                self._exchanges.drop(sync)
            case processes.AbandonAll():
                await self._exchanges.close()
                if self._model is not None:
                    self._model.log.keep(())

    async def _lay_out(self, told: processes.ProcessLayout) -> None:
        if not self._connection.descriptors:
            raise InvalidMessage("a layout comes without the descriptor of SNAPSHOT")
        fd = self._connection.descriptors.popleft()
        self._model = await run_to_its_end(partial(PartOfModel, self._folders, self._settings, told, fd))
        self._hub.keep_payloads_in(self._model.log)
        keeps_errors = self._settings.sync.error_feedback_down > 0
        self._hub.allow(told.max_retained_bytes, told.reduce_buffer_bytes, keeps_errors=keeps_errors)

    async def _begin(self, told: processes.BeginInProcess) -> None:
        model, begun = self._model, told.begun
        if model is None:
            raise InvalidMessage("an exchange begins before it is known what of")
        plan = begun.plan
        in_flight = {plan.sync, *begun.in_flight}
        model.log.keep(in_flight)
        self._exchanges.keep(in_flight)
        try:
            data = await run_to_its_end(partial(model.data_of, told))
            region = range(told.region_start, told.region_end)
            model.log.expect(AttemptKey.of(plan), data.chunks, region, told.held)
        except AtollError as error:
            self._exchanges.refuse(plan, error)
            return
        model.log.in_force = frozenset(attempt.key for attempt in told.in_force)
        model.log.led_to_base(plan.fragment, {attempt.of_fragment: attempt.key for attempt in told.left_errors})
        await self._exchanges.begin_on(begun, data)


def _shown(word: processes.ProcessShown) -> Shown:
    return Shown(word.roots, word.certificate, word.key)


async def serve(fd: int) -> None:
    """Until the node ends."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    connection = NodeConnection(sock)
    frame = await connection.read_frame()
    start = processes.heard_of_node(frame) if frame is not None else None
    if not isinstance(start, processes.ProcessStart):
        return  # the node has ended meanwhile
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if start.is_debug else logging.INFO)
    root.addHandler(LinesToNode(connection))
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(prepare_kernels)
        run_id, folders = settings_from_json(start.settings_json).run_id, HomeFolders(Path(os.fsdecode(start.home)))
        pool = giving_way(start.num_threads, "exchange", start.nice)
        security = MutualTls(run_id, _shown(start.shown)) if start.shown is not None else PLAIN
        machine = Machine.through(start.proxy)
        relays = relay_client(security, machine, stack)
        hub = await make_hub(run_id, folders.spills_of(start.number), machine, security, pool=pool, relays=relays)
        hub.num_processes = start.num_processes
        process = ExchangeProcess(connection, start, hub, security)
        await together([connection.write_all(), process.run(stack)])


def main(arguments: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the node gets these too, and ends this process when it has left
    try:
        die_with_parent()
        transport.run(serve(int(arguments[0])))
    except (asyncio.CancelledError, ConnectionError):
        pass  # the node has ended
    except (AtollError, OSError) as error:
        sys.exit(f"exchange process: {error}")
