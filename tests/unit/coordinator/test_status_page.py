"""The status page, its JSON and its metrics, over real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import ANY

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.coordinator.metrics import METRICS
from atoll.coordinator.web import load_page, standby_pages, status_pages
from atoll.protocol import messages as m
from atoll.protocol import pages
from atoll.protocol.errors import HostError
from atoll.protocol.metrics import families
from tests.harness.coordinator_story import Story, some_settings


def a_document() -> dict[str, Any]:
    story = Story(some_settings())
    story.start("a", "b")
    story.says(
        "a", m.Heartbeat(phase="training", inner_step=7, steps_per_s=2.5, loss=2.25, sent_bytes=1000, train_s=9.0)
    )
    story.commit_one("a", "b", state="s0", following="s1")
    story.ready("a", unreachable="b")
    story.drop("b")
    story.join("c")
    story.leave("c")
    story.connect("d")
    more = {"atoll_version": "1", "settings": asdict(story.settings), "time": 1.0}
    return asdict(story.view) | more


def shown(document: dict[str, Any]) -> bytes:
    """Its metrics, as they are scraped."""
    return pages.metrics(families(METRICS, document)).body


def served(check: Callable[[str], None], document: dict[str, Any], obstacles: Sequence[str] = ()) -> None:
    """Runs `check(base url)` on a thread while the page is served."""

    async def main() -> None:
        async def on_loop() -> dict[str, Any]:
            return document

        page = status_pages(on_loop, obstacles=lambda: iter(obstacles))
        await page.start("127.0.0.1:0", "the status page")
        try:
            await asyncio.to_thread(check, f"http://{page.address}")
        finally:
            await page.close()

    asyncio.run(main())


def get(url: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_the_lag_of_the_event_loop_is_a_metric_where_it_is_measured() -> None:
    measured = a_document() | {"event_loop": {"lag_p999_s": 0.25, "worst_lag_s": 2.0}}
    assert b"atoll_event_loop_lag_seconds 0.25" in shown(measured)
    assert b"event_loop" not in shown(a_document())


def test_the_pages() -> None:
    document = a_document()

    def check(base: str) -> None:
        code, headers, body = get(base + "/")
        assert code == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"<title>atoll</title>" in body
        assert json.loads(get(base + "/status.json")[2]) == json.loads(json.dumps(document))
        assert get(base + "/healthz")[2] == get(base + "/livez")[2] == b"ok\n"
        assert get(base + "/readyz") == (200, ANY, b"ok: it leads\n")
        code, headers, body = get(base + "/metrics")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"atoll_commit 1.0" in body
        assert get(base + "/../secret")[0] == 404

    served(check, document)


def test_a_leader_that_cannot_do_its_work_is_not_ready_and_lives() -> None:
    def check(base: str) -> None:
        assert get(base + "/readyz") == (503, ANY, b"it leads, and is not ready: no quorum; the store is stuck\n")
        assert get(base + "/livez")[0] == get(base + "/healthz")[0] == get(base + "/status.json")[0] == 200

    served(check, a_document(), ["no quorum", "the store is stuck"])


def test_nothing_of_a_run_can_become_markup() -> None:
    page, policy = load_page()
    text = page.decode()
    assert "innerHTML" not in text
    assert "insertAdjacentHTML" not in text
    assert "document.write" not in text
    assert not re.search(r'(?:src|href)="(?!data:,|/)', text), "no outside assets"
    assert "default-src 'none'" in policy
    assert policy.count("sha256-") == 2
    assert "unsafe" not in policy


def test_metrics_are_well_formed() -> None:
    families = {f.name: f for f in text_string_to_metric_families(shown(a_document()).decode())}
    assert all(name.startswith("atoll_") for name in families)
    assert families["atoll_site_sent_bytes"].type == "counter"
    sent = {s.labels["site"]: s.value for s in families["atoll_site_sent_bytes"].samples}
    assert sent == {"a": 1000.0}, "b has said nothing"
    assert {s.labels["site"]: s.value for s in families["atoll_site_loss"].samples} == {"a": 2.25}, "b has not said any"
    undialled = {s.labels["site"]: s.value for s in families["atoll_site_not_dialled_by"].samples}
    assert undialled == {"a": 0, "b": 1}
    assert {s.labels["state"]: s.value for s in families["atoll_sites"].samples} == {
        "away": 1.0,
        "member": 1.0,
        "gone": 1.0,
        "at the door": 1.0,
    }
    state = {s.labels["state"]: s.value for s in families["atoll_run_state"].samples}
    assert state == {"waiting": 0, "training": 1, "syncing": 0, "paused": 0, "finished": 0}
    for family in families.values():
        for sample in family.samples:
            assert set(sample.labels) <= {
                "site",
                "state",
                "run_id",
                "codec",
                "robust",
                "version",
                "cause",
                "what",
                "part",
            }


def test_the_loss_is_that_of_the_newest_commit_though_the_curve_of_a_long_run_is_thinned_out() -> None:
    document = a_document()
    document["losses"] = [(1, 10, 100, 9.0)]
    families = {f.name: f for f in text_string_to_metric_families(shown(document).decode())}
    assert [s.value for s in families["atoll_loss"].samples] == [2.0]


def test_a_taken_port_is_named() -> None:
    async def nothing() -> dict[str, Any]:
        return {}

    async def main() -> None:
        first, second = status_pages(nothing), status_pages(nothing)
        await first.start("127.0.0.1:0", "the status page")
        try:
            with pytest.raises(HostError, match=r"for the status page.*--http-listen"):
                await second.start(first.address, "the status page")
        finally:
            await first.close()

    asyncio.run(main())


def test_a_coordinator_that_stands_by_lives_and_is_not_ready() -> None:
    async def main() -> None:
        page = standby_pages(lambda: "it stands by: another one leads", pages.OPEN)
        await page.start("127.0.0.1:0", "the status page")
        found = {}
        try:
            for path in ("healthz", "livez", "readyz", "status.json", "metrics"):
                found[path] = await asyncio.to_thread(get, f"http://{page.address}/{path}")
        finally:
            await page.close()
        says = b"it stands by: another one leads"
        assert found["healthz"] == found["livez"] == (200, ANY, b"ok: " + says + b"\n")
        for path in ("readyz", "status.json"):
            assert found[path][0] == 503
            assert found[path][2].startswith(says + b"; ask that one")
        assert b"atoll_leads 0.0" in found["metrics"][2]

    asyncio.run(main())


def test_healthz_answers_where_the_document_does_not() -> None:
    async def main() -> None:
        never = asyncio.get_running_loop().create_future()
        page = status_pages(lambda: never)
        await page.start("127.0.0.1:0", "the status page")
        try:
            assert await asyncio.to_thread(get, f"http://{page.address}/healthz") == (200, ANY, b"ok\n")
        finally:
            await page.close()

    asyncio.run(main())
