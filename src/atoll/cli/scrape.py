"""A folder from which a Prometheus scrapes a run: its configuration, the run's root, a viewer's
tokens, one for the coordinator and one for nodes."""

from __future__ import annotations

from pathlib import Path

from atoll.node.daemon.metrics import METRICS
from atoll.protocol import metrics
from atoll.protocol.disk import Disk
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.tokens import from_text

PROCESS = ("cpu_seconds_total", "max_fds", "open_fds", "resident_memory_bytes", "start_time_seconds",
           "virtual_memory_bytes")  # fmt: skip
"""What Prometheus' own client says of each process."""
CONFIGURATION = """\
# Begin it with: prometheus --config.file prometheus.yml
# Recording rules and alerts: deploy/prometheus/atoll.rules.yml, beside this file.
global:
  scrape_interval: 15s
  evaluation_interval: 15s
rule_files: ["*.rules.yml"]
scrape_configs:
  - job_name: atoll  # the coordinator, which shows the whole run
    scheme: https
    authorization: &token {{type: Bearer, credentials_file: token}}  # 2.42 takes no default in http_sd_configs
    tls_config: &tls {{ca_file: root.pem, server_name: {page_name}}}
    static_configs:
      - targets: ["{target}"]
  - job_name: atoll-nodes  # what nodes show beside that, those with an --http-listen that is reached from here
    scheme: https
    authorization: {{type: Bearer, credentials_file: node-token}}
    tls_config: {{ca_file: root.pem, server_name: {metrics_name}}}
    # A node is a member's machine: it speaks for itself alone, and whatever it says makes no series but these.
    body_size_limit: 1MB
    sample_limit: 500
    metric_relabel_configs:
      - {{source_labels: [__name__], regex: {of_nodes}, action: keep}}
      - {{regex: __name__|job|instance|site, action: labelkeep}}
    http_sd_configs:
      - url: https://{target}/sd
        authorization: *token
        tls_config: *tls
"""


def write(folder: Path, token: str, node_token: str, root_pem: bytes, target: str) -> None:
    """`target`: where the coordinator's page is reached. Raises HostError, and InvalidMessage for what is no token of
    that root."""
    root = certificates.from_pem(root_pem)[0]
    run_id = from_text(token, [root]).run_id
    salt = certificates.salt_of(root)
    page_name, metrics_name = (Subject(run_id, kind).dns_name(salt) for kind in (Kind.PAGE, Kind.METRICS))
    disk = Disk()
    folder.mkdir(parents=True, exist_ok=True)
    disk.write_whole(folder / "root.pem", root_pem, mode=0o644)
    disk.write_whole(folder / "token", token.encode() + b"\n")
    disk.write_whole(folder / "node-token", node_token.encode() + b"\n")
    text = configuration(page_name, metrics_name, target)
    disk.write_whole(folder / "prometheus.yml", text.encode(), mode=0o644)


def configuration(page_name: str, metrics_name: str, target: str) -> str:
    """The names: of whom the coordinator's page and nodes' metrics are, in their certificates."""
    own = (row.exposed_name for row in METRICS if row.kind is not metrics.Kind.INFO)  # which is nothing without labels
    of_nodes = "|".join((*own, *(f"process_{name}" for name in PROCESS)))
    return CONFIGURATION.format(page_name=page_name, metrics_name=metrics_name, target=target, of_nodes=of_nodes)
