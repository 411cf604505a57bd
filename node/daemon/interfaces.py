"""The network interfaces of this machine (Linux)."""

from __future__ import annotations

import fcntl
import socket
import struct

from atoll.protocol.errors import ConfigError

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s24x")  # a name, and room for what the kernel says of it
_ADDRESS = slice(20, 24)


def check(interface: str) -> None:
    """Raises ConfigError, naming those that there are, if this machine has none of that name."""
    try:
        socket.if_nametoindex(interface)
    except OSError:
        raise _refused(interface, "there is none") from None


def address_of(interface: str) -> str:
    """Its IPv4 address. Raises ConfigError, naming those that there are, if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, _IFREQ.pack(interface.encode()[:15]))
        except OSError as error:
            raise _refused(interface, error.strerror) from None
    return socket.inet_ntoa(answer[_ADDRESS])


def _refused(interface: str, why: str | None) -> ConfigError:
    names = ", ".join(name for _, name in socket.if_nameindex())
    return ConfigError(f"network interface {interface!r}: {why}; this machine has {names}")


def interface_with(address: str) -> str:
    """The interface that has this IPv4 address. Raises ConfigError if none has."""
    if address.startswith("127."):
        return LOOPBACK
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except ConfigError:
            continue  # it has no address
    raise ConfigError(f"no network interface of this machine has the address {address}; name one with --interface")
