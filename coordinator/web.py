"""Status page, /status.json, /curves.json, /metrics, /sd (nodes to be scraped), /healthz and /readyz: read-only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from atoll.coordinator.metrics import METRICS, STANDBY, Document
from atoll.protocol import pages
from atoll.protocol.http import Answer, plain_text
from atoll.protocol.metrics import families
from atoll.protocol.page_access import Access

LIVES = ("/healthz", "/livez")
DOCUMENTS = ("/status.json", "/curves.json", "/metrics", "/sd")
PROCESS = ProcessCollector(registry=None)
"""Memory, processor, descriptors."""


async def no_curves() -> Document:
    return {"run": [], "sites": [], "phases": []}


def status_pages(
    document: Callable[[], Awaitable[Document]],
    access: Access = pages.OPEN,
    curves: Callable[[], Awaitable[Document]] = no_curves,
    obstacles: Callable[[], Iterator[str]] = lambda: iter(()),
) -> pages.Pages:
    """`document` says the run, within the limit of an answer; what is made of one is kept until it is another one.
    `curves`: the same of what /curves.json shows. `obstacles`: to the work of this coordinator, without which it is
    ready, as `atoll health --ready` has it."""
    page, policy = load_page()
    headers = {"Content-Security-Policy": policy}

    made: dict[str, tuple[Document, Answer]] = {}  # of which document
    making = {path: asyncio.Lock() for path in DOCUMENTS}  # apart: curves do not wait for the store

    async def answer(path: str) -> Answer:
        if path == "/":
            return Answer(200, "text/html; charset=utf-8", page, headers)
        if path in LIVES:  # this process, whatever its store does
            return plain_text(200, "ok")
        if path == "/readyz":
            found = "; ".join(obstacles())
            return plain_text(503, f"it leads, and is not ready: {found}") if found else plain_text(200, "ok: it leads")
        if path not in DOCUMENTS:
            return plain_text(404, "there are /, /status.json, /curves.json, /metrics, /sd, /healthz and /readyz")
        async with making[path]:  # of many that ask at once each would make its own
            shown = await (curves() if path == "/curves.json" else document())
            if path not in made or made[path][0] is not shown:
                made[path] = shown, await asyncio.to_thread(_answer, path, shown, headers)
            return made[path][1]

    return pages.Pages(answer, access)


def standby_pages(state: Callable[[], str], access: Access) -> pages.Pages:
    """`state`: of a coordinator that stands by, in words."""

    async def answer(path: str) -> Answer:
        if path in LIVES:
            return plain_text(200, f"ok: {state()}")
        if path == "/metrics":
            return pages.metrics([*families(STANDBY, {"leads": 0.0}), *PROCESS.collect()])
        return plain_text(503, f"{state()}; ask that one. Here are /metrics, /livez and /readyz")

    return pages.Pages(answer, access)


def _answer(path: str, document: Document, headers: Mapping[str, str]) -> Answer:
    if path == "/metrics":
        return pages.metrics(_collected(document), headers)
    body = json.dumps(nodes_to_scrape(document)) if path == "/sd" else in_json(document)
    return Answer(200, "application/json", body.encode(), headers)


def in_json(document: Document) -> str:
    """Item by item: no other thread runs while the encoder has one, and curves of many sites are megabytes."""
    found = []
    for name, value in document.items():
        is_long = isinstance(value, list | tuple)
        text = f"[{', '.join(map(json.dumps, value))}]" if is_long else json.dumps(value)
        found.append(f"{json.dumps(name)}: {text}")
    return f"{{{', '.join(found)}}}"


def load_page() -> tuple[bytes, str]:
    """The page, and a content security policy that lets only its own script and style run."""
    page = importlib.resources.files("atoll.coordinator").joinpath("status.html").read_bytes()
    hashes = {}
    for kind in (b"script", b"style"):
        found = re.search(rb"<" + kind + rb">(.*?)</" + kind + rb">", page, re.DOTALL)
        assert found is not None
        hashes[kind.decode()] = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"
    for name, value in hashes.items():
        policy += f"; {name}-src 'sha256-{value}'"
    return page, policy


def _collected(document: Document) -> Iterator[Metric]:
    """With this process's own."""
    yield from families(METRICS, document)
    yield from PROCESS.collect()


def nodes_to_scrape(document: Document) -> list[dict[str, object]]:
    """As Prometheus' service discovery over HTTP wants it: the nodes here that said where their metrics are. The series
    of a site do not go by an address, which it may say anew each second."""
    return [
        {"targets": [address], "labels": {"site": site["name"], "instance": site["name"]}}
        for site in document["sites"]
        if site["site_id"] and site["state_kind"] != "gone" and (address := site["telemetry"]["metrics_address"])
    ]
