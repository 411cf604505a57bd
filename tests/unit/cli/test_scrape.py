"""What a Prometheus keeps of what a node, a member's machine, shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import yaml
from prometheus_client import ProcessCollector

from atoll.cli import scrape
from atoll.node.daemon.metrics import METRICS
from atoll.protocol.metrics import Kind


def rule(action: str) -> re.Pattern[str]:
    """Of that job for nodes; Prometheus compares whole names."""
    configuration: Any = yaml.safe_load(scrape.configuration("page", "metrics", "run.example:7701"))
    (job,) = (job for job in configuration["scrape_configs"] if job["job_name"] == "atoll-nodes")
    (found,) = (rule["regex"] for rule in job["metric_relabel_configs"] if rule["action"] == action)
    return re.compile(found)


def test_of_a_node_the_metrics_that_nodes_have_are_kept_and_no_others() -> None:
    own = {row.exposed_name for row in METRICS if row.kind is not Kind.INFO}
    of_its_process = {sample.name for family in ProcessCollector(registry=None).collect() for sample in family.samples}
    assert len(of_its_process) == 6
    kept = rule("keep")
    assert not [name for name in own | of_its_process if not kept.fullmatch(name)]
    for made_up in ("atoll_node_commit_1", "atoll_node_1", "process_1", "atoll_site_loss", "atoll_node_info", "up"):
        assert not kept.fullmatch(made_up)
    assert kept.pattern.count("|") + 1 == len(own | of_its_process)


def test_of_a_node_no_label_is_kept() -> None:
    """Beside those that Prometheus itself gives; of the other metrics of a node none has one."""
    assert not [row.name for row in METRICS if row.labels]
    kept = rule("labelkeep")
    assert all(kept.fullmatch(name) for name in ("__name__", "job", "instance", "site"))
    assert not any(kept.fullmatch(name) for name in ("exported_site", "exported_instance", "phase", "le", "sites"))


def test_a_machine_without_what_a_node_needs_writes_it() -> None:
    """A coordinator's has neither arrays nor kernels."""
    code = "import sys; import atoll.cli.scrape; print([m for m in ('numpy', 'numba', 'torch') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert said.stdout == "[]\n"
