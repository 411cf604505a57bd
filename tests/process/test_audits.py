"""A reducer that lies in a run of real processes with certificates: audits name it, and it is sent away, then banned.
What it signed shows that to others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator import admin
from atoll.node.dataplane import false_payload
from atoll.protocol.errors import ConfigError
from atoll.protocol.trust import certificates, enrolled
from tests.harness.chaos import LIMIT_S, SETTINGS, WORKER, ChaosRun
from tests.harness.local_run import LocalRun, Status
from tests.process import test_endpoints as endpoints
from tests.process import test_gradients as gradients
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


def test_a_reducer_that_lies_about_buffers_alone_is_named_and_evicted(tmp_path: Path) -> None:
    worker = [*WORKER, "--tensors", "a=40x20,m=60x40:mean,n=5:lowest"]
    with ChaosRun(tmp_path, replace(SETTINGS, sync=replace(SETTINGS.sync, audits=4)), worker, secured=True) as run:
        run.start_coordinator()
        coordinator = run.coordinator
        assert coordinator is not None
        for name in HONEST:
            run.start_node(name, run.worker)
        run.killed.add(run.start_node("liar", run.worker, program=(HOSTILE_NODE, "false-buffers")))
        found = coordinator.wait_for_line(
            r"evicted liar \(site \d\): an audit of commit \d+: the payload of chunk (\d+) in commit \d+, "
            r"which it made, is not the average of what was contributed, as found by",
            2 * LIMIT_S,
        )
        assert int(found.group(1)) > 0, "the trainable tensor is of one chunk"
        assert run.wait_for_commits(3)["num_audits_right"] > 0
        assert not [line for line in coordinator.lines if any(f"evicted {name} (" in line for name in HONEST)]
        run.end_well(HONEST, 2 * LIMIT_S)


OF_ERRORS = {
    "made-up": ("audit", r"what it gave is not what it has said, by a root, of sync \d+$"),
    "silent": (
        "silence",
        r"in 3 rounds it gave ([abc]) \(site \d\) and ([abc]) \(site \d\) nothing of the error that it says it added "
        r"to chunk \d+, and exchanged with both of them meanwhile$",
    ),
}
"""By what a reducer does: of which kind the eviction is, and why."""


@pytest.mark.parametrize("kind", OF_ERRORS)
def test_a_reducer_that_makes_up_what_it_adds_or_keeps_it_back_is_named_and_evicted_and_nobody_else(
    tmp_path: Path, kind: str
) -> None:
    """Payload, contributions and roots are right: only what it has signed of its errors tells, or that it gives none.
    Syncs take long enough that auditors ask in each of some that follow one another."""
    sync = replace(
        SETTINGS.sync, audits=2, codec="sign1", up="int8", error_feedback=0.5, error_feedback_down=0.5, log_commits=16
    )
    cause, why = OF_ERRORS[kind]
    slowly = [*WORKER, "--step-delay-s", "0.1"]
    with ChaosRun(tmp_path, replace(SETTINGS, sync=sync), slowly, secured=True) as run:
        coordinator = run.start_coordinator()
        for name in HONEST:
            run.start_node(name, run.worker)
        run.killed.add(run.start_node("liar", run.worker, program=(HOSTILE_NODE, kind)))
        coordinator.wait_for_line(rf"evicted liar \(site \d\): an audit of commit \d+: {why}", 3 * LIMIT_S)
        run.wait(lambda status: dict(status["evictions"])[cause] == 1, LIMIT_S, "the status says so")
        run.wait(lambda status: status["num_audits_right"] > 0, LIMIT_S, "right audits")
        run.wait_for_commits(2)
        assert not [line for line in coordinator.lines if any(f"evicted {name} (" in line for name in HONEST)]
        run.end_well(HONEST, 2 * LIMIT_S)


@pytest.mark.slow
def test_a_reducer_that_lies_about_gradients_at_every_step_is_found_though_few_commits_are_audited(
    tmp_path: Path,
) -> None:
    sync = replace(gradients.SETTINGS.sync, codec="int8", chunk_elements=100, audits=4)
    settings = replace(gradients.SETTINGS, steps=1_000_000, min_sites=3, quorum=2, time_limits="wan", sync=sync)
    with LocalRun(tmp_path, settings, secured=True) as run:
        coordinator = run.start_coordinator()

        def start(name: str, **options: Any) -> None:
            worker = [gradients.WORKER, str(gradients.trace(run, name))]
            run.start_node(name, worker, launcher="python", **options)

        for name in HONEST:
            start(name)
        start("liar", program=(HOSTILE_NODE, "false"))
        coordinator.wait_for_line(
            r"evicted liar \(site \d\): an audit of commit \d+: the payload of chunk \d+ in commit \d+, which it made, "
            r"is not the average of what was contributed, as found by [abc] \(site \d\), [abc] \(site \d\)$",
            3 * LIMIT_S,
        )
        at = run.status()["num_audits_right"]
        run.wait(lambda status: status["num_audits_right"] > at, LIMIT_S, "right audits of the others")
        assert not [line for line in coordinator.lines if any(f"evicted {name} (" in line for name in HONEST)]
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S, HONEST) == dict.fromkeys(HONEST, 0)
        assert len(set(run.hashes(run.status()["last_commit"]).values())) == 1


def test_a_host_that_averages_falsely_is_found_as_its_site_and_sites_of_several_hosts_audit(tmp_path: Path) -> None:
    """Host 0 of the site is honest: asked itself, it finds what the others did, by what its other host keeps."""
    sync = replace(SETTINGS.sync, chunk_elements=500, audits=2)
    settings = replace(endpoints.SETTINGS, steps=100_000, min_sites=2, sync=sync)
    with LocalRun(tmp_path, settings, secured=True) as run:
        run.start_coordinator()
        coordinator = run.coordinator
        assert coordinator is not None
        honest = ("one", "two")
        sites = endpoints.Sites(run, {"one": 1, "two": 2, "liar": 2}, "--step-delay-s", "0.02")
        for name, host in (("one", 0), ("two", 0), ("two", 1), ("liar", 0)):
            sites.start(name, host)
        sites.start("liar", 1, program=(HOSTILE_NODE, "false"))
        coordinator.wait_for_line(
            r"evicted liar \(site \d\): .*the payload of chunk \d+ in commit \d+, which it made.*"
            r"as found by (one|two) \(site \d\), (one|two) \(site \d\); computed once more there it is",
            2 * LIMIT_S,
        )
        run.wait(endpoints.committed(run.status()["last_commit"] + 3), LIMIT_S)
        assert run.status()["num_audits_right"] > 0
        assert not [line for line in coordinator.lines if any(f"evicted {name} (" in line for name in honest)]
        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S, ["one", "two", "two-host1"]) == {"one": 0, "two": 0, "two-host1": 0}
        held = run.hashes(run.status()["last_commit"])
        assert held["one"] == held["two"]


def test_a_site_that_loses_a_host_and_has_it_back_is_audited_before_and_after_and_blamed_for_nothing(
    tmp_path: Path,
) -> None:
    sync = replace(SETTINGS.sync, chunk_elements=500, audits=2, fragments=2, overlap_steps=3)
    settings = replace(endpoints.SETTINGS, steps=100_000, min_sites=2, quorum=1, sync=sync)
    with LocalRun(tmp_path, settings) as run:
        run.start_coordinator()
        sites = endpoints.Sites(run, {"one": 1, "two": 2, "three": 3}, "--step-delay-s", "0.02")
        sites.start_all()

        def audited(more: int) -> Callable[[Status], bool]:
            least = run.status()["num_audits_right"] + more
            return lambda status: bool(status["num_audits_right"] >= least)

        run.wait(audited(12), LIMIT_S, "right audits")
        run.nodes["two-host1"].kill()
        run.wait(endpoints.contributes("one", "three"), LIMIT_S, "the others go on")
        sites.start("two", 1)
        run.wait(endpoints.contributes("one", "three", "two"), LIMIT_S, "the site contributes again")
        run.wait(audited(12), LIMIT_S, "right audits again")
        status = run.status()
        assert status["num_audits_wrong"] == status["num_evicted"] == 0
        sites.stop()
