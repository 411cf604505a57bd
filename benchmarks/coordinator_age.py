"""A run of a million commits at its coordinator: what a commit, a start and the status cost, and what the store takes.

The core and the store of the product, two sites that exchange gradients at every step, no network and no model. CPU and
memory have the sites of a test in them, about an eighth of the CPU. The store is where --folder says (the file system
decides what a commit costs); by default in memory, where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from atoll.coordinator.core.core import Core
from atoll.coordinator.sqlite_store import SqliteStore
from atoll.protocol.settings import RunSettings
from tests.harness.coordinator_story import Story, some_settings

RATES = (1e-3, 0.1)
MIB = 1 << 20
REMEMBERED = 60
"""Messages that the sites of the story look back at."""


def settings_of() -> RunSettings:
    base = some_settings(min_sites=2, quorum=2)
    sync = replace(base.sync, strategy="gradient", every=1, log_commits=256)
    return replace(base, steps=1 << 40, sync=sync, outer=replace(base.outer, optimizer="adamw", momentum=0.9))


def commit(story: Story, number: int) -> None:
    for name in "ab":
        story.ready(name, rates=RATES)
    for name in "ab":
        story.done(name, f"s{number - 1}")
    for name in "ab":
        story.applied(name, number, f"s{number}")
    del story.sent[:-REMEMBERED]
    if number % 1000 == 0:
        forget(story, number - REMEMBERED)


def forget(story: Story, before: int) -> None:
    """The story of a test remembers all."""
    story.kept = {kept for kept in story.kept if kept[1] > before}
    story.kept_weights = {of: tokens for of, tokens in story.kept_weights.items() if of[0] > before}
    for said in (story.log, story.reports):
        said.clear()
    for site in story.sites.values():
        site.was_at = {commit: value for commit, value in site.was_at.items() if commit > before}


def start_s(path: Path, settings: RunSettings) -> float:
    """Of a coordinator on a copy of the store, which nobody has open: until it has said what its status is."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=path.parent) as folder:
        copy = Path(shutil.copy(path, folder))
        began = time.perf_counter()
        store = SqliteStore(copy)
        Core(settings, store.begin(settings, ""), 0.0, 0.0).view(0.0)
        took = time.perf_counter() - began
        store.close()
    return took


def copy_s(store: SqliteStore, to: Path) -> float:
    """As `atoll backup` makes it, while nothing is decided."""
    began = time.perf_counter()
    store.copy_to(to)
    took = time.perf_counter() - began
    to.unlink()
    return took


def goes_on(story: Story, path: Path, last: int) -> SqliteStore:
    """The coordinator starts again, and the sites come back."""
    story.store = store = SqliteStore(path)
    story.restart()
    for name in "ab":
        story.connect(name, state=(last, f"s{last}"))
        story.offer(name)
    return store


def milestones(last: int) -> Iterator[int]:
    """1,000, 10,000 and so on, and the last."""
    number = 1000
    while number < last:
        yield number
        number *= 10
    yield last


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks coordinator_age", description=__doc__)
    parser.add_argument("--commits", type=int, default=1_000_000)
    shm = Path("/dev/shm")
    parser.add_argument("--folder", type=Path, default=shm if shm.is_dir() else None, help="of the store")
    arguments = parser.parse_args(argv)
    settings = settings_of()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=arguments.folder) as folder:
        path = Path(folder) / "run.db"
        store = SqliteStore(path)
        story = Story(settings, store=store)
        story.start("a", "b")
        print("| commits | CPU of a commit | store | rows | start | a copy | status | memory |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        done = 0
        for number in milestones(arguments.commits):
            began, before = time.process_time(), done
            while done < number:
                done += 1
                commit(story, done)
            each_ms = 1e3 * (time.process_time() - began) / (number - before)
            status = len(json.dumps(asdict(story.core.view(story.now))))
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            copied_s = copy_s(store, Path(folder) / "copy.db")
            store.close()
            with closing(sqlite3.connect(path)) as db:
                rows = db.execute("SELECT count(*) FROM records").fetchone()[0]
            size = sum(os.path.getsize(p) for p in Path(folder).iterdir() if p.is_file())
            print(
                f"| {number:,} | {each_ms:.2f} ms | {size / MIB:.1f} MiB | {rows:,} | {start_s(path, settings):.2f} s "
                f"| {copied_s:.2f} s | {status / 1024:.1f} KiB | {memory:.0f} MiB |",
                flush=True,
            )
            print(f"{number:,} commits", file=sys.stderr)
            store = goes_on(story, path, number)
    return 0
