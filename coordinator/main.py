"""The coordinator as a process: store, gRPC, status page, admin socket; until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from atoll.coordinator.admin import admin_server
from atoll.coordinator.authority import Authority, folder_of
from atoll.coordinator.backup import remove_left_over
from atoll.coordinator.config import CoordinatorConfig, Restore, validate
from atoll.coordinator.core.records import OpenRecord, Record
from atoll.coordinator.lease import Leading, LeaseHeld
from atoll.coordinator.loop_lag import LoopLag
from atoll.coordinator.restoring import Restoring
from atoll.coordinator.service import CoordinatorServer
from atoll.coordinator.sql_store import SqlStore
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.coordinator.standby import only_here, stands_by
from atoll.coordinator.store_disk import StoreDisk
from atoll.coordinator.tracing import SyncTraces
from atoll.coordinator.tracking.curves_told import Tracking
from atoll.coordinator.tracking.opened import feeds
from atoll.coordinator.tracking.tracker import About
from atoll.coordinator.web import status_pages
from atoll.protocol import notify, outer
from atoll.protocol.addresses import is_host, is_loopback, is_unspecified, parse_address
from atoll.protocol.deposits import Seal
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.exit_codes import ENDED_AT_ONCE
from atoll.protocol.machine import Machine
from atoll.protocol.outer_settings import AUTO
from atoll.protocol.page_access import LOOPBACK_NAMES, Access, ByName, ByToken
from atoll.protocol.run_length import too_short
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.signals import Signals, end_process
from atoll.protocol.trace_export import from_environment
from atoll.protocol.trust.renewing import keep_in_force
from atoll.protocol.trust.security import PLAIN, MutualTls, Security, Shown
from atoll.protocol.trust.server_tls import ServerTls

log = logging.getLogger("atoll.coordinator")

END_LIMIT_S = 2.0
"""From a second SIGINT or SIGTERM to the end of this process, at most."""


class NewestSync:
    """The one that was opened last, since this start."""

    sync: int | None = None

    def kept(self, records: Sequence[Record], _: float) -> None:
        """In the store."""
        self.sync = max((r.open.sync for r in records if isinstance(r, OpenRecord)), default=self.sync)


async def secured(
    config: CoordinatorConfig, run_id: str, machine: Machine, stack: AsyncExitStack, *, is_new: bool
) -> tuple[Authority | None, Security]:
    """The run's root, and what this process shows, which is renewed until `stack` ends; neither in plain text.
    `is_new`: there was no store. Raises HostError or ConfigError."""
    if config.is_plain_text:
        return None, PLAIN
    folder = Path(config.trust) if config.trust else folder_of(config.store_path)
    if not is_new and not folder.exists():
        raise HostError(
            f"{config.kept_in} is there and {folder} is not, without which no site knows this coordinator: restore it "
            "from a copy, or copy it from the coordinator that began the run. If this run has been in plain text so "
            f"far, or nobody has joined it, `mkdir {folder}`: another root is made then, and every site needs a new "
            "invite"
        )
    authority = await asyncio.to_thread(Authority.opened, folder, run_id, machine)
    tls = MutualTls(run_id, authority.shown())

    async def renew() -> Shown:
        return authority.shown()

    renewing = asyncio.create_task(keep_in_force(tls, renew, machine.wall_time))
    stack.callback(renewing.cancel)
    authority.told.append(lambda: tls.show(authority.shown()))
    return authority, tls


def names_of_page(config: CoordinatorConfig) -> list[str]:
    """By which browsers come to it. Raises ConfigError if nobody could."""
    host, _ = parse_address(config.http_listen)
    names = {config.http_name.lower()} - {""}
    if any(not is_host(name) for name in names):
        raise ConfigError(f"--http-name {config.http_name} is no name or number of a machine, such as run.example")
    if is_unspecified(config.http_listen):
        if not names:
            raise ConfigError(
                f"--http-listen {config.http_listen} is every address of this machine: say by which name browsers come "
                "to it, with --http-name NAME"
            )
        return sorted(names | LOOPBACK_NAMES)  # it is one of these addresses
    names.add(host.lower())
    return sorted(names | LOOPBACK_NAMES if is_loopback(config.http_listen) else names)


def _page_access(
    config: CoordinatorConfig,
    authority: Authority | None,
    may_look: Callable[[str], bool],
    machine: Machine,
    stack: AsyncExitStack,
) -> Access:
    """Raises ConfigError if nobody could come to the page."""
    if authority is None and not is_loopback(config.http_listen):
        log.warning("the status page at %s is in plain text, for whoever reaches it", config.http_listen)
        return ByName(())
    names = names_of_page(config)
    if authority is None or is_loopback(config.http_listen):
        return ByName(names)
    tls = ServerTls(authority.shown_on_pages(names))

    async def renew() -> Shown:
        return authority.shown_on_pages(names)

    renewing = asyncio.create_task(keep_in_force(tls, renew, machine.wall_time))
    stack.callback(renewing.cancel)
    authority.told.append(lambda: tls.show(authority.shown_on_pages(names)))
    return ByToken(names, tls.context, may_look)


def _is_signed(authority: Authority | None, token: str) -> bool:
    """What one that stands by knows of a token: not whether it was taken back."""
    return authority is not None and authority.token_of(token) is not None


async def _opened(
    config: CoordinatorConfig,
    settings: RunSettings,
    parent_json: str,
    machine: Machine,
    stack: AsyncExitStack,
    *,
    is_restored: bool,
) -> tuple[SqlStore, Leading | None, Authority | None, Security]:
    """The store, this coordinator's place among those that share it, if it can be shared, and what `secured` says."""
    if not config.store:
        is_new = not config.store_path.exists()
        if is_new and is_restored:
            raise ConfigError(f"--restore: there is no {config.store_path}; put the copy there (atoll backup made it)")
        store = SqliteStore(config.store_path)
        stack.callback(store.close)
        await asyncio.to_thread(remove_left_over, config.store_path)
        return store, None, *await secured(config, settings.run_id, machine, stack, is_new=is_new)
    try:
        from atoll.coordinator.shared_store import SharedStore
    except ImportError as error:
        raise ConfigError(f"store = {config.store} needs psycopg ({error}): pip install 'atoll[postgresql]'") from None
    only_here(config, stack)
    shared = await asyncio.to_thread(SharedStore, config)
    stack.callback(shared.store.close)
    if (is_new := await asyncio.to_thread(shared.is_new)) and is_restored:
        raise ConfigError(f"--restore: {config.store} has no run; put the copy there")
    authority, security = await secured(config, settings.run_id, machine, stack, is_new=is_new)
    leading = await shared.place(settings, parent_json, authority, machine, stack)
    return shared.store, leading, authority, security


async def _begun(
    make: Callable[[], CoordinatorServer], leads: Callable[[], Awaitable[bool]]
) -> CoordinatorServer | None:
    """What serves the run, once this coordinator leads; None if it is to end before."""
    while await leads():
        try:
            return make()
        except LeaseHeld as error:
            log.info("%s", error)
    return None


def to_stdout(line: str) -> None:
    """For whoever started this process, beside its log."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _restored(
    restoring: Restoring, config: CoordinatorConfig, run_id: str, asked: asyncio.Event, say: Callable[[str], None]
) -> bool:
    """Brings an old copy of the store up to what sites have kept. False if this is to end before."""
    admin = admin_server(config.store_path, restoring.command)
    await admin.start()
    try:
        where = await restoring.start(config.listen)
        say(f"run {run_id}: restoring {config.kept_in}; sites tell what they kept at {where}")
        notify.tell("READY=1", f"STATUS=run {run_id} is being restored")
        work, ended = asyncio.create_task(restoring.restored()), asyncio.create_task(asked.wait())
        await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if restoring.is_keeping:
            await asyncio.wait((work,))  # it is in a thread, and done or not
        if not work.done():
            work.cancel()
            say(f"run {run_id}: ended before it was restored; {config.kept_in} is as it was")
            return False
        work.result()
        return not asked.is_set()
    finally:
        await restoring.stop()
        await admin.close()


def _track(config: CoordinatorConfig, server: CoordinatorServer, machine: Machine, stack: AsyncExitStack) -> None:
    """Tells the tools that are named of the run, until `stack` ends."""
    about = About(run_id=server.settings.run_id, settings=json.loads(settings_to_json(server.settings)))
    if found := list(feeds(config.track, about, config.store_path.with_suffix(".tracked"), machine)):
        tracking = Tracking(found, server.curves.recent)
        server.said_beside["trackers"] = tracking.document
        stack.push_async_callback(tracking.close, asyncio.create_task(tracking.run()))


async def serve(
    config: CoordinatorConfig,
    settings: RunSettings,
    *,
    resume_parent: dict[str, Any] | None = None,
    restore: Restore | None = None,
    newest: NewestSync | None = None,
    say: Callable[[str], None] = to_stdout,
) -> None:
    """Serves one run; returns after SIGTERM or SIGINT, and a second one ends the process at once: what the store has
    kept is whole at any moment.

    `resume_parent`: run_id, commit, run_step and run_tokens of the saved model that commit 0 is made of.
    `newest`: is told of syncs, for lines of the log. `say`: is given the line that this listens, and few others, which
    are on standard output without it.
    Raises ConfigError, HostError or StateError: what, where, what to do.
    """
    validate(config)
    parent_json = json.dumps(resume_parent, sort_keys=True) if resume_parent else ""
    async with AsyncExitStack() as stack:
        asked = asyncio.Event()

        def first(name: str) -> None:
            log.info("%s: stopping; again to end at once", name)
            notify.tell("STOPPING=1")
            asked.set()

        # Until all is closed: a store on a disk that is stuck keeps that waiting.
        stack.callback(Signals(first, lambda _: end_process(ENDED_AT_ONCE), END_LIMIT_S).close)
        machine = Machine()
        exporter = await from_environment(os.environ, "atoll-coordinator", machine.wall_time)
        if exporter is not None:
            stack.push_async_callback(exporter.close)
        store, leading, authority, security = await _opened(
            config, settings, parent_json, machine, stack, is_restored=restore is not None
        )
        make = partial(
            CoordinatorServer,
            config,
            settings,
            store,
            parent_json,
            machine,
            authority=authority,
            security=security,
            leading=leading,
        )
        if restore is not None:
            seal = Seal(authority.secret if authority is not None else b"", settings.run_id)
            restoring = Restoring(settings, store, machine, security=security, seal=seal, num_sites=restore.num_sites)
            if leading is not None:
                leading.start(stack)
            if not await _restored(restoring, config, settings.run_id, asked, say):
                return
            server = make()
        else:
            to_standby = partial(_page_access, config, authority, partial(_is_signed, authority), machine, stack)

            async def leads() -> bool:
                return leading is None or await stands_by(leading, config, settings.run_id, to_standby, asked, say=say)

            begun = await _begun(make, leads)
            if begun is None:
                return
            server = begun
            if leading is not None:
                leading.start(stack)
        if settings.outer.optimizer == AUTO:
            log.info("outer.optimizer = auto: %s", outer.in_words(settings, server.settings.outer))
        if advice := too_short(server.settings):
            log.warning("%s", advice)
        if exporter is not None:
            server.hear_kept.append(SyncTraces(settings.run_id, exporter.send).kept)
            server.said_beside["num_lost_spans"] = lambda: exporter.num_lost
        if newest is not None:
            server.hear_kept.append(newest.kept)
        server.loop_lag = LoopLag()
        ticking = asyncio.create_task(server.loop_lag.run())
        stack.callback(ticking.cancel)
        if not config.store:  # a database is on another machine's disk
            disk = StoreDisk(config.store_path.parent, machine.resources)
            server.said_beside["store_disk"] = disk.document
            measuring = asyncio.create_task(disk.run())
            stack.callback(measuring.cancel)
        await server.start()
        stack.push_async_callback(server.stop)
        _track(config, server, machine, stack)

        admin = admin_server(config.store_path, server.command)
        await admin.start()
        stack.push_async_callback(admin.close)
        where = ""
        if config.http_listen:
            access = _page_access(config, authority, server.may_look, machine, stack)
            page = status_pages(server.status.recent, access, server.curves.recent, server.obstacles)
            await page.start(config.http_listen, "the status page")
            stack.push_async_callback(page.close)
            where = f" (status page http{'s' if access.tls else ''}://{page.address}/)"
        watched = asyncio.create_task(notify.stay_watched())
        stack.callback(watched.cancel)
        notify.tell("READY=1", f"STATUS=run {settings.run_id} on {server.address}")
        running = asyncio.create_task(server.run())
        say(f"run {settings.run_id}: listening on {server.address}{where}")
        waiting = asyncio.create_task(asked.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            await server.stop()  # whoever waits for an answer hears it before the socket closes
            running.result()  # only an error ends it before it is asked to
            return
        await server.stop()
        await running
        say(f"run {settings.run_id}: stopped; all of it is in {config.kept_in}")
