"""What a person sees while the demo runs: lines, and on a terminal the run as it stands below them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from atoll.cli.status import table
from atoll.cli.words import share
from atoll.protocol.text import byte_count

if TYPE_CHECKING:
    from rich.console import Group

    from atoll.cli.demo_watch import Watch
    from atoll.coordinator.core.view.document import RunView


class View:
    """Use as a context manager. Where `out` is no terminal there are lines alone."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=out), refresh_per_second=4, transient=True)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Something happened."""
        self._live.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def show(self, status: RunView, watch: Watch, notes: dict[str, str]) -> None:
        """How the run stands; `notes` are words on some sites."""
        self._live.update(picture(status, watch, notes, self._live.console.width))


def picture(status: RunView, watch: Watch, notes: dict[str, str], width: int) -> Group:
    """The table of sites, the run's bar, and what all sites have sent."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(padding=(0, 2))
    bar.add_row(ProgressBar(total=max(1, status.steps), completed=status.run_step, width=50), f"step {status.run_step}")
    totals = watch.totals()
    used = f"{byte_count(totals.sent_bytes)} sent, {share(totals.utilization)} of the time spent training"
    return Group(
        table(status, width),
        Text(),
        bar,
        *(Text(f"{name}: {note}", style="yellow") for name, note in notes.items() if note),
        Text(f"all sites: {used}"),
    )
