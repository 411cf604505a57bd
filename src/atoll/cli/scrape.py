"""A folder from which a Prometheus scrapes a run: its configuration, the run's root, a viewer's
tokens, one for the coordinator and one for nodes."""

from __future__ import annotations

from pathlib import Path

from atoll.protocol.disk import Disk
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.tokens import from_text

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
    # A node is a member's machine: what it may say is bounded, and it speaks for itself alone.
    body_size_limit: 1MB
    sample_limit: 500
    label_limit: 10
    label_value_length_limit: 256
    metric_relabel_configs:
      - {{source_labels: [__name__], regex: (atoll_node|process)_.+, action: keep}}
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
    text = CONFIGURATION.format(page_name=page_name, metrics_name=metrics_name, target=target)
    disk.write_whole(folder / "prometheus.yml", text.encode(), mode=0o644)
