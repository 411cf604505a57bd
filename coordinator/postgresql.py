"""Connections to a PostgreSQL database, and its errors in words. No password is in anything that is said here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import psycopg
from psycopg import conninfo, errors

from atoll.protocol.addresses import join_address
from atoll.protocol.errors import ConfigError, HostError

SCHEMA = "atoll"
"""Of its tables: other programs may use the same database."""
CONNECT_S = 3
IDLE_IN_TRANSACTION_S = 3
"""After this the server ends a transaction whose coordinator says nothing, and with it the locks that it holds. Less
than a lease: whoever stands by finds nothing locked."""
LOCK_WAIT_S = 5
SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")

Connection = psycopg.Connection[tuple[Any, ...]]

_SESSION = {
    "search_path": SCHEMA,
    "default_transaction_isolation": "read\\ committed",  # a row that is locked is read again
    "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_S}s",
    "lock_timeout": f"{LOCK_WAIT_S}s",
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": f"{IDLE_IN_TRANSACTION_S}s",
}
_CLIENT = {
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 1000 * IDLE_IN_TRANSACTION_S,
    "client_encoding": "UTF8",
    "application_name": "atoll",
}
_UNSAFE = ("fsync", "full_page_writes")


@dataclass(frozen=True, slots=True)
class Database:
    """One that the coordinator's `store` names."""

    words: dict[str, Any]
    where: str
    """For errors and logs."""

    @classmethod
    def named(cls, url: str) -> Database:
        """Raises ConfigError for what names none, and for a password: the list of processes and copies of the run's
        file would show it."""
        try:
            parts = urlsplit(url)
            is_secret = parts.password is not None or any(name in SECRETS for name, _ in parse_qsl(parts.query))
        except ValueError:
            raise ConfigError("the store is no postgresql://HOST/DATABASE that can be read") from None
        if is_secret:
            raise ConfigError(
                "the store's address has a password in it: leave it out, and put it into ~/.pgpass or the file that "
                "PGPASSFILE names (mode 0600), or into PGPASSWORD"
            )
        try:
            words = conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise ConfigError(f"the store is no postgresql://HOST/DATABASE that can be read: {_line(error)}") from None
        host, port, name = (str(words.get(key) or "") for key in ("host", "port", "dbname"))
        place = join_address(host, int(port)) if port.isdigit() else host
        return cls(words, f"the store postgresql://{place}/{name}")

    def connect(self) -> Connection:
        """A session in which each statement is a transaction of its own until BEGIN. Raises HostError, and ConfigError
        for a database that may lose what it has said that it keeps."""
        options = " ".join(f"-c {name}={value}" for name, value in _SESSION.items())
        given = str(self.words.get("options") or "")
        words = {**_CLIENT, **self.words, "options": f"{given} {options}".strip()}
        with explained(self.where):
            connection = psycopg.connect(**words, autocommit=True)
            try:
                self._check(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _check(self, connection: Connection) -> None:
        asked = ", ".join(f"current_setting('{name}')" for name in (*_UNSAFE, "server_encoding", "synchronous_commit"))
        *unsafe, encoding, synchronous = connection.execute(f"SELECT {asked}".encode()).fetchone() or ()
        if off := [name for name, value in zip(_UNSAFE, unsafe, strict=True) if value == "off"]:
            raise ConfigError(f"{self.where} has {off[0]} = off, and forgets commits in a power cut: turn it on")
        if encoding != "UTF8":
            raise ConfigError(f"{self.where} has encoding {encoding}: make one with ENCODING 'UTF8'")
        if synchronous not in ("on", "remote_apply"):  # the second one waits for more
            connection.execute("SET synchronous_commit = on")


@contextmanager
def explained(where: str) -> Iterator[None]:
    """PostgreSQL's errors in words."""
    try:
        yield
    except errors.DiskFull as error:
        raise HostError(f"{where}: its disk is full; make room, then start the coordinator again") from error
    except errors.LockNotAvailable as error:
        raise HostError(f"{where}: another session holds its rows ({_line(error)}); end that one") from error
    except (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction) as error:
        text = f"it cannot be written ({_line(error)}); check the rights of its user, and that it is no replica"
        raise HostError(f"{where}: {text}") from error
    except psycopg.Error as error:
        raise HostError(f"{where}: {_line(error)}; is the database up, and does it know this user?") from error


def _line(error: psycopg.Error) -> str:
    """Of all that libpq says."""
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__


@lru_cache(maxsize=256)
def placed(statement: str) -> bytes:
    """With the placeholders of this database."""
    return statement.replace("?", "%s").encode()
