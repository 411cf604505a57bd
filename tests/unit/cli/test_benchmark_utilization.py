"""What the benchmark makes of steps and of bytes counted at interfaces."""

from __future__ import annotations

import pytest

from atoll.protocol.sync_settings import SyncSettings
from benchmarks import netns, utilization
from benchmarks.utilization_figures import (
    ETHERNET_BYTES,
    SEGMENT_BYTES,
    Counted,
    Step,
    computed,
    figures,
    link_bits_per_s,
    peak_bytes_per_s,
    wire_bytes,
)

WINDOW = 4
STEP_S = 0.1


def steps(sync_s: float, num_windows: int = 3) -> list[Step]:
    """Of a site that waits so long after each window."""
    numbers = range(1, num_windows * WINDOW + 1)
    return [Step(step=n, at_s=n * STEP_S + (n - 1) // WINDOW * sync_s, train_s=STEP_S) for n in numbers]


def counted(bytes_per_s: float, until_s: float) -> list[Counted]:
    return [(t / 100, round(bytes_per_s * t / 100)) for t in range(round(until_s * 100) + 1)]


def test_a_site_that_waits_for_its_syncs_is_idle_for_their_share() -> None:
    sites, links = [steps(0.2)] * 3, [counted(1000, 2.0)] * 3
    found = figures(sites, links, WINDOW, 3 * WINDOW, WINDOW * STEP_S)
    assert found.utilization == pytest.approx(0.4 / 0.6)
    assert found.steps_per_s == pytest.approx(4 / 0.6)
    assert found.peak_bytes_per_s == pytest.approx(1000)


def test_the_peak_is_of_the_busiest_link_and_of_the_steps_that_count() -> None:
    before = [(0.0, 0), (0.3, 0), (0.35, 1 << 30), *((t + 0.4, n + (1 << 30)) for t, n in counted(1000, 2.0))]
    found = figures([steps(0.2)] * 2, [before, counted(3000, 2.0)], WINDOW, 3 * WINDOW, WINDOW * STEP_S)
    assert found.peak_bytes_per_s == pytest.approx(3000)


def test_a_peak_is_of_its_busiest_span_wherever_the_counts_lie() -> None:
    burst: list[Counted] = [(0.0, 0), (1.0, 0), (1.1, 500), (1.2, 1000), (3.0, 1000)]
    assert peak_bytes_per_s(burst, 0.2) == pytest.approx(5000)
    assert peak_bytes_per_s(burst, 0.1) == pytest.approx(5000)
    assert peak_bytes_per_s(burst, 0.4) == pytest.approx(2500)


def test_counts_that_do_not_cover_a_span_are_no_peak() -> None:
    with pytest.raises(ValueError, match="2 counts do not cover"):
        peak_bytes_per_s([(0.0, 0), (0.1, 5)], 0.2)


def test_a_site_sends_two_thirds_of_its_contributions_and_its_payloads_twice() -> None:
    settings = SyncSettings(codec="fp32", chunk_elements=1 << 12)
    encoded = 4 * 30_000
    assert wire_bytes(settings, [30_000]) == pytest.approx(4 / 3 * encoded * ETHERNET_BYTES / SEGMENT_BYTES, rel=0.01)


def test_a_link_is_as_thin_as_is_asked() -> None:
    settings = SyncSettings(every=WINDOW)
    bits_per_s = link_bits_per_s(settings, [1 << 20], 0.3 * WINDOW * STEP_S)
    found = computed(settings, [1 << 20], bits_per_s, WINDOW * STEP_S)
    assert found.utilization == pytest.approx(1 / 1.3, rel=1e-4)
    assert found.steps_per_s == pytest.approx(1 / 1.3 / STEP_S, rel=1e-4)
    assert found.peak_bytes_per_s == pytest.approx(bits_per_s / 8)


def test_where_links_cannot_be_limited_it_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(netns, "available", lambda: "needs root")
    assert utilization.main([]) == 1
    assert capsys.readouterr().err == "not measured: needs root\n"
