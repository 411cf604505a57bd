"""Addresses as people write them: HOST:PORT or [IPv6]:PORT; NAME@HOST:PORT of a site that a relay leads to. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from atoll.protocol.errors import ConfigError

PLAIN = re.compile(r"[A-Za-z0-9._:%@\[\]-]{1,256}")
HOST = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.IGNORECASE)

HERE = "unix-abstract:"
"""Before the name of a socket of this process, through which gRPC comes to a relay."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """Where a site is reached that nobody can dial: the relay is asked for it."""

    name: str
    """The site's."""
    relay: str
    """HOST:PORT."""

    def __str__(self) -> str:
        return f"{self.name}@{self.relay}"


def relayed(address: str) -> Relayed | None:
    """None for an address that is dialled itself. Raises ConfigError for no address of a relay."""
    name, at, relay = address.rpartition("@")
    if not at:
        return None
    parse_address(relay)
    return Relayed(name, relay)


def problem_with(address: str, name: str) -> str:
    """Why peers cannot be told this address of the site of that name; empty if they can."""
    try:
        found = relayed(address)
        parse_address(found.relay if found is not None else address)
    except ConfigError as error:
        return str(error)
    if not is_plain(address):
        return f"{address!r} has characters that no address has"
    if found is not None and found.name != name:
        return f"{address!r} is of site {found.name!r}: a relay leads to {name} at {Relayed(name, found.relay)}"
    return ""


def parse_proxy(text: str) -> str:
    """HOST:PORT of "http://HOST:PORT"; empty of nothing. Raises ConfigError."""
    if not text:
        return ""
    address = text.removeprefix("http://").removesuffix("/")
    if not text.startswith("http://") or not is_plain(address):
        raise ConfigError(f"--proxy {text}: write http://HOST:PORT; a password is not taken here")
    parse_address(address)
    return address


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; an IPv6 host is written in brackets. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or "@" in host or not port.isascii() or not port.isdigit():
        raise ConfigError(f"{address!r} is not an address; write HOST:PORT, for example 127.0.0.1:7700")
    if len(port) > 5 or int(port) > 65535:  # Python takes no number of thousands of digits
        raise ConfigError(f"{address!r} is not an address: a port is a number from 0 to 65535")
    if bracketed:
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{address!r}: write the host of an IPv6 address in brackets, for example [::1]:7700")
    return host, int(port)


def parse_addresses(text: str) -> tuple[str, ...]:
    """Of "HOST:PORT,HOST:PORT", each one; none of nothing. Raises ConfigError."""
    found = tuple(text.split(",")) if text else ()
    for address in found:
        parse_address(address)
    return found


def is_plain(address: str) -> bool:
    """Whether it has only characters of names and numbers of hosts: it is shown in logs, on pages and in metrics."""
    return PLAIN.fullmatch(address) is not None


def is_host(name: str) -> bool:
    """Whether a machine can be called so: a name of DNS, or a number, without a port."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return HOST.fullmatch(name) is not None and len(name) < 254
    return True


def join_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_unspecified(address: str) -> bool:
    """Whether "HOST:PORT" is every address of its machine, at which nobody is reached."""
    host, _ = parse_address(address)
    try:
        return ipaddress.ip_address("0.0.0.0" if host == "0" else host).is_unspecified
    except ValueError:
        return False


def on_this_machine(listens: str, port: int) -> str:
    """Where a process of this machine reaches one that listens on `listens`, which may be all addresses."""
    host, _ = parse_address(listens)
    if is_unspecified(listens):
        host = "::1" if ":" in host else "127.0.0.1"
    return join_address(host, port)


def is_loopback(address: str) -> bool:
    """Whether "HOST:PORT" can only be reached from this machine. Names are not looked up."""
    host, _ = parse_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def source_of(address: str) -> str:
    """Whose an address is: of IPv6 its network of 64 bits, as one machine has all of that."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
