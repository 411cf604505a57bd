"""What the benchmark makes of the sites' journals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.sync import NAMES, WARM_UP_SYNCS, _medians


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
