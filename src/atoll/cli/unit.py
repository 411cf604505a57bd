"""A unit for systemd that starts this machine's node: `atoll join --install`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.protocol.disk import Disk
from atoll.protocol.errors import HostError

UNIT = """\
[Unit]
Description=atoll node of site {name}
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
WorkingDirectory=-{folder}
ExecStart={command}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2 4 6
TimeoutStartSec=infinity
WatchdogSec=60
KillMode=mixed
TimeoutStopSec=360

# What it does not need, as far as a script of one's own runs with it.
UMask=0077
NoNewPrivileges=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
# For a library that can do without: an error, and not the end of the process.
SystemCallErrorNumber=EPERM
{of_system}
[Install]
WantedBy={target}
"""
OF_SYSTEM = """\
# The node and its script are root's, and no more of root than files, ports below 1024 and memory that stays in place,
# as InfiniBand among hosts wants it: files of data and script may be anybody's, and lie anywhere but in folders of the
# system, which are not written.
CapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_NET_BIND_SERVICE
LimitMEMLOCK=infinity
AmbientCapabilities=
ProtectSystem=full
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectProc=invisible
"""
"""What a user's own systemd has not the privileges for."""
AS_ROOT = (
    "the unit is the system's and has no User=: the node and its script run as root. To have them run as somebody "
    "else, join as that user, whose own systemd then starts the node, or take deploy/systemd/atoll-node@.service"
)


def text(name: str, words: Sequence[str], *, is_system: bool) -> str:
    """`words`: of the command that starts the node, in which paths may begin in this process's folder."""
    target = "multi-user.target" if is_system else "default.target"
    folder = str(Path.cwd()).replace("%", "%%")
    command = " ".join(quoted(word) for word in words)
    of_system = OF_SYSTEM if is_system else ""
    return UNIT.format(name=name, folder=folder, command=command, of_system=of_system, target=target)


def quoted(word: str) -> str:
    """As systemd.service(5) reads it: no specifier, no variable, one word."""
    word = word.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"' if not word or any(c in word for c in " \t'\"\\;") else word


def options(words: Sequence[str], invite: str) -> list[str]:
    """Those of `atoll join` that the node is started with."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word == "--home":
            rest.pop(0)
        elif word not in ("join", "--install", "--debug", invite) and not word.startswith("--home="):
            kept.append(word)
    return kept


def warnings() -> list[str]:
    """Of what `install` writes for this user."""
    return [AS_ROOT] if os.geteuid() == 0 else []


def install(name: str, words: Sequence[str]) -> list[str]:
    """Writes the unit of the user, or for root of the system. Returns the commands that start it. Raises HostError."""
    is_system = os.geteuid() == 0
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    folder = Path("/etc/systemd/system") if is_system else config / "systemd" / "user"
    path = folder / f"atoll-{name}.service"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{folder}: {error.strerror}") from None
    Disk().write_whole(path, text(name, words, is_system=is_system).encode(), mode=0o644)
    control = "systemctl" if is_system else "systemctl --user"
    commands = [f"{control} daemon-reload", f"{control} enable --now {path.name}"]
    return commands if is_system else [*commands, f"loginctl enable-linger {os.environ.get('USER', '')}".rstrip()]


def node_command(home: Path, words: Sequence[str], script: Sequence[str]) -> list[str]:
    behind = ["--", *script] if script else []
    return [sys.executable, "-m", "atoll", "node", "--home", str(home.absolute()), *words, *behind]
