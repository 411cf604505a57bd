"""A folder from which a Prometheus scrapes a run: its configuration, the run's root, a viewer's token."""

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
    tls_config: &tls {{ca_file: root.pem, server_name: {server_name}}}
    static_configs:
      - targets: ["{target}"]
  - job_name: atoll-nodes  # what nodes show beside that, those with an --http-listen that is reached from here
    scheme: https
    authorization: *token
    tls_config: *tls
    http_sd_configs:
      - url: https://{target}/sd
        authorization: *token
        tls_config: *tls
"""


def write(folder: Path, token: str, root_pem: bytes, target: str) -> None:
    """`target`: where the coordinator's page is reached. Raises HostError, and InvalidMessage for what is no token of
    that root."""
    root = certificates.from_pem(root_pem)[0]
    run_id = from_text(token, [root]).run_id
    server_name = Subject(run_id, Kind.PAGE).dns_name(certificates.salt_of(root))
    disk = Disk()
    folder.mkdir(parents=True, exist_ok=True)
    disk.write_whole(folder / "root.pem", root_pem, mode=0o644)
    disk.write_whole(folder / "token", token.encode() + b"\n")
    text = CONFIGURATION.format(server_name=server_name, target=target)
    disk.write_whole(folder / "prometheus.yml", text.encode(), mode=0o644)
