"""What ranks are started with and told, and the socket on which they meet."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from atoll.node.daemon import processes
from atoll.node.daemon.child import ENV_PARENT
from atoll.node.daemon.config import NodeConfig, validate
from atoll.node.daemon.interfaces import address_of
from atoll.node.daemon.rank_commands import (
    TRAINER_MODULE,
    Meeting,
    agent_command,
    of_rank,
    on_interface,
    rank_command,
)
from atoll.node.daemon.store_socket import StoreSocket
from atoll.node.daemon.worker_tree import WorkerTree
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import ConfigError


def config_of(**values: Any) -> NodeConfig:
    return NodeConfig(coordinator="127.0.0.1:1", name="a", **values)


def test_each_rank_is_told_what_torchrun_would_tell_it() -> None:
    meeting = Meeting(address="127.0.0.1:4567", group_name="run-x")
    assert of_rank(1, config_of(num_ranks=3), meeting) == {
        "RANK": "1", "LOCAL_RANK": "1", "ROLE_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3", "ROLE_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4567", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run-x", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def test_ranks_of_several_hosts_are_counted_on_and_meet_at_the_first() -> None:
    meeting = Meeting(address="192.168.0.1:4567", group_name="run-x")
    config = config_of(num_ranks=3, site_hosts=2, site_rank=1, site_address="192.168.0.1:7800")
    told = of_rank(1, config, meeting)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")
    assert [told[name] for name in names] == ["4", "1", "1", "6", "3", "2", "192.168.0.1"]


def test_groups_are_kept_on_one_interface() -> None:
    """NCCL takes a name for the beginning of one, unless told otherwise."""
    assert on_interface("lo") == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "TP_SOCKET_IFNAME": "lo",
    }


def test_the_built_in_trainer_runs_without_a_command() -> None:
    assert rank_command(config_of()) == [sys.executable, "-m", TRAINER_MODULE]
    assert rank_command(config_of(command=(__file__, "--lr", "1"))) == [sys.executable, __file__, "--lr", "1"]


def test_torchruns_rendezvous_is_a_file(tmp_path: Path) -> None:
    """What its agent unpickles comes from nobody else; its ranks are told the address of the interface."""
    agent = agent_command(config_of(launcher="torchrun", num_ranks=2), tmp_path)
    options = dict(itertools.pairwise(agent))
    assert options["--rdzv-conf"] == "store_type=file"
    assert options["--rdzv-endpoint"] == str(tmp_path / "rendezvous")
    assert options["--local-addr"] == "127.0.0.1"
    assert options["--max-restarts"] == "0"
    assert "--standalone" not in agent


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"network interface 'nowhere0': .*; this machine has .*lo"):
        address_of("nowhere0")


def test_an_interface_is_for_torchrun() -> None:
    config = config_of(interface="eth0")
    with pytest.raises(ConfigError, match="--interface eth0: only with --launcher torchrun or --site-hosts"):
        validate(config)


def test_the_store_is_started_by_the_first_who_connects() -> None:
    async def main() -> None:
        started: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        store = StoreSocket("127.0.0.1", lambda fd: started.set_result(socket.socket(fileno=os.dup(fd))))
        ranks = [socket.create_connection(parse_address(store.address)) for _ in range(3)]
        with await started as handed_over:
            store.close()  # the ranks' connections wait in the socket that was handed over
            assert handed_over.getsockname() == parse_address(store.address)
            for rank in ranks:
                connection, address = handed_over.accept()
                assert address == rank.getsockname()
                connection.close()
                rank.close()

    asyncio.run(main())


def test_no_store_is_started_once_the_socket_is_closed() -> None:
    async def main() -> None:
        store = StoreSocket("127.0.0.1", lambda fd: pytest.fail("started"))
        with socket.create_connection(parse_address(store.address)):
            store.close()
            await asyncio.sleep(0)
        store.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(parse_address(store.address))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("rank", "store", "ending"),
    [
        ("import time; time.sleep(600)", "raise SystemExit(3)", (3, "the store of the workers' process groups ended")),
        ("import time; time.sleep(600)", "", (1, "the store of the workers' process groups ended")),
        ("raise SystemExit(4)", "import time; time.sleep(600)", (4, "the workers ended with exit code 4")),
        ("", "import time; time.sleep(600)", (0, "the workers ended")),
    ],
)
def test_ranks_do_not_go_on_without_their_store(rank: str, store: str, ending: tuple[int, str]) -> None:
    async def main(folder: str) -> None:
        tree = WorkerTree(1, Path(folder))
        name, _, value = tree.mark.partition("=")
        environment = {**os.environ, name: value, ENV_PARENT: str(os.getpid())}
        tree.spawn_rank([sys.executable, "-S", "-c", rank], 0, environment)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            tree.spawn_store([sys.executable, "-S", "-c", store], listening.fileno(), environment)
        code, text = await tree.ended()
        assert code == ending[0]
        assert text.startswith(ending[1])
        await processes.end_tree(tree.mark, 5.0, tree.own_pids)
        tree.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))
        assert not list(Path(folder).iterdir())


def test_of_ranks_that_crash_the_first_one_is_shown_with_all_of_its_traceback(tmp_path: Path) -> None:
    """The other one fails by the end of the process that the node waits for, and says more."""
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    first = (
        f"import os\nheld = open({str(meeting)!r}, 'wb')\nheld.write(b'%d' % os.getppid())\n"
        "def deep(n):\n    if n % 2:\n        return deep(n - 1) + 1\n    elif n:\n        return deep(n - 1)\n"
        "    raise ValueError('the reason\\nin two lines')\ndeep(40)"
    )
    second = (
        f"import contextlib, os, select, time\nother = int(open({str(meeting)!r}, 'rb').read())\n"
        "with contextlib.suppress(ProcessLookupError):\n    select.select([os.pidfd_open(other)], [], [])\n"
        "time.sleep(0.05)  # more than a tick of the kernel's clock of files\n"
        "for n in range(30):\n    print('line', n)\nraise OSError('peer is gone')"
    )

    async def main(folder: Path) -> tuple[str, ...]:
        tree = WorkerTree(1, folder)
        name, _, value = tree.mark.partition("=")
        environment = {**os.environ, name: value, ENV_PARENT: str(os.getpid())}
        for rank, script in enumerate((second, first)):
            tree.spawn_rank([sys.executable, "-S", "-c", script], rank, environment)
        code, text = await tree.ended()
        assert (code, text) == (1, "the workers ended with exit code 1")
        await processes.end_tree(tree.mark, 60.0, tree.own_pids)
        tree.close()
        return tree.last_lines()

    said, *lines = asyncio.run(main(tmp_path))
    assert said.startswith("rank 1 failed first")
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[-2:] == ["[rank 1] ValueError: the reason", "[rank 1] in two lines"]
    assert len(lines) > 40
    assert all(line.startswith("[rank 1]") for line in lines)
