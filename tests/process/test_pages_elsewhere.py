"""The status page and metrics for other machines: over TLS, for viewers with a token."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from atoll.coordinator.authority import folder_of
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind, Subject
from tests.harness.local_run import LocalRun
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class Shown:
    """An answer, read whole."""

    status: int
    headers: Mapping[str, str]
    text: str


class NamedConnection(http.client.HTTPConnection):
    """Over TLS, as to a machine of that name."""

    def __init__(self, host: str, port: int, name: str, tls: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=LIMIT_S)
        self._name = name
        self._tls = tls

    def connect(self) -> None:
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name)


class Browser:
    """Knows the run's root, and comes to that port by that name."""

    def __init__(self, run: LocalRun, port: int, name: str, root: Path | None = None, host: str = "127.0.0.1") -> None:
        self._tls = ssl.create_default_context(cafile=str(root or folder_of(run.store_path) / "root.pem"))
        self._tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as curl and Prometheus have it
        self._host, self._port = host, port
        self._name = name

    def asks(self, path: str, method: str = "GET", body: str = "", **headers: str) -> Shown:
        with closing(NamedConnection(self._host, self._port, self._name, self._tls)) as connection:
            connection.request(method, path, body=body or None, headers={"Host": self._name} | headers)
            answer = connection.getresponse()
            return Shown(answer.status, dict(answer.headers), answer.read().decode())


def test_other_machines_see_the_run_by_a_token_over_tls(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        extra = ["--http-listen", "0.0.0.0:0", "--http-name", "run.example"]
        coordinator = run.start_coordinator(extra=extra)
        port = int(coordinator.wait_for_line(r"status page https://0\.0\.0\.0:(\d+)/", LIMIT_S).group(1))
        run.start_node("a", MODEL, extra=["--http-listen", "0.0.0.0:0"])
        token = atoll(run, "token", str(run.toml), "--viewer", "anna").lines[-1]
        shows = {"Authorization": f"Bearer {token}"}
        browser = Browser(run, port, "run.example")

        assert browser.asks("/status.json").status == 401
        assert browser.asks("/metrics", **shows).text.count("atoll_run_info{") == 1
        assert browser.asks("/status.json", Host="evil.example", **shows).status == 421

        form = browser.asks("/", Accept="text/html")
        assert (form.status, "<form" in form.text) == (401, True)
        welcome = browser.asks("/login", "POST", f"token={quote(token)}")
        assert welcome.status == 303
        cookie = str(welcome.headers["Set-Cookie"]).partition(";")[0]
        assert "<title>atoll</title>" in browser.asks("/", Cookie=cookie).text
        assert json.loads(browser.asks("/status.json", Cookie=cookie).text)["run_id"] == "secret-run"

        metrics = run.nodes["a"].wait_for_line(r"metrics on https://0\.0\.0\.0:(\d+)/metrics", LIMIT_S).group(1)
        root = certificates.from_pem((folder_of(run.store_path) / "root.pem").read_bytes())[0]
        page = Subject("secret-run", Kind.PAGE).dns_name(certificates.salt_of(root))
        of_nodes = Subject("secret-run", Kind.METRICS).dns_name(certificates.salt_of(root))
        at_node = Browser(run, int(metrics), of_nodes)
        node_token = atoll(run, "token", str(run.toml), "--viewer", "anna", "--nodes").lines[-1]
        to_nodes = {"Authorization": f"Bearer {node_token}"}
        assert at_node.asks("/metrics").status == 401
        assert at_node.asks("/metrics", **shows).status == 401, "it is for the coordinator"
        run.wait(lambda _: at_node.asks("/metrics", **to_nodes).status == 200, LIMIT_S)  # once it has heard of it
        assert 'site="a"' in at_node.asks("/metrics", **to_nodes).text
        assert browser.asks("/metrics", **to_nodes).status == 401, "sites are shown it"
        assert Browser(run, port, page).asks("/metrics", Host="run.example", **shows).status == 200
        assert Browser(run, port, "localhost").asks("/metrics", **shows).status == 200, "on that machine itself"
        with pytest.raises(ssl.SSLCertVerificationError):
            Browser(run, int(metrics), page).asks("/metrics")  # no site stands in for the coordinator

        own = certificates.Root.made(bytes(16), certificates.CLOCKS_DIFFER_BY, root.not_valid_before_utc)
        (tmp_path / "own.pem").write_bytes(certificates.to_pem(own.certificate))
        with pytest.raises(ssl.SSLCertVerificationError):
            Browser(run, port, "run.example", tmp_path / "own.pem").asks("/metrics")
        with pytest.raises(ssl.SSLCertVerificationError):
            Browser(run, port, "another.example").asks("/metrics")
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        plain.request("GET", "/metrics", headers=shows)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain.getresponse()

        assert atoll(run, "invite", str(run.toml), "--viewer", "anna", "--take-back").popen.returncode == 0
        assert browser.asks("/status.json", Cookie=cookie).status == 401
        run.wait(lambda _: at_node.asks("/metrics", **to_nodes).status == 401, LIMIT_S)
        again = atoll(run, "token", str(run.toml), "--viewer", "anna", "--nodes").lines[-1]
        run.wait(lambda _: at_node.asks("/metrics", Authorization=f"Bearer {again}").status == 200, LIMIT_S)


def test_every_address_needs_a_name_and_loopback_is_for_this_machine(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        refused = atoll(run, "coordinator", str(run.toml), "--listen", "127.0.0.1:0", "--http-listen", "0.0.0.0:0")
        assert refused.popen.returncode == 2
        assert any("say by which name browsers come to it, with --http-name" in line for line in refused.lines)
        for name in ("run.example:7701", "bücher.example", "a..b"):
            wrong = atoll(
                run, "coordinator", str(run.toml), "--listen", "127.0.0.1:0", "--http-listen", "0.0.0.0:0",
                "--http-name", name,
            )  # fmt: skip
            assert wrong.popen.returncode == 2
            assert any("is no name or number of a machine" in line for line in wrong.lines), wrong.lines
        coordinator = run.start_coordinator(extra=["--http-listen", "127.0.0.1:0"])
        port = int(coordinator.wait_for_line(r"status page http://127\.0\.0\.1:(\d+)/", LIMIT_S).group(1))
        for host, code in (("localhost", 200), (f"127.0.0.1:{port}", 200), ("evil.example", 421)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
            connection.request("GET", "/status.json", headers={"Host": host})
            assert connection.getresponse().status == code
            connection.close()
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)) as connection:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            assert (answer.status, b"needed for a quorum" in answer.read()) == (503, True)
