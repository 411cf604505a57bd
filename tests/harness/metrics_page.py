"""Writes docs/metrics.md from the tables of metrics: `python -m tests.harness.metrics_page`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atoll.coordinator.metrics import METRICS as OF_RUN
from atoll.node.daemon.metrics import METRICS as OF_NODE
from atoll.node.relay.metrics import METRICS as OF_RELAY
from atoll.protocol.metrics import Kind, Row

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

Made from `coordinator/metrics.py`, `node/daemon/metrics.py` and `node/relay/metrics.py` by
`python -m tests.harness.metrics_page`; a test compares. How a figure gets here:
[decisions/0060](decisions/0060-seen-from-one-place.md).

The coordinator's `/metrics` shows the whole run, also of sites that nobody can reach: they say their figures in their
session. On the coordinator's machine it is at http://127.0.0.1:7701/metrics; other machines see it over TLS, with a
viewer's token (`atoll token --viewer NAME`). `/sd` there is Prometheus' service discovery over HTTP of the
nodes whose own `/metrics` other machines reach (`atoll node --http-listen`). Rules, alerts and a configuration to begin
with are in [deploy/prometheus](../deploy/prometheus).

Counters begin anew with their process, but for those of the whole run; what is since the node's start, with the node.
Beside these each process has Prometheus' own `process_*`. A metric that is not known is left out: a GPU's where there
is none, a norm before the first commit.
"""


def table(rows: Iterable[Row[Any]]) -> Iterable[str]:
    yield "| metric | kind | labels | meaning |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        labels = ", ".join(row.labels) if row.kind is not Kind.INFO else "all that is said"
        yield f"| `{row.exposed_name}` | {row.kind.value} | {labels} | {row.text} |"


def page() -> str:
    lines = [HEAD, "## Of the run, at the coordinator", "", *table(OF_RUN), ""]
    lines += ["## Of a node, beside these", "", *table(OF_NODE), ""]
    lines += ["## Of a relay (`atoll relay --http-listen`)", "", *table(OF_RELAY)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
