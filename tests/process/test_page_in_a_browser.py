"""The status page in a real browser: it follows a run, says that a site was killed, and lets nobody write markup."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from atoll.protocol.figures import PHASES
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chromium import Chromium, needs_chromium
from tests.harness.local_run import LocalRun

LIMIT_S = 150.0
LOGGING = Path(__file__).parents[1] / "workers" / "logging_worker.py"
pytestmark = [needs_chromium, pytest.mark.timeout(400)]


def test_the_page_follows_a_run_and_shows_a_killed_site(tmp_path: Path) -> None:
    settings = RunSettings(run_id="seen", steps=100_000, min_sites=2, sync=SyncSettings(every=5, codec="fp32"))
    with LocalRun(tmp_path, settings) as run, Chromium(tmp_path / "browser") as page:
        url = run.start_coordinator(extra=("--http-listen", "127.0.0.1:0")).wait_for_line(r"http://[0-9.:]+/", LIMIT_S)[
            0
        ]
        worker = [sys.executable, str(LOGGING)]
        nodes = {name: run.start_node(name, worker) for name in ("a", "b")}
        page.open(url)
        page.until("document.getElementById('errors').innerText.includes('this run is in plain text (--insecure)')")
        page.until("document.querySelectorAll('#chart .curve').length === 3")  # the run and its sites
        page.until("[...document.getElementById('what').options].some((o) => o.value === 'val_loss')")
        page.until("/tokens\\/s\\s*[0-9]/.test(document.getElementById('facts').innerText)")
        page.until("/time left\\s*[0-9]+ (s|min|h|d)/.test(document.getElementById('facts').innerText)")
        page.until("document.querySelectorAll('#timeline .exchange').length > 1")
        page.ask("const box = document.getElementById('what'); box.value = 'val_loss';"
                 "box.dispatchEvent(new Event('change'))")  # fmt: skip
        page.until("document.getElementById('legend').innerText.includes('of the outer parameters')")
        page.ask("document.getElementById('chart').focus()")
        page.press("ArrowLeft")
        assert page.ask("document.getElementById('readout').textContent").startswith("step ")
        look_at_axes_and_pointer(page)
        page.until("['train', 'wait', 'exchange', 'apply'].every((kind) => document.querySelector('#phases .' + kind))")
        page.ask("const of = document.getElementById('phases-of'); of.value = 'a';"
                 "of.dispatchEvent(new Event('change')); document.getElementById('phases').focus()")  # fmt: skip
        page.press("ArrowLeft")
        told = page.ask("document.getElementById('phases-readout').textContent")
        seconds = ", ".join(rf"{name} [\d.]+ s" for name in PHASES)
        assert re.fullmatch(rf"sync \d+, a: {seconds}", told)
        look_at_names(page)
        for width in (1200, 390):
            page.look(tmp_path / f"{width}.png", width=width, dark=width == 390)
            assert page.ask("document.documentElement.scrollWidth") <= width, "nothing lies beyond the screen"

        page.ask("performance.clearResourceTimings()")
        nodes["b"].kill()
        page.until("[...document.querySelectorAll('#sites tr')].some((row) => "
                   "row.cells[0].textContent === 'b' && /away|gone/.test(row.cells[2].textContent))")  # fmt: skip
        looks = "performance.getEntriesByType('resource').filter((one) => one.name.includes('status.json')).length"
        assert page.ask(looks) <= 3, "one that was under way, and those of two seconds"
        page.until("document.getElementById('events').innerText.includes('b (site')")
        assert page.console == []
        said = {one["name"]: one for site in run.status()["sites"] if site["name"] == "a" for one in site["logged"]}
        assert said["val_loss"]["step"] > 0
        values = [value for line in run.journal("a", "logged") for value in line["values"]]
        assert {value["name"] for value in values} == {"val_loss"}
        assert {value.get("of_outer", False) for value in values} == {False, True}
        nodes["a"].popen.send_signal(signal.SIGKILL)


def look_at_axes_and_pointer(page: Chromium) -> None:
    """Of the training loss: on a scale of powers the marks are as far from each other by factors as by pixels; along
    tokens and along time the first and last place are those of the run; the pointer is told of the place below it."""
    page.ask("byId('what').value = LOSS; byId('what').dispatchEvent(new Event('change'))")
    marks = "[...document.querySelectorAll('#chart text[text-anchor=end]')].slice(0, 5).map((one) => +one.textContent)"
    even = page.ask(marks)
    assert even[2] == pytest.approx((even[0] + even[4]) / 2, rel=1e-2)
    assert even[4] > 1.5 * even[0], "else the two scales look alike"
    page.ask("byId('log').checked = true; byId('log').dispatchEvent(new Event('change'))")
    powers = page.ask(marks)
    assert powers[2] == pytest.approx((powers[0] * powers[4]) ** 0.5, rel=1e-2)

    for by, name, shown in ((1, "tokens", "whole"), (2, "time", "clock")):
        page.ask(f"byId('by').value = '{by}'; byId('by').dispatchEvent(new Event('change'))")
        for end, place in (("right - 13", "curves.run.at(-1)"), ("left + 63", "curves.run[0]")):
            at = page.ask(f"((box) => ({{ x: box.{end}, y: box.top + 50 }}))(byId('chart').getBoundingClientRect())")
            page.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
            told, where = page.ask(f"[byId('readout').textContent, {shown}({place}[{by}])]")
            assert told.startswith(f"{name} {where}: the run ")
    page.ask("byId('by').value = '0'; byId('log').checked = false; byId('by').dispatchEvent(new Event('change'))")


def look_at_names(page: Chromium) -> None:
    """All that the keyboard comes to has a name for those who hear the page."""
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    reached = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node["ignored"]
        and any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", ()))
    ]
    assert [role for role, name in reached if not name] == []
    assert {"combobox", "checkbox", "link"} <= {role for role, _ in reached}
    assert {"of", "by", "logarithmic", "at"} <= {name for _, name in reached}
    page.call("Accessibility.disable")
