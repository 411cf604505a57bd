"""Writes Grafana's dashboards, deploy/grafana/*.json: `python -m tests.harness.dashboards`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """One of Grafana's."""
    queries: tuple[tuple[str, str], ...]
    """PromQL, and what is said of each series."""
    kind: str = "timeseries"
    width: int = 8
    text: str = ""


def _run(name: str, more: str = "") -> str:
    return f'{name}{{instance=~"$run"{more}}}'


def _site(name: str) -> str:
    return _run(name, ', site=~"$site"')


def _rate(query: str) -> str:
    return f"rate({query}[$__rate_interval])"


def _lately(query: str) -> str:
    return f"increase({query}[10m])"


MEMBERS = "sum(" + _run("atoll_sites", ', state="member"') + ")"
P90 = "histogram_quantile(0.9, sum by (part, le) (rate(" + _run("atoll_sync_seconds_bucket") + "[30m])))"
OF_PEAK = _rate(_site("atoll_site_model_flops_total")) + " / " + _site("atoll_site_peak_flops_per_second")
RUN_PANELS = (
    Panel("State", "none", ((_run("atoll_run_state") + " == 1", "{{state}}"),), "stat", 4),
    Panel("Commit", "none", ((_run("atoll_commit"), "commit"),), "stat", 4),
    Panel("Tokens", "short", ((_run("atoll_run_tokens"), "tokens"),), "stat", 4),
    Panel("Tokens/s", "short", ((_run("atoll_run_tokens_per_second"), "tokens/s"),), "stat", 4),
    Panel("Sites here", "none", ((MEMBERS, "members"),), "stat", 4),
    Panel("Compression", "none", ((_run("atoll_contribution_compression"), "of fp32"),), "stat", 4),
    Panel("Loss", "none", ((_run("atoll_loss"), "median"), (_run("atoll_site_loss"), "{{site}}")), width=12),
    Panel("Tokens/s by site", "short", ((_rate(_run("atoll_site_tokens_total")), "{{site}}"),),
          width=12),
    Panel("Sites by state", "none", ((_run("atoll_sites"), "{{state}}"),)),
    Panel("Parts of a sync, 90th percentile", "s",
          ((P90, "{{part}}"),)),
    Panel("Utilization", "percentunit", ((_run("atoll_site_utilization"), "{{site}}"),),
          text="Share of a site's time that is not spent waiting for syncs."),
    Panel("Sent by what it is", "Bps",
          (("sum by (what, codec) (" + _rate(_run("atoll_site_wire_bytes_total")) + ")", "{{what}} {{codec}}"),)),
    Panel("Commits behind", "none", ((_run("atoll_site_commits_behind"), "{{site}}"),)),
    Panel("Attempts and abandoned syncs", "none",
          ((_lately(_run("atoll_sync_attempts_total")), "attempts"),
           (_lately(_run("atoll_syncs_abandoned_total")), "abandoned"))),
    Panel("Evictions by cause", "none", ((_lately(_run("atoll_sites_evicted_total")), "{{cause}}"),)),
    Panel("Norms and cosines", "none",
          ((_run("atoll_average_share"), "norm of the average"),
           (_run("atoll_average_cosine"), "cosine to the one before"),
           (_run("atoll_codec_error"), "error of the codec"))),
    Panel("Samples", "none", ((_run("atoll_samples"), "{{state}}"),)),
    Panel("Slow links", "Bps", ((_run("atoll_link_bytes_per_second"), "{{sender}} to {{receiver}}"),)),
    Panel("Wrong states", "none", ((_run("atoll_wrong_states_total"), "in the run"),)),
    Panel("Coordinator", "bytes", ((_run("process_resident_memory_bytes"), "memory"),)),
    Panel("Disk of the store, free", "bytes", ((_run("atoll_store_disk_free_bytes"), "free"),)),
)  # fmt: skip
SITE_PANELS = (
    Panel("Inner step", "none", ((_site("atoll_site_inner_step"), "{{site}}"),), "stat", 4),
    Panel("Steps/s", "none", ((_site("atoll_site_steps_per_second"), "{{site}}"),), "stat", 4),
    Panel("Ranks", "none", ((_site("atoll_site_ranks"), "{{site}}"),), "stat", 4),
    Panel("Silent", "s", ((_site("atoll_site_silent_seconds"), "{{site}}"),), "stat", 4),
    Panel("Certificate", "dateTimeFromNow",
          (("1000 * " + _site("atoll_site_certificate_expiry_timestamp_seconds"), "{{site}}"),), "stat", 4),
    Panel("Commits behind", "none", ((_site("atoll_site_commits_behind"), "{{site}}"),), "stat", 4),
    Panel("Loss", "none", ((_site("atoll_site_loss"), "{{site}}"),), width=12),
    Panel("Time", "percentunit",
          ((_rate(_site("atoll_site_train_seconds_total")), "{{site}} trains"),
           (_rate(_site("atoll_site_wait_seconds_total")), "{{site}} waits"),
           (_rate(_site("atoll_site_snapshot_seconds_total")), "{{site}} writes snapshots"),
           (_rate(_site("atoll_site_exchange_seconds_total")), "{{site}} exchanges"),
           (_rate(_site("atoll_site_apply_seconds_total")), "{{site}} applies")), width=12,
          text="Seconds a second: exchanges and applying may go on beside training."),
    Panel("Sent", "Bps", ((_rate(_site("atoll_site_wire_bytes_total")), "{{site}} {{what}}"),)),
    Panel("Received", "Bps", ((_rate(_site("atoll_site_received_bytes_total")), "{{site}}"),)),
    Panel("Bandwidth to one of the others", "Bps",
          ((_site("atoll_site_up_bytes_per_second"), "{{site}} up"),
           (_site("atoll_site_down_bytes_per_second"), "{{site}} down"))),
    Panel("Memory", "bytes",
          ((_site("atoll_site_node_memory_bytes"), "{{site}} node"),
           (_site("atoll_site_rank_memory_bytes"), "{{site}} ranks"))),
    Panel("Disk free", "bytes", ((_site("atoll_site_disk_free_bytes"), "{{site}}"),)),
    Panel("GPU memory", "bytes",
          ((_site("atoll_site_gpu_memory_used_bytes"), "{{site}} used"),
           (_site("atoll_site_gpu_memory_bytes"), "{{site}} has"))),
    Panel("Use of the GPUs' peak", "percentunit",
          ((OF_PEAK, "{{site}}"),)),
    Panel("Norm of its contributions", "none", ((_site("atoll_site_contribution_norm"), "{{site}}"),)),
    Panel("Crashes of workers", "none", ((_lately(_site("atoll_site_worker_crashes_total")), "{{site}}"),)),
)  # fmt: skip


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "refresh": 2, "multi": True,
        "includeAll": True, "query": {"query": query, "refId": name}, "definition": query,
        "current": {"text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def _dashboard(uid: str, title: str, panels: Sequence[Panel], variables: list[dict[str, Any]]) -> dict[str, Any]:
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        placed.append({
            "id": number, "title": panel.title, "description": panel.text, "type": panel.kind, "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT if panel.kind != "stat" else HEIGHT // 2},
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend}
                for i, (query, legend) in enumerate(panel.queries)
            ],
        })  # fmt: skip
        x += panel.width
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid, "title": title, "tags": ["atoll"], "schemaVersion": 38, "version": 1, "editable": True,
        "refresh": "10s", "time": {"from": "now-6h", "to": "now"}, "timezone": "", "panels": placed,
        "templating": {"list": [source, *variables]},
    }  # fmt: skip


def dashboards() -> dict[str, dict[str, Any]]:
    """By file name."""
    run = _variable("run", "Coordinator", "label_values(atoll_run_info, instance)")
    site = _variable("site", "Site", 'label_values(atoll_site_inner_step{instance=~"$run"}, site)')
    return {
        "run.json": _dashboard("atoll-run", "atoll: the run", RUN_PANELS, [run]),
        "site.json": _dashboard("atoll-site", "atoll: sites", SITE_PANELS, [run, site]),
    }


def text_of(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    for name, dashboard in dashboards().items():
        (FOLDER / name).write_text(text_of(dashboard))
