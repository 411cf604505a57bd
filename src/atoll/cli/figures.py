"""Figures of a run that follow from its document (/status.json): how fast it is, how long it takes, what its last sync
took. A figure that the document does not give is left out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from atoll.cli.words import count, duration
from atoll.protocol.figures import PHASES
from atoll.protocol.text import last_line

RATE_COMMITS = 16
SAID_LATE_S = 30.0
"""After a commit sites have said what its sync took at them; what they said of older ones is not of the last one."""
BARS = "▁▂▃▄▅▆▇█"
SPARKS = 40
SHOWN_LOGGED = 8
PAST = {"train": "trained", "snapshot": "snapshot", "exchange": "exchanged", "apply": "applied", "wait": "waited"}


@dataclass(frozen=True, slots=True)
class Pace:
    """Over the newest commits."""

    tokens_per_s: float
    steps_per_s: float
    left_s: float | None
    """Until the run is as long as its settings say; None once it is over."""


def pace(document: Mapping[str, Any]) -> Pace | None:
    """None where the times of two commits are not known, or the clock was set back."""
    timed = [commit for commit in document.get("commits", ()) if commit.get("time") is not None][-RATE_COMMITS:]
    if len(timed) < 2 or (passed_s := timed[-1]["time"] - timed[0]["time"]) <= 0:
        return None
    tokens_per_s = sum(commit["tokens"] for commit in timed[1:]) / passed_s
    steps_per_s = (timed[-1]["run_step"] - timed[0]["run_step"]) / passed_s
    in_steps = document.get("steps", 0) > 0
    left = (document["steps"] - document["run_step"]) if in_steps else (document["tokens"] - document["run_tokens"])
    per_s = steps_per_s if in_steps else tokens_per_s
    left_s = max(0.0, left / per_s) if per_s > 0 and not document.get("finished") else None
    return Pace(tokens_per_s, steps_per_s, left_s)


def last_sync(document: Mapping[str, Any]) -> str:
    """What the parts of the newest commit's sync took by the coordinator's clock, or those of one that ended with it or
    shortly before at the median site, if sites have said so; empty if that is not known."""
    spans = [span for span in document.get("timeline", ()) if span.get("commit") is not None]
    if not spans:
        return ""
    newest = [span for span in spans if spans[-1]["ended_s"] - span["ended_s"] <= SAID_LATE_S]
    span = next((span for span in reversed(newest) if span.get("phases")), spans[-1])
    times = [span["opened_s"], span["ready_s"], span["ended_s"], span["attested_s"]]
    parts = [
        f"{name} {max(0.0, end - begin):.1f} s"
        for name, begin, end in zip(("trained", "exchanged", "applied"), times, times[1:], strict=False)
        if begin is not None and end is not None
    ]
    if said := span.get("phases"):
        parts = [f"{PAST[name]} {said[name]:.1f} s" for name in PHASES if name in said]
    again = f", attempt {span['attempts']}" if span["attempts"] > 1 else ""
    return f"sync {span['sync']}: {', '.join(parts)}{again}" if parts else ""


def sparkline(values: Sequence[float], width: int = SPARKS) -> str:
    """One character for each part of the values, the mean of it: high or low within their range."""
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    ends = [len(finite) * i // width for i in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    size = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / size * len(BARS)))] for mean in means)


def logged(document: Mapping[str, Any]) -> list[str]:
    """What scripts logged last, of the outer parameters first."""
    found = [
        (not one["of_outer"], one["name"], site["name"], one["step"], one["value"])
        for site in _here(document)
        for one in site["logged"]
    ]
    lines = [
        f"{name} {value:.4g} at step {step}, {site}{'' if is_local else ', of the outer parameters'}"
        for is_local, name, site, step, value in sorted(found)
    ]
    more = [f"and {len(lines) - SHOWN_LOGGED} more values of scripts"] if len(lines) > SHOWN_LOGGED else []
    return [last_line(line) for line in lines[:SHOWN_LOGGED]] + more


def _here(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sites = document.get("sites", ())
    return [site for site in sites if site.get("state_kind") != "gone" and site.get("logged")]


def lines(document: Mapping[str, Any]) -> list[str]:
    """Below the table of sites."""
    found = []
    if (at := pace(document)) is not None:
        left = f", {duration(at.left_s)} left" if at.left_s is not None else ""
        found.append(f"{count(round(at.tokens_per_s))} tokens/s, {at.steps_per_s:.2f} steps/s{left}")
    if words := last_sync(document):
        found.append(words)
    losses = [loss for _, _, _, loss in document.get("losses", ())]
    if len(losses) > 1:
        found.append(f"loss {sparkline(losses)} {losses[0]:.3f} to {losses[-1]:.3f}")
    untold = [tracker for tracker in document.get("trackers", ()) if tracker.get("problem")]
    found += [last_line(f"{one['name']} is not told of the run, which goes on: {one['problem']}") for one in untold]
    return found + logged(document)
