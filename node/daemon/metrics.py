"""The node's own metrics; docs/metrics.md is made from this table. Those that the whole run is seen by are the
coordinator's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.protocol.metrics import Kind, Row

if TYPE_CHECKING:  # the table is read where no node runs, too, and without what one needs
    from atoll.node.core.site import SiteCore
    from atoll.node.daemon.config import NodeConfig
    from atoll.node.exchange.hub import Hub
    from atoll.node.relay.attached import Attached
    from atoll.protocol import messages as m


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """At a node, at one moment."""

    config: NodeConfig
    core: SiteCore
    hub: Hub
    said: m.Heartbeat
    """What a heartbeat would say."""
    num_refused: int
    restart_s: float
    exchange_s: float
    apply_s: float
    num_applied: int
    month_sent_bytes: int
    attached: Attached | None = None
    """To the relay of this site, if it has one."""
    num_lost_spans: int | None = None
    """None where nothing is traced."""


def _info(look: Look) -> Mapping[str, str]:
    return {
        "run_id": look.core.settings.run_id,
        "site": look.config.name,
        "site_id": str(look.core.site.site_id),
        "incarnation": str(look.core.ctx.identity.incarnation),
        "phase": look.said.phase,
    }


def _commit(look: Look) -> int:
    outer = look.core.site.disk.outer
    return outer.commit if outer else -1


GAUGE, COUNTER, INFO = Kind.GAUGE, Kind.COUNTER, Kind.INFO
METRICS: tuple[Row[Look], ...] = (
    Row(INFO, "atoll_node", "Who this node is and what it does.", _info),
    Row(GAUGE, "atoll_node_connected", "1 while the session with the coordinator is up.",
        lambda look: float(look.core.site.welcomed)),
    Row(GAUGE, "atoll_node_relay_attached", "1 while the relay of this site leads peers here, 0 while it does not; not "
        "there without --relay.", lambda look: None if look.attached is None else float(look.attached.is_attached)),
    Row(GAUGE, "atoll_node_commit", "Last commit applied; -1 before commit 0.", _commit),
    Row(GAUGE, "atoll_node_inner_step", "Inner steps of the run, as this site counts them.",
        lambda look: look.said.inner_step),
    Row(GAUGE, "atoll_node_steps_per_second", "Inner steps per second in the last window.",
        lambda look: look.said.steps_per_s),
    Row(GAUGE, "atoll_node_loss", "Mean training loss of the last window.", lambda look: look.said.loss),
    Row(GAUGE, "atoll_node_error_share", "Norm of the error feedback over that of what was to be sent, of the fragment "
        "with the largest.", lambda look: look.said.error_share),
    Row(GAUGE, "atoll_node_retained_bytes", "Contributions, payloads and errors of averages held as a reducer.",
        lambda look: look.hub.retained_bytes),
    Row(GAUGE, "atoll_node_restart_wait_seconds", "Time until workers that crashed again and again are started anew; 0 "
        "while there are workers.", lambda look: look.restart_s),
    Row(GAUGE, "atoll_node_last_exchange_seconds", "Time of the last exchange.", lambda look: look.exchange_s),
    Row(GAUGE, "atoll_node_last_apply_seconds", "Time of applying and hashing the last commit.",
        lambda look: look.apply_s),
    Row(COUNTER, "atoll_node_sent_bytes", "Bytes sent to peers.", lambda look: look.said.sent_bytes),
    Row(COUNTER, "atoll_node_capped_bytes", "Bytes of these that went through --max-upload-mbit.",
        lambda look: look.hub.uplink.cap.num_bytes if look.hub.uplink.cap else 0),
    Row(COUNTER, "atoll_node_capped_seconds", "Time that frames waited for --max-upload-mbit.",
        lambda look: look.hub.uplink.cap.waited_s if look.hub.uplink.cap else 0.0),
    Row(GAUGE, "atoll_node_month_sent_bytes", "Bytes sent to peers in this calendar month, across starts; counted "
        "with --monthly-upload-gb or --hours alone.",
        lambda look: look.month_sent_bytes),
    Row(GAUGE, "atoll_node_month_allowed_bytes", "What --monthly-upload-gb allows; 0 without it.",
        lambda look: look.config.monthly_upload_bytes),
    Row(COUNTER, "atoll_node_received_bytes", "Bytes received from peers.", lambda look: look.said.received_bytes),
    Row(COUNTER, "atoll_node_moved_bytes", "Bytes of chunks that were lacking and came, or that a site took which "
        "lacks them.", lambda look: look.said.moved_bytes),
    Row(COUNTER, "atoll_node_reconnects", "Streams to peers that broke and were opened again.",
        lambda look: look.hub.counters.reconnects),
    Row(COUNTER, "atoll_node_refused_messages", "Messages refused as malformed, stale or foreign.",
        lambda look: look.num_refused),
    Row(COUNTER, "atoll_node_train_seconds", "Time the workers trained.", lambda look: look.said.train_s),
    Row(COUNTER, "atoll_node_wait_seconds", "Time the workers waited for a sync.", lambda look: look.said.wait_s),
    Row(COUNTER, "atoll_node_tokens", "Tokens that the workers trained on.",
        lambda look: look.core.ranks.trained_tokens),
    Row(COUNTER, "atoll_node_skipped_steps", "Steps that the script left out, or whose loss was not finite.",
        lambda look: look.core.ranks.skipped_steps),
    Row(COUNTER, "atoll_node_worker_starts", "Generations of workers launched.",
        lambda look: look.core.site.workers.generation),
    Row(COUNTER, "atoll_node_worker_crashes", "Times that the workers crashed or hung.",
        lambda look: look.core.site.num_crashes),
    Row(COUNTER, "atoll_node_checkpoints_written", "Checkpoints of inner optimizers that ranks wrote.",
        lambda look: look.core.ranks.checkpoints.written),
    Row(COUNTER, "atoll_node_checkpoints_skipped", "Checkpoints left out because the one before was still being "
        "written.", lambda look: look.core.ranks.checkpoints.skipped),
    Row(COUNTER, "atoll_node_checkpoints_failed", "Checkpoints that could not be written, as on a full disk.",
        lambda look: look.core.ranks.checkpoints.failed),
    Row(COUNTER, "atoll_node_wrong_states", "States that were not the run's and were repaired.",
        lambda look: look.core.site.num_wrong_states),
    Row(COUNTER, "atoll_node_errors_dropped", "Times that error feedback was lost and began anew.",
        lambda look: look.core.site.num_errors_dropped),
    Row(COUNTER, "atoll_node_average_errors_dropped", "Chunks whose average's error was lost.",
        lambda look: look.hub.average_errors.num_dropped),
    Row(COUNTER, "atoll_node_spans_lost", "Of traces, those that their collector has not taken; not there where "
        "nothing is traced.", lambda look: look.num_lost_spans),
    Row(COUNTER, "atoll_node_syncs", "Commits applied by this process.", lambda look: look.num_applied),
)  # fmt: skip
