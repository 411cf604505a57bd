"""Status page, /status.json, /metrics and /healthz: read-only, on a thread of its own."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.resources
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from atoll.protocol import addresses
from atoll.protocol.errors import HostError

ANSWER_LIMIT_S = 10.0
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

Document = dict[str, Any]


class StatusPage:
    """Serves until `close`. `document` is called on `loop`. Raises HostError if the port cannot be had."""

    def __init__(
        self, listen: str, document: Callable[[], Coroutine[Any, Any, Document]], loop: asyncio.AbstractEventLoop
    ) -> None:
        host, port = addresses.parse_address(listen)

        def from_thread() -> Document:
            return asyncio.run_coroutine_threadsafe(document(), loop).result(ANSWER_LIMIT_S)

        try:
            self._server = _Server(host, port, from_thread)
        except OSError as error:
            raise HostError(
                f"cannot listen on {listen} for the status page: {error.strerror}; choose another --http-listen, or an "
                "empty one to leave it out"
            ) from None
        self.address = addresses.join_address(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="status page", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        await asyncio.to_thread(self._server.shutdown)
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, document: Callable[[], Document]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.document = document
        self.page, self.policy = load_page()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own looks the host's name up, which may take seconds where there is no name service.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is nobody's error."""


def load_page() -> tuple[bytes, str]:
    """The page, and a content security policy that lets only its own script and style run."""
    page = importlib.resources.files("atoll.coordinator").joinpath("status.html").read_bytes()
    hashes = {}
    for kind in (b"script", b"style"):
        found = re.search(rb"<" + kind + rb">(.*?)</" + kind + rb">", page, re.DOTALL)
        assert found is not None
        hashes[kind.decode()] = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    for name, value in hashes.items():
        policy += f"; {name}-src 'sha256-{value}'"
    return page, policy


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = ANSWER_LIMIT_S
    server_version = "atoll"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.split("?", 1)[0]
        if path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
        elif path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        elif path in ("/status.json", "/metrics"):
            try:
                document = self.server.document()
            except (TimeoutError, RuntimeError) as error:
                text = f"the coordinator does not answer: {type(error).__name__}\n"
                self._answer(503, "text/plain; charset=utf-8", text.encode())
                return
            if path == "/metrics":
                self._answer(200, PROMETHEUS_TEXT, metrics(document))
            else:
                self._answer(200, "application/json", json.dumps(document).encode())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there are /, /status.json, /metrics and /healthz\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def metrics(document: Document) -> bytes:
    """The document in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Collector(document))
    return generate_latest(registry)


class _Collector:
    def __init__(self, document: Document) -> None:
        self._document = document

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        d = self._document
        info = {
            "run_id": d["run_id"],
            "codec": d["codec"],
            "version": d["atoll_version"],
        }
        yield InfoMetricFamily("atoll_run", "The run that is served.", info)
        states = GaugeMetricFamily("atoll_run_state", "1 for the state that the run is in.", labels=["state"])
        for name in ("waiting", "training", "syncing", "paused", "finished"):
            states.add_metric([name], float(d["state_kind"] == name))
        yield states
        for name, text, value in (
            ("atoll_term", "How often a coordinator was started on this run.", d["term"]),
            ("atoll_epoch", "Version of the membership.", d["epoch"]),
            ("atoll_commit", "Newest commit.", d["last_commit"]),
            ("atoll_run_step", "Inner steps of the newest commit.", d["run_step"]),
            ("atoll_run_tokens", "Tokens in all commits.", d["run_tokens"]),
            ("atoll_sync_attempt", "Attempt of the sync under way; 0 while it is collected.", _attempt(d)),
        ):
            yield GaugeMetricFamily(name, text, value)
        for key, name, text in (
            ("median_loss", "atoll_loss", "Training loss of the newest commit, the median over its contributors."),
            ("mean_loss", "atoll_mean_loss", "The same, the mean weighted by tokens."),
        ):
            said = [commit[key] for commit in d["commits"] if commit[key] is not None]
            if said:  # the curve of a long run is thinned out, and lacks the newest one
                yield GaugeMetricFamily(name, text, said[-1])
        for name, text, value in (
            ("atoll_sync_attempts", "Plans since this start of the coordinator.", d["num_attempts"]),
            ("atoll_syncs_abandoned", "Syncs that ended without a commit, in the whole run.", d["num_abandoned"]),
            ("atoll_sites_evicted", "Evictions since this start.", d["num_evicted"]),
            ("atoll_wrong_states", "States of sites that were not the run's, since this start.", d["num_wrong_states"]),
            ("atoll_refusals", "Refused messages since this start.", d["num_refused"]),
            ("atoll_malformed_messages", "Messages that were no messages, since this start.", d["num_malformed"]),
        ):
            yield CounterMetricFamily(name, text, value)
        samples = GaugeMetricFamily("atoll_samples", "Samples of all passes that were begun.", labels=["state"])
        for state in ("done", "leased", "open"):
            samples.add_metric([state], sum(line[f"num_{state}"] for line in d["data"]))
        yield samples
        by_state = Counter(site["state"].split(":")[0] for site in d["sites"])
        sites = GaugeMetricFamily("atoll_sites", "Sites by state.", labels=["state"])
        for state, count in sorted(by_state.items()):
            sites.add_metric([state], count)
        yield sites
        yield from self._by_site(d["sites"])

    def _by_site(self, sites: list[Document]) -> Iterable[Metric]:
        for key, name, text in (
            ("inner_step", "atoll_site_inner_step", "Inner step that the site is at."),
            ("steps_per_s", "atoll_site_steps_per_second", "Pace of training."),
            ("loss", "atoll_site_loss", "Training loss."),
            ("last_commit", "atoll_site_commit", "Last commit that the site applied."),
            ("silent_s", "atoll_site_silent_seconds", "Since its last message."),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["site"])
            for site in sites:
                if site[key] is not None:
                    gauge.add_metric([site["name"]], site[key])
            yield gauge
        undialled = GaugeMetricFamily("atoll_site_not_dialled_by", "Sites that cannot dial this one.", labels=["site"])
        for site in sites:
            undialled.add_metric([site["name"]], len(site["not_dialled_by"]))
        yield undialled
        for key, name, text in (
            ("sent_bytes", "atoll_site_sent_bytes", "Sent to peers since the node started."),
            ("received_bytes", "atoll_site_received_bytes", "Received from peers since the node started."),
            ("train_s", "atoll_site_train_seconds", "Spent training since the node started."),
            ("wait_s", "atoll_site_wait_seconds", "Spent waiting for syncs since the node started."),
        ):
            counter = CounterMetricFamily(name, text, labels=["site"])
            for site in sites:
                counter.add_metric([site["name"]], site[key])
            yield counter


def _attempt(document: Document) -> int:
    sync = document["sync"]
    return int(sync["attempt"]) if sync else 0
