"""Makes the pictures of the README, of a run on this machine of which one site is killed, and a curve of held-out loss
beside one site alone and data parallel, which takes minutes: `make pictures`.

Needs Debian's package chromium, and matplotlib.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

from rich.console import Console

from atoll.cli import demo_view
from atoll.cli.client import local_status, parse_status
from atoll.cli.demo_watch import Watch
from atoll.cli.main import main as atoll
from atoll.cli.top import picture
from atoll.coordinator.core.view.document import RunView
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chromium import Chromium
from tests.harness.local_run import LocalRun, Status

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
WORKER = Path(__file__).parents[1] / "workers" / "logging_worker.py"
LIMIT_S = 120.0
COLUMNS = 110
LINES = 12
CHOOSE = """
const box = document.getElementById("what");
box.value = "val_loss";
document.getElementById("log").checked = true;
box.dispatchEvent(new Event("change"));
document.getElementById("curves-title").scrollIntoView();
"""
SITES = ("berlin", "oslo", "turin")


class Seen:
    """What `atoll demo` shows of a run: lines as things happen, and how it stands below them."""

    def __init__(self) -> None:
        self._watch, self._lines = Watch(), deque[str](maxlen=LINES)
        self._status: RunView | None = None

    def until(self, status: Status, commit: int) -> bool:
        """Looks; whether the run is there."""
        self._status = parse_status(status)
        self._lines += self._watch.observe(self._status)
        return self._status.last_commit >= commit

    def draw(self, folder: Path) -> None:
        """demo.svg."""
        assert self._status is not None
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        for line in self._lines:
            console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        console.print(demo_view.picture(self._status, self._watch, {}, COLUMNS))
        console.save_svg(str(folder / "demo.svg"), title="atoll demo")


def make(folder: Path) -> None:
    """Of one run: the page, light and on a narrow dark screen, what `atoll demo` and `atoll top` show, and
    `atoll plot`."""
    settings = RunSettings(run_id="tide", steps=900, min_sites=2, sync=SyncSettings(every=20, codec="int8"))
    with tempfile.TemporaryDirectory() as name, LocalRun(Path(name), settings) as run:
        coordinator = run.start_coordinator(extra=("--http-listen", "127.0.0.1:0"))
        url = coordinator.wait_for_line(r"http://[0-9.:]+/", LIMIT_S)[0]
        nodes = {site: run.start_node(site, [sys.executable, str(WORKER)]) for site in SITES}
        with Chromium(Path(name) / "browser") as page:
            page.look(Path(name) / "first.png")  # in its size from the beginning
            page.open(url)
            seen = Seen()
            run.wait(lambda status: seen.until(status, 30), LIMIT_S)
            nodes["turin"].kill()
            page.until("[...document.querySelectorAll('#sites tr')].some((row) => "
                       "row.cells[0].textContent === 'turin' && row.cells[2].className === 'bad')")  # fmt: skip
            status = run.wait(lambda status: seen.until(status, 36), LIMIT_S)
            seen.draw(folder)
            page.until(f"document.getElementById('facts').innerText.includes('{status['last_commit']}')")
            page.look(folder / "page.png", height=1000)
            page.ask(CHOOSE)
            page.look(folder / "page-dark.png", width=420, height=900, dark=True)
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        console.print(picture(local_status(run.store_path), COLUMNS))
        console.save_svg(str(folder / "top.svg"), title="atoll top")
        run.wait(lambda status: status["finished"], LIMIT_S)
        copy = Path(name) / "copy.db"
        atoll(["backup", str(run.toml), "--to", str(copy)])
        atoll(["plot", str(copy), "-o", str(folder / "plot.svg")])


def draw_quality(folder: Path) -> None:
    """Held-out loss of three sites in some codecs, beside one alone and data parallel, as docs/codecs.md says."""
    names = ["data parallel", "one site alone", "fp32", "int4", "sign1, error feedback", "topk2"]
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks", "quality", "--seeds", "1", "--sites", "3"]
        command += ["--out", name, "--only", *names]
        subprocess.run(command, check=True)
        shutil.copyfile(Path(name) / "quality.png", folder / "quality.png")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    make(FOLDER)
    draw_quality(FOLDER.parent)
