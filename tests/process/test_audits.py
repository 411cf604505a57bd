"""A reducer that lies in a run of real processes with certificates: audits name it, and it is sent away, then banned.
What it signed shows that to others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.node.dataplane import false_payload
from atoll.protocol.errors import ConfigError
from atoll.protocol.trust import certificates, enrolled
from tests.harness.chaos import LIMIT_S, SETTINGS, ChaosRun
from tests.process.test_hostile_members import HOSTILE_NODE

pytestmark = pytest.mark.timeout(400)
HONEST = "abc"


@pytest.mark.parametrize(
    "has_errors",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["one site of two exchange processes", "two-sided errors"],
)
def test_a_reducer_that_lies_is_named_evicted_and_banned_and_the_others_hold_the_same(
    tmp_path: Path, has_errors: bool
) -> None:
    """Twelve chunks of four sites, all of which reduce. What it had made of them before all sites hold alike."""
    sync = replace(SETTINGS.sync, audits=2)
    if has_errors:
        sync = replace(sync, codec="sign1", up="int8", error_feedback=0.5, error_feedback_down=0.5, log_commits=16)
    with ChaosRun(tmp_path, replace(SETTINGS, sync=sync), secured=True) as run:
        run.start_coordinator()
        coordinator = run.coordinator
        assert coordinator is not None
        two_processes = ["--exchange-processes", "2"]
        for name in HONEST:
            run.start_node(name, run.worker, extra=two_processes if name == "a" and not has_errors else [])
        if has_errors:
            refused = run.start_node("split", run.worker, extra=two_processes)
            run.killed.add(refused)
            assert refused.wait(LIMIT_S) == ConfigError.exit_code
            assert any("audits = 2 with sync.error_feedback_down: one process" in line for line in refused.lines)
        liar = run.start_node("liar", run.worker, program=(HOSTILE_NODE, "false"))
        run.killed.add(liar)
        found = coordinator.wait_for_line(
            r"evicted liar \(site \d\): an audit of commit (\d+): the payload of chunk \d+ in commit \d+, "
            r"which it made, is not the average of what was contributed, "
            r"as found by ([abc]) \(site \d\), ([abc]) \(site \d\)$",
            2 * LIMIT_S,
        )
        assert found.group(2) != found.group(3)
        undone = coordinator.wait_for_line(r"to undo it: atoll rollback --to (\d+)", LIMIT_S)
        assert int(undone.group(1)) == int(found.group(1)) - 1
        auditor = run.nodes[found.group(3)]
        file = auditor.wait_for_line(r"shows it to others: atoll evidence (\S+)$", LIMIT_S).group(1)
        roots = certificates.from_pem((run.home("a") / enrolled.FOLDER / enrolled.ROOTS).read_bytes())
        evidence = false_payload.read(Path(file).read_bytes())
        assert "site liar (key " in false_payload.check(evidence, roots)
        coordinator.wait_for_line(r"evicted liar .* it is banned, as this was not the first time", 2 * LIMIT_S)
        status = run.wait_for_commits(3)
        assert status["num_audits_right"] > 0
        assert dict(status["evictions"])["audit"] == 2
        assert not [line for line in coordinator.lines if any(f"evicted {name} (" in line for name in HONEST)]
        run.end_well(HONEST, 2 * LIMIT_S)
