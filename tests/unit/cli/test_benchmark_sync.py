"""What the benchmark asks of a run, and what it makes of the sites' journals."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from atoll.protocol.settings import validate
from atoll.protocol.sync_settings import ROBUST
from benchmarks.sync import NAMES, WARM_UP_SYNCS, _medians, _settings, arguments


class Journals:
    """Of sites that seal at commit - 0.5, hear of it at commit, and publish 0.25 later."""

    def __init__(self, contributes: Callable[[str, int], bool]) -> None:
        self._contributes = contributes

    def journal(self, name: str, kind: str) -> list[dict[str, Any]]:
        lines, sent_bytes = [], 0
        for commit in range(1, WARM_UP_SYNCS + 4):
            took_part = self._contributes(name, commit)
            sent_bytes += 100 * took_part
            match kind:
                case "window" if took_part:
                    lines.append({"time_s": commit - 0.5})
                case "commit_received" | "commit":
                    lines.append({"time_s": float(commit), "commit": commit, "sent_bytes": sent_bytes})
                case "published":
                    lines.append({"time_s": commit + 0.25, "commit": commit})
        return lines


def test_a_sync_in_which_a_site_only_received_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    late = WARM_UP_SYNCS + 2
    run: Any = Journals(lambda name, commit: (name, commit) != (NAMES[0], late))
    assert _medians(run, WARM_UP_SYNCS + 3, 0.0, 0.0) == (0.5, 0.75, 100, 0.0, 0.0)
    assert f"commit {late} is not counted: 1 of the sites only received" in capsys.readouterr().out


def test_a_run_in_which_a_site_never_contributed_measures_nothing() -> None:
    run: Any = Journals(lambda name, commit: name != NAMES[0])
    with pytest.raises(SystemExit, match="nothing is measured"):
        _medians(run, WARM_UP_SYNCS + 3, 0.0, 0.0)


@pytest.mark.parametrize(
    ("said", "mbit", "chunk_elements"),
    [
        ([], [200, 2000], 1 << 20),
        (["--hosts-per-site", "2"], [25], 1 << 18),
        (["--hosts-per-site", "2", "--mbit", "100", "--chunk-elements", "4096"], [100], 4096),
        (["--mbit"], [], 1 << 20),
    ],
)
def test_sites_of_several_hosts_are_compared_on_slow_links(
    said: list[str], mbit: list[int], chunk_elements: int
) -> None:
    """But where something else is said."""
    args = arguments(said)
    assert (list(args.mbit), args.chunk_elements) == (mbit, chunk_elements)


@pytest.mark.parametrize("robust", ROBUST)
def test_a_run_is_measured_with_each_way_of_averaging(robust: str) -> None:
    validate(_settings(Namespace(codec="int8", robust=robust, chunk_elements=1 << 20, syncs=12)))
