"""Sites behind routers that translate addresses (nftables) and let connections out to one port alone, each with the
same private address, and public hosts: network namespaces of one machine. Needs root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from shutil import which
from types import TracebackType
from typing import Self, TypeVar

from tests.harness.namespace import NAMESPACE, enter

T = TypeVar("T")

HUB, GATE, WATCH = PUBLIC = ("198.51.100.1", "198.51.100.2", "198.51.100.3")
"""The public hosts: the coordinator's, a relay's, and the one from which the run is looked at."""
SITE = "192.168.1.2"
ROUTER = "192.168.1.1"
RULES = """
table ip nat {
 chain leaving {
  type nat hook postrouting priority 100
  oifname "out" masquerade
 }
}
table ip filter {
 chain passing {
  type filter hook forward priority 0; policy drop
  ct state established,related accept
  iifname "in" oifname "out" tcp dport PORT accept
 }
 chain arriving {
  type filter hook input priority 0; policy drop
  ct state established,related accept
 }
}
"""


def available() -> str:
    """Why it cannot be done here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")):
        if which(program) is None:
            return f"needs Debian's package {package}"
    return ""


class Nat:
    """The hub has a bridge `wan`, so all wires end there; each of `names` is a site, whose router is beside it."""

    def __init__(self, names: Sequence[str], port: int) -> None:
        self._names = names
        self._rules = RULES.replace("PORT", str(port))
        self._mark = f"an{os.getpid() % 100_000}"
        self._stack = ExitStack()

    def there(self, host: str) -> dict[str, str]:
        """The environment of a guarded command that is to run there: at a public address, or at the site of a name."""
        return {NAMESPACE: self._namespace(host)}

    def prefix(self, host: str) -> list[str]:
        """The same in front of any command."""
        return ["ip", "netns", "exec", self._namespace(host)]

    def inside(self, host: str, work: Callable[[], T]) -> T:
        """Does it as from there, in a thread: a socket that it makes belongs to that host."""
        with ThreadPoolExecutor(1, initializer=enter, initargs=(self._namespace(host),)) as there:
            return there.submit(work).result()

    def router_address(self, name: str) -> str:
        """By which public hosts see the site."""
        return f"198.51.100.{11 + self._names.index(name)}"

    def _namespace(self, host: str) -> str:
        return f"{self._mark}p{PUBLIC.index(host)}" if host in PUBLIC else f"{self._mark}s{self._names.index(host)}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._make(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _make(self, stack: ExitStack) -> None:
        for host in PUBLIC:
            self._host(stack, self._namespace(host))
        hub = self._namespace(HUB)
        _in(hub, "ip link add wan type bridge")
        _in(hub, f"ip addr add {HUB}/24 dev wan")
        _in(hub, "ip link set wan up")
        for host in PUBLIC[1:]:
            self._join(self._namespace(host), "wan", hub, f"host{PUBLIC.index(host)}")
            _in(self._namespace(host), f"ip addr add {host}/24 dev wan")
            _in(hub, f"ip link set host{PUBLIC.index(host)} master wan")
        for number, name in enumerate(self._names):
            site, router, wire = self._namespace(name), f"{self._mark}r{number}", f"site{number}"
            self._host(stack, site)
            self._host(stack, router)
            self._join(site, "eth0", router, "in")
            self._join(router, "out", hub, wire)
            _in(hub, f"ip link set {wire} master wan")
            _in(site, f"ip addr add {SITE}/24 dev eth0")
            _in(router, f"ip addr add {ROUTER}/24 dev in")
            _in(router, f"ip addr add {self.router_address(name)}/24 dev out")
            _in(site, f"ip route add default via {ROUTER}")
            _in(router, "sysctl -q -w net.ipv4.ip_forward=1")
            _in(router, "nft -f -", self._rules)

    def _host(self, stack: ExitStack, namespace: str) -> None:
        _call(["ip", "netns", "add", namespace])
        stack.callback(subprocess.run, ["ip", "netns", "del", namespace], check=False)
        _in(namespace, "ip link set lo up")

    def _join(self, one: str, device: str, other: str, other_device: str) -> None:
        words = ["ip", "-n", one, "link", "add", device, "type", "veth"]
        _call([*words, "peer", "name", other_device, "netns", other])
        _in(one, f"ip link set {device} up")
        _in(other, f"ip link set {other_device} up")


def _in(namespace: str, command: str, said: str = "") -> None:
    _call(["ip", "netns", "exec", namespace, *command.split()], said)


def _call(command: list[str], said: str = "") -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, input=said)
