"""Coordinator and sites are stopped and started again one after the other while the run goes on: with the same code,
and with the code of the last release in the beginning. Real processes, not in plain text."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from atoll.coordinator import admin
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.errors import RefusedError
from tests.harness import chaos, released
from tests.harness.chaos import LIMIT_S, PLAIN_WORKER, SIGNS_OF_A_BUG
from tests.harness.data_account import LEASED, TRACE, assert_every_sample_counts_once
from tests.harness.local_run import GUARDED, PLAIN, LocalRun, Process, Status

SITES = "ab"
SETTINGS = replace(chaos.SETTINGS, min_sites=2, time_limits="wan")
OPTIONS = ("--tensors", "a=300x40,b=10", "--step-delay-s", "0.02", *LEASED)

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Of the code that processes run."""

    program: tuple[str, ...] = GUARDED
    environment: dict[str, str] = field(default_factory=dict)
    worker: tuple[str, ...] = (sys.executable, str(PLAIN_WORKER))

    @classmethod
    def of(cls, code: released.Code) -> Version:
        return cls(program=PLAIN, environment=code.environment, worker=tuple(code.worker))


NEW = Version()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> released.Code:
    """Of the last release: in one place for all tests, where its kernels are compiled once."""
    return released.code_of(released.last_release().commit, tmp_path_factory.mktemp("released"))


def start_coordinator(run: LocalRun, version: Version) -> Process:
    return run.start_coordinator(environment=version.environment, program=version.program)


def start_site(run: LocalRun, name: str, version: Version) -> Process:
    worker = [*version.worker, *OPTIONS, "--trace", str(run.folder / TRACE)]
    return run.start_node(name, worker, environment=version.environment, program=version.program)


def stopped(process: Process) -> None:
    """As systemd does it."""
    process.popen.terminate()
    assert process.wait(LIMIT_S) == 0, process.lines[-20:]


def commit_of_all(run: LocalRun) -> Status:
    """Of a sync that begins after this call."""
    under_way = run.status()["last_commit"] + 1

    def there(status: Status) -> bool:
        return any(sorted(c["contributors"]) == list(SITES) for c in status["commits"] if c["commit"] > under_way)

    return run.wait(there, LIMIT_S, "a commit of all")


def roll(run: LocalRun, before: Version, after: Version) -> None:
    """From the first commits to the end of the run."""
    coordinator = start_coordinator(run, before)
    for name in SITES:
        start_site(run, name, before)
    commit_of_all(run)
    stopped(coordinator)
    start_coordinator(run, after)
    commit_of_all(run)
    for name in SITES:
        stopped(run.nodes[name])
        start_site(run, name, after)
        commit_of_all(run)
    admin.ask(run.store_path, "stop", reason="the test is over")
    assert run.wait_all(LIMIT_S) == dict.fromkeys(SITES, 0)


SETTINGS_SINCE = (
    *("audits", "best_by", "best_is", "connections_per_address", "insecure_network", "keep_models", "store"),
    *("project", "tensorboard", "wandb", "mlflow", "trackio"),
    "evaluate_every",
)
"""Which the last release does not know."""


def forget_settings_since(run: LocalRun) -> None:
    """A run.toml as the last release writes it."""
    lines = run.toml.read_text().splitlines(keepends=True)
    run.toml.write_text(
        "".join(line for line in lines if line.strip() != "[track]" and line.partition(" = ")[0] not in SETTINGS_SINCE)
    )


def assert_nothing_is_lost(run: LocalRun) -> None:
    status = run.status()
    assert status["term"] == 2, "the coordinator was started twice"
    assert (status["num_abandoned"], status["num_evicted"], status["num_wrong_states"]) == (0, 0, 0)
    last = status["last_commit"]
    assert status["run_step"] == last * SETTINGS.sync.every, "each sync that was begun was committed"
    of_commits: dict[int, set[str]] = {}
    for name in SITES:
        assert any("start 2," in line for line in run.nodes[name].lines)
        for line in run.journal(name, "commit"):
            of_commits.setdefault(line["commit"], set()).add(line["state_hash"])
    assert sorted(of_commits) == list(range(1, last + 1)), "each is there"
    assert all(len(hashes) == 1 for hashes in of_commits.values()), of_commits
    assert set(run.hashes(last)) == set(SITES)
    assert of_commits[last] == {status["state_hash"]}
    said = [line for process in run.processes for line in process.lines]
    assert not [line for line in said if any(sign in line for sign in SIGNS_OF_A_BUG)]
    assert_every_sample_counts_once(run)


def test_coordinator_and_sites_are_started_again_one_by_one_and_no_sync_is_lost(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SETTINGS, secured=True) as run:
        roll(run, NEW, NEW)
        assert_nothing_is_lost(run)


def test_a_run_of_the_last_release_is_taken_over(tmp_path: Path, code: released.Code) -> None:
    """Coordinator first, then site by site."""
    spoken = released.last_release().protocol_version
    if spoken != PROTOCOL_VERSION:
        pytest.skip(f"the last release speaks version {spoken} of the protocol, and is refused by the next test's word")
    with LocalRun(tmp_path, SETTINGS, secured=True) as run:
        forget_settings_since(run)
        roll(run, Version.of(code), NEW)
        assert_nothing_is_lost(run)


@pytest.mark.parametrize("is_site_older", [True, False])
def test_a_release_of_another_protocol_is_refused_with_both_versions(
    tmp_path: Path, code: released.Code, is_site_older: bool
) -> None:
    spoken = released.last_release().protocol_version
    older = spoken if spoken != PROTOCOL_VERSION else spoken - 1
    of_coordinator, of_site = (NEW, Version.of(code)) if is_site_older else (Version.of(code), NEW)
    with code.speaking(older), LocalRun(tmp_path, SETTINGS, secured=True) as run:
        forget_settings_since(run)
        start_coordinator(run, of_coordinator)
        site = start_site(run, "a", of_site)
        assert site.wait(LIMIT_S) == RefusedError.exit_code
        theirs, ours = (older, PROTOCOL_VERSION) if is_site_older else (PROTOCOL_VERSION, older)
        said = [line for line in site.lines if f"a speaks protocol version {theirs} " in line]
        assert any(f"this coordinator speaks {ours}: " in line for line in said), site.lines
