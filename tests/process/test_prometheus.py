"""A real Prometheus (Debian's package) scrapes a real run over TLS by a viewer's token; rules, alerts and dashboards
ask it for nothing that it does not have."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from atoll.cli import scrape
from atoll.coordinator import web
from atoll.coordinator.metrics import METRICS as OF_RUN
from atoll.node.daemon.metrics import METRICS as OF_NODE
from atoll.protocol.metrics import Kind, Row
from tests.harness.dashboards import FOLDER as DASHBOARDS
from tests.harness.dashboards import dashboards, text_of
from tests.harness.local_run import LocalRun
from tests.harness.sockets import free_address
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll

RULES = Path(__file__).parents[2] / "deploy" / "prometheus"
TESTS_OF_RULES = ("atoll.rules.test.yml", "atoll.rules.days.test.yml")
needs_prometheus = pytest.mark.skipif(which("promtool") is None, reason="needs Debian's package prometheus")

NOT_ON_CPU = {"atoll_site_gpu", "atoll_site_peak_flops", "atoll:site_flops_utilization"}
"""Of these a machine without a GPU has none."""
NOT_IN_A_FAST_RUN = {
    "atoll_link_bytes_per_second",
    "atoll_site_up_bytes_per_second",
    "atoll_site_down_bytes_per_second",
}
"""Said where exchanges take long enough to be measured."""

pytestmark = pytest.mark.timeout(400)


def promtool(*arguments: str, folder: Path = RULES) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], check=False, cwd=folder, capture_output=True, text=True, timeout=240
    )


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / "atoll.rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@needs_prometheus
def test_rules_are_right_and_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("check", "rules", "atoll.rules.yml").stdout
    tested = promtool("test", "rules", *TESTS_OF_RULES)
    assert "SUCCESS" in tested.stdout, tested.stdout + tested.stderr


@needs_prometheus
def test_an_alert_that_never_comes_or_always_does_is_noticed(tmp_path: Path) -> None:
    for name in TESTS_OF_RULES:
        shutil.copy(RULES / name, tmp_path)
    rules = yaml.safe_load((RULES / "atoll.rules.yml").read_text())
    for wrong in ("vector(1) > 1", "vector(1)"):
        for alert in rules["groups"][1]["rules"]:
            alert["expr"] = wrong
        (tmp_path / "atoll.rules.yml").write_text(yaml.safe_dump(rules))
        said = promtool("test", "rules", *TESTS_OF_RULES, folder=tmp_path)
        noticed = set(re.findall(r"alertname: (\w+)", said.stdout + said.stderr))
        assert noticed == {alert["alert"] for alert in alerts()}, said.stdout + said.stderr


def test_each_alert_has_an_entry_in_the_runbook() -> None:
    page = (RULES.parents[1] / "docs" / "operations.md").read_text()
    entries = re.findall(r"^### (Atoll\w+)$", page, re.MULTILINE)
    assert entries == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"


def test_the_dashboards_are_what_the_code_says() -> None:
    for name, dashboard in dashboards().items():
        assert (DASHBOARDS / name).read_text() == text_of(dashboard), "run python -m tests.harness.dashboards"


def queries() -> list[str]:
    """Of recording rules and dashboards, and what alerts look at."""
    groups = yaml.safe_load((RULES / "atoll.rules.yml").read_text())["groups"]
    found = [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]
    for alert in alerts():
        found += re.findall(r"\b(?:atoll[:_][a-z0-9_:]+|up)\b", alert["expr"])
    for dashboard in dashboards().values():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "1m").replace("$run", ".+").replace("$site", ".+")
                found.append(query)
    return list(dict.fromkeys(found))


def test_rules_and_dashboards_name_metrics_that_there_are() -> None:
    """Also those that a real run on this machine has not."""
    rows: tuple[Row[Any], ...] = (*OF_RUN, *OF_NODE)
    there = {row.exposed_name for row in rows if row.kind is not Kind.HISTOGRAM}
    spreads = [row.exposed_name for row in rows if row.kind is Kind.HISTOGRAM]
    there |= {name + part for name in spreads for part in ("_bucket", "_sum", "_count")}
    groups = yaml.safe_load((RULES / "atoll.rules.yml").read_text())["groups"]
    there |= {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    texts = [rule["expr"] for group in groups for rule in group["rules"]]
    for dashboard in dashboards().values():
        texts += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        texts += [one["definition"] for one in dashboard["templating"]["list"] if "definition" in one]
    named = {name for text in texts for name in re.findall(r"\batoll[:_][a-z0-9_:]+", text)}
    assert len(named) > 50
    assert not named - there


def started(run: LocalRun, configuration: Path) -> Callable[..., Any]:
    """What asks that Prometheus."""
    address = free_address()
    run.start(
        "prometheus",
        ["prometheus", "--config.file", str(configuration), "--storage.tsdb.path", str(run.folder / "data"),
         "--web.listen-address", address, "--log.level", "warn"],
    )  # fmt: skip

    def asked(path: str, **parameters: str) -> Any:
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    return asked


@needs_prometheus
def test_a_real_prometheus_finds_all_that_rules_and_dashboards_ask_for(tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        page = free_address()
        port = page.rpartition(":")[2]
        run.start_coordinator(extra=["--http-listen", f"0.0.0.0:{port}", "--http-name", "localhost"])
        for name in "ab":
            extra = ["--http-listen", "0.0.0.0:0"] if name == "a" else []
            run.start_node(name, MODEL, extra=extra)
        written = atoll(
            run, "token", str(run.toml), "--viewer", "prometheus", "--prometheus", str(folder),
            "--target", f"localhost:{port}",
        )  # fmt: skip
        assert written.popen.returncode == 0, written.lines
        assert (folder / "token").stat().st_mode & 0o77 == 0
        shutil.copy(RULES / "atoll.rules.yml", folder)
        configuration = folder / "prometheus.yml"
        text = configuration.read_text().replace("interval: 15s", "interval: 1s")
        configuration.write_text(text.replace("http_sd_configs:", "http_sd_configs:", 1).replace(
            f"      - url: https://localhost:{port}/sd\n",
            f"      - url: https://localhost:{port}/sd\n        refresh_interval: 1s\n",
        ))  # fmt: skip
        checked = promtool("check", "config", "prometheus.yml", folder=folder)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        asked = started(run, configuration)

        def unanswered() -> list[str]:
            try:
                return [query for query in queries() if not asked("query", query=query)["result"]]
            except OSError as error:
                return [str(error)]

        known = NOT_ON_CPU | NOT_IN_A_FAST_RUN

        def missing() -> list[str]:
            return [query for query in unanswered() if not any(name in query for name in known)]

        def senders() -> list[str]:
            found = asked("query", query="atoll_site_wire_bytes_total{what='average'} > 0")["result"]
            return sorted(one["metric"]["site"] for one in found)

        run.wait(lambda found: not found["missing"], LIMIT_S, "it answers all", status=lambda: {"missing": missing()})
        sent = run.wait(lambda f: f["sent"] == ["a", "b"], LIMIT_S, "both have told", lambda: {"sent": senders()})
        assert sent["sent"] == ["a", "b"], "the coordinator alone shows the whole run"
        targets = {t["labels"]["job"]: t for t in asked("targets")["activeTargets"]}
        assert {job: t["health"] for job, t in targets.items()} == {"atoll": "up", "atoll-nodes": "up"}, targets
        assert targets["atoll-nodes"]["labels"]["site"] == "a", "that says where its metrics are"
        rules = [rule for group in asked("rules", type="alert")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {alert["alert"] for alert in alerts()}
        assert not [rule for rule in rules if rule.get("lastError")]


class HostileNode(ThreadingHTTPServer):
    """The /sd of a coordinator whose only site says another address of its metrics each time, and what is found there:
    names and labels that no two scrapes have in common."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("0.0.0.0", 0), Answering)
        self.scrapes: Counter[str] = Counter()
        """By address."""
        self._numbers = itertools.count(2)

    def nodes(self) -> str:
        where = f"127.0.0.{next(self._numbers) % 250 + 2}:{self.server_port}"
        site = {"site_id": 1, "state_kind": "member", "name": "a", "telemetry": {"metrics_address": where}}
        return json.dumps(web.nodes_to_scrape({"sites": [site]}))

    def metrics(self, address: str) -> str:
        self.scrapes[address] += 1
        number = next(self._numbers)
        lines = [f'atoll_node_commit{{made_up="{number}",site="{number}",le="{number}"}} {number}']
        lines += [f"{name}_{number} 1" for name in ("atoll_node_commit", "process", "atoll_site_loss", "up")]
        lines += ['atoll_site_loss{site="b"} 9', f'atoll_node_info{{phase="{number}"}} 1']
        return "".join(f"{line}\n" for line in lines)


class Answering(BaseHTTPRequestHandler):
    server: HostileNode

    def do_GET(self) -> None:
        is_discovery = self.path == "/sd"
        text = self.server.nodes() if is_discovery else self.server.metrics(self.headers["Host"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if is_discovery else "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal of the tests."""


def in_plain_text(job: dict[str, Any]) -> dict[str, Any]:
    """Quick, and without a root and tokens."""
    found = {key: value for key, value in job.items() if key not in ("authorization", "tls_config")}
    return found | {"scheme": "http", "scrape_interval": "200ms", "scrape_timeout": "200ms"}


@needs_prometheus
def test_a_node_that_moves_and_makes_up_names_and_labels_has_the_series_of_a_node_alone(tmp_path: Path) -> None:
    with LocalRun(tmp_path, FOREVER) as run, ExitStack() as stack:
        node = HostileNode()
        stack.callback(node.server_close)
        threading.Thread(target=node.serve_forever, daemon=True).start()
        stack.callback(node.shutdown)
        text = scrape.configuration("page", "metrics", f"127.0.0.1:{node.server_port}")
        (job,) = (job for job in yaml.safe_load(text)["scrape_configs"] if job["job_name"] == "atoll-nodes")
        job = in_plain_text(job) | {
            "http_sd_configs": [{"url": f"http://127.0.0.1:{node.server_port}/sd", "refresh_interval": "1s"}]
        }
        configuration = tmp_path / "prometheus.yml"
        configuration.write_text(yaml.safe_dump({"scrape_configs": [job]}))
        asked = started(run, configuration)
        run.wait(
            lambda found: found["moved"] > 1, LIMIT_S, "it scrapes one site at two addresses",
            lambda: {"moved": sum(num > 3 for num in node.scrapes.values())},
        )  # fmt: skip
        series = asked("series", **{"match[]": '{job="atoll-nodes"}'})
        names = Counter(found["__name__"] for found in series)
        assert [name for name in names if name != "up" and not name.startswith("scrape_")] == ["atoll_node_commit"]
        assert set(names.values()) == {1}, names
        assert {frozenset(found) for found in series} == {frozenset({"__name__", "job", "instance", "site"})}
        assert {(found["instance"], found["site"]) for found in series} == {("a", "a")}
