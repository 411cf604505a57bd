"""A machine of its own under a real systemd: namespaces in which this machine's files are seen, and what is written is
in memory. `/opt/atoll` is this checkout, as units expect it. Needs root and Debian's package systemd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

import atoll

PROGRAMS = ("unshare", "nsenter", "runuser", "useradd", "curl")
SYSTEMD = Path("/lib/systemd/systemd")
LIMIT_S = 120.0
POLL_S = 0.2
needed = pytest.mark.skipif(
    os.geteuid() != 0 or not SYSTEMD.exists() or any(shutil.which(program) is None for program in PROGRAMS),
    reason="needs root and the Debian packages systemd and curl",
)

# In a cgroup of its own, which is that machine's root, so that it does not meet a systemd of this machine.
_CGROUP = """\
set -eu
mount -t tmpfs tmpfs {tree}
mkdir {tree}/cgroup {tree}/upper {tree}/work {tree}/source {tree}/source-work {tree}/root
mount -t cgroup2 cgroup2 {tree}/cgroup
mkdir -p {tree}/cgroup/{name}
echo 0 > {tree}/cgroup/{name}/cgroup.procs
exec unshare --cgroup bash -c "$1"
"""
# /proc/sys and /sys are read-only, as a container's are: units that set up a kernel leave this one alone.
_BOOT = """\
set -eu
root={tree}/root
mount -t overlay overlay -o lowerdir=/,upperdir={tree}/upper,workdir={tree}/work $root
mkdir -p $root/opt/python $root/opt/atoll-packages $root/opt/atoll-source
mount -o bind,ro {python} $root/opt/python
mount -o bind,ro {packages} $root/opt/atoll-packages
mount -t overlay overlay -o lowerdir={source},upperdir={tree}/source,workdir={tree}/source-work $root/opt/atoll-source
mount -t tmpfs tmpfs $root/run
mount -t tmpfs tmpfs $root/tmp
mount -t tmpfs tmpfs $root/dev
for device in null zero full random urandom tty; do
    touch $root/dev/$device
    mount --bind /dev/$device $root/dev/$device
done
mkdir $root/dev/shm $root/dev/pts
mount -t tmpfs tmpfs $root/dev/shm
mount -t devpts devpts $root/dev/pts -o newinstance,ptmxmode=0666
ln -s pts/ptmx $root/dev/ptmx
ln -s /proc/self/fd $root/dev/fd
mount -t proc proc $root/proc
mount --bind $root/proc/sys $root/proc/sys
mount -o remount,bind,ro $root/proc/sys
mount -t sysfs -o ro sysfs $root/sys
mount -t cgroup2 cgroup2 $root/sys/fs/cgroup
ip link set lo up
cd $root
pivot_root . mnt
umount -l /mnt
mount --make-rshared /
: > /etc/machine-id
mount -t tmpfs tmpfs /root
rm -rf /etc/systemd/system /etc/atoll /var/lib/atoll
mkdir -p /etc/systemd/system
ln -s /opt/atoll-source/deploy /root/deploy
exec env -i container=test PATH={path} {systemd} --system --unit=multi-user.target
"""
_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIBRARIES = "LD_LIBRARY_PATH=/opt/python/lib"
"""Where the interpreter finds its own: those that it was linked to may lie in a home, of which units see nothing."""
_CACHED = "ReadWritePaths=/opt/atoll-source"
"""Kernels are there, compiled, beside their source; numba looks for them where it may write."""
_INSTALL = """\
set -eu
mkdir -p /opt/atoll/bin /opt/atoll/lib/{version}/site-packages
echo 'home = /opt/python/bin' > /opt/atoll/pyvenv.cfg
ln -s /opt/python/bin/{version} /opt/atoll/bin/python
printf '/opt/atoll-source/src\\n/opt/atoll-packages\\n' > /opt/atoll/lib/{version}/site-packages/atoll.pth
printf '#!/opt/atoll/bin/python\\nfrom atoll.__main__ import run\\nraise SystemExit(run())\\n' > /opt/atoll/bin/atoll
printf '#!/bin/sh\\nuser=$2\\nshift 2\\nexec runuser -u "$user" -- "$@"\\n' > /usr/local/bin/sudo
chmod +x /opt/atoll/bin/atoll /usr/local/bin/sudo
mkdir -p /etc/systemd/system/service.d
printf '[Service]\\nEnvironment={libraries}\\n{cached}\\n' > /etc/systemd/system/service.d/python.conf
find /opt/atoll-source/protocol /opt/atoll-source/node -name __pycache__ -exec chmod a+w {{}} +
systemctl daemon-reload
"""
_REMOVE = """\
mount -t cgroup2 cgroup2 {tree} && cd {tree} && find {name} -depth -type d -exec rmdir {{}} +
"""


class Booted:
    """Use as a context manager, with a folder of its own. `beside`: a machine whose network it shares."""

    def __init__(self, folder: Path, beside: Self | None = None) -> None:
        self._beside = beside
        self._tree = folder / "tree"
        self._name = f"atoll-test-{os.getpid()}-{time.monotonic_ns()}"
        self._log = folder / "systemd.log"

    def __enter__(self) -> Self:
        self._tree.mkdir(parents=True)
        names = {
            "tree": self._tree,
            "name": self._name,
            "systemd": SYSTEMD,
            "libraries": _LIBRARIES,
            "cached": _CACHED,
            "path": _PATH,
        }
        names |= {"version": f"python{sys.version_info.major}.{sys.version_info.minor}", "python": sys.base_prefix}
        names |= {"packages": sysconfig.get_path("purelib"), "source": Path(atoll.__file__).parents[2]}
        network = (
            ["unshare", "--net"] if self._beside is None else ["nsenter", f"--net=/proc/{self._beside.pid}/ns/net"]
        )
        kinds = ["--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc"]
        scripts = [_CGROUP.format(**names), "boot", _BOOT.format(**names)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*network, "unshare", *kinds, "bash", "-c", *scripts], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self.until(self._has_booted)
            self.type(_INSTALL.format(**names))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # and with it all that it holds
        self._process.wait()
        remove = _REMOVE.format(tree=self._tree, name=self._name)
        deadline = time.monotonic() + LIMIT_S
        while (
            done := subprocess.run(["unshare", "--mount", "sh", "-c", remove], check=False, capture_output=True)
        ).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(POLL_S)

    @property
    def pid(self) -> int:
        """Of its systemd. Raises ValueError if it has not begun."""
        (pid,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(pid)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """As root, in a folder in which `deploy/` is that of this checkout."""
        enter = ["nsenter", f"--target={self.pid}", "--all", "env", "-i", "HOME=/root", _LIBRARIES, f"PATH={_PATH}"]
        return subprocess.run(
            [*enter, "bash", "-c", f"cd /root\n{command}"], check=False, capture_output=True, text=True, timeout=LIMIT_S
        )

    def type(self, command: str) -> str:
        """What it says. It has to succeed."""
        done = self.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def journal(self, unit: str = "*") -> str:
        return self.run(f"journalctl --no-pager --output=cat --lines=200 --unit='{unit}'").stdout

    def wait_for_text(self, unit: str, text: str) -> None:
        """In its journal, which may hear of it later than systemd tells that the unit has started or ended."""
        self.until(lambda: text in self.journal(unit))

    def shown(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.type(f"systemctl show --value --property={name} {unit}").strip()

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self.journal()
            time.sleep(POLL_S)

    def _has_booted(self) -> bool:
        with suppress(ValueError):  # it has no process yet
            return self.run("systemctl is-active multi-user.target").stdout.strip() == "active"
        return False
