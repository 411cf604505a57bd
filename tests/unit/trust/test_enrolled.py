"""What lies in the folder of whoever has joined, and how the coordinator is found by it."""

from __future__ import annotations

import asyncio
import stat
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from atoll.cli.node import complete
from atoll.coordinator import main as coordinator_main
from atoll.coordinator.authority import folder_of
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.core.events import Answer, InviteAsked
from atoll.coordinator.enrolment import Enrolment
from atoll.node.daemon import discover
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.home import Home, locked
from atoll.node.daemon.security import Identity
from atoll.protocol.dates import date_of
from atoll.protocol.disk import PRIVATE_FILE, REAL_DISK, Disk
from atoll.protocol.errors import ConfigError, HostError, PeerError
from atoll.protocol.machine import Machine
from atoll.protocol.settings import RunSettings
from atoll.protocol.trust import certificates, enrolled, standing
from atoll.protocol.trust.certificates import Root
from atoll.protocol.trust.invites import Invite
from atoll.protocol.trust.names import Kind, Subject

NOW_S = 1_764_000_000.0
DAY = timedelta(days=1)
ROOT = Root.made(bytes(16), 3650 * DAY, date_of(NOW_S))
ADDRESSES = ("10.0.0.1:7700", "192.0.2.1:7700")


def an_invite(invite_id: str = "i1") -> Invite:
    key = certificates.new_key()
    certificate = ROOT.sign(key.public_key(), Subject("run", Kind.INVITE, invite_id), DAY, date_of(NOW_S))
    return Invite("run", "site", "berlin", ADDRESSES, ROOT.certificate, certificate, key)


def joined(home: Path, invite: Invite | None = None, disk: Disk = REAL_DISK) -> certificates.PrivateKey:
    """The key with which it did."""
    invite, folder = invite or an_invite(), home / enrolled.FOLDER
    key = enrolled.key_for(folder, invite.invite_id, Disk())
    certificate = ROOT.sign(key.public_key(), invite.subject, 365 * DAY, date_of(NOW_S))
    der, roots = certificates.to_der(certificate), [certificates.to_der(ROOT.certificate)]
    enrolled.keep(folder, invite, key, certificate=der, roots=roots, disk=disk)
    return key


def test_what_is_kept_is_for_its_owner_alone_and_read_back(tmp_path: Path) -> None:
    home = tmp_path / "home"
    key = joined(home)
    found = enrolled.load(home / enrolled.FOLDER)
    assert found is not None
    assert (found.subject, found.addresses) == (Subject("run", Kind.SITE_IDENTITY, "berlin"), ADDRESSES)
    assert found.shown.key == certificates.key_to_pem(key)
    for path in (home, home / enrolled.FOLDER, *(home / enrolled.FOLDER).iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_an_invite_has_one_key_and_another_invite_another(tmp_path: Path) -> None:
    folder = tmp_path / enrolled.FOLDER
    first = enrolled.key_for(folder, "i1", Disk())
    again = enrolled.key_for(folder, "i1", Disk())  # the answer was lost
    assert certificates.key_to_bytes(again) == certificates.key_to_bytes(first)
    assert certificates.key_to_bytes(joined(tmp_path)) == certificates.key_to_bytes(first)
    assert certificates.key_to_bytes(enrolled.key_for(folder, "i1", Disk())) == certificates.key_to_bytes(first)
    second = enrolled.key_for(folder, "i2", Disk())
    assert certificates.key_to_bytes(second) != certificates.key_to_bytes(first)
    found = enrolled.load(folder)
    assert found is not None, "until the other invite is used the first one counts"
    assert found.shown.key == certificates.key_to_pem(first)
    assert certificates.key_to_bytes(joined(tmp_path, an_invite("i2"))) == certificates.key_to_bytes(second)


class Cut(Disk):
    """Loses power at the write of that number, from 0: before it, or when it is on the disk."""

    def __init__(self, number: int, *, is_written: bool) -> None:
        self._left, self._is_written = number, is_written

    def write_whole(self, path: Path, data: bytes, *, fsync: bool = False, mode: int = PRIVATE_FILE) -> None:
        self._left -= 1
        if self._left >= 0 or self._is_written:
            super().write_whole(path, data, fsync=fsync, mode=mode)
        if self._left < 0:
            raise PowerCut


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("had_joined", [False, True])
def test_wherever_the_answer_to_an_invite_is_cut_off_the_same_invite_goes_on_with_its_key(
    tmp_path: Path, number: int, *, had_joined: bool, is_written: bool
) -> None:
    """The coordinator knows the invite by that key, and takes it from no other."""
    if had_joined:
        joined(tmp_path, an_invite("i1"))
    folder, invite = tmp_path / enrolled.FOLDER, an_invite("i2")
    key = certificates.key_to_pem(enrolled.key_for(folder, "i2", Disk()))
    with pytest.raises(PowerCut):
        joined(tmp_path, invite, Cut(number, is_written=is_written))
    assert certificates.key_to_pem(enrolled.key_for(folder, "i2", Disk())) == key
    if (cut := enrolled.load(folder)) is not None:
        enrolled.keep_shown(folder, cut.shown, Disk())  # as its renewal does, with the key that it has
        assert certificates.key_to_pem(enrolled.key_for(folder, "i2", Disk())) == key
    assert certificates.key_to_pem(joined(tmp_path, invite)) == key
    found = enrolled.load(folder)
    assert found is not None
    assert (found.invite_id, found.shown.key) == ("i2", key)
    assert not [*folder.glob("*.key")]


@pytest.mark.parametrize("name", [enrolled.IDENTITY, enrolled.ROOTS, enrolled.COORDINATOR])
def test_what_is_damaged_or_missing_is_said(tmp_path: Path, name: str) -> None:
    joined(tmp_path)
    folder = tmp_path / enrolled.FOLDER
    (folder / name).write_bytes(b"{}")
    with pytest.raises(ConfigError, match="remove it, and join with a new invite"):
        enrolled.load(folder)
    (folder / name).unlink()
    if name != enrolled.IDENTITY:
        with pytest.raises(HostError, match=name):
            enrolled.load(folder)
    else:
        assert enrolled.load(folder) is None


def test_the_end_of_an_identity_is_said_before_and_after(tmp_path: Path) -> None:
    joined(tmp_path)
    found = enrolled.load(tmp_path / enrolled.FOLDER)
    assert found is not None
    until_s = NOW_S + 365 * 86_400
    assert enrolled.check_dates(found, NOW_S) == ""
    assert "expires at 2026-11-24 16:00:00 UTC" in enrolled.check_dates(found, until_s - 86_400)
    with pytest.raises(ConfigError, match=r"has expired at 2026-11-24 .* clock says 2026-11-25"):
        enrolled.check_dates(found, until_s + 86_400)


def test_nobody_joins_with_a_home_that_is_in_use(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    try:
        with pytest.raises(HostError, match="in use by another node"), locked(tmp_path / "home"):
            pass
    finally:
        home.close()
    with locked(tmp_path / "home"), pytest.raises(HostError, match="in use by another node"):
        Home(tmp_path / "home")


# --- the coordinator is found


def test_every_address_is_tried_that_of_the_command_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined(tmp_path)
    config = NodeConfig(name="berlin", home=tmp_path, coordinator="127.0.0.9:1")
    identity = Identity.of(config, NOW_S)
    assert identity is not None
    assert identity.addresses == ("127.0.0.9:1", *ADDRESSES)
    asked: list[str] = []

    async def answers(address: str, *_: Any) -> RunSettings:
        asked.append(address)
        if address != ADDRESSES[1]:
            raise Unavailable
        return RunSettings(run_id="run")

    class Unavailable(grpc.aio.AioRpcError):
        def __init__(self) -> None:
            pass

        def code(self) -> Any:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "refused"

    monkeypatch.setattr(discover, "_asked", answers)
    settings, address = asyncio.run(discover.discover(identity.addresses, None, 5.0))
    assert (settings.run_id, address) == ("run", ADDRESSES[1])
    assert asked == list(identity.addresses)
    with pytest.raises(PeerError, match=r"no coordinator at 127.0.0.9:1 or 10.0.0.1:7700 \(refused\)"):
        asyncio.run(discover.discover(identity.addresses[:2], None, 0.0))


def test_a_coordinator_that_starts_again_just_then_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "RETRY_S", 0.01)
    tried, shown = 0, object()

    async def call() -> Any:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise PeerError("not yet")
        return shown

    assert asyncio.run(standing.within(5.0, call)) is shown
    tried = -1000
    with pytest.raises(PeerError, match="not yet"):
        asyncio.run(standing.within(0.05, call))


def test_a_home_says_run_name_and_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace

    joined(tmp_path)
    monkeypatch.setattr("atoll.cli.node.time.time", lambda: NOW_S)
    args = Namespace(site_rank=0, home=tmp_path, name="", run="", coordinator="")
    args.insecure = args.insecure_network = False
    complete(args)
    assert (args.name, args.coordinator) == ("berlin", ",".join(ADDRESSES))
    for wrong in ({"name": "paris"}, {"run": "another"}):
        with pytest.raises(ConfigError, match="is of site berlin of run run"):
            complete(Namespace(**vars(args) | wrong))
    with pytest.raises(ConfigError, match="--site-rank 2: this machine was invited as the site itself, its host 0"):
        complete(Namespace(**vars(args) | {"site_rank": 2}))
    monkeypatch.setattr("atoll.cli.node.time.time", lambda: NOW_S + 400 * 86_400)
    with pytest.raises(ConfigError, match="has expired"):
        complete(args)


# --- the coordinator's side


def test_a_store_without_its_root_is_not_given_another(tmp_path: Path) -> None:
    config = CoordinatorConfig(store_path=tmp_path / "run.db")

    async def begin(*, is_new: bool) -> None:
        async with AsyncExitStack() as stack:
            await coordinator_main.secured(config, "run", Machine(), stack, is_new=is_new)

    with pytest.raises(HostError, match=r"run\.db\.trust is not.*restore it"):
        asyncio.run(begin(is_new=False))
    assert not folder_of(config.store_path).exists()
    folder_of(config.store_path).mkdir()  # as the error says
    asyncio.run(begin(is_new=False))
    asyncio.run(begin(is_new=False))


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        (("0.0.0.0:7700",), "is every address of this machine"),
        (("[::]:7700",), "is every address"),
        (("0:7700",), "is every address"),
        (("a",), "not an address"),
        (("a,b:1",), "is no address of a coordinator"),
        (("hö:1",), "is no address of a coordinator"),
        (("a:1",) * 9, "9 addresses of a coordinator"),
    ],
)
def test_an_invite_that_nobody_could_use_is_not_made(addresses: tuple[str, ...], text: str) -> None:
    async def never(asked: object) -> Answer:
        raise AssertionError(asked)

    anything: Any = None
    enrolment = Enrolment(anything, anything, anything, never)
    answer = asyncio.run(enrolment.invite(InviteAsked(role="site", name="a", addresses=addresses), "127.0.0.1:1"))
    assert text in answer.problem
