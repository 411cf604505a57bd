"""Several hosts on one machine: network namespaces behind a bridge, each with a limited link. Needs root.

`tbf` limits both directions of each link. Its bucket is kept small, so that a burst cannot hide the limit. The hosts
use TCP cubic, the kernel's own default, whatever this machine's is. With a round trip time each link is a wire of
`long_wire` in place of a pair that the kernel joins.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "atoll"
SUBNET, LAN_SUBNET = "10.77.0", "10.78.0"
WIRE_QUEUE_FRAMES = 16_384
"""Before each end of a wire with a delay: small frames that come faster than its process wakes must not be lost."""
NOBODY = "02:00:00:00:00:99"
"""A hardware address that no interface has."""
FILTERED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
"""1: frames that a bridge passes on go through the firewall, which drops them where Docker has set it up."""
SYSCTL = Path(__file__).parents[1] / "deploy" / "sysctl.d" / "90-atoll.conf"


def available() -> str:
    """Why it cannot be done here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        subprocess.run(["ip", "-V"], check=True, capture_output=True)
        subprocess.run(["tc", "-V"], check=True, capture_output=True)
        subprocess.run(["sysctl", "-V"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "needs iproute2 (ip, tc) and procps (sysctl)"
    with suppress(OSError):  # no such file where bridges are not filtered
        if FILTERED.read_text().strip() != "0":
            return "needs bridges that no firewall filters: sysctl net.bridge.bridge-nf-call-iptables=0 (Docker sets 1)"
    return ""


class Hosts:
    """`num_hosts` namespaces with addresses 10.77.0.11, .12, ...; the bridge in this namespace is 10.77.0.1."""

    def __init__(
        self,
        num_hosts: int,
        bits_per_s: int,
        congestion: str = "cubic",
        rtt_s: float = 0.0,
        *,
        forgets: bool = False,
        has_lan: bool = False,
    ) -> None:
        """`has_lan`: hosts reach each other over a second network, too, at addresses 10.78.0.11, .12, ..., which has no
        limit: the hosts of one site are near each other. `rtt_s`: the round trip time between two hosts; half of that
        to the bridge, which is in the middle. With it the hosts are set up as deploy/sysctl.d says, but where `forgets`
        is given."""
        self.num_hosts = num_hosts
        self.bits_per_s = bits_per_s
        self.congestion = congestion
        self.rtt_s = rtt_s
        self.forgets = forgets
        self.has_lan = has_lan
        self._wires: subprocess.Popen[bytes] | None = None
        self.bridge, self.lan = f"{PREFIX}-br", f"{PREFIX}-lan"
        self.bridge_address = f"{SUBNET}.1"

    def namespace(self, host: int) -> str:
        return f"{PREFIX}-{host}"

    def address(self, host: int) -> str:
        return f"{SUBNET}.{11 + host}"

    def lan_address(self, host: int) -> str:
        return f"{LAN_SUBNET}.{11 + host}"

    def prefix(self, host: int) -> list[str]:
        """In front of a command that is to run on that host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def sent_bytes(self, host: int) -> int:
        """By the host's interface since it was made, headers included."""
        return self._sent(host, "bytes")

    def sent_frames(self, host: int) -> int:
        """The same: Ethernet frames, or what the kernel hands over as one."""
        return self._sent(host, "packets")

    def _sent(self, host: int, of: str) -> int:
        path = f"/sys/class/net/{PREFIX}-v{host}/statistics/rx_{of}"  # our end of the pair receives what it sends
        with open(path, encoding="ascii") as file:
            return int(file.read())

    def drop(self, source: int | None, target: int | None) -> None:
        """From now on nothing that `source` sends reaches `target`; None is the bridge's side. Nobody is told."""
        _ip(*self._neighbour("replace", source, target), "lladdr", NOBODY, "nud", "permanent")

    def restore(self, source: int | None, target: int | None) -> None:
        _ip(*self._neighbour("del", source, target))

    def _neighbour(self, verb: str, source: int | None, target: int | None) -> list[str]:
        inside = [] if source is None else ["-n", self.namespace(source)]
        device = self.bridge if source is None else f"{PREFIX}-i{source}"
        address = self.bridge_address if target is None else self.address(target)
        return [*inside, "neigh", verb, address, "dev", device]

    def set_link(self, host: int, state: str) -> None:
        """`down` pulls the cable, `up` puts it back."""
        _ip("link", "set", f"{PREFIX}-v{host}", state)

    def __enter__(self) -> Self:
        self._lock = os.open("/run/atoll-netns.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the names and addresses are there once on a machine
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        self._remove()
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("addr", "add", f"{self.bridge_address}/24", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")
        ends = [(f"{PREFIX}-v{host}", f"{PREFIX}-i{host}") for host in range(self.num_hosts)]
        self._join(ends)
        for host, (outer, inner) in enumerate(ends):
            name = self.namespace(host)
            _ip("netns", "add", name)
            _ip("link", "set", inner, "netns", name)
            _ip("link", "set", outer, "master", self.bridge)
            _ip("link", "set", outer, "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", inner)
            _ip("-n", name, "link", "set", inner, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            route = ["dev", inner, "proto", "kernel", "scope", "link", "src", self.address(host)]
            _ip("-n", name, "route", "change", f"{SUBNET}.0/24", *route, "congctl", self.congestion)
            self.set_rate(host, self.bits_per_s)
            if self.rtt_s and not self.forgets:
                _run([*self.prefix(host), "sysctl", "--quiet", "--load", str(SYSCTL)])
        if self.has_lan:
            self._add_lan()

    def _add_lan(self) -> None:
        _ip("link", "add", self.lan, "type", "bridge")
        _ip("link", "set", self.lan, "up")
        for host in range(self.num_hosts):
            name, outer, inner = self.namespace(host), f"{PREFIX}-l{host}", f"{PREFIX}-m{host}"
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", inner, "netns", name)
            _ip("link", "set", outer, "master", self.lan)
            _ip("link", "set", outer, "up")
            _ip("-n", name, "addr", "add", f"{self.lan_address(host)}/24", "dev", inner)
            _ip("-n", name, "link", "set", inner, "up")

    def set_rate(self, host: int, bits_per_s: int) -> None:
        """Of that host's link, in both directions, from now on."""
        bucket_bytes = max(bits_per_s // 8 // 500, 16 << 10)  # 2 ms; one segment of offload at least
        limit = ["root", "tbf", "rate", f"{bits_per_s}bit", "burst", str(bucket_bytes), "latency", "50ms"]
        _run(["tc", "qdisc", "replace", "dev", f"{PREFIX}-v{host}", *limit])
        _run([*self.prefix(host), "tc", "qdisc", "replace", "dev", f"{PREFIX}-i{host}", *limit])

    def _join(self, ends: list[tuple[str, str]]) -> None:
        if not self.rtt_s:
            for outer, inner in ends:
                _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            return
        delay_ms = 1e3 * self.rtt_s / 4  # from one host to another it is two wires, and back as many
        command = [sys.executable, "-m", "benchmarks.long_wire", "--delay-ms", str(delay_ms), *map("=".join, ends)]
        self._wires = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._wires.stdout is not None
        if self._wires.stdout.readline() != b"ready\n":
            raise RuntimeError("long_wire ended early; its error is above")
        for name in (name for wire in ends for name in wire):
            _ip("link", "set", name, "txqueuelen", str(WIRE_QUEUE_FRAMES))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wires is not None:
            self._wires.communicate()  # its input ends, and so does it
        self._remove()
        os.close(self._lock)

    def _remove(self) -> None:
        for host in range(self.num_hosts):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", f"{PREFIX}-v{host}"], check=False, capture_output=True)
        for bridge in (self.bridge, self.lan):
            subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def _ip(*args: str) -> None:
    _run(["ip", *args])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)
