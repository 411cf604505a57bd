"""Two coordinators on one PostgreSQL database: one leads, the other one stands by; real processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from atoll.cli.client import local_status
from atoll.cli.main import main
from atoll.coordinator import admin
from atoll.coordinator.core.events import CommitRecord
from atoll.protocol.errors import ConfigError, HostError, StaleError
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust import certificates, enrolled
from tests.harness import postgresql
from tests.harness.commit_records import assert_each_sample_counts_once, decoded
from tests.harness.data_account import DATA, LEASED, assert_account_balances
from tests.harness.local_run import POLL_S, LocalRun, Process, Status
from tests.harness.sockets import free_address
from tests.harness.struck_at_commit import PROGRAM, STRIKES

WORKER = [sys.executable, str(Path(__file__).parents[1] / "workers" / "plain_worker.py"), "--step-delay-s", "0.02"]
MODEL = [*WORKER, "--tensors", "w=30x40,b=10", *LEASED]
SETTINGS = RunSettings(
    run_id="run",
    steps=100_000,
    min_sites=3,
    data=DATA,
    time_limits="local",
    sync=SyncSettings(every=10, chunk_elements=1000, codec="fp32"),
)
LIMIT_S = 150.0
"""Of a hang: on a machine with twenty processes a core the start of three nodes alone has taken a minute."""

pytestmark = [pytest.mark.timeout(600), postgresql.needed]


class Coordinator:
    """One of two, in a folder of its own as on a machine of its own."""

    def __init__(self, run: LocalRun, name: str, url: str) -> None:
        self.name = name
        self.address = free_address()
        self.folder = run.folder / name
        self.folder.mkdir()
        self.strikes = run.folder / f"{name}.strikes"
        self.toml = self.folder / "run.toml"
        shutil.copyfile(run.toml, self.toml)
        self.store_path = self.folder / "run.db"
        self.process: Process
        self._run = run
        self._url = url

    def start(self, until: str) -> Process:
        command = [sys.executable, *PROGRAM, "coordinator", str(self.toml), "--listen", self.address]
        process = self._run.start(
            self.name, [*command, "--store", self._url], {STRIKES: str(self.strikes), "PYTHONUNBUFFERED": "1"}
        )
        process.wait_for_line(until, LIMIT_S)
        self.process = process
        return process

    def status(self) -> Status:
        """Of one that leads. As its unit does, it is started again if it lost its lease: so it does where it gets no
        processor for five seconds."""
        while True:
            try:
                return local_status(self.store_path)
            except HostError:
                if self.process.wait(LIMIT_S) != StaleError.exit_code:
                    raise
                self.start("listening on")

    def strike(self, name: str) -> None:
        """In front of COMMIT of its next commit. The file is whole when it is there."""
        written = self.strikes.with_suffix(".written")
        written.write_text(name)
        written.rename(self.strikes)

    def wait_until_struck(self) -> float:
        deadline = time.monotonic() + LIMIT_S
        while self.strikes.exists():
            assert time.monotonic() < deadline, self._run.story()
            time.sleep(0.02)
        return time.monotonic()

    def leads(self, run: LocalRun) -> None:
        """What `run` asks, it asks this one."""
        run.toml = self.toml

    def is_brought_the_next_root_of(self, leader: Coordinator) -> None:
        """By a person, and the next root signs."""
        store = str(leader.store_path)
        assert main(["rotate", "--store", store]) == HostError.exit_code, "this one has not the next root"
        for path in (leader.folder / "run.db.trust").glob("root-2.*"):
            shutil.copy(path, self.folder / "run.db.trust")
        for step in ([], ["--sign"]):
            deadline = time.monotonic() + LIMIT_S
            while main(["rotate", "--store", store, *step]) != 0:
                assert time.monotonic() < deadline, self._run.story()
                time.sleep(POLL_S)


def is_of_first_root(run: LocalRun, name: str, roots: bytes, _: Status) -> bool:
    """Of those that are in force, and which signs."""
    shown = enrolled.joined(run.home(name)).shown
    first = certificates.from_pem(roots)[0]
    return certificates.is_signed_by(certificates.from_pem(shown.certificate)[0], first)


def commits_in(url: str) -> list[CommitRecord]:
    with psycopg.connect(url) as db:
        return decoded(db.execute("SELECT body FROM atoll.records WHERE kind = 'commit' ORDER BY number").fetchall())


def assert_no_commit_was_lost(run: LocalRun, commits: list[CommitRecord]) -> None:
    """That any site has heard of: it is in the store, and came out alike everywhere."""
    kept = [c.commit.commit for c in commits]
    assert kept == list(range(1, len(kept) + 1))
    heard: dict[int, set[Any]] = {}
    for name in run.nodes:
        for line in run.journal(name, "commit"):
            heard.setdefault(line["commit"], set()).add(line["state_hash"])
    assert set(heard) - {0} <= set(kept)
    assert all(len(hashes) == 1 for hashes in heard.values()), heard


def test_the_one_that_stands_by_goes_on_when_the_leader_is_stopped_or_killed_in_front_of_commit(
    tmp_path: Path, postgresql_server: postgresql.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgresql_server.database()
    with LocalRun(tmp_path, SETTINGS, secured=True) as run:
        one, two = Coordinator(run, "one", url), Coordinator(run, "two", url)
        stopped = one.start("listening on")
        one.leads(run)

        shutil.copytree(one.folder / "run.db.trust", two.folder / "run.db.trust")
        two.start(f"it stands by: the coordinator at {one.address} leads")
        assert "it stands by" in admin.ask(two.store_path, "health")
        with pytest.raises(HostError, match=r"it stands by: .*; ask that one"):
            admin.ask(two.store_path, "stop", reason="?")
        assert main(["health", "--store", str(two.store_path)]) == 0
        assert main(["health", "--store", str(two.store_path), "--ready"]) == HostError.exit_code
        run.wait(lambda s: s["leading"]["standbys"] == [two.address], LIMIT_S)
        for name in "abc":
            run.start_node(name, MODEL)
        assert main(["ban", "--store", str(one.store_path), "nobody"]) == 0
        last = run.wait(lambda s: s["last_commit"] >= 2, LIMIT_S)["last_commit"]

        one.strike("SIGSTOP")
        struck_at = one.wait_until_struck()
        two.leads(run)
        two.process.wait_for_line("listening on", LIMIT_S)
        led_s = time.monotonic() - struck_at
        last = run.wait(lambda s: s["last_commit"] > last + 1, LIMIT_S, status=two.status)["last_commit"]
        took_s = time.monotonic() - struck_at
        with capsys.disabled():
            sys.stdout.write(
                f"\nafter SIGSTOP: the other one listened within {led_s:.1f} s, commits went on within {took_s:.1f} s\n"
            )
        assert [text.partition(":")[0] for text in run.status()["banned"]] == ["nobody"]
        assert "store_disk" not in run.status(), "the database is on another one"
        at_wake = len(commits_in(url))
        os.kill(stopped.popen.pid, signal.SIGCONT)
        assert stopped.wait(LIMIT_S) in (HostError.exit_code, StaleError.exit_code)
        assert not any("Traceback" in line for line in stopped.lines), stopped.lines
        terms = {c.commit.term for c in commits_in(url)[at_wake:]}
        assert 1 not in terms, "what the first one wanted to commit is not there"

        one.start(f"it stands by: the coordinator at {two.address} leads")
        run.wait(lambda s: s["leading"]["standbys"] == [one.address], LIMIT_S, status=two.status)
        one.is_brought_the_next_root_of(two)
        last = run.status()["last_commit"]
        two.strike("SIGKILL")
        struck_at = two.wait_until_struck()
        one.leads(run)
        one.process.wait_for_line("listening on", LIMIT_S)
        led_s = time.monotonic() - struck_at
        run.wait(lambda s: s["last_commit"] > last + 1, LIMIT_S, status=one.status)
        took_s = time.monotonic() - struck_at
        with capsys.disabled():
            sys.stdout.write(
                f"after kill -9: the other one listened within {led_s:.1f} s, commits went on within {took_s:.1f} s\n"
            )

        roots = run.status()["root"].encode()
        assert len(certificates.from_pem(roots)) == 2, "it knows how far the rotation has come"
        for name in "abc":
            run.wait(partial(is_of_first_root, run, name, roots), LIMIT_S, status=one.status)
            learned = enrolled.joined(run.home(name)).learned
            assert set(learned) == {one.address, two.address}, "kept for a start without the one that it knew"
        assert main(["stop", "--store", str(one.store_path)]) == 0
        assert run.wait_all(LIMIT_S, ["a", "b", "c"]) == {"a": 0, "b": 0, "c": 0}
        assert_account_balances(run.status())
        final = run.status()["last_commit"]
        hashes = run.hashes(final)
        assert set(hashes) == {"a", "b", "c"}
        assert len(set(hashes.values())) == 1
        commits = commits_in(url)
        assert len(commits) == final
        assert_no_commit_was_lost(run, commits)
        assert_each_sample_counts_once(commits)


def test_who_cannot_lead_is_refused_by_name_before_it_stands_by(
    tmp_path: Path, postgresql_server: postgresql.Server
) -> None:
    url = postgresql_server.database()
    with LocalRun(tmp_path, SETTINGS, secured=True) as run:
        one, two = Coordinator(run, "one", url), Coordinator(run, "two", url)
        one.start("listening on")
        refused = two.start("run.db.trust is not, without which no site knows this coordinator")
        assert refused.wait(LIMIT_S) == HostError.exit_code
        (two.folder / "run.db.trust").mkdir()
        refused = two.start("the run.s root is another one")
        assert refused.wait(LIMIT_S) == ConfigError.exit_code
        shutil.rmtree(two.folder / "run.db.trust")
        shutil.copytree(one.folder / "run.db.trust", two.folder / "run.db.trust")
        two.toml.write_text(two.toml.read_text().replace("steps = 100000", "steps = 100001"))
        refused = two.start("steps was 100000, now 100001")
        assert refused.wait(LIMIT_S) == ConfigError.exit_code
        with pytest.raises(HostError, match="pg_dump"):
            admin.ask(one.store_path, "backup", path=str(tmp_path / "copy.db"))
