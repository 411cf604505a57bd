"""The relay's own metrics; docs/metrics.md is made from this table. Series by site are as many as sites are
remembered."""

from __future__ import annotations

from atoll.node.relay.server import RelayServer
from atoll.protocol.metrics import Kind, Row

GAUGE, COUNTER = Kind.GAUGE, Kind.COUNTER
METRICS: tuple[Row[RelayServer], ...] = (
    Row(GAUGE, "atoll_relay_attached_sites", "Sites that are reached by this relay now.",
        lambda relay: float(len(relay.pairing.attached))),
    Row(GAUGE, "atoll_relay_connections", "Connections between two sites that are open, or being made.",
        lambda relay: float(len(relay.pairing.pairs))),
    Row(GAUGE, "atoll_relay_coordinator_connections", "Connections to the coordinator by this relay that are open.",
        lambda relay: float(len(relay.to_coordinator))),
    Row(COUNTER, "atoll_relay_calls", "Connections between two sites that were begun.",
        lambda relay: float(relay.pairing.num_pairs)),
    Row(COUNTER, "atoll_relay_strangers", "Connections of nobody whom this relay serves, or that broke off early.",
        lambda relay: float(relay.num_strangers)),
    Row(COUNTER, "atoll_relay_carried_bytes", "Bytes carried, both ways, by the site that called.",
        lambda relay: relay.quotas.totals, labels=("site",)),
    Row(COUNTER, "atoll_relay_quotas_used_up", "Times that a site came to the end of its quota.",
        lambda relay: float(relay.quotas.num_ended)),
)  # fmt: skip
