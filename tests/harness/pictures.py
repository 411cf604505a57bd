"""Makes the pictures of the README, of a run on this machine of which one site is killed: `make pictures`.

Needs Debian's package chromium, and matplotlib.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from atoll.cli.client import local_status
from atoll.cli.main import main as atoll
from atoll.cli.top import picture
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chromium import Chromium
from tests.harness.local_run import LocalRun

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
WORKER = Path(__file__).parents[1] / "workers" / "logging_worker.py"
LIMIT_S = 120.0
COLUMNS = 110
CHOOSE = """
const box = document.getElementById("what");
box.value = "val_loss";
document.getElementById("log").checked = true;
box.dispatchEvent(new Event("change"));
document.getElementById("curves-title").scrollIntoView();
"""
SITES = ("berlin", "oslo", "turin")


def make(folder: Path) -> None:
    """Of one run: the page, light and on a narrow dark screen, `atoll top`, and `atoll plot`."""
    settings = RunSettings(run_id="tide", steps=900, min_sites=2, sync=SyncSettings(every=20, codec="int8"))
    with tempfile.TemporaryDirectory() as name, LocalRun(Path(name), settings) as run:
        coordinator = run.start_coordinator(extra=("--http-listen", "127.0.0.1:0"))
        url = coordinator.wait_for_line(r"http://[0-9.:]+/", LIMIT_S)[0]
        nodes = {site: run.start_node(site, [sys.executable, str(WORKER)]) for site in SITES}
        with Chromium(Path(name) / "browser") as page:
            page.look(Path(name) / "first.png")  # in its size from the beginning
            page.open(url)
            run.wait(lambda status: status["last_commit"] >= 30, LIMIT_S)
            nodes["turin"].kill()
            page.until("[...document.querySelectorAll('#sites tr')].some((row) => "
                       "row.cells[0].textContent === 'turin' && row.cells[2].className === 'bad')")  # fmt: skip
            status = run.wait(lambda status: status["last_commit"] >= 36, LIMIT_S)
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


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    make(FOLDER)
