"""What the store in PostgreSQL has of its own: who leads, and what the server does to one that hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from atoll.coordinator import postgresql as module
from atoll.coordinator import rows
from atoll.coordinator.core import events as e
from atoll.coordinator.core.persisted import Persisted, Row
from atoll.coordinator.lease import LEASE_S, Claim, LeaseHeld, Standby
from atoll.coordinator.postgresql import Database
from atoll.coordinator.postgresql_lease import PostgresqlLease
from atoll.coordinator.postgresql_store import PostgresqlStore
from atoll.coordinator.sql_store import Found
from atoll.coordinator.stage import Stage, check_held
from atoll.protocol.errors import ConfigError, HostError, StaleError, StateError
from tests.harness import postgresql
from tests.harness.coordinator_story import some_settings
from tests.harness.memory_store import MemoryStore
from tests.unit.coordinator.test_store_contract import a_commit

SETTINGS = some_settings()
pytestmark = postgresql.needed


B = Standby("b:1", frozenset())


class SomeRoots:
    """Of a coordinator."""

    def __init__(self, *roots: str) -> None:
        self.told: list[Callable[[], None]] = []
        self.stage = Stage(roots[:1], roots[0] if roots else "")
        self._held = frozenset(roots)

    def held(self) -> frozenset[str]:
        return self._held

    def follow(self, stage: Stage) -> bool:
        check_held(stage, self.stage, self._held)
        was, self.stage = self.stage, stage
        return was != stage


class Two:
    """Coordinators on one database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.taken: list[str] = []
        """Who had the lease each time that one took it."""
        self._opened: list[PostgresqlStore | PostgresqlLease] = []

    def one(self, name: str, *roots: str) -> tuple[PostgresqlStore, PostgresqlLease]:
        """`roots`: that it has; the first one is trusted."""
        database, claim = Database.named(self.url), Claim(name, f"{name}:1")
        store, lease = PostgresqlStore(database), PostgresqlLease(database, claim)
        self._opened += [store, lease]
        store.claims(claim, lambda: self.takes(store), SomeRoots(*roots))
        return store, lease

    def takes(self, store: PostgresqlStore) -> None:
        """Called when it takes the lease: it is not another one's yet, and the rows were checked."""
        assert store._is_in_transaction()
        self.taken.append(self.held_by())

    def held_by(self) -> str:
        with psycopg.connect(self.url, autocommit=True) as db:
            (holder,) = db.execute("SELECT holder FROM atoll.lease").fetchone() or ("",)
            return str(holder)

    def do(self, statement: str) -> None:
        """By somebody else."""
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute(statement.encode())

    def waits_for_a_lock(self) -> bool:
        """Whether a session does."""
        with psycopg.connect(self.url, autocommit=True) as db:
            return bool(db.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall())

    def end_lease(self) -> None:
        self.do("UPDATE atoll.lease SET until = clock_timestamp()")

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


@pytest.fixture
def two(postgresql_server: postgresql.Server) -> Iterator[Two]:
    made = Two(postgresql_server.emptied())
    yield made
    made.close()


def test_a_second_one_leads_when_the_lease_is_over_and_the_first_one_keeps_nothing_more(two: Two) -> None:
    (a, lease_a), (b, lease_b) = two.one("a"), two.one("b")
    assert a.begin(SETTINGS).term == 1
    held = lease_b.stand_by(frozenset())
    assert (held.holder, held.address) == ("a", "a:1")
    assert 0 < held.left_s <= LEASE_S
    assert not held.is_over
    with pytest.raises(LeaseHeld, match="the coordinator at a:1 leads for"):
        b.begin(SETTINGS)
    assert lease_a.renew() == (B,), "who stands by is known"
    a.persist(1, [e.StopRecord("enough")], 1.0)

    two.end_lease()
    assert lease_b.stand_by(frozenset()).is_over
    assert lease_a.renew() is None, "what is over is not renewed, though nobody has taken it"
    found = b.begin(SETTINGS)
    assert found.term == 2, "a start that was refused was none"
    assert found.one(e.StopRecord) == e.StopRecord("enough")
    with pytest.raises(StaleError, match="term 1 is over, the newest is 2"):
        a.persist(1, [e.StopRecord("another")], 1.0)
    assert lease_a.renew() is None
    assert lease_b.renew() == (), "it stands by no more, it leads"
    lease_a.end()
    with pytest.raises(LeaseHeld):
        a.begin(SETTINGS)
    lease_b.end()
    assert a.begin(SETTINGS).one(e.StopRecord) == e.StopRecord("enough")
    assert two.taken == ["", "a", "b"], "what is refused takes nothing"


def test_one_that_stood_by_while_the_database_was_started_again_leads_when_it_is_needed(two: Two) -> None:
    (a, _), (b, _) = two.one("a"), two.one("b")
    a.begin(SETTINGS)
    two.do("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'atoll'")
    two.end_lease()
    assert b.begin(SETTINGS).term == 2
    with pytest.raises(HostError, match="terminating connection"):
        a.persist(1, [e.StopRecord("enough")], 1.0)


def test_a_database_that_another_version_has_made_meanwhile_is_refused(two: Two) -> None:
    a, _ = two.one("a")
    two.do("UPDATE atoll.format SET version = 8")
    with pytest.raises(StateError, match="has format 8, this version of atoll reads"):
        a.begin(SETTINGS)


def test_while_a_store_is_restored_its_lease_is_renewed_and_nobody_else_leads(two: Two) -> None:
    """However long that takes: the database holds up neither. Then the next term begins with the lease."""
    (a, lease_a), (b, lease_b) = two.one("a"), two.one("b")
    a.begin(SETTINGS)
    memory = MemoryStore()
    memory.begin(SETTINGS)
    memory.persist(1, [e.StopRecord("enough"), a_commit(1)], 1.0)
    deposits = [
        replace(deposit, seq=a.last_seq() + n) for n, deposit in enumerate(memory.deposits_after(0, 1 << 20), 1)
    ]
    assert deposits

    def settle(folded: Persisted) -> tuple[e.Record, ...]:
        assert folded.one(e.StopRecord) == e.StopRecord("enough")
        two.do("UPDATE atoll.lease SET until = clock_timestamp() + interval '1 s'")
        assert lease_a.renew() == ()
        assert lease_b.stand_by(frozenset()).left_s > LEASE_S - 1
        with pytest.raises(LeaseHeld):
            b.begin(SETTINGS)
        return (e.PausedRecord("settled"),)

    a.restore(1000, deposits, settle)
    kept = a.begin(SETTINGS)
    assert kept.term == 1001
    assert kept.one(e.PausedRecord) == e.PausedRecord("settled")
    assert kept.all(e.CommitRecord) == (a_commit(1),)
    assert lease_a.renew() == (B,)
    assert two.taken == ["", "a"]


def test_what_follows_from_a_restore_may_take_longer_than_the_server_waits_for_a_transaction_else(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._SESSION, "idle_in_transaction_session_timeout", "200ms")
    a, _ = two.one("a")
    a.begin(SETTINGS)

    def settle(folded: Persisted) -> tuple[e.Record, ...]:
        two.do("SELECT pg_sleep(0.6)")  # on a connection of its own: time has to pass
        return (e.PausedRecord("settled"),)

    a.restore(1000, [], settle)
    assert a.begin(SETTINGS).one(e.PausedRecord) == e.PausedRecord("settled")


def test_a_log_may_take_longer_to_read_than_the_server_waits_for_a_transaction_else(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 4,096 commits of 64 sites do."""
    monkeypatch.setitem(module._SESSION, "idle_in_transaction_session_timeout", "200ms")
    a, _ = two.one("a")
    a.begin(SETTINGS)
    a.persist(1, [a_commit(1)], 1.0)
    decode = rows.decode

    def slow(kind: str, body: bytes) -> Row:
        if kind == "commit":
            two.do("SELECT pg_sleep(0.6)")  # on a connection of its own: time has to pass
        return decode(kind, body)

    monkeypatch.setattr(rows, "decode", slow)
    assert a.begin(SETTINGS).all(e.CommitRecord) == (a_commit(1),)


def test_a_renewal_counts_from_the_clock_of_the_database(two: Two) -> None:
    a, lease = two.one("a")
    a.begin(SETTINGS)
    two.do("UPDATE atoll.lease SET until = clock_timestamp() + interval '1 s'")
    assert lease.renew() == ()
    assert LEASE_S - 1 < lease.stand_by(frozenset()).left_s <= LEASE_S


def test_what_a_hanging_leader_has_not_committed_is_undone_by_the_server(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in front of COMMIT, it holds the rows that the next term needs."""
    monkeypatch.setitem(module._SESSION, "idle_in_transaction_session_timeout", "200ms")
    (a, _), (b, _) = two.one("a"), two.one("b")
    a.begin(SETTINGS)
    commit: Callable[[], None] = a._commit

    def hangs() -> None:
        two.end_lease()
        assert b.begin(SETTINGS).all(e.StopRecord) == (), "it waited for the lock"
        commit()

    monkeypatch.setattr(a, "_commit", hangs)
    with pytest.raises(HostError, match="terminating connection due to idle-in-transaction timeout"):
        a.persist(1, [e.StopRecord("enough")], 1.0)
    assert b.begin(SETTINGS).all(e.StopRecord) == ()


def test_what_an_old_leader_commits_while_the_next_one_checks_the_rows_is_no_damage(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes when all rows were read, and the sum of their checksums is read next."""
    monkeypatch.setitem(module._SESSION, "lock_timeout", "60s")
    (a, _), (b, _) = two.one("a"), two.one("b")
    a.begin(SETTINGS)
    two.end_lease()
    execute = b._execute
    persisting: list[Future[object]] = []

    def executed(statement: str, values: Sequence[object] = ()) -> Found:
        if statement == "SELECT term, total, checksum FROM head":
            persisting.append(pool.submit(a.persist, 1, [e.StopRecord("enough")], 1.0))
            while not persisting[0].done() and not two.waits_for_a_lock():
                pass
        return execute(statement, values)

    monkeypatch.setattr(b, "_execute", executed)
    with ThreadPoolExecutor() as pool:
        found = b.begin(SETTINGS)
        with pytest.raises(StaleError, match="term 1 is over, the newest is 2"):
            persisting[0].result()
    assert found.term == 2
    assert found.all(e.StopRecord) == ()


def test_another_root_than_the_runs_is_refused(two: Two) -> None:
    a, _ = two.one("a", "aa")
    assert a.is_new
    a.begin(SETTINGS)
    assert not a.is_new
    for roots in (("bb",), ()):
        with pytest.raises(ConfigError, match="the run's root is another one: root aa, this coordinator has"):
            two.one("b", *roots)
    two.one("b", "aa")


def test_whoever_leads_next_has_the_roots_that_the_first_one_came_to(two: Two) -> None:
    """The stage is in the store, and no key; who lacks a root of it does not lead, and says which."""
    (a, lease_a), (b, lease_b), (c, _) = two.one("a", "aa", "bb"), two.one("b", "aa", "bb"), two.one("c", "aa")
    a.begin(SETTINGS)
    assert lease_b.stand_by(frozenset({"aa", "bb"})).stage == Stage(("aa",), "aa")
    assert lease_a.renew() == (Standby("b:1", frozenset({"aa", "bb"})),)
    signs = Stage(("aa", "bb"), "bb", 7.5)
    assert not lease_b.keep_stage(signs), "it does not lead"
    assert lease_a.keep_stage(signs)
    assert lease_b.stand_by(frozenset()).stage == signs
    two.end_lease()
    assert not lease_a.keep_stage(Stage(("aa",), "aa")), "its lease is over"
    with pytest.raises(ConfigError, match="the run's root is another one: root bb, this coordinator has root aa"):
        c.begin(SETTINGS)
    assert b.begin(SETTINGS).term == 2
    assert b._roots.stage == signs
    two.do("UPDATE atoll.lease SET stage = '{}'")
    with pytest.raises(StateError, match="says no roots of a run"):
        lease_a.stand_by(frozenset())


def test_where_the_roots_were_lost_the_next_one_has_another(two: Two) -> None:
    """As docs/operations.md has it typed."""
    (a, lease), (b, _) = two.one("a", "aa"), two.one("b", "bb")
    a.begin(SETTINGS)
    lease.end()
    with pytest.raises(ConfigError, match="the run's root is another one"):
        b.begin(SETTINGS)
    two.do("UPDATE atoll.lease SET stage = NULL")
    assert b.begin(SETTINGS).term == 2


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE atoll.records SET kept_at = 1", "its checksum is not that of its values"),
        ("DELETE FROM atoll.records", "a row is missing"),
        ("UPDATE atoll.head SET term = 7", "table head: its checksum"),
    ],
)
def test_who_leads_next_refuses_what_was_altered(two: Two, statement: str, says: str) -> None:
    a, lease = two.one("a")
    a.begin(SETTINGS)
    two.do(statement)
    lease.end()
    b, _ = two.one("b")
    with pytest.raises(StateError, match=f"is damaged .*{says}"):
        b.begin(SETTINGS)


def test_a_database_of_another_version_is_refused(two: Two) -> None:
    two.one("a")
    two.do("UPDATE atoll.format SET version = 8")
    with pytest.raises(StateError, match="has format 8, this version of atoll reads"):
        two.one("b")


def test_a_database_that_may_forget_is_refused(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNSAFE", ("fsync", "autovacuum"))  # the second one is off here
    with pytest.raises(ConfigError, match="has autovacuum = off, and forgets commits in a power cut"):
        two.one("a")
    monkeypatch.undo()
    two.url += "&options=-c%20synchronous_commit%3Doff"
    store, _ = two.one("a")
    assert store._execute("SHOW synchronous_commit").fetchone() == ("on",)
    assert store._execute("SHOW search_path").fetchone() == ("atoll",)
    (idle,) = store._execute("SHOW idle_in_transaction_session_timeout").fetchone()
    assert 0 < float(idle.removesuffix("s")) < LEASE_S, "whoever stands by finds nothing locked"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://atoll:geheim@db/run",
        "postgresql://db/run?password=geheim",
        "postgresql://db/run?user=a&sslpassword=geheim",
        "postgresql://a:gehe%zzim@db/run",
        "postgresql://db/run?oauth_client_secret=geheim",
    ],
)
def test_an_address_with_a_password_is_refused_without_saying_it(url: str) -> None:
    with pytest.raises(ConfigError, match="has a password in it") as refused:
        Database.named(url)
    assert "gehe" not in str(refused.value)


def test_a_database_that_is_not_there_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=rf"the store postgresql://{tmp_path}/run: .*is the database up"):
        PostgresqlStore(Database.named(f"postgresql:///run?host={tmp_path}"))
    with pytest.raises(ConfigError, match='"PassWord"') as refused:
        Database.named("postgresql://db/run?PassWord=geheim")
    assert "geheim" not in str(refused.value), "it may be a password"
