"""What a person sees while the demo runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Self, TextIO

from atoll.cli.status import table
from atoll.cli.words import byte_count, share

if TYPE_CHECKING:
    from rich.console import Console, Group

    from atoll.cli.demo_watch import Watch
    from atoll.coordinator.core.view.document import RunView

RECENT_LINES = 8


class View:
    """Plain lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def say(self, line: str) -> None:
        """Something happened."""
        print(line, file=self._out, flush=True)

    def show(self, status: RunView, watch: Watch, notes: dict[str, str]) -> None:
        """How the run stands; `notes` are words on some sites."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class LiveView(View):
    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._lines: deque[str] = deque(maxlen=RECENT_LINES)
        self._status: RunView | None = None
        self._watch: Watch | None = None
        self._notes: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._refresh()

    def show(self, status: RunView, watch: Watch, notes: dict[str, str]) -> None:
        self._status, self._watch, self._notes = status, watch, notes
        self._refresh()

    def _refresh(self) -> None:
        width = self._live.console.width
        self._live.update(picture(self._status, self._watch, self._notes, tuple(self._lines), width))


def picture(
    status: RunView | None, watch: Watch | None, notes: dict[str, str], lines: tuple[str, ...], width: int
) -> Group:
    """The run's bar, the table of sites, the sync in progress, and the last lines."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[object] = []
    if status is not None:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=max(1, status.steps), completed=status.run_step, width=50), f"step {status.run_step}"
        )
        parts += [
            table(status, width),
            Text(),
            bar,
            Text(sync_in_words(status)),
            *(Text(f"{name}: {note}", style="yellow") for name, note in notes.items() if note),
        ]
    if watch is not None and watch.totals:
        sent = sum(t.sent_bytes for t in watch.totals.values())
        used = [t.utilization for t in watch.totals.values() if t.utilization is not None]
        mean = sum(used) / len(used) if used else None
        parts.append(Text(f"all sites: {byte_count(sent)} sent, {share(mean)} of the time spent training"))
    parts += [Text(line, style="dim") for line in lines]
    return Group(*parts)  # type: ignore[arg-type]


def sync_in_words(status: RunView) -> str:
    sync = status.sync
    if sync is None:
        return f"{len(status.commits)} commits" if status.finished else "no sync yet"
    if sync.attempt:
        return f"sync {sync.sync}: exchanging, done {len(sync.done)} of {len(sync.contributors)}"
    ready = f", ready: {', '.join(sync.ready)}" if sync.ready else ""
    return f"sync {sync.sync}: sites are training towards it{ready}"


def make_view(*, as_json: bool) -> View:
    """Live if the stream is a terminal. With JSON on stdout, people read stderr."""
    stream = sys.stderr if as_json else sys.stdout
    if not stream.isatty():
        return View(stream)
    from rich.console import Console

    return LiveView(Console(file=stream))
