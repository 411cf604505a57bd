"""Whole runs in which a site has two hosts: each a daemon of its own, which share no memory and no folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.local_run import LocalRun, Process, Status
from tests.harness.sockets import free_address
from tests.process.test_sites_of_several_ranks import of_shapes

LIMIT_S = 100.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    return folder


class TwoHosts:
    """The daemons of a site named "two"."""

    def __init__(self, run: LocalRun, text: Path, layout: str) -> None:
        self._run, self._text, self._layout, self._address = run, text, layout, free_address()

    def start(self, host: int) -> Process:
        extra = ["--data", str(self._text), "--parallel", self._layout, "--site-hosts", "2"]
        extra += ["--site-rank", str(host), "--site-address", self._address, "--name", "two"]
        return self._run.start_node("two" if host == 0 else f"two-host{host}", launcher="python", extra=extra)


def newest(status: Status) -> int:
    return int(status["last_commit"])


@pytest.mark.parametrize("layout", ["dp_shard=2"])
def test_a_site_of_two_hosts_and_one_of_one_train_one_model(tmp_path: Path, text: Path, layout: str) -> None:
    with LocalRun(tmp_path, of_shapes(min_sites=2, steps=40)) as run:
        run.start_coordinator()
        hosts = TwoHosts(run, text, layout)
        hosts.start(1)
        hosts.start(0)
        run.start_node("one", launcher="python", extra=["--data", str(text)])
        assert run.wait_all(LIMIT_S) == {"one": 0, "two": 0, "two-host1": 0}
        status = run.status()
        assert run.hashes(4) == dict.fromkeys(("one", "two"), status["state_hash"])
        assert {site["name"]: site["num_ranks"] for site in status["sites"]} == {"one": 1, "two": 2}
        samples = {line["site"]: line["num_done"] for line in status["data"]}
        assert sum(samples.values()) * 32 == status["run_tokens"]
