"""Seconds of a sync over a site's link and what they leave of its time, for each strategy. Pure.

A site sends its contributions to what the others reduce and the payloads of its own share to the others: of `S` sites
`(S - 1) / S` of one encoding of the model and `(S - 1) / S` of all payloads, and takes as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.protocol.codecs import max_encoded_bytes
from atoll.protocol.layout import Manifest, chunk_runs
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.presets import PRESETS, with_preset
from atoll.protocol.settings import RunSettings, validate
from atoll.protocol.spec import Spec, spec_of
from atoll.protocol.strict import build
from atoll.protocol.sync_settings import SyncSettings

DEFAULT = "default"
STRATEGIES = (DEFAULT, *PRESETS)
GOAL = 0.95
"""Utilization: steps over all time."""
FRAMES = 1514 / 1448
"""A full segment of TCP with its headers, over what it carries."""
TRIPS = 1.5
"""Round trips that no sync can do without: contributions, payloads, Done and Commit."""
PAPER_EVERY = 500
"""The longest window of DiLoCo's paper (arXiv 2311.08105)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    bits_per_s: float
    """Of each site, each way."""
    rtt_s: float
    num_sites: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    name: str
    every: int
    """Steps between two syncs of a parameter."""
    fragments: int
    overlap_steps: int
    bits_up: float
    """A parameter, of contributions."""
    bits_down: float
    """Of payloads."""
    sent_bytes: int
    """By a site in `every` steps."""
    sync_s: float
    """Of one sync, which is of one fragment."""
    utilization: float
    utilization_waiting: float
    """If the site waited at each boundary."""
    enough_overlap_steps: int
    """The smallest tau with which it waits for nothing; 0: no tau up to H does."""
    enough_every: int
    """The smallest H for `GOAL`, waiting; with one fragment."""


def settings_of(name: str, num_sites: int, every: int | None) -> RunSettings:
    """Of the strategy, with H where it can have one. Raises ConfigError if it cannot have this H."""
    preset = "" if name == DEFAULT else name
    tables: dict[str, Mapping[str, Any]] = dict(with_preset(preset, {}))
    sync = dict(tables.get("sync", {}))
    if every is not None and sync.get("strategy", "diloco") == "diloco":
        sync["every"] = every
    settings = RunSettings(
        run_id="plan",
        preset=preset,
        min_sites=num_sites,
        sync=build(SyncSettings, sync, name),
        outer=build(OuterSettings, tables.get("outer", {}), name),
    )
    validate(settings)
    return settings


def sync_plans(name: str, settings: SyncSettings, manifest: Manifest, link: Link, step_s: float) -> list[SyncPlan]:
    """One, or with a warm-up two."""
    later = settings.warmup_commits + settings.local_doubling * settings.most_local_steps
    steps = settings.phases.steps(later + 1) if settings.steps_at_nodes else settings.every
    phases = [(name, later, steps)]
    if settings.warmup_commits:
        phases.insert(0, (f"{name}, first {settings.warmup_commits}", 0, 1))
    return [
        _planned(
            phase,
            settings,
            sizes=encoded_bytes(manifest, settings, spec_of(settings, base, 0), link.num_sites),
            every=every,
            num_parameters=manifest.num_trainable,
            link=link,
            step_s=step_s,
        )
        for phase, base, every in phases
    ]


def encoded_bytes(manifest: Manifest, settings: SyncSettings, spec: Spec, num_sites: int) -> tuple[int, int]:
    """Of all contributions of a site, and of all payloads."""
    up = down = 0
    for tensor, count, num_elements in chunk_runs(manifest, settings.chunk_elements):
        up += count * max_encoded_bytes(spec.of(tensor.role).up, num_elements)
        down += count * spec.payload_bytes(tensor.role, num_elements, 4, num_sites)
    return up, down


def _planned(
    name: str,
    settings: SyncSettings,
    *,
    sizes: tuple[int, int],
    every: int,
    num_parameters: int,
    link: Link,
    step_s: float,
) -> SyncPlan:
    up, down = sizes
    others = (link.num_sites - 1) / link.num_sites
    sent_bytes = others * (up + down)
    all_s = 8 * FRAMES * sent_bytes / link.bits_per_s
    carried_s, trips_s = all_s / settings.fragments, TRIPS * link.rtt_s
    window_s, sync_s = every * step_s / settings.fragments, carried_s + trips_s
    waits_s = max(sync_s - settings.overlap_steps * step_s, carried_s - window_s, 0.0)
    enough = math.ceil(sync_s / step_s)
    can_overlap = not settings.steps_at_nodes and carried_s <= window_s and enough <= every
    return SyncPlan(
        name=name,
        every=every,
        fragments=settings.fragments,
        overlap_steps=settings.overlap_steps,
        bits_up=8 * up / num_parameters,
        bits_down=8 * down / num_parameters,
        sent_bytes=round(sent_bytes),
        sync_s=sync_s,
        utilization=window_s / (window_s + waits_s),
        utilization_waiting=window_s / (window_s + sync_s),
        enough_overlap_steps=enough if can_overlap else 0,
        enough_every=max(1, math.ceil(GOAL / (1 - GOAL) * (all_s + trips_s) / step_s - 1e-9)),
    )


def recommended(plans: Sequence[SyncPlan]) -> tuple[SyncPlan, int, str]:
    """Of strategies with steps between exchanges, if there are any: which, with which H, and why."""
    several = [plan for plan in plans if plan.every > 1] or list(plans)
    goal = f"{100 * GOAL:.0f} % of the time in steps"
    if enough := [plan for plan in several if plan.utilization >= GOAL]:
        best = min(enough, key=lambda plan: (plan.every, -plan.bits_up - plan.bits_down))
        return best, best.every, f"the shortest H of those with {goal}"
    best = max(several, key=lambda plan: plan.utilization)
    if best.enough_overlap_steps:
        return best, best.every, f"waiting none has {goal} at its own H, and with this overlap no step waits"
    return best, best.enough_every, f"none has {goal} at its own H; this is the nearest, with the H that has it"


def advice(plan: SyncPlan) -> str:
    """Which H, and why."""
    if plan.utilization >= GOAL:
        return f"H = {plan.every} is enough: {100 * plan.utilization:.1f} % of the time is steps"
    text = f"waiting, H = {plan.enough_every} is the smallest with {100 * GOAL:.0f} % of the time in steps"
    if plan.enough_every > PAPER_EVERY:
        text += f", longer than the {PAPER_EVERY} of DiLoCo's paper: choose fewer bits"
    if plan.enough_overlap_steps:
        text += f"; with sync.overlap_steps = {plan.enough_overlap_steps} at H = {plan.every} no step waits"
    return text
