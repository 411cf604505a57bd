"""Rule 46 with real processes: what a site of one host opens for its own ranks, others cannot reach."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.chaos import command_line, descendants
from tests.harness.local_run import LocalRun, Status
from tests.harness.sockets import Address, listening, outside_loopback

SCRIPT = Path(__file__).parents[1] / "workers" / "torch_worker.py"
STORE = "atoll.node.worker.group_store"
LIMIT_S = 100.0
SETTINGS = RunSettings(
    run_id="doors", steps=40, min_sites=1, data="local", time_limits="local", sync=SyncSettings(every=10)
)
pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        pytest.param("--ddp", 2, marks=pytest.mark.slow),
        ("--fsdp2", 2),
        pytest.param("--ddp", 1, marks=pytest.mark.slow),
    ],
)
def test_an_unmodified_script_opens_nothing_to_the_network(kind: str, num_ranks: int, tmp_path: Path) -> None:
    """`init_process_group` and `init_device_mesh` find their ranks through the environment, as under torchrun."""
    opened: set[Address] = set()
    stores: set[int] = set()

    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        node = run.start_node(
            "one", [str(SCRIPT), kind], launcher="python", extra=["--ranks", str(num_ranks), "--listen", "127.0.0.1:0"]
        ).popen.pid

        def finished(status: Status) -> bool:
            pids = [node, *descendants(node)]
            opened.update(listening(pids))
            stores.update(pid for pid in pids if STORE in command_line(pid)[:5])
            return bool(status["state_kind"] == "finished")

        run.wait(finished, LIMIT_S)
        assert run.wait_all(LIMIT_S) == {"one": 0}
        assert len(run.hashes(4)) == 1
    assert len(stores) == 1, "the ranks meet in one store"
    assert len(opened) > 1 + num_ranks, "the node's door, the store's and one of each rank were seen"
    assert not outside_loopback(opened)


def test_torchrun_opens_one_port_and_says_so(tmp_path: Path) -> None:
    """Its agent's rendezvous, which is unpickled, is a file."""
    opened: set[Address] = set()
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        node = run.start_node("one", [str(SCRIPT), "--ddp"], launcher="torchrun", extra=["--ranks", "2"])

        def finished(status: Status) -> bool:
            opened.update(listening([node.popen.pid, *descendants(node.popen.pid)]))
            return bool(status["state_kind"] == "finished")

        run.wait(finished, LIMIT_S)
        assert run.wait_all(LIMIT_S) == {"one": 0}
        node.wait_for_line(
            "torchrun: the store in which the ranks meet listens on every address of this machine", LIMIT_S
        )
    assert len(outside_loopback(opened)) == 1


def test_ranks_that_form_no_group_need_no_store(tmp_path: Path) -> None:
    script = [sys.executable, str(SCRIPT.with_name("plain_worker.py"))]
    stores: set[int] = set()
    with LocalRun(tmp_path, SETTINGS) as run:
        run.start_coordinator()
        node = run.start_node("one", script, extra=["--ranks", "2"]).popen.pid

        def finished(status: Status) -> bool:
            stores.update(pid for pid in descendants(node) if STORE in command_line(pid))
            return bool(status["state_kind"] == "finished")

        run.wait(finished, LIMIT_S)
        assert run.wait_all(LIMIT_S) == {"one": 0}
    assert not stores
