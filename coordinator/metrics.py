"""The run's metrics, from its status document; docs/metrics.md is made from this table.

Labels are names of sites that were admitted and are here, and words of this code: nobody outside adds series.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from atoll.coordinator.sync_times import BOUNDS_S
from atoll.protocol.metrics import Kind, Row, Spread, Values

Document = dict[str, Any]
Of = Callable[[Document], Values]
RATE_COMMITS = 16
"""Over which the run's pace is measured."""
FP32_BYTES = 4

STATES = ("waiting", "training", "syncing", "paused", "finished")


def _field(key: str) -> Of:
    """None is not known."""
    return lambda d: d[key]


def _here(d: Document) -> list[dict[str, Any]]:
    """Names of sites that were never admitted would be new labels for ever."""
    return [site for site in d["sites"] if site["site_id"] and site["state_kind"] != "gone"]


def _of_sites(value: Callable[[dict[str, Any]], float | None]) -> Of:
    """By the site's name, where it is known."""
    return lambda d: {site["name"]: found for site in _here(d) if (found := value(site)) is not None}


def _site(key: str) -> Of:
    return _of_sites(lambda site: site[key])


def _told(key: str) -> Of:
    """Of what the site says now and then; 0 there is not known."""
    return _of_sites(lambda site: site["telemetry"][key] or None)


def _counted(key: str) -> Of:
    """The same, of what is counted. Not 0 until it is said: that would be a counter that has begun anew."""
    return _of_sites(lambda site: site["telemetry"][key] if site["has_told"] else None)


def _beaten(key: str) -> Of:
    """Of heartbeats, and counted."""
    return _of_sites(lambda site: site[key] if site["phase"] else None)


def _tracked(d: Document) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for one in d.get("trackers", ()):
        found |= {(one["name"], key): one[key] for key in ("told", "dropped")}
    return found


def _disk_free(site: dict[str, Any]) -> float | None:
    return site["telemetry"]["disk_free_bytes"] if site["telemetry"]["disk_total_bytes"] else None


def _store_disk(key: str) -> Of:
    return lambda d: d["store_disk"][key] if d.get("store_disk") else None


def _newest(key: str) -> Of:
    def found(d: Document) -> float | None:  # the curve of a long run is thinned out, and lacks the newest one
        said = [commit[key] for commit in d["commits"] if commit[key] is not None]
        return said[-1] if said else None

    return found


def _info(d: Document) -> Mapping[str, str]:
    return {key: str(d[key]) for key in ("run_id", "codec", "robust")} | {"version": str(d["atoll_version"])}


def _timed(d: Document) -> list[dict[str, Any]]:
    """The newest commits of which the time is known."""
    return [commit for commit in d["commits"] if commit.get("time") is not None][-RATE_COMMITS:]


def _interval_s(d: Document) -> float | None:
    """Between commits, over the newest."""
    timed = _timed(d)
    return (timed[-1]["time"] - timed[0]["time"]) / (len(timed) - 1) if len(timed) > 1 else None


def _pace(d: Document) -> float | None:
    """Tokens a second over the same commits; not known if the clock was set back."""
    tokens, interval_s = [commit["tokens"] for commit in _timed(d)[1:]], _interval_s(d)
    return float(sum(tokens) / (interval_s * len(tokens))) if interval_s is not None and interval_s > 0 else None


def _by_state(d: Document) -> Mapping[str, float]:
    found: dict[str, float] = {"at the door": d["num_at_the_door"], "gone": d["num_gone"]}
    for site in _here(d):
        found[site["state_kind"]] = found.get(site["state_kind"], 0) + 1
    return dict(sorted(found.items()))


def _parts(d: Document) -> Values:
    if "sync_times" not in d:
        return None
    return {
        part: Spread(tuple(zip(BOUNDS_S, accumulate(said["counts"]), strict=True)), said["total_s"])
        for part, said in d["sync_times"].items()
    }


def _compression(d: Document) -> float | None:
    sent = d["contribution_bytes"]
    return FP32_BYTES * d["num_parameters"] / sent if sent else None


def _links(d: Document) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for link in d["slow_links"]:
        found[link["sender"], link["receiver"]] = link["bytes_per_s"]
    return found


def _wire(d: Document) -> Values:
    codecs = {"contribution": d["codec_up"], "average": d["codec_down"], "state": ""}  # it has several
    found: dict[tuple[str, ...], float] = {}
    for site in _here(d):
        if site["has_told"]:
            for what, codec in codecs.items():
                found[site["name"], what, codec] = site["telemetry"][f"sent_{what}_bytes"]
    return found


def _logged(d: Document) -> Values:
    found: dict[tuple[str, ...], float] = {}
    for site in _here(d):
        for said in site["logged"]:
            found[site["name"], said["name"], "outer" if said["of_outer"] else "local"] = said["value"]
    return found


def _behind(d: Document) -> Values:
    return {site["name"]: d["last_commit"] - held for site in _here(d) if (held := site["last_commit"]) is not None}


def _flops_share(site: dict[str, Any]) -> float | None:
    """Of all the time since its node started that its ranks trained."""
    told = site["telemetry"]
    at_peak = told["peak_flops_per_s"] * site["train_s"]
    return told["model_flops"] / at_peak if at_peak else None


GAUGE, COUNTER, INFO, HISTOGRAM = Kind.GAUGE, Kind.COUNTER, Kind.INFO, Kind.HISTOGRAM
SITE, STATE = ("site",), ("state",)
LEADS: Row[Document] = Row(GAUGE, "atoll_leads", "1 for a coordinator that serves the run, 0 for one that stands by.",
    lambda d: d.get("leads", 1.0))  # fmt: skip
STANDBY = (LEADS,)
METRICS: tuple[Row[Document], ...] = (
    Row(INFO, "atoll_run", "The run that is served.", _info),
    Row(GAUGE, "atoll_run_state", "1 for the state that the run is in.",
        lambda d: {state: float(d["state_kind"] == state) for state in STATES}, STATE),
    Row(GAUGE, "atoll_term", "How often a coordinator was started on this run.", _field("term")),
    Row(GAUGE, "atoll_commit", "Newest commit.", _field("last_commit")),
    Row(GAUGE, "atoll_commit_timestamp_seconds", "When it was made, since 1970.",
        lambda d: d["commits"][-1].get("time") if d["commits"] else None),
    Row(GAUGE, "atoll_commit_interval_seconds", f"Between the newest {RATE_COMMITS} commits, the mean.", _interval_s),
    Row(GAUGE, "atoll_run_step", "Inner steps of the newest commit.", _field("run_step")),
    Row(GAUGE, "atoll_run_tokens", "Tokens in all commits.", _field("run_tokens")),
    Row(GAUGE, "atoll_run_tokens_per_second", f"Over the newest {RATE_COMMITS} commits.", _pace),
    Row(GAUGE, "atoll_loss", "Training loss of the newest commit, the median over its contributors.",
        _newest("median_loss")),
    Row(GAUGE, "atoll_mean_loss", "The same, the mean weighted by tokens.", _newest("mean_loss")),
    Row(HISTOGRAM, "atoll_sync_seconds", "Parts of a sync, since this start: collect (from its opening to the first "
        "plan), exchange (from the last plan to the commit), attest (until the commit's state is attested).",
        _parts, ("part",)),
    Row(GAUGE, "atoll_sync_attempt", "Attempt of the sync under way, of several the highest; 0 while it is collected.",
        lambda d: max((sync["attempt"] for sync in d["syncs"]), default=0)),
    Row(COUNTER, "atoll_sync_attempts", "Plans since this start of the coordinator.", _field("num_attempts")),
    Row(COUNTER, "atoll_syncs_abandoned", "Syncs that ended without a commit, in the whole run.",
        _field("num_abandoned")),
    Row(GAUGE, "atoll_sites", "Sites by state.", _by_state, STATE),
    Row(COUNTER, "atoll_sites_evicted", "Evictions since this start, by cause.", lambda d: dict(d["evictions"]),
        ("cause",)),
    Row(COUNTER, "atoll_losses_not_finite", "Times that a site's loss stopped being a number, since this start.",
        _field("num_not_finite")),
    Row(COUNTER, "atoll_sites_failed", "Sites that left because they cannot go on, since this start.",
        _field("num_failed")),
    Row(COUNTER, "atoll_wrong_states", "States of sites that were not the run's, since this start.",
        _field("num_wrong_states")),
    Row(COUNTER, "atoll_audits", "Chunks that were averaged once more, since this start, by how it ended: right, wrong "
        "(a site was found out), unknown.", lambda d: {k: d[f"num_audits_{k}"] for k in ("right", "wrong", "unknown")},
        ("what",)),
    Row(COUNTER, "atoll_refusals", "Refused messages since this start.", _field("num_refused")),
    Row(COUNTER, "atoll_malformed_messages", "Messages that were no messages, since this start.",
        _field("num_malformed")),
    Row(COUNTER, "atoll_connections_turned_away", "Connections that the coordinator did not take, or has closed, since "
        "this start (docs/operations.md).", lambda d: d.get("turned_away"), ("cause",)),
    Row(COUNTER, "atoll_messages_delayed", "Messages of sites that came faster than they are heard, since this start.",
        lambda d: d.get("delayed_messages"), ("what",)),
    Row(GAUGE, "atoll_samples", "Samples of all passes that were begun.",
        lambda d: {state: sum(line[f"num_{state}"] for line in d["data"]) for state in ("done", "leased", "open")},
        STATE),
    Row(GAUGE, "atoll_contribution_bytes", "The most that a site sends for a sync of the whole model.",
        _field("contribution_bytes")),
    Row(GAUGE, "atoll_contribution_compression", "The same of fp32 values over that; of bf16 ones half as much.",
        _compression),
    Row(GAUGE, "atoll_average_share", "Norm of the average over the mean norm of pseudo-gradients, a sample.",
        _field("average_share")),
    Row(GAUGE, "atoll_average_cosine", "Of an average to the one before, in a sample.", _field("last_cosine")),
    Row(GAUGE, "atoll_codec_error", "What the codec loses of a pseudo-gradient, relative to it, in a sample.",
        _field("codec_error")),
    Row(GAUGE, "atoll_link_bytes_per_second", "From site to site: the slowest links, where some are slower than most.",
        _links, ("sender", "receiver")),
    Row(GAUGE, "atoll_store_stuck_seconds", "How long the store has kept a decision waiting.",
        _field("store_stuck_s")),
    Row(GAUGE, "atoll_store_disk_free_bytes", "On the disk where the store is; not there where it is in PostgreSQL.",
        _store_disk("free_bytes")),
    Row(GAUGE, "atoll_store_disk_bytes", "The size of that disk.", _store_disk("total_bytes")),
    LEADS,
    Row(GAUGE, "atoll_lease_seconds", "How long this coordinator leads without renewing its lease (PostgreSQL).",
        lambda d: d["leading"]["left_s"] if d.get("leading") else None),
    Row(GAUGE, "atoll_standbys", "Other coordinators that stand by (PostgreSQL); 0 where the store is a file.",
        lambda d: float(len(d["leading"]["standbys"])) if d.get("leading") else 0.0),
    Row(GAUGE, "atoll_event_loop_lag_seconds", "How late the event loop comes to what is due, at most in 99.9 % of all "
        "moments.", lambda d: d["event_loop"]["lag_p999_s"] if "event_loop" in d else None),
    Row(COUNTER, "atoll_spans_lost", "Of traces, those that their collector has not taken since this start; not there "
        "where nothing is traced.", lambda d: d.get("num_lost_spans")),
    Row(COUNTER, "atoll_tracked_values", "Values of curves that a tool was told ([track]), or that were dropped, since "
        "it is slow, away or not installed; since this start.", _tracked, ("name", "what")),
    Row(GAUGE, "atoll_root_expiry_timestamp_seconds", "When the run's root expires, since 1970.",
        lambda d: d.get("root_until_s")),
    Row(GAUGE, "atoll_plain_text", "1 for a run without TLS (--insecure).",
        lambda d: float(d.get("root_until_s") is None)),
    Row(GAUGE, "atoll_site_inner_step", "Inner step that the site is at.", _site("inner_step"), SITE),
    Row(GAUGE, "atoll_site_steps_per_second", "Pace of training.", _site("steps_per_s"), SITE),
    Row(GAUGE, "atoll_site_loss", "Training loss.", _site("loss"), SITE),
    Row(GAUGE, "atoll_site_logged", "What its script logged last (site.log), by name: at most 16 names, each of its "
        "local parameters and of the outer ones.", _logged, ("site", "name", "of")),
    Row(COUNTER, "atoll_site_tokens", "Trained since the node started, whether they are in a commit or not.",
        _counted("trained_tokens"), SITE),
    Row(GAUGE, "atoll_site_ranks", "Worker processes.", _site("num_ranks"), SITE),
    Row(GAUGE, "atoll_site_commit", "Last commit that the site applied.", _site("last_commit"), SITE),
    Row(GAUGE, "atoll_site_commits_behind", "Commits that it has not applied yet.", _behind, SITE),
    Row(GAUGE, "atoll_site_silent_seconds", "Since its last message.", _site("silent_s"), SITE),
    Row(GAUGE, "atoll_site_not_dialled_by", "Sites that cannot dial this one.",
        _of_sites(lambda site: len(site["not_dialled_by"])), SITE),
    Row(COUNTER, "atoll_site_sent_bytes", "Sent to peers since the node started.", _beaten("sent_bytes"), SITE),
    Row(COUNTER, "atoll_site_received_bytes", "Received from peers since the node started.", _beaten("received_bytes"),
        SITE),
    Row(COUNTER, "atoll_site_wire_bytes", "The same of what was sent, by what it is: contribution (up), average (down) "
        "or state that others fetch; and by the codec that the run's settings have for trainable values in it: "
        "`bf16+sign1` where a warm-up has another one, `bundle` of averages that sites make by themselves, none of "
        "state. Headers and buffers are counted with them.", _wire, ("site", "what", "codec")),
    Row(GAUGE, "atoll_site_up_bytes_per_second", "To one of the others, in the middle of them.",
        _site("up_bytes_per_s"), SITE),
    Row(GAUGE, "atoll_site_down_bytes_per_second", "From one of the others, in the middle of them.",
        _site("down_bytes_per_s"), SITE),
    Row(COUNTER, "atoll_site_train_seconds", "Spent training since the node started.", _beaten("train_s"), SITE),
    Row(COUNTER, "atoll_site_wait_seconds", "Spent waiting for syncs since the node started.", _beaten("wait_s"), SITE),
    Row(GAUGE, "atoll_site_utilization", "Share of its time not spent waiting for syncs.", _site("utilization"), SITE),
    Row(COUNTER, "atoll_site_snapshot_seconds", "Spent writing snapshots for syncs whose result it took, since the "
        "coordinator started.", _site("snapshot_s"), SITE),
    Row(COUNTER, "atoll_site_exchange_seconds", "Spent exchanging since the node started, beside training or not.",
        _counted("exchange_total_s"), SITE),
    Row(COUNTER, "atoll_site_apply_seconds", "Spent applying commits since the node started.",
        _counted("apply_total_s"), SITE),
    Row(COUNTER, "atoll_site_commits_applied", "Since the node started.", _counted("num_applied"), SITE),
    Row(COUNTER, "atoll_site_model_flops", "Floating-point operations of its training since the node started: 6 for "
        "each trainable parameter and token.", _counted("model_flops"), SITE),
    Row(GAUGE, "atoll_site_peak_flops_per_second", "Of its GPUs together, by their data sheets.",
        _told("peak_flops_per_s"), SITE),
    Row(GAUGE, "atoll_site_flops_utilization", "Operations of its training over what its GPUs can do in the time that "
        "it trained.", _of_sites(_flops_share), SITE),
    Row(COUNTER, "atoll_site_worker_crashes", "Times that its workers crashed or hung.", _counted("num_crashes"), SITE),
    Row(COUNTER, "atoll_site_reconnects", "Streams to peers that broke and were opened again.",
        _counted("num_reconnects"), SITE),
    Row(COUNTER, "atoll_site_checkpoints_failed", "Checkpoints of its inner optimizer that could not be written.",
        _counted("num_failed_checkpoints"), SITE),
    Row(COUNTER, "atoll_site_wrong_states", "Times that its state was not the run's, since the coordinator started.",
        _site("num_wrong_states"), SITE),
    Row(GAUGE, "atoll_site_node_memory_bytes", "Resident memory of the node's process.", _told("node_memory_bytes"),
        SITE),
    Row(GAUGE, "atoll_site_rank_memory_bytes", "Resident memory of its ranks' processes together.",
        _told("rank_memory_bytes"), SITE),
    Row(GAUGE, "atoll_site_gpus", "GPUs of its ranks.", _told("num_gpus"), SITE),
    Row(GAUGE, "atoll_site_gpu_memory_used_bytes", "Of these together, by whomever.", _told("gpu_used_bytes"), SITE),
    Row(GAUGE, "atoll_site_gpu_memory_bytes", "That they have.", _told("gpu_total_bytes"), SITE),
    Row(GAUGE, "atoll_site_disk_free_bytes", "Where its home is.", _of_sites(_disk_free), SITE),
    Row(GAUGE, "atoll_site_disk_bytes", "The size of that disk.", _told("disk_total_bytes"), SITE),
    Row(GAUGE, "atoll_site_certificate_expiry_timestamp_seconds", "When its identity expires, since 1970.",
        _told("certificate_until_s"), SITE),
    Row(GAUGE, "atoll_site_contributes_every", "Syncs, to one of which it contributes.", _site("contributes_every"),
        SITE),
    Row(GAUGE, "atoll_site_extra_seconds", "By which its link makes a sync longer in which it contributes.",
        _site("extra_s"), SITE),
    Row(GAUGE, "atoll_site_contribution_norm", "Norm of its last pseudo-gradient.", _site("norm"), SITE),
    Row(GAUGE, "atoll_site_cosine", "Of its last pseudo-gradient to the average, in a sample.", _site("cosine"), SITE),
    Row(GAUGE, "atoll_site_influence", "Its share of the last commit's averages, with sync.robust = gram.",
        _site("influence"), SITE),
    Row(GAUGE, "atoll_site_error_share", "Norm of its error feedback, over that of what was to be sent.",
        _site("error_share"), SITE),
    Row(GAUGE, "atoll_site_high_norms", "Contributions in a row with a norm above sync.clip times the median.",
        _site("high_in_a_row"), SITE),
)  # fmt: skip
