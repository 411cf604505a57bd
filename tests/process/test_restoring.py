"""The coordinator's store is lost, and an old copy of it is put in its place; real processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psycopg
import pytest

from atoll.cli.main import main
from atoll.coordinator import admin, restoring, rows
from atoll.coordinator.core import restored
from atoll.coordinator.core.events import BanRecord, CommitRecord, PausedRecord, Record, RollbackRecord, StopRecord
from atoll.coordinator.core.persisted import Persisted, Row
from atoll.coordinator.core.restored import PASSED_OVER
from atoll.coordinator.lease import Claim
from atoll.coordinator.postgresql import Database
from atoll.coordinator.postgresql_store import PostgresqlStore
from atoll.coordinator.restoring import Restoring
from atoll.coordinator.stage import NoRoots
from atoll.coordinator.store import Store
from atoll.protocol import messages as m
from atoll.protocol import transport
from atoll.protocol.deposits import Seal
from atoll.protocol.errors import RefusedError
from atoll.protocol.machine import Machine
from atoll.protocol.messages import Deposit
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust.security import PLAIN
from atoll.protocol.v1 import session_pb2, session_pb2_grpc
from tests.harness import postgresql
from tests.harness.commit_records import assert_each_sample_counts_once, commits_of, decoded
from tests.harness.data_account import DATA, LEASED, assert_account_balances
from tests.harness.local_run import POLL_S, LocalRun, Process, guarded_with
from tests.harness.memory_store import MemoryStore
from tests.process.test_coordinator_session import Client
from tests.unit.coordinator.test_restored import a_run

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--step-delay-s", "0.02"]
MODEL = [*WORKER, "--tensors", "w=30x40,b=10", *LEASED]
SETTINGS = RunSettings(
    run_id="run",
    steps=400,
    min_sites=2,
    data=DATA,
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="fp32"),
)
LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(180)


def committed(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda status: bool(status["last_commit"] >= count)


def lost(run: LocalRun, coordinator: Process, copy: Path) -> None:
    """The disk of the coordinator, and what is left is the copy."""
    coordinator.kill()
    for name in ("", "-wal", "-shm"):
        run.store_path.with_name(run.store_path.name + name).unlink(missing_ok=True)
    shutil.copyfile(copy, run.store_path)


class InFile:
    """The store of a run, and the copy of it."""

    def __init__(self, run: LocalRun, copy: Path) -> None:
        self._run, self._copy = run, copy
        self.flags: list[str] = []

    def keep_copy(self) -> None:
        assert main(["backup", "--store", str(self._run.store_path), "--to", str(self._copy)]) == 0

    def lose(self, coordinator: Process) -> None:
        lost(self._run, coordinator, self._copy)

    def commits(self) -> list[CommitRecord]:
        """While no coordinator runs, or none but the copy was written."""
        return commits_of(self._run.store_path)


class InDatabase:
    """The same in PostgreSQL."""

    def __init__(self, server: postgresql.Server, copy: Path) -> None:
        self._server, self._copy, self._url = server, copy, server.database()
        self._name = urlsplit(self._url).path.removeprefix("/")
        self.flags = ["--store", self._url]

    def keep_copy(self) -> None:
        self._server.dump(self._name, self._copy)

    def lose(self, coordinator: Process) -> None:
        coordinator.kill()
        self._server.put_back(self._name, self._copy)
        deadline = time.monotonic() + LIMIT_S
        with psycopg.connect(self._url, autocommit=True) as db:  # of the coordinator that had it when it was copied
            while db.execute("SELECT until > clock_timestamp() FROM atoll.lease").fetchall() != [(False,)]:
                assert time.monotonic() < deadline
                time.sleep(POLL_S)

    def commits(self) -> list[CommitRecord]:
        with psycopg.connect(self._url) as db:
            return decoded(
                db.execute("SELECT body FROM atoll.records WHERE kind = 'commit' ORDER BY number").fetchall()
            )


@pytest.mark.parametrize(
    ("secured", "data", "is_shared"),
    [
        (True, DATA, False),
        (False, "local", False),
        pytest.param(True, DATA, True, marks=[postgresql.needed, pytest.mark.slow]),
    ],
    ids=["secured", "plain, own data", "postgresql"],
)
def test_a_run_goes_on_from_its_newest_commit_with_an_old_copy_of_the_store(
    tmp_path: Path, secured: bool, data: str, is_shared: bool, request: pytest.FixtureRequest
) -> None:
    """Another site has joined since the copy, and one was banned: both are known."""
    copy = tmp_path / "copy.db"
    with LocalRun(tmp_path, replace(SETTINGS, steps=100_000, data=data), secured=secured) as run:
        store: InFile | InDatabase = InFile(run, copy)
        if is_shared:
            store = InDatabase(request.getfixturevalue("postgresql_server"), copy)
        coordinator = run.start_coordinator(extra=store.flags)
        for name in "abx":
            run.start_node(name, MODEL)
        run.wait(committed(2), LIMIT_S)
        store.keep_copy()
        at_copy = run.status()["last_commit"]
        run.start_node("late", MODEL)
        assert main(["ban", "--store", str(run.store_path), "x"]) == 0
        run.wait(
            lambda s: any("late" in c["contributors"] for c in s["commits"]) and committed(at_copy + 6)(s), LIMIT_S
        )
        before = run.status()
        store.lose(coordinator)
        assert store.commits()[-1].commit.commit <= at_copy, "it is an old one"
        again = run.start_coordinator(extra=[*store.flags, "--restore"])
        last = int(again.wait_for_line(r"the run goes on from commit (\d+)", LIMIT_S).group(1))
        assert last >= before["last_commit"] > at_copy + 5
        everybody = {"a", "b", "late"}
        run.wait(
            lambda s: committed(last + 3)(s) and set(s["commits"][-1]["contributors"]) == everybody,
            LIMIT_S,
            "all are back",
        )
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert [text.partition(":")[0] for text in run.status()["banned"]] == ["x"]
        assert run.wait_all(LIMIT_S, ["a", "b", "late"]) == {"a": 0, "b": 0, "late": 0}
        assert_account_balances(run.status())
        final, step = (run.status()[name] for name in ("last_commit", "run_step"))
        hashes = run.hashes(final)
        assert set(hashes) == {"a", "b", "late"}
        assert len(set(hashes.values())) == 1
        again.popen.terminate()
        assert again.wait(LIMIT_S) == 0
        commits = store.commits()
        assert [c.commit.commit for c in commits] == list(range(1, final + 1)), "none is missing"
        assert [c.commit.run_step for c in commits][-1] == step > before["run_step"]
        assert_each_sample_counts_once(commits)
        known = {c["commit"]: (c["run_step"], c["state_hash"]) for c in before["commits"] if c["state_hash"]}
        kept = {c.commit.commit: c.commit.run_step for c in commits}
        assert {n: step for n, (step, _) in known.items()}.items() <= kept.items(), "what was committed stays so"


def test_an_old_copy_is_refused_without_that_and_a_coordinator_that_waits_says_for_whom(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with LocalRun(tmp_path, replace(SETTINGS, steps=100_000), secured=True) as run:
        coordinator = run.start_coordinator()
        for name in "abc":
            run.start_node(name, MODEL)
        run.wait(lambda s: committed(2)(s) and len(s["commits"][-1]["contributors"]) == 3, LIMIT_S)
        assert main(["backup", "--store", str(run.store_path), "--to", str(copy)]) == 0
        assert main(["backup", "--store", str(run.store_path), "--to", str(copy)]) != 0, "a copy is not written over"
        run.wait(committed(run.status()["last_commit"] + 3), LIMIT_S)
        for name in "bc":
            run.nodes[name].kill()
        lost(run, coordinator, copy)
        often = guarded_with("atoll.coordinator.restoring.SAY_EVERY_S", 1.0)
        again = run.start_coordinator(extra=["--restore"], until="sites tell what they kept", program=often)
        again.wait_for_line("a told what they kept; 2 sites have to, and these were in the run: b, c", LIMIT_S)
        again.interrupt()
        assert again.wait(LIMIT_S) == 0
        assert commits_of(run.store_path) == commits_of(copy), "as it was"
        refused = run.start_coordinator()
        assert run.nodes["a"].wait(LIMIT_S) == RefusedError.exit_code, "it does not go on with an old copy"
        refused.kill()


class Site(Client):
    """One that says what it keeps."""

    def keeps(self, deposits: Sequence[Deposit], *, answers: bool = True, **hello: Any) -> None:
        said = {"deposits_to": 1, "address": "127.0.0.1:1", **hello}
        self.say(m.Hello(name=self.name, key=bytes(32), **said))
        if answers:
            self.say(m.DepositsReturned(deposits=tuple(deposits), is_last=True))


@pytest.fixture(params=["memory", pytest.param("postgresql", marks=postgresql.needed)])
def copy(request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store that is one."""
    if request.param == "memory":
        yield MemoryStore()
        return
    with closing(PostgresqlStore(Database.named(request.getfixturevalue("postgresql_server").emptied()))) as store:
        store.claims(Claim("one", "here:1"), lambda: None, NoRoots())
        yield store


def test_what_no_coordinator_has_made_counts_for_nothing(
    copy: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that was altered, one of another run, one of what the copy has, numbers that no store takes, and a site
    that says nothing: the copy stays as it is until sites enough have told."""
    monkeypatch.setattr(restoring, "OTHERS_S", 0.0)
    seal, settings = Seal(b"secret", "run"), replace(SETTINGS, data="local")
    before = copy.begin(settings)
    copy.persist(before.term, [StopRecord("known")], 1.0)
    whole = seal.sealed(rows.deposit_of(PausedRecord("a rest"), copy.last_seq() + 5, 2.0))
    bad = {
        "altered": replace(whole, body=b'{"reason":"another"}'),
        "of another run": Seal(b"secret", "another").sealed(whole),
        "old": seal.sealed(replace(whole, seq=1)),
        "no record": seal.sealed(replace(whole, record="nothing")),
        "no number": seal.sealed(replace(whole, seq=1 << 63)),
    }

    async def main() -> None:
        started = Restoring(settings, copy, Machine(), security=PLAIN, seal=seal, num_sites=2)
        address = await started.start("127.0.0.1:0")
        work = asyncio.create_task(started.restored())
        last = copy.last_seq()
        for name, deposit in bad.items():
            site = Site(address, name.replace(" ", "-"))
            site.keeps([whole, deposit])
            assert await site.ended()
            await site.close()
        silent = Site(address, "silent")
        silent.keeps([], answers=False)
        for name in ("a", "a"):  # twice the same
            site = Site(address, name)
            site.keeps([whole])
            assert await site.ended()
            await site.close()
        assert not work.done()
        assert copy.last_seq() == last
        site = Site(address, "b")
        site.keeps([])
        async with asyncio.timeout(LIMIT_S):
            await work
        await silent.close()
        await site.close()
        await started.stop()

    asyncio.run(main())
    kept = copy.begin(settings)
    assert kept.one(PausedRecord) == PausedRecord("a rest")
    assert kept.term > before.term + PASSED_OVER
    assert sum("does not count" in record.message for record in caplog.records) >= len(bad)


def test_who_tells_while_it_is_kept_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from records is made of those that are kept, and of no other ones."""
    monkeypatch.setattr(restoring, "OTHERS_S", 0.0)
    seal, settings, copy = Seal(b"secret", "run"), replace(SETTINGS, data="local"), MemoryStore()
    copy.begin(settings)
    in_time, late = (
        seal.sealed(rows.deposit_of(record, copy.last_seq() + seq, 2.0))
        for seq, record in ((5, PausedRecord("a rest")), (6, StopRecord("too late")))
    )
    begun, goes_on = threading.Event(), threading.Event()
    followed: list[Row] = []
    restore, settled = copy.restore, restored.settled

    def waits(term: int, deposits: Sequence[Deposit], settle: Callable[[Persisted], Sequence[Record]]) -> None:
        begun.set()
        assert goes_on.wait(LIMIT_S)
        restore(term, deposits, settle)

    def follows(
        of: RunSettings, folded: Persisted, voided: Mapping[int, CommitRecord], records: Sequence[Row], wall_s: float
    ) -> tuple[Record, ...]:
        followed.extend(records)
        return settled(of, folded, voided, records, wall_s)

    monkeypatch.setattr(copy, "restore", waits)
    monkeypatch.setattr(restored, "settled", follows)

    async def main() -> None:
        started = Restoring(settings, copy, Machine(), security=PLAIN, seal=seal, num_sites=1)
        address = await started.start("127.0.0.1:0")
        work = asyncio.create_task(started.restored())
        for name, deposit in (("a", in_time), ("b", late)):
            site = Site(address, name)
            site.keeps([deposit])
            assert await site.ended()
            await site.close()
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
        goes_on.set()
        async with asyncio.timeout(LIMIT_S):
            await work
        await started.stop()

    asyncio.run(main())
    assert followed == [PausedRecord("a rest")]
    assert copy.begin(settings).one(StopRecord) is None


def test_what_an_earlier_restore_has_given_up_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One site has kept what no earlier restore had heard: that the run went back to before the commit of the copy."""
    monkeypatch.setattr(restoring, "OTHERS_S", 0.0)
    seal, (story, copy) = Seal(b"", "run"), a_run()
    first = RollbackRecord(branch=1, commit=0, voided=(1,), reason="by hand")
    restore = RollbackRecord(branch=1 + PASSED_OVER, commit=1, voided=(), reason=restored.REASON)
    last = copy.last_seq()
    told = [seal.sealed(rows.deposit_of(r, last + n, 2.0)) for n, r in enumerate((first, restore), 1)]

    async def main() -> None:
        started = Restoring(story.settings, copy, Machine(), security=PLAIN, seal=seal, num_sites=1)
        address = await started.start("127.0.0.1:0")
        work = asyncio.create_task(started.restored())
        site = Site(address, "a")
        site.keeps(told)
        assert await site.ended()
        await site.close()
        async with asyncio.timeout(LIMIT_S):
            await work
        await started.stop()

    asyncio.run(main())
    kept = copy.begin(story.settings)
    assert [r.commit.commit for r in kept.all(CommitRecord)] == [1]
    assert [r.branch for r in kept.all(RollbackRecord)] == [1 + PASSED_OVER, 2 * (1 + PASSED_OVER)]


# --- what sites say to hold


async def said(address: str, name: str, **hello: Any) -> None:
    """By a site that keeps nothing of the time since the copy."""
    site = Site(address, name)
    site.keeps([], answers=bool(hello.get("deposits_to", 1)), **hello)
    assert await site.ended()
    await site.close()


async def state_of(address: str) -> str:
    channel = transport.open_channel(address, handshake=None, max_message_bytes=1 << 20)
    try:
        stub = session_pb2_grpc.CoordinatorServiceStub(channel)
        reply = await stub.Status(session_pb2.StatusRequest(), timeout=LIMIT_S)
        return str(json.loads(reply.json)["state"])
    finally:
        await channel.close()


HOLDS_ALL = {"has_state": True, "last_commit": (1 << 64) - 1, "state_hash": bytes(32)}


def test_what_strangers_and_banned_sites_say_to_hold_stops_no_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "OTHERS_S", 0.0)
    story, copy = a_run()
    copy.persist(copy.begin(story.settings).term, [BanRecord(name="evil", key_digest=b"", reason="it lies")], 1.0)

    async def main() -> None:
        started = Restoring(story.settings, copy, Machine(), security=PLAIN, seal=Seal(b"", "run"))
        address = await started.start("127.0.0.1:0")
        work = asyncio.create_task(started.restored())
        for name in ("evil", "unknown"):
            await said(address, name, deposits_to=0, **HOLDS_ALL)
        assert "is missing" not in await state_of(address)
        for name in "ab":
            await said(address, name, has_state=True, last_commit=1, state_hash=bytes(32))
        async with asyncio.timeout(LIMIT_S):
            await work
        await started.stop()

    asyncio.run(main())


def test_who_is_banned_hears_it_in_plain_text_too() -> None:
    """No key was ever seen with its name: that is not everybody's."""
    story, copy = a_run()
    copy.persist(copy.begin(story.settings).term, [BanRecord(name="x", key_digest=b"", reason="it lies")], 1.0)

    async def main() -> None:
        started = Restoring(story.settings, copy, Machine(), security=PLAIN, seal=Seal(b"", "run"))
        address = await started.start("127.0.0.1:0")
        for name in ("x", "a"):
            site = Site(address, name)
            site.keeps([])
            assert await site.ended()
            assert (await site.call.code() is grpc.StatusCode.PERMISSION_DENIED) == (name == "x")
            await site.close()
        await started.stop()

    asyncio.run(main())


@pytest.mark.parametrize("is_branch", [False, True])
def test_what_one_site_alone_says_to_hold_is_said_with_its_name_and_a_person_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, is_branch: bool
) -> None:
    """However high the number is, the coordinator answers."""
    monkeypatch.setattr(restoring, "OTHERS_S", 0.0)
    story, copy = a_run()
    lie = {**HOLDS_ALL, "last_commit": 1, "branch": 7} if is_branch else HOLDS_ALL

    async def main(num_sites: int | None) -> str:
        started = Restoring(story.settings, copy, Machine(), security=PLAIN, seal=Seal(b"", "run"), num_sites=num_sites)
        address = await started.start("127.0.0.1:0")
        work = asyncio.create_task(started.restored())
        await said(address, "a", has_state=True, last_commit=1, state_hash=bytes(32))
        await said(address, "b", **lie)
        state = await state_of(address)
        if num_sites is None:
            assert not work.done()
            work.cancel()
        else:
            async with asyncio.timeout(LIMIT_S):
                await work
        await started.stop()
        return state

    waits = asyncio.run(main(None))
    assert ("(branch 7), of which nobody tells, by b: " if is_branch else f"commit {(1 << 64) - 1}, by b: ") in waits
    assert "say how many sites are to be enough (--restore N)" in waits
    asyncio.run(main(2))
