"""What one node needs to know beside the run's settings, which it gets from the coordinator."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.node.daemon import interfaces
from atoll.node.daemon.allowance import Allowance, hours
from atoll.node.daemon.interfaces import LOOPBACK
from atoll.node.host_protocol import MAX_HOSTS
from atoll.node.parallel.settings import parse
from atoll.node.process_protocol import MAX_PROCESSES
from atoll.protocol.addresses import parse_address, parse_addresses, parse_proxy
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import SITE_NAME
from atoll.protocol.trust import plain_text

LAUNCHERS = ("python", "exec", "torchrun")
MAX_NICE = 19
MAX_PORT = (1 << 16) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    coordinator: str = ""
    """Where the coordinator listens, or with commas in between where each of several does; without it, where the invite
    says."""
    name: str = ""
    """Of this site, unique within the run; without it, that of the invite by which --home joined."""
    insecure: bool = False
    """Plain text, to a coordinator of this machine that says so too. It needs --coordinator and --name."""
    insecure_network: bool = False
    """The same to other machines: whoever is between can read and change all of it. For a network on which everybody is
    trusted."""
    data_paths: tuple[Path, ...] = ()
    """Text files and folders, or a folder of `atoll tokenize`; without it, what the run's `data` names."""
    advertise: str = ""
    """Where other nodes reach this one, if it is not --listen."""
    listen: str = ""
    """For other nodes; without it, the local address of the connection to the coordinator, any free port."""
    relay: str = ""
    """Where an `atoll relay` of the run listens, by which other nodes reach this one, which nobody can dial. Without
    --listen, this one then listens on loopback alone."""
    proxy: str = ""
    """An HTTP proxy, http://HOST:PORT, through which this machine dials the coordinator, other nodes and relays.
    Without it none is used, whatever the environment says."""
    home: Path | None = None
    """The node's own folder: key, outer state, log; without it, ~/.local/state/atoll/RUN/NAME."""
    from_saved: Path | None = None
    """The saved model that a resumed run starts from, or a folder of Hugging Face's (Llama)."""
    num_ranks: int = 1
    """Worker processes of this site, on each of its hosts."""
    site_hosts: int = 1
    """Machines of this site. The same command is given on each of them, but for --site-rank; the run hears host 0
    alone, which leads, and needs --site-address."""
    site_rank: int = 0
    """Which of its machines this is, from 0."""
    site_address: str = ""
    """Where host 0 listens for the other hosts of this site, on a network that nobody else reaches."""
    parallel: str = ""
    """How the ranks share the model, the built-in one or that of a script with atoll.share, as dp_shard=2,tp=2: of
    dp_replicate, dp_shard, cp, tp, pp, ep (one of these may be -1: as many as there are ranks left, of --ranks),
    cp_ulysses, sequence_parallel, zero, pp_schedule, microbatches, accumulation, checkpointing, precision, compile and
    offload. Without it, each rank has all of it (DDP). It is this site's own: others may share it in another way."""
    num_threads: int = 0
    """Of each worker, and of the node's kernels if nothing else is said of them; without it, cores / ranks."""
    num_node_threads: int = 0
    """Of the node's kernels; without it, as many as --threads says of each worker, else as many as there are cores:
    docs/log.md."""
    nice: int = 0
    """How much less of busy cores the threads of the node's kernels get than its workers do, 0 to 19: docs/log.md."""
    command: tuple[str, ...] = ()
    """The user's script and its arguments; empty: the built-in trainer."""
    start_limit_s: float = 0.0
    """What the workers may take up to their first step (imports, loading, compilation), in seconds; without it, what
    the run's time_limits say."""
    launcher: str = "python"
    """python: run the script once for each rank; exec: the same with any command; torchrun: its agent starts the ranks,
    and opens a port without a password on every address of this machine."""
    interface: str = ""
    """Network interface of ranks: with torchrun (without it, loopback), and of a site of several hosts (without it, the
    one towards --site-address)."""
    max_retained_bytes: int | None = None
    """Bound on contributions of others that this node holds while it averages; a plan that needs more is refused.
    Without it: by the model's size, the free memory and the free disk."""
    reduce_buffer_bytes: int | None = None
    """Of these, in memory; the rest is on the disk. Without it: at most a quarter of the free memory."""
    bandwidth_bytes_per_s: int = 0
    """Uplink; sites with more of it average more, until it is measured. Without it, as much as --max-upload-mbit says,
    or all alike."""
    max_upload_bytes_per_s: int = 0
    """What this site may send to others, state for those that join included, without the transport's own few percent.
    Without it, as fast as the link goes."""
    monthly_upload_bytes: int = 0
    """What it may send in a calendar month, counted on across starts. When it has, it leaves after its sync, which may
    be a sync's traffic more, waits, and comes back on the first. Without it, no limit."""
    hours: str = ""
    """When it may be in the run, by this machine's clock, as 22-07. It leaves after the sync under way, waits, and
    comes back by itself. Without it, always."""
    max_disk_bytes: int = 0
    """What --home may take of the disk, at the most: a run that needs more is not joined, and what it needs less is for
    contributions that are averaged here. Without it, the free disk."""
    exchange_processes: int = 1
    """Processes of this host that exchange with other sites, for a link that one core cannot fill: each has an equal
    part of the model, and a port: that of --listen and those after it."""
    http_listen: str = ""
    """Where /metrics is served; without it, nowhere."""
    save_dir: Path | None = None
    """Where the model is saved, a folder of its own; without it, HOME/model."""
    log_format: str = "text"
    """text or json: of what the node says on the terminal and of the log in its home, which has the lines of its
    workers too. As json an object a line, with time, level, run, site, logger, sync and message."""
    debug: bool = False
    """Tracebacks and debug lines in the log."""

    @property
    def is_plain_text(self) -> bool:
        return self.insecure or self.insecure_network

    @property
    def coordinators(self) -> tuple[str, ...]:
        """Raises ConfigError."""
        return parse_addresses(self.coordinator)

    @property
    def allowance(self) -> Allowance:
        """Raises ConfigError."""
        return Allowance(hours(self.hours), self.monthly_upload_bytes)

    @property
    def num_rank_threads(self) -> int:
        return self.num_threads or max(1, _num_cores() // self.num_ranks)

    @property
    def num_site_ranks(self) -> int:
        """On all hosts of the site."""
        return self.num_ranks * self.site_hosts

    @property
    def first_rank(self) -> int:
        """Of this host."""
        return self.num_ranks * self.site_rank

    @property
    def rank_interface(self) -> str:
        return self.interface or LOOPBACK

    @property
    def num_kernel_threads(self) -> int:
        """Of the node's own kernels."""
        return self.num_node_threads or self.num_threads or _num_cores()

    @property
    def num_exchange_threads(self) -> int:
        """Of these, for each exchange process."""
        return -(-self.num_kernel_threads // self.exchange_processes)


def validate(config: NodeConfig) -> None:
    """Raises ConfigError, naming the flag, if a value is out of range."""
    if not SITE_NAME.fullmatch(config.name):
        raise ConfigError(
            f'--name "{config.name}": 1 to 64 letters, digits, ".", "_" or "-", the first a letter or digit'
        )
    if config.num_ranks < 1:
        raise ConfigError(f"--ranks {config.num_ranks}: a site has at least one rank")
    _validate_hosts(config)
    parse(config.parallel).resolved(config.num_site_ranks)
    if (fewest := min(config.num_threads, config.num_node_threads)) < 0:
        raise ConfigError(f"--threads or --node-threads {fewest}: must be at least 1, or 0 for the default")
    if not 0 <= config.nice <= MAX_NICE:
        raise ConfigError(f"--nice {config.nice}: 0 (as the workers) to {MAX_NICE} (only where they leave cores idle)")
    if not 0 <= config.start_limit_s < math.inf:
        raise ConfigError(f"--start-limit-s {config.start_limit_s:g}: give seconds, or leave it out for the run's")
    if config.launcher not in LAUNCHERS:
        raise ConfigError(f"--launcher {config.launcher}: choose one of {', '.join(LAUNCHERS)}")
    if config.launcher == "exec" and not config.command:
        raise ConfigError("--launcher exec needs a command after --")
    if config.interface and config.launcher != "torchrun" and config.site_hosts == 1:
        raise ConfigError(
            f"--interface {config.interface}: only with --launcher torchrun or --site-hosts; otherwise ranks use "
            f"{LOOPBACK} alone"
        )
    if config.interface:
        interfaces.check(config.interface)
    _validate_processes(config)
    parse_proxy(config.proxy)
    _validate_relay(config)
    if config.insecure and not config.insecure_network:
        for address in config.coordinators:
            plain_text.check({"--coordinator": address})
        plain_text.check(
            {
                "--listen": config.listen,
                "--advertise": config.advertise,
                "--http-listen": config.http_listen,
                "--site-address": config.site_address,
            }
        )
    _validate_limits(config)
    if min(config.max_retained_bytes or 0, config.reduce_buffer_bytes or 0, config.bandwidth_bytes_per_s) < 0:
        raise ConfigError("--max-retained-mib, --reduce-buffer-mib and --bandwidth-mbit cannot be negative")


def _validate_relay(config: NodeConfig) -> None:
    if not config.relay:
        return
    if config.advertise:
        raise ConfigError(f"--relay {config.relay} with --advertise {config.advertise}: peers are told one of them")
    if config.exchange_processes > 1:
        raise ConfigError(
            f"--relay {config.relay}: a relay leads to one process of a site; leave out --exchange-processes"
        )


def _validate_limits(config: NodeConfig) -> None:
    """Of what the owner gives."""
    if min(config.max_upload_bytes_per_s, config.monthly_upload_bytes, config.max_disk_bytes) < 0:
        raise ConfigError("--max-upload-mbit, --monthly-upload-gb and --max-disk-gb cannot be negative")
    is_limited = config.max_upload_bytes_per_s or config.allowance
    if is_limited and (config.site_hosts > 1 or config.exchange_processes > 1):
        raise ConfigError(
            "--max-upload-mbit, --monthly-upload-gb and --hours are for a site of one host with one exchange process: "
            "leave out --site-hosts and --exchange-processes"
        )


def _validate_processes(config: NodeConfig) -> None:
    num = config.exchange_processes
    if not 1 <= num <= MAX_PROCESSES:
        raise ConfigError(f"--exchange-processes {num}: must be 1 to {MAX_PROCESSES}")
    port = parse_address(config.listen)[1] if config.listen else 0
    if num > 1 and config.advertise and not port:
        raise ConfigError(
            f"--exchange-processes {num} with --advertise needs --listen with a port: other nodes reach the processes "
            f"at the {num} ports from that of --advertise on, which lead to those from that of --listen on"
        )
    last = max(port, parse_address(config.advertise)[1] if config.advertise else 0) + num - 1
    if last > MAX_PORT:
        raise ConfigError(
            f"--exchange-processes {num}: their ports, from that of --listen or --advertise on, go to {last}"
        )


def _validate_hosts(config: NodeConfig) -> None:
    """Of a site with several."""
    if not config.coordinator and not config.site_rank:
        raise ConfigError("say where the coordinator listens: --coordinator HOST:PORT")
    if not 1 <= config.site_hosts <= MAX_HOSTS:
        raise ConfigError(f"--site-hosts {config.site_hosts}: must be 1 to {MAX_HOSTS}")
    if not 0 <= config.site_rank < config.site_hosts:
        raise ConfigError(
            f"--site-rank {config.site_rank}: the hosts of this site are 0 to {config.site_hosts - 1}, as --site-hosts "
            f"is {config.site_hosts}"
        )
    if (config.site_hosts > 1) != bool(config.site_address):
        raise ConfigError(
            f"--site-hosts {config.site_hosts} and --site-address {config.site_address or '(none)'}: a site of several "
            "hosts needs both, HOST:PORT of its host 0; one of one host neither"
        )
    if config.site_hosts > 1 and config.launcher == "torchrun":
        raise ConfigError("--site-hosts with --launcher torchrun: the node starts the ranks of several hosts itself")


def default_home(run_id: str, name: str, environment: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/atoll/RUN/NAME`, or the same below `~/.local/state`."""
    state = environment.get("XDG_STATE_HOME") or str(Path(environment.get("HOME", ".")) / ".local" / "state")
    return Path(state) / "atoll" / run_id / name


def _num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
