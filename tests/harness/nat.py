"""Sites behind routers that translate addresses (nftables) and let connections out to one port alone, each with the
same private address, and one public host: network namespaces of one machine. Needs root."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from shutil import which
from types import TracebackType
from typing import Self

PUBLIC = "198.51.100.1"
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
    """The public host has a bridge `wan`; each of `names` is a site, whose router is beside it."""

    def __init__(self, names: str, port: int) -> None:
        self._names = names
        self._rules = RULES.replace("PORT", str(port))
        self._mark = f"an{os.getpid() % 100_000}"
        self._stack = ExitStack()

    @property
    def public(self) -> list[str]:
        """In front of a command that is to run there."""
        return self._prefix("p")

    def site(self, name: str) -> list[str]:
        return self._prefix(f"s{name}")

    def router_address(self, name: str) -> str:
        """By which the public host sees the site."""
        return f"198.51.100.{11 + self._names.index(name)}"

    def _prefix(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self._mark}{host}"]

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
        self._host(stack, "p")
        self._run("p", "ip link add wan type bridge")
        self._run("p", f"ip addr add {PUBLIC}/24 dev wan")
        self._run("p", "ip link set wan up")
        for name in self._names:
            site, router = f"s{name}", f"r{name}"
            self._host(stack, site)
            self._host(stack, router)
            self._join(site, "eth0", router, "in")
            self._join("p", f"wan{name}", router, "out")
            self._run("p", f"ip link set wan{name} master wan")
            self._run(site, f"ip addr add {SITE}/24 dev eth0")
            self._run(router, f"ip addr add {ROUTER}/24 dev in")
            self._run(router, f"ip addr add {self.router_address(name)}/24 dev out")
            for host, device in ((site, "eth0"), (router, "in"), (router, "out"), ("p", f"wan{name}")):
                self._run(host, f"ip link set {device} up")
            self._run(site, f"ip route add default via {ROUTER}")
            self._run(router, "sysctl -q -w net.ipv4.ip_forward=1")
            self._run(router, "nft -f -", self._rules)

    def _host(self, stack: ExitStack, host: str) -> None:
        _call(["ip", "netns", "add", f"{self._mark}{host}"])
        stack.callback(subprocess.run, ["ip", "netns", "del", f"{self._mark}{host}"], check=False)
        self._run(host, "ip link set lo up")

    def _join(self, one: str, device: str, other: str, other_device: str) -> None:
        words = ["ip", "-n", f"{self._mark}{one}", "link", "add", device, "type", "veth"]
        _call([*words, "peer", "name", other_device, "netns", f"{self._mark}{other}"])

    def _run(self, host: str, command: str, said: str = "") -> None:
        _call([*self._prefix(host), *command.split()], said)


def _call(command: list[str], said: str = "") -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, input=said)
