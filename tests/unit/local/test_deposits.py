"""What a site keeps for its coordinator."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest

from atoll.node.daemon import deposit_box
from atoll.node.daemon.deposit_box import DepositBox, box_bytes, most_on_disk
from atoll.node.daemon.deposits import Deposits
from atoll.node.tasks import Tasks
from atoll.protocol import messages as m
from atoll.protocol.deposit_messages import DEPOSITS_PART_BYTES, MAX_DEPOSITS_AT_ONCE
from atoll.protocol.deposits import Seal, parts_of
from atoll.protocol.errors import HostError
from atoll.protocol.messages import Deposit

SEAL = Seal(b"secret", "run")


def a_deposit(seq: int, number: int = 0, body: bytes = b"{}", kind: str = "commit") -> Deposit:
    made = Deposit(seq=seq, record=kind, kind=kind, number=number, part=0, name="", body=body, kept_at=1.5)
    return SEAL.sealed(made)


def all_of(box: DepositBox, after: int = 0) -> list[Deposit]:
    found: list[Deposit] = []
    while part := box.after(after):
        found += part
        after = part[-1].seq
    return found


def test_what_was_changed_is_told_whatever_of_it_was() -> None:
    whole = a_deposit(7, 3)
    assert SEAL.is_whole(whole)
    other = {"seq": 8, "number": 4, "part": 1, "kept_at": 1.6, "body": b"{ }", "seal": bytes(32)}
    for field in fields(Deposit):
        assert not SEAL.is_whole(replace(whole, **{field.name: other.get(field.name, "x")})), field.name  # type: ignore[arg-type]
    assert not Seal(b"another", "run").is_whole(whole)
    assert not Seal(b"secret", "other run").is_whole(whole)
    assert not SEAL.is_whole(SEAL.sealed(replace(whole, seq=1 << 63))), "no database takes that"


def test_a_later_record_of_a_key_takes_the_place_of_an_earlier_one_and_no_other_does(tmp_path: Path) -> None:
    path = tmp_path / "deposits.db"
    first, later, other = a_deposit(5, 1, b"first"), a_deposit(9, 1, b"later"), a_deposit(7, 2, b"other")
    with closing(DepositBox(path)) as box:
        assert box.last_seq == 0
        box.add([first, other])
        box.add([later])
        box.add([later])  # said again
        box.add([first])
        assert all_of(box) == [other, later]
    with closing(DepositBox(path)) as box:
        assert (box.last_seq, all_of(box), all_of(box, 7)) == (9, [other, later], [later])


def test_it_keeps_the_newest_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deposit_box, "MAX_KEPT", 3)
    monkeypatch.setattr(deposit_box, "TRIMMED_EVERY", 1)
    box = DepositBox(None, max_bytes=1 << 16)
    box.add([a_deposit(1, kind="ban"), *(a_deposit(n, n) for n in range(2, 8))])
    assert [d.seq for d in all_of(box)] == [1, 5, 6, 7], "of each kind"
    box.add([a_deposit(8, 7, bytes(1 << 16))])
    assert [d.seq for d in all_of(box)] == [1, 8], "of commits; what there are few of stays"
    box.add([a_deposit(9, 7, b"")])
    assert [d.seq for d in all_of(box)] == [1, 9], "what was replaced does not count"


def test_its_files_have_at_most_what_is_counted_against_the_limit_of_the_disk(tmp_path: Path) -> None:
    """Seventeen times as much comes as may stay there, in bodies of all sizes."""
    max_bytes, path = box_bytes(64 << 20), tmp_path / "deposits.db"
    assert (max_bytes, box_bytes(0), box_bytes(1 << 50)) == (2 << 20, 1 << 30, 1 << 30)
    with closing(DepositBox(path, max_bytes)) as box:
        for first in range(1, 480, 8):
            kinds = ("commit", "open")
            box.add([a_deposit(n, n, bytes(n % 97 * 1500), kinds[n % 2]) for n in range(first, first + 8)])
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= most_on_disk(max_bytes), first
        kept = all_of(box)
    assert kept[-1].seq == 480
    assert sum(len(d.body) for d in kept) > max_bytes // 8, "it is used"


def test_a_file_of_a_home_that_might_have_more_before_is_made_smaller(tmp_path: Path) -> None:
    max_bytes, path = 1 << 20, tmp_path / "deposits.db"
    with closing(DepositBox(path)) as box:
        box.add([a_deposit(1, kind="ban"), *(a_deposit(n, n, bytes(100_000)) for n in range(2, 80))])
    assert path.stat().st_size > 7 * max_bytes
    with closing(DepositBox(path, max_bytes)) as box:
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= max_bytes + max_bytes // 4
        assert [d.seq for d in all_of(box)] == [1, *range(71, 80)], "the newest, and what there are few of"


def test_where_a_full_disk_leaves_no_room_to_make_it_smaller_it_stays_as_it_is_and_the_node_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deposits.db"
    with closing(DepositBox(path)) as box:
        box.add([a_deposit(n, n, bytes(100_000)) for n in range(1, 40)])

    def full(_: DepositBox) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(DepositBox, "_trim", full)
    with closing(DepositBox(path, 1 << 20)) as box:
        assert [d.seq for d in all_of(box)] == [*range(1, 40)]
    assert "could not be made smaller, and stays as large as it is: database or disk is full" in caplog.text


def test_a_file_that_is_no_database_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "deposits.db"
    path.write_bytes(b"not a database" * 100)
    with closing(DepositBox(path)) as box:
        box.add([a_deposit(1)])
        assert all_of(box) == [a_deposit(1)]
    assert f"{path} is damaged, and is begun anew" in caplog.text


def test_a_box_that_cannot_be_opened_now_is_whole_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = tmp_path / "deposits.db", [a_deposit(n, n) for n in range(1, 6)]
    with closing(DepositBox(path)) as box:
        box.add(kept)

    def failing_once(*_: object, **__: object) -> sqlite3.Connection:
        monkeypatch.undo()
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(sqlite3, "connect", failing_once)
    with pytest.raises(HostError, match=r"deposits\.db cannot be read or written \(disk I/O error\)"):
        DepositBox(path)
    with closing(DepositBox(path)) as box:
        assert (box.last_seq, all_of(box)) == (5, kept)


def test_messages_are_bounded_in_bytes_and_in_number() -> None:
    large, small = [a_deposit(n, n, bytes(DEPOSITS_PART_BYTES)) for n in (1, 2)], [a_deposit(n, n) for n in range(9000)]
    assert [len(part) for part in parts_of(large)] == [1, 1]
    parts = list(parts_of(small))
    assert [d for part in parts for d in part] == small
    assert max(map(len, parts)) <= MAX_DEPOSITS_AT_ONCE
    assert max(sum(len(d.body) for d in part) for part in parts) < DEPOSITS_PART_BYTES


def test_a_site_says_what_it_has_and_gives_back_what_it_is_asked_for() -> None:
    said: list[m.SiteMessage] = []

    def failed(error: BaseException) -> None:
        raise error

    async def main() -> None:
        box, tasks = DepositBox(None), Tasks(failed)
        deposits = Deposits(box, tasks, said.append)
        hello = m.Hello(name="a", key=bytes(32), address="h:1")
        assert deposits.in_hello(hello).deposits_to == 1, "it takes them, and has none"
        kept: Sequence[Deposit] = [a_deposit(n, n) for n in range(1, 6)]
        deposits.take(m.Deposits(deposits=(*kept[:2], replace(kept[0], seq=1 << 63))))
        deposits.take(m.Deposits(deposits=tuple(kept[2:])))
        for after in (3, 5):
            deposits.give_back(m.ReturnDeposits(after_seq=after))
            while tasks:
                await asyncio.wait(tasks)
        assert said == [
            m.DepositsReturned(deposits=tuple(kept[3:]), is_last=False),
            m.DepositsReturned(is_last=True),
        ]
        deposits.give_back(m.ReturnDeposits(after_seq=0))
        assert deposits.in_hello(hello).deposits_to == 6
        while tasks:
            await asyncio.wait(tasks)
        assert len(said) == 2, "what was asked for on another stream is not said on this one"

    asyncio.run(main())


def test_a_disk_that_fails_costs_the_site_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failed(error: BaseException) -> None:
        raise error

    async def main() -> None:
        box, tasks = DepositBox(tmp_path / "deposits.db"), Tasks(failed)
        deposits = Deposits(box, tasks, lambda message: None)
        box._db.execute("PRAGMA query_only = ON")  # as a disk that takes nothing any more
        for number in (1, 2):
            deposits.take(m.Deposits(deposits=(a_deposit(number, number),)))
            while tasks:
                await asyncio.wait(tasks)
        hello = m.Hello(name="a", key=bytes(32), address="h:1")
        assert deposits.in_hello(hello).deposits_to == 0, "it takes none any more"
        box.close()

    asyncio.run(main())
    (line,) = [record.message for record in caplog.records]
    assert "keeps nothing more for its coordinator" in line


def test_a_box_that_cannot_be_read_costs_the_site_nothing_and_says_nothing_that_is_not_true(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    said: list[m.SiteMessage] = []

    async def main() -> None:
        box, tasks = DepositBox(tmp_path / "deposits.db"), Tasks(failures.append)
        deposits = Deposits(box, tasks, said.append)
        box.add([a_deposit(1, 1)])
        box._db.execute("ALTER TABLE deposits RENAME TO lost")  # as pages that are damaged
        deposits.give_back(m.ReturnDeposits(after_seq=0))
        while tasks:
            await asyncio.wait(tasks)
        hello = m.Hello(name="a", key=bytes(32), address="h:1")
        assert deposits.in_hello(hello).deposits_to == 0, "it keeps nothing for its coordinator"
        box.close()

    asyncio.run(main())
    assert (failures, said) == ([], [])
