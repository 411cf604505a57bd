"""Which commands the node starts for the ranks of its site, and what these find in their environment.

`python` and `exec` start a rank for a process, with everything that torchrun would tell it. A script that calls
`init_process_group` or `init_device_mesh` meets its other ranks in a store on a socket that the node opened
(`store_socket.py`). At a site of one host socket and groups are kept on the loopback interface: nothing that other
machines could reach; at one of several hosts they are on the network of the site.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from atoll.node.daemon import child
from atoll.node.daemon.config import NodeConfig
from atoll.node.daemon.interfaces import address_of
from atoll.protocol.addresses import parse_address
from atoll.protocol.errors import ConfigError

TRAINER_MODULE = "atoll.node.worker"
STORE_MODULE = "atoll.node.worker.group_store"
LOOPBACK_ADDRESS = "127.0.0.1"
STOP_LIMIT_S = 5.0


def rank_command(config: NodeConfig) -> list[str]:
    """Of every rank, started with `python` or `exec`. Raises ConfigError if there is no such script or program."""
    if config.launcher == "python":
        return [sys.executable, *_script(config)]
    if not config.command or shutil.which(config.command[0]) is None:
        raise ConfigError(f"cannot run {' '.join(config.command) or 'an empty command'}: no such program")
    return list(config.command)


def agent_command(config: NodeConfig, folder: Path) -> list[str]:
    """Of torchrun, whose ranks print into pipes in `folder`.

    Raises ConfigError if there is no such script or network interface.
    """
    # Its own restarts are off: the node restarts, with a new generation. Its rendezvous, which it unpickles, is a file.
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--max-restarts", "0"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-id", folder.name]
    agent += ["--rdzv-endpoint", str(folder / "rendezvous"), "--local-addr", address_of(config.rank_interface)]
    agent += ["--nproc-per-node", str(config.num_ranks), "--log-dir", str(folder), "--no-python"]
    return [*agent, *tied("--output", str(folder)), sys.executable, *_script(config)]


def _script(config: NodeConfig) -> list[str]:
    script = list(config.command) or ["-m", TRAINER_MODULE]
    if not script[0].startswith("-") and not Path(script[0]).is_file():
        raise ConfigError(f"no such script: {script[0]} (in {os.getcwd()})")
    return script


def store_command(fd: int) -> list[str]:
    """Serves the ranks' store on the listening socket `fd`. -P: no module of the current folder is taken for torch."""
    return [sys.executable, "-P", "-m", STORE_MODULE, str(fd)]


def tied(*options: str) -> list[str]:
    """What stands before a command that must not outlive the node."""
    return [sys.executable, "-I", "-S", child.__file__, *options, "--"]


def on_interface(interface: str) -> dict[str, str]:
    """Keeps process groups (gloo, NCCL, and torch's RPC) on one network interface."""
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # exactly this one, not all whose names begin so
        "TP_SOCKET_IFNAME": interface,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of all hosts find each other."""

    address: str
    """HOST:PORT of their store."""
    group_name: str


def of_rank(local_rank: int, config: NodeConfig, meeting: Meeting) -> dict[str, str]:
    """What torchrun tells a rank; its groups meet in the node's store and open none of their own."""
    rank, host = str(config.first_rank + local_rank), parse_address(meeting.address)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": rank,
        "GROUP_RANK": str(config.site_rank),
        "WORLD_SIZE": str(config.num_site_ranks),
        "LOCAL_WORLD_SIZE": str(config.num_ranks),
        "ROLE_WORLD_SIZE": str(config.num_site_ranks),
        "GROUP_WORLD_SIZE": str(config.site_hosts),
        "ROLE_NAME": "default",
        "MASTER_ADDR": host[0],
        "MASTER_PORT": str(host[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else rank 0 opens a store on all interfaces
        "TORCHELASTIC_RUN_ID": meeting.group_name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
