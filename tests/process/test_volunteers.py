"""What a volunteer's machine gives: a part of its uplink, some hours, some bytes a month, some of its disk; real
processes."""

from __future__ import annotations

import urllib.request
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.cli.main import main
from atoll.node.daemon.time_off import FILE
from atoll.protocol.errors import ConfigError, HostError
from tests.harness import chaos
from tests.harness.chaos import LIMIT_S, ChaosRun
from tests.harness.local_run import Status
from tests.harness.sockets import free_address

SETTINGS = replace(chaos.SETTINGS, min_sites=1)

pytestmark = pytest.mark.timeout(150)


def test_all_that_a_site_sends_is_within_what_its_owner_gives(tmp_path: Path) -> None:
    """Contributions, averages, and the state that another one fetches."""
    with ChaosRun(tmp_path, SETTINGS) as run:
        page = free_address()
        run.start_coordinator()
        run.start_node("a", run.worker, extra=["--max-upload-mbit", "2.2", "--http-listen", page])
        run.wait_for_commits(2)
        run.start_site("b")
        run.wait_for_contributors("ab")

        def metrics() -> dict[str, float]:
            with urllib.request.urlopen(f"http://{page}/metrics", timeout=60) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                return {sample.name: sample.value for family in families for sample in family.samples}

        def all_is_capped(_: Status) -> bool:
            """Between two syncs: a frame counts as sent once it is written."""
            seen = metrics()
            return 0 < seen["atoll_node_sent_bytes_total"] == seen["atoll_node_capped_bytes_total"]

        run.wait(all_is_capped, LIMIT_S, "what was sent is what was let through")
        assert metrics()["atoll_node_capped_seconds_total"] > 0
        run.end_well()


def test_a_cap_or_a_disk_that_the_run_cannot_do_with_is_refused_with_the_figures(tmp_path: Path) -> None:
    with ChaosRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        slow = run.start_node("a", run.worker, extra=["--max-upload-mbit", "1"])
        assert slow.wait(LIMIT_S) == ConfigError.exit_code
        assert (
            "--max-upload-mbit 1: run run (time_limits local) takes no link of less than 2.1 Mbit/s" in slow.lines[-1]
        )
        run.home("b").mkdir(mode=0o700, parents=True)
        (run.home("b") / FILE).write_text("")  # no account; of a site without an allowance nobody reads that
        small = run.start_node("b", run.worker, extra=["--max-disk-gb", "0.1"])
        assert small.wait(LIMIT_S) == HostError.exit_code
        assert "--max-disk-gb 0.1: " in small.lines[-1]
        assert "MiB logs) at the most, in " in small.lines[-1]


def test_a_site_is_in_the_run_in_its_hours_and_until_its_share_of_the_month_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By itself, in one process, by a clock that the test sets."""
    clock = tmp_path / "clock"

    def set_clock(text: str) -> None:
        new = clock.with_suffix(".new")  # whole at each moment: nodes read it all the time
        new.write_text(str(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()))
        new.replace(clock)

    with ChaosRun(tmp_path, SETTINGS) as run:
        run.begin("a")
        coordinator = run.coordinator
        assert coordinator is not None
        set_clock("2026-05-30 23:00")
        volunteer = run.start_node(
            "b",
            run.worker,
            extra=["--hours", "22-07", "--monthly-upload-gb", "1"],
            environment={"TZ": "UTC"},
            program=["-m", "tests.harness.clocked", str(clock)],
        )
        run.wait_for_contributors("ab")

        set_clock("2026-05-31 07:00")
        because = r"outside its hours \(22:00-07:00\); back at 2026-05-31 22:00 there"
        coordinator.wait_for_line(rf"b \(site \d\) leaves: {because}", LIMIT_S)
        volunteer.wait_for_line(f"^off: {because}", LIMIT_S)
        run.wait_for_contributors("a")
        last = run.journal("b", "commit")[-1]
        sent = run.home("b") / FILE
        month, num_bytes = sent.read_text().split()
        assert month == "2026-05"
        assert int(num_bytes) >= last["sent_bytes"] > 0
        assert main(["health", "--node", str(run.home("b")), "--ready"]) == HostError.exit_code
        assert "not ready: the site is off: outside its hours" in capsys.readouterr().err
        assert main(["gc", str(run.home("b"))]) == HostError.exit_code, "the home is in use"

        coordinator.popen.terminate()
        assert coordinator.wait(LIMIT_S) == 0
        set_clock("2026-05-31 22:00")
        volunteer.wait_for_line(r"^off: no coordinator at .*; back at 2026-05-31 22:01 there", LIMIT_S)
        run.start_coordinator()

        sent.write_text(f"2026-05 {10**9}\n")
        set_clock("2026-05-31 22:01")
        volunteer.wait_for_line(
            r"^off: it has sent its share of the month \(.* of .*\); back at 2026-06-01 00:00 there", LIMIT_S
        )
        set_clock("2026-06-01 00:00")
        run.wait_for_contributors("ab")
        assert any("site b, start 2," in line for line in volunteer.lines)

        set_clock("2026-06-01 07:00")
        volunteer.wait_for_line("^off: .* back at 2026-06-01 22:00 there", LIMIT_S)
        volunteer.popen.terminate()
        assert volunteer.wait(LIMIT_S) == 0
        assert run.status()["num_evicted"] == 0
        run.end_well("a")
