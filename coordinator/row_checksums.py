"""A checksum in every row of the store. SQLite checks the structure of its file, not that a value is what was written.

Triggers of the connection, not of the file, write them: no statement can forget to, and any tool can read the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from blake3 import blake3

CHECKSUM_BYTES = 16


def _checksum(table: str, *values: int | float | bytes | None) -> bytes:
    """Python's repr of these types is exact, and tells them apart."""
    return blake3(repr((table, values)).encode()).digest(CHECKSUM_BYTES)


def _tables(db: sqlite3.Connection) -> Iterator[tuple[str, list[str], list[str], str]]:
    """Name, columns but for the checksum, those of the key, and what the checksum has to be."""
    for (table,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table' ORDER BY name").fetchall():
        columns = [c for c in db.execute(f"PRAGMA table_info({table})").fetchall() if c[1] != "checksum"]
        # As bytes, so that text which is no UTF-8 any more is a wrong checksum like any other damage.
        values = [f"CAST({c[1]} AS BLOB)" if c[2] in ("TEXT", "BLOB") else c[1] for c in columns]
        names, key = [c[1] for c in columns], [c[1] for c in columns if c[5]]
        yield table, names, key, f"row_checksum('{table}', {', '.join(values)})"


def keep_checksums(db: sqlite3.Connection) -> None:
    """From now on rows are written with their checksums, and one is checked before it is changed or deleted."""
    db.execute("PRAGMA temp_store = MEMORY")
    db.create_function("row_checksum", -1, _checksum, deterministic=True)
    for table, columns, _, checksum in _tables(db):
        write = f"BEGIN UPDATE {table} SET checksum = {checksum} WHERE rowid = NEW.rowid; END"
        check = (
            f"BEGIN SELECT RAISE(ABORT, 'table {table}: a row was changed on the disk') FROM {table} "
            f"WHERE rowid = OLD.rowid AND checksum IS NOT {checksum}; END"
        )
        of_columns = f"UPDATE OF {', '.join(columns)}"
        db.execute(f"CREATE TEMP TRIGGER {table}_inserted AFTER INSERT ON main.{table} {write}")
        db.execute(f"CREATE TEMP TRIGGER {table}_updated AFTER {of_columns} ON main.{table} {write}")
        db.execute(f"CREATE TEMP TRIGGER {table}_updates BEFORE {of_columns} ON main.{table} {check}")
        db.execute(f"CREATE TEMP TRIGGER {table}_deletes BEFORE DELETE ON main.{table} {check}")


def wrong_row(db: sqlite3.Connection) -> str:
    """Table and key of a row that is not what was written, '' if all are. After `keep_checksums`."""
    for table, _, key, checksum in _tables(db):
        found = db.execute(f"SELECT {', '.join(key)} FROM {table} WHERE checksum IS NOT {checksum} LIMIT 1").fetchone()
        if found is not None:
            where = ", ".join(f"{name} {value}" for name, value in zip(key, found, strict=True))
            return f"table {table}, row {where}: its checksum is not that of its values"
    return ""
