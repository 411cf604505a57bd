"""Addresses as people write them: HOST:PORT or [IPv6]:PORT. Pure."""

from __future__ import annotations

import ipaddress
import re

from atoll.protocol.errors import ConfigError

PLAIN = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,256}")
HOST = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.IGNORECASE)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; an IPv6 host is written in brackets. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not an address; write HOST:PORT, for example 127.0.0.1:7700")
    if bracketed:
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{address!r}: write the host of an IPv6 address in brackets, for example [::1]:7700")
    return host, int(port)


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


def is_loopback(address: str) -> bool:
    """Whether "HOST:PORT" can only be reached from this machine. Names are not looked up."""
    host, _ = parse_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
