"""Status page, /status.json, /metrics and /healthz: read-only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from atoll.protocol import pages
from atoll.protocol.http import Answer, plain_text
from atoll.protocol.page_access import Access

Document = dict[str, Any]


def status_pages(document: Callable[[], Awaitable[Document]], access: Access = pages.OPEN) -> pages.Pages:
    """`document` says the run, within the limit of an answer."""
    page, policy = load_page()
    headers = {"Content-Security-Policy": policy}

    async def answer(path: str) -> Answer:
        if path == "/":
            return Answer(200, "text/html; charset=utf-8", page, headers)
        if path == "/healthz":  # this process lives, whatever its store does
            return plain_text(200, "ok")
        if path == "/status.json":
            body = (await asyncio.to_thread(json.dumps, await document())).encode()
            return Answer(200, "application/json", body, headers)
        if path == "/metrics":
            return await asyncio.to_thread(pages.metrics, metrics(await document()), headers)
        return plain_text(404, "there are /, /status.json, /metrics and /healthz")

    return pages.Pages(answer, access)


def load_page() -> tuple[bytes, str]:
    """The page, and a content security policy that lets only its own script and style run."""
    page = importlib.resources.files("atoll.coordinator").joinpath("status.html").read_bytes()
    hashes = {}
    for kind in (b"script", b"style"):
        found = re.search(rb"<" + kind + rb">(.*?)</" + kind + rb">", page, re.DOTALL)
        assert found is not None
        hashes[kind.decode()] = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    policy = "default-src 'none'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
    for name, value in hashes.items():
        policy += f"; {name}-src 'sha256-{value}'"
    return page, policy


def metrics(d: Document) -> Iterator[Metric]:
    """Of the document."""
    info = {
        "run_id": d["run_id"],
        "codec": d["codec"],
        "version": d["atoll_version"],
    }
    yield InfoMetricFamily("atoll_run", "The run that is served.", info)
    kinds = ("waiting", "training", "syncing", "paused", "finished")
    is_in = {kind: float(d["state_kind"] == kind) for kind in kinds}
    yield _labelled(GaugeMetricFamily, "atoll_run_state", "1 for the state that the run is in.", "state", is_in)
    attempt = max((sync["attempt"] for sync in d["syncs"]), default=0)  # of several the highest
    for name, text, value in (
        ("atoll_term", "How often a coordinator was started on this run.", d["term"]),
        ("atoll_commit", "Newest commit.", d["last_commit"]),
        ("atoll_run_step", "Inner steps of the newest commit.", d["run_step"]),
        ("atoll_run_tokens", "Tokens in all commits.", d["run_tokens"]),
        ("atoll_store_stuck_seconds", "How long the store has kept a decision waiting.", d["store_stuck_s"]),
        ("atoll_sync_attempt", "Attempt of the sync under way; 0 while it is collected.", attempt),
    ):
        yield GaugeMetricFamily(name, text, value)
    for key, name, text in (
        ("median_loss", "atoll_loss", "Training loss of the newest commit, the median over its contributors."),
        ("mean_loss", "atoll_mean_loss", "The same, the mean weighted by tokens."),
    ):
        said = [commit[key] for commit in d["commits"] if commit[key] is not None]
        if said:  # the curve of a long run is thinned out, and lacks the newest one
            yield GaugeMetricFamily(name, text, said[-1])
    for key, name, text in (
        ("contribution_bytes", "atoll_contribution_bytes", "The most that a site sends for a sync of the whole model."),
        (
            "average_share",
            "atoll_average_share",
            "Norm of the average over the mean norm of pseudo-gradients, a sample.",
        ),
        ("last_cosine", "atoll_average_cosine", "Of an average to the one before, in a sample."),
        ("codec_error", "atoll_codec_error", "What the codec loses of a pseudo-gradient, relative to it, in a sample."),
    ):
        if d[key] is not None:
            yield GaugeMetricFamily(name, text, d[key])
    for name, text, value in (
        ("atoll_sync_attempts", "Plans since this start of the coordinator.", d["num_attempts"]),
        ("atoll_syncs_abandoned", "Syncs that ended without a commit, in the whole run.", d["num_abandoned"]),
        ("atoll_sites_evicted", "Evictions since this start.", d["num_evicted"]),
        ("atoll_wrong_states", "States of sites that were not the run's, since this start.", d["num_wrong_states"]),
        ("atoll_refusals", "Refused messages since this start.", d["num_refused"]),
        ("atoll_malformed_messages", "Messages that were no messages, since this start.", d["num_malformed"]),
    ):
        yield CounterMetricFamily(name, text, value)
    samples = {state: sum(line[f"num_{state}"] for line in d["data"]) for state in ("done", "leased", "open")}
    yield _labelled(GaugeMetricFamily, "atoll_samples", "Samples of all passes that were begun.", "state", samples)
    if "event_loop" in d:
        text = "How late the event loop comes to what is due, at most in 99.9 % of all moments."
        yield GaugeMetricFamily("atoll_event_loop_lag_seconds", text, d["event_loop"]["lag_p999_s"])
    # Names of sites that were never admitted would be new labels for ever.
    here = [site for site in d["sites"] if site["site_id"] and site["state_kind"] != "gone"]
    by_state = Counter(site["state_kind"] for site in here)
    by_state["at the door"] = d["num_at_the_door"]
    by_state["gone"] = d["num_gone"]
    yield _labelled(GaugeMetricFamily, "atoll_sites", "Sites by state.", "state", dict(sorted(by_state.items())))
    for key, name, text in (
        ("inner_step", "atoll_site_inner_step", "Inner step that the site is at."),
        ("steps_per_s", "atoll_site_steps_per_second", "Pace of training."),
        ("loss", "atoll_site_loss", "Training loss."),
        ("last_commit", "atoll_site_commit", "Last commit that the site applied."),
        ("silent_s", "atoll_site_silent_seconds", "Since its last message."),
        ("up_bytes_per_s", "atoll_site_up_bytes_per_second", "To one of the others, in the middle of them."),
        ("down_bytes_per_s", "atoll_site_down_bytes_per_second", "From one of the others, in the middle of them."),
        ("contributes_every", "atoll_site_contributes_every", "Syncs, to one of which it contributes."),
        ("extra_s", "atoll_site_extra_seconds", "By which its link makes a sync longer in which it contributes."),
        ("norm", "atoll_site_contribution_norm", "Norm of its last pseudo-gradient."),
        ("cosine", "atoll_site_cosine", "Of its last pseudo-gradient to the average, in a sample."),
        ("error_share", "atoll_site_error_share", "Norm of its error feedback, over that of what was to be sent."),
        (
            "high_in_a_row",
            "atoll_site_high_norms",
            "Contributions in a row with a norm above sync.clip times the median.",
        ),
    ):
        known = {site["name"]: site[key] for site in here if site[key] is not None}
        yield _labelled(GaugeMetricFamily, name, text, "site", known)
    undialled = {site["name"]: len(site["not_dialled_by"]) for site in here}
    text = "Sites that cannot dial this one."
    yield _labelled(GaugeMetricFamily, "atoll_site_not_dialled_by", text, "site", undialled)
    for key, name, text in (
        ("sent_bytes", "atoll_site_sent_bytes", "Sent to peers since the node started."),
        ("received_bytes", "atoll_site_received_bytes", "Received from peers since the node started."),
        ("train_s", "atoll_site_train_seconds", "Spent training since the node started."),
        ("wait_s", "atoll_site_wait_seconds", "Spent waiting for syncs since the node started."),
    ):
        yield _labelled(CounterMetricFamily, name, text, "site", {site["name"]: site[key] for site in here})


def _labelled(
    family: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
) -> Metric:
    made = family(name, text, labels=[label])
    for value_of_label, value in values.items():
        made.add_metric([value_of_label], value)
    return made
