"""Debian's PostgreSQL for tests: a server of this process in a folder of its own, on a Unix socket."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
import pytest

ROOT = Path("/usr/lib/postgresql")
USER = "atoll"
LIMIT_S = 60.0
CONF = """
listen_addresses = ''
max_connections = 40
shared_buffers = 16MB
autovacuum = off
"""


def programs() -> Path | None:
    """Of the newest version here; None without the Debian package."""
    found = sorted(ROOT.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


needed = pytest.mark.skipif(programs() is None, reason="needs the Debian package postgresql")


class Server:
    """A cluster, which runs inside the context. fsync is on. It refuses root: then it is user `postgres`'s."""

    def __init__(self) -> None:
        found = programs()
        assert found is not None
        self._programs = found
        base = next(place for place in ("/dev/shm", "/tmp") if os.path.isdir(place))  # short: the name of a socket
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-pg-", dir=base))
        self._user = "postgres" if os.geteuid() == 0 else None
        self._popen: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        if self._user is not None:
            os.chown(self.folder, pwd.getpwnam(self._user).pw_uid, -1)
        data = self.folder / "data"
        command = [
            str(self._programs / "initdb"),
            "-D",
            str(data),
            "-U",
            USER,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        subprocess.run([*command, "--locale=C"], user=self._user, check=True, capture_output=True, cwd="/")
        with (data / "postgresql.conf").open("a") as file:
            file.write(CONF)
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._popen is not None:
            self._popen.send_signal(signal.SIGQUIT)
            self._popen.wait(LIMIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        data, log = self.folder / "data", self.folder / "log"
        command = [str(self._programs / "postgres"), "-D", str(data), "-k", str(self.folder)]
        with log.open("ab") as file:
            self._popen = subprocess.Popen(command, user=self._user, stdout=file, stderr=file, cwd="/")
        ready = [str(self._programs / "pg_isready"), "-h", str(self.folder), "-q"]
        deadline = time.monotonic() + LIMIT_S
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._popen.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()

    def database(self) -> str:
        """The address of a new one, without a password."""
        name = f"d{next(self._numbers)}"
        with self.connected("postgres") as db:
            db.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql://{USER}@/{name}?host={self.folder}"

    def dump(self, name: str, to: Path) -> None:
        """What an operator keeps as a copy of that database."""
        self._run("pg_dump", name, "--schema=atoll", "-f", str(to))

    def put_back(self, name: str, dump: Path) -> None:
        """The database is lost, and what there is of it is that copy. Nobody is connected."""
        with self.connected("postgres") as db:
            db.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            db.execute(f"CREATE DATABASE {name}".encode())
        self._run("psql", name, "-q", "-v", "ON_ERROR_STOP=1", "-f", str(dump))

    def _run(self, program: str, name: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-h", str(self.folder), "-U", USER, "-d", name, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def emptied(self) -> str:
        """The address of one without a store, which tests that need no other one share."""
        with self.connected("postgres") as db:
            db.execute("DROP SCHEMA IF EXISTS atoll CASCADE")
        return f"postgresql://{USER}@/postgres?host={self.folder}"

    @contextmanager
    def connected(self, name: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        with psycopg.connect(host=str(self.folder), user=USER, dbname=name, autocommit=True) as db:
            yield db
