"""What a process of a run hears of coordinators that share a store, and by what it finds the one that leads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.coordinator.authority import Authority
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core.events import BanAsked, InviteAsked, TakeBackAsked
from atoll.coordinator.lease import Leading, Standby
from atoll.coordinator.restoring import Restoring
from atoll.coordinator.service import CoordinatorServer
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.security import Identity
from atoll.protocol.dates import date_of
from atoll.protocol.deposits import Seal
from atoll.protocol.disk import PRIVATE_FILE, Disk
from atoll.protocol.errors import PeerError
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates, enrolled, tokens, watching
from atoll.protocol.trust.invites import Invite, from_text
from atoll.protocol.trust.joining import join
from atoll.protocol.trust.security import MutualTls
from atoll.protocol.trust.standing import Standing
from tests.harness.coordinator_story import some_settings
from tests.harness.memory_store import MemoryStore
from tests.harness.sites import until
from tests.harness.sockets import free_address

LIMIT_S = 60.0
LIFE = timedelta(days=3650)
SETTINGS = some_settings(run_id="run")


class Coordinators:
    """One after the other, on one store."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.opened(folder / "trust", "run", Machine())
        self.store = MemoryStore()
        self._folder = folder

    @asynccontextmanager
    async def leads(self, address: str, standbys: tuple[str, ...] = ()) -> AsyncIterator[CoordinatorServer]:
        tls = MutualTls("run", self.authority.shown())
        config = CoordinatorConfig(store_path=self._folder / "run.db", listen=address)
        never: Any = None
        leading = Leading(never, "the store", self.authority)
        server = CoordinatorServer(
            config, SETTINGS, self.store, authority=self.authority, security=tls, leading=leading
        )
        await server.start()
        running = asyncio.create_task(server.run())
        says_standbys(leading, standbys)
        try:
            yield server
        finally:
            await server.stop()
            await running


def says_standbys(leading: Leading | None, addresses: tuple[str, ...]) -> None:
    """As after a renewal."""
    assert leading is not None
    leading.standbys = tuple(Standby(address, frozenset()) for address in addresses)
    for tell in leading.told:
        tell()


async def invited(server: CoordinatorServer, name: str, addresses: tuple[str, ...] = ()) -> Invite:
    answer = await server.ask(InviteAsked(role="site", name=name, addresses=addresses))
    assert not answer.problem
    return from_text(answer.found)


async def joined(invite: Invite, home: Path) -> None:
    key = enrolled.key_for(home / enrolled.FOLDER, invite.invite_id, Disk())
    signed = await join(invite, key, invite.subject)
    enrolled.keep(
        home / enrolled.FOLDER,
        invite,
        key,
        certificate=signed.certificate,
        roots=signed.roots,
        disk=Disk(),
    )


def test_who_stands_by_is_learned_kept_and_asked_when_the_first_one_is_gone(tmp_path: Path) -> None:
    """Watch and renewals go on there, and so does whoever starts anew while the other one alone lives."""
    home, one, two = tmp_path / "home", free_address(), free_address()

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with AsyncExitStack() as stack:
            async with coordinators.leads(one) as first:
                invite = await invited(first, "berlin")
                assert invite.addresses == (one,), "nobody stands by"
                await joined(invite, home)
                found = enrolled.load(home / enrolled.FOLDER)
                assert found is not None
                standing = Standing(found, home / enrolled.FOLDER, (one,), Machine())
                heard: list[tuple[str, ...]] = []
                standing.tell_banned(heard.append)
                await standing.open(stack, LIMIT_S)
                assert standing.addresses == (one,)
                says_standbys(first.leading, (two,))
                await until(lambda: standing.addresses == (one, two))
                assert (await invited(first, "paris")).addresses == (one, two)
                assert (await first.document())["coordinators"] == [one, two]
            async with coordinators.leads(two) as second:
                await second.ask(BanAsked(name="x", reason="it lies"))
                await until(lambda: heard[-1] == ("x",))
                shown = await standing._renewed()
                assert certificates.from_pem(shown.certificate)
                says_standbys(second.leading, (one,))
                elsewhere = await invited(second, "rome", addresses=("run.example:7700",))
                assert elsewhere.addresses == ("run.example:7700", two, one), "of an operator elsewhere, too"
        again = Identity.of(NodeConfig(name="berlin", home=home, coordinator=one), Machine().wall_time())
        assert again is not None
        assert again.addresses == (one, two)

    asyncio.run(main())


def test_while_a_coordinator_is_restored_whoever_wants_a_certificate_or_news_tries_again(tmp_path: Path) -> None:
    """Each is told so, and none takes it for a refusal; then all goes on."""
    home, address = tmp_path / "home", free_address()

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with coordinators.leads(address) as server:
            invite, late = await invited(server, "berlin"), await invited(server, "paris")
            await joined(invite, home)
        with pytest.raises(PeerError, match=rf"no coordinator answers at {address} .*; is `atoll coordinator` running"):
            await joined(late, tmp_path / "late")
        found = enrolled.load(home / enrolled.FOLDER)
        assert found is not None
        tls = MutualTls("run", coordinators.authority.shown())
        seal = Seal(coordinators.authority.secret, "run")
        restoring = Restoring(SETTINGS, coordinators.store, Machine(), security=tls, seal=seal, num_sites=1)
        await restoring.start(address)
        standing = Standing(found, home / enrolled.FOLDER, (address,), Machine())
        async with AsyncExitStack() as stack:
            opening = asyncio.create_task(standing.open(stack, LIMIT_S))
            before = standing.before_coordinator
            calls = (
                standing._renewed(),
                joined(late, tmp_path / "late"),
                watching._watch(before, address, standing._heed, Machine().network),
            )
            for call, how_far in zip(calls, (": no site has come yet", "", ": no site has come yet"), strict=True):
                with pytest.raises(PeerError, match=f"is being restored from a copy of its store{how_far}"):
                    await call
            assert not opening.done()
            await restoring.stop()
            async with coordinators.leads(address) as server:
                await opening
                heard: list[tuple[str, ...]] = []
                standing.tell_banned(heard.append)
                await server.ask(BanAsked(name="x", reason="it lies"))
                await until(lambda: heard[-1] == ("x",))

    asyncio.run(main())


def test_a_token_counts_while_the_coordinator_says_so(tmp_path: Path) -> None:
    home, address = tmp_path / "home", free_address()

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with AsyncExitStack() as stack, coordinators.leads(address) as server:
            await joined(await invited(server, "berlin"), home)
            found = enrolled.load(home / enrolled.FOLDER)
            assert found is not None
            standing = Standing(found, home / enrolled.FOLDER, (address,), Machine())
            assert standing.knows_token("of nobody"), "nothing was heard yet"
            await standing.open(stack, LIMIT_S)
            await until(lambda: not standing.knows_token("of nobody"))
            given = await server.ask(InviteAsked(role="viewer", name="anna", is_token=True, life_s=3600))
            root = coordinators.authority.root.certificate
            token_id = tokens.from_text(given.found, [root]).token_id
            await until(lambda: standing.knows_token(token_id))
            await server.ask(TakeBackAsked(role="viewer", name="anna"))
            await until(lambda: not standing.knows_token(token_id))

    asyncio.run(main())


def test_roots_that_change_while_an_identity_is_renewed_are_kept_beside_the_new_one(tmp_path: Path) -> None:
    """Both write into one folder: the roots wait until the identity is there, and then keep that one."""
    home, address = tmp_path / "home", free_address()
    folder = home / enrolled.FOLDER
    is_writing, may_write, is_renewed = (threading.Event() for _ in range(3))

    class Slow(Disk):
        """Stops the renewal in its first write, and the roots of the news until the renewal is through."""

        def __init__(self, of_news: bytes) -> None:
            self._of_news = of_news

        def write_whole(self, path: Path, data: bytes, *, fsync: bool = False, mode: int = PRIVATE_FILE) -> None:
            if data == self._of_news:
                assert is_renewed.wait(LIMIT_S)
            else:
                is_writing.set()
                assert may_write.wait(LIMIT_S)
            super().write_whole(path, data, fsync=fsync, mode=mode)

    async def main() -> None:
        coordinators = Coordinators(tmp_path)
        async with coordinators.leads(address) as server:
            await joined(await invited(server, "berlin"), home)
            found = enrolled.load(folder)
            assert found is not None
            root = coordinators.authority.root.certificate
            another = certificates.Root.made(certificates.salt_of(root), LIFE, date_of(Machine().wall_time()), 2)
            news = watching.News([root, another.certificate], (), (), None)
            pem = certificates.to_pem(*news.roots)
            standing = Standing(found, folder, (address,), Machine(disk=Slow(pem)))
            before = standing.before_coordinator
            standing.among_sites = MutualTls("run", await standing._renewed())

            async def renews() -> None:
                """As `keep_in_force` does."""
                before.show(await standing._renewed_identity())

            renewing = asyncio.create_task(renews())
            assert await asyncio.to_thread(is_writing.wait, LIMIT_S)
            heeding = asyncio.create_task(standing._heed(news))
            await asyncio.sleep(0)  # it has come as far as it comes
            may_write.set()
            await renewing
            is_renewed.set()
            await heeding
            assert before.shown.certificate != found.shown.certificate
            assert before.shown.roots == standing.among_sites.shown.roots == pem
            again = enrolled.load(folder)
            assert again is not None
            assert again.shown == before.shown

    asyncio.run(main())


def test_a_failure_that_nothing_was_prepared_for_leaves_nobody_deaf_to_bans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The task is nobody's to wait for: ended, it would be missed by no one until the root is another one."""
    monkeypatch.setattr(watching, "FIRST_WAIT_S", 0.0)
    again = asyncio.Event()

    class Broken:
        num_dialled = 0

        def open_channel(self, address: str, **options: Any) -> Any:
            self.num_dialled += 1
            if self.num_dialled > 2:
                again.set()
            raise RuntimeError(f"no thread for {address}")

    async def main() -> None:
        network: Any = Broken()
        heed: Any = pytest.fail
        tls: Any = SimpleNamespace(towards=lambda kind: None)
        listening = asyncio.create_task(watching.watch(tls, lambda: ["here"], heed, network))
        waiting = asyncio.create_task(again.wait())
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait((listening, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert again.is_set(), listening
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

    asyncio.run(main())
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in errors] == ["it is not known who is banned: no thread for here"], "said once"
    assert errors[0].exc_info
