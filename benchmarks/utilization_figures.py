"""The figures of `utilization.py`: what the links' rate leaves of a window, and what the sites' steps and interfaces
say. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings

NUM_SITES = 3
PEAK_SHARE = 0.05
"""Of a window: bytes/s at peak are those of its busiest part of that length."""
SEGMENT_BYTES, ETHERNET_BYTES = 1448, 1514
"""What a full segment of TCP with timestamps carries, and has on the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One inner step, as its worker saw it."""

    step: int
    """How many were done with it."""
    at_s: float
    """When it was done, by a clock that all workers share."""
    train_s: float


Counted = tuple[float, int]
"""A time, by the same clock, and the bytes that the interface had sent then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    utilization: float
    """Seconds trained over seconds."""
    steps_per_s: float
    """Of a site."""
    peak_bytes_per_s: float
    """Of the busiest link."""


def wire_bytes(settings: SyncSettings, sizes: Sequence[int]) -> int:
    """What each of the sites sends in a sync of tensors of so many elements, with the headers of its segments: its
    contributions to what the others reduce, and the payloads of its own third to both of them."""
    tensors = [TensorSpec(name=f"{i}", shape=(n,), dtype="F32", role=Role.TRAINABLE) for i, n in enumerate(sizes)]
    layout, travels = Layout(Manifest.canonical(tensors), settings.chunk_elements), spec_of(settings, 0, 0)
    encoded_bytes = sum(travels.max_bytes(Role.TRAINABLE, chunk.num_elements, 4) for chunk in layout.chunks)
    return 2 * (NUM_SITES - 1) * encoded_bytes * ETHERNET_BYTES // SEGMENT_BYTES // NUM_SITES


def link_bits_per_s(settings: SyncSettings, sizes: Sequence[int], sync_s: float) -> int:
    """The rate at which the bytes of a sync take so long."""
    return round(8 * wire_bytes(settings, sizes) / sync_s)


def computed(settings: SyncSettings, sizes: Sequence[int], bits_per_s: int, window_s: float) -> Figures:
    """Of a run that waits for each sync, if a sync takes what its bytes take on the link."""
    sync_s = 8 * wire_bytes(settings, sizes) / bits_per_s
    cycle_s = window_s + sync_s
    peak = bits_per_s / 8 * min(1.0, sync_s / (PEAK_SHARE * window_s))
    return Figures(utilization=window_s / cycle_s, steps_per_s=settings.every / cycle_s, peak_bytes_per_s=peak)


def figures(
    sites: Sequence[Sequence[Step]], links: Sequence[Sequence[Counted]], first: int, last: int, window_s: float
) -> Figures:
    """Of the steps after `first` up to `last`, both of them the last of a window: so each of the windows between them
    has its sync. Means of the sites, and the peak of the busiest link meanwhile."""
    utilization = steps_per_s = peak = 0.0
    for steps, counted in zip(sites, links, strict=True):
        began_s, ended_s = (next(s.at_s for s in steps if s.step == step) for step in (first, last))
        train_s = sum(s.train_s for s in steps if first < s.step <= last)
        utilization += train_s / (ended_s - began_s) / len(sites)
        steps_per_s += (last - first) / (ended_s - began_s) / len(sites)
        during = [item for item in counted if began_s <= item[0] <= ended_s]
        peak = max(peak, peak_bytes_per_s(during, PEAK_SHARE * window_s))
    return Figures(utilization=utilization, steps_per_s=steps_per_s, peak_bytes_per_s=peak)


def peak_bytes_per_s(counted: Sequence[Counted], span_s: float) -> float:
    """Of the busiest span of that length; between two counts bytes are sent evenly."""
    times = [at_s for at_s, _ in counted]
    if len(times) < 2 or times[-1] - times[0] < span_s:
        raise ValueError(f"{len(times)} counts do not cover {span_s:.3f} s")

    def sent_by(at_s: float) -> float:
        place = bisect_left(times, at_s)
        (before_s, before), (after_s, after) = counted[max(place - 1, 0)], counted[max(place, 1)]
        return before + (after - before) * (at_s - before_s) / (after_s - before_s)

    # A busiest span begins or ends at a count.
    begins = [*(t for t in times if t + span_s <= times[-1]), *(t - span_s for t in times if t - span_s >= times[0])]
    return max(sent_by(begin + span_s) - sent_by(begin) for begin in begins) / span_s
