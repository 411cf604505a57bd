"""When a site may be in the run: hours and months, by a wall clock that the test sets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from atoll.node.daemon.allowance import Allowance, Hours, Sent, hours
from atoll.node.daemon.config import NodeConfig, validate
from atoll.node.daemon.time_off import Account
from atoll.protocol.disk import Disk
from atoll.protocol.errors import ConfigError, HostError
from tests.harness.power_cut import Recorder

GB = 10**9
NOTHING = Sent()


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of central Europe: summer time begins on 2026-03-29 at 02:00, and ends on 2026-10-25 at 03:00."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def back_at(allowance: Allowance, now: str, sent: Sent = NOTHING) -> str:
    """When it may come back; empty if it may stay."""
    time_off = allowance.time_off(sent, at(now))
    return f"{datetime.fromtimestamp(time_off.until_s):%Y-%m-%d %H:%M}" if time_off else ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [("22-07", "22:00-07:00"), ("8:30-17", "08:30-17:00"), ("0-24", ""), ("20-24", "20:00-00:00"), ("", "None")],
)
def test_hours_are_read(text: str, expected: str) -> None:
    if expected:
        assert str(hours(text)) == expected
    else:
        with pytest.raises(ConfigError, match="say from when to when"):
            hours(text)


@pytest.mark.parametrize("text", ["22", "22-", "7-7", "25-3", "22-24:30", "7:60-8", "-1-3", "22-07 ", "٢٢-٠٧"])
def test_what_are_no_hours_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hours .*as 22-07 or 8:30-17"):
        hours(text)


def test_a_site_is_off_outside_of_its_hours_until_they_begin() -> None:
    night, day = Allowance(hours=hours("22-07")), Allowance(hours=hours("8:30-17"))
    assert back_at(night, "2026-05-02 21:59:59") == "2026-05-02 22:00"
    assert back_at(night, "2026-05-02 22:00") == ""
    assert back_at(night, "2026-05-03 06:59") == ""
    assert back_at(night, "2026-05-03 07:00") == "2026-05-03 22:00"
    assert back_at(day, "2026-05-03 08:29") == "2026-05-03 08:30"
    assert back_at(day, "2026-05-03 16:59") == ""
    assert back_at(day, "2026-12-31 17:00") == "2027-01-01 08:30"
    time_off = night.time_off(NOTHING, at("2026-05-02 12:00"))
    assert str(time_off) == "outside its hours (22:00-07:00); back at 2026-05-02 22:00 there"


def test_hours_are_those_on_the_clock_where_summer_time_begins_and_ends() -> None:
    early = Allowance(hours=Hours(4 * 60, 6 * 60))
    for noon, until, num_hours in (
        ("2026-03-28 12:00", "2026-03-29 04:00", 15),
        ("2026-10-24 12:00", "2026-10-25 04:00", 17),
        ("2026-05-02 12:00", "2026-05-03 04:00", 16),
    ):
        assert back_at(early, noon) == until
        assert at(until) - at(noon) == num_hours * 3600


def test_a_site_that_has_sent_its_share_of_a_month_is_off_until_the_next() -> None:
    allowance = Allowance(monthly_bytes=10 * GB)
    sent = NOTHING.plus(10 * GB - 1, at("2026-05-02 12:00"))
    assert back_at(allowance, "2026-05-31 23:59", sent) == ""
    sent = sent.plus(1, at("2026-05-31 23:59"))
    assert back_at(allowance, "2026-05-31 23:59", sent) == "2026-06-01 00:00"
    assert back_at(allowance, "2026-06-01 00:00", sent) == "", "of that month nothing is sent"
    assert sent.plus(5, at("2026-06-01 00:00")) == Sent("2026-06", 5)
    assert sent.plus(5, at("2026-04-30 12:00")) == Sent("2026-05", 10 * GB + 5), "a clock that goes back gives nothing"
    december = NOTHING.plus(10 * GB, at("2026-12-24 12:00"))
    assert back_at(allowance, "2026-12-24 12:00", december) == "2027-01-01 00:00"


def test_of_two_limits_the_rest_that_is_longer_counts_and_none_is_none() -> None:
    both = Allowance(hours=hours("22-07"), monthly_bytes=GB)
    sent = NOTHING.plus(GB, at("2026-05-02 12:00"))
    assert back_at(both, "2026-05-02 12:00", sent) == "2026-06-01 00:00"
    assert back_at(both, "2026-05-02 12:00") == "2026-05-02 22:00"
    assert back_at(both, "2026-05-02 23:00") == ""
    assert back_at(Allowance(), "2026-05-02 12:00", sent) == ""
    assert both
    assert not Allowance()


def read(home: Path, now_s: float) -> Account:
    account = Account(home, Disk())
    asyncio.run(account.read(now_s))
    return account


def test_what_was_sent_is_counted_across_starts(tmp_path: Path) -> None:
    now_s = at("2026-05-02 12:00")
    for start in (0, 300):
        account = read(tmp_path, now_s)
        assert account.sent.num_bytes == start
        for total_bytes in (100, 250, 250, 300):
            asyncio.run(account.count(total_bytes, now_s))
            assert account.sent == Sent("2026-05", start + total_bytes)
    assert (tmp_path / "sent").read_text() == "2026-05 600\n"


def test_a_power_cut_leaves_an_account_of_no_less_than_the_last_look(tmp_path: Path) -> None:
    now_s, home = at("2026-05-02 12:00"), tmp_path / "home"
    home.mkdir()
    counted = []  # (moment, bytes)
    with Recorder(home, pytest.MonkeyPatch()) as recorder:
        account = Account(home, Disk())
        for total_bytes in (100, 250, 300):
            asyncio.run(account.count(total_bytes, now_s))
            counted.append((recorder.note(), total_bytes))
        for seed in range(100):
            image = tmp_path / str(seed)
            image.mkdir()
            cut = recorder.image(seed, image)
            least = max((num_bytes for moment, num_bytes in counted if moment <= cut), default=0)
            found = read(image, now_s).sent.num_bytes
            assert found >= least
            assert found in (0, 100, 250, 300)


@pytest.mark.parametrize("text", ["", "2026-05", "2026-05 -3\n", "2026-05 1e3\n", f"2026-05 {10**30}\n", "\0"])
def test_an_account_that_is_none_is_refused_and_never_taken_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "sent").write_text(text)
    with pytest.raises(HostError, match="does not say what was sent in which month"):
        read(tmp_path, at("2026-05-02 12:00"))
    assert (tmp_path / "sent").read_text() == text
    with pytest.raises(ValueError, match=r".*"):
        Sent.of(text)


@pytest.mark.parametrize("limit", [{"hours": "22-07"}, {"max_upload_bytes_per_s": 10}, {"monthly_upload_bytes": 10}])
def test_limits_of_a_site_of_several_processes_are_refused(limit: dict[str, object]) -> None:
    config = {"coordinator": "127.0.0.1:1", "name": "a", **limit}
    validate(NodeConfig(**config))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one host with one exchange process"):
        validate(NodeConfig(**config, exchange_processes=2))  # type: ignore[arg-type]
