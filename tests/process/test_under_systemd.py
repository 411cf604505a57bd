"""The units of deploy/systemd under a real systemd, each machine's own, with what deploy/README.md tells to type."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness import booted
from tests.harness.booted import Booted

PAGE = Path(__file__).parents[2] / "deploy" / "README.md"
ATOLL = "/opt/atoll/bin/atoll"
STORE = "--store /var/lib/atoll/run.db"
NOT_ALLOWED = (
    "import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.syscall(438, -1, 0, 0); print(ctypes.get_errno())"
)
"""pidfd_getfd, which units leave out: without a filter it says EBADF."""

CAPABILITIES = 1 << 1 | 1 << 10  # CAP_DAC_OVERRIDE and CAP_NET_BIND_SERVICE of linux/capability.h
SCRIPT = "-- /opt/atoll-source/tests/workers/torch_worker.py --step-delay-s 0.1"
"""Where much is waited for: a trainer that steps as fast as it can would take this machine for as long."""
WATCHDOG_S = 10
"""In place of the 30 and 60 of the units."""

pytestmark = [booted.needed, pytest.mark.timeout(600)]


def blocks() -> Iterator[list[str]]:
    """Of lines that are typed one after the other."""
    section = PAGE.read_text().partition("\n## systemd\n")[2].partition("\n## ")[0]
    for block in re.findall(r"(?:^    .+\n)+", section, re.MULTILINE):
        yield [line.partition("  #")[0].strip() for line in block.splitlines()]


EVERY, COORDINATOR, SITE, RELAY, END, AFTER, *_ = blocks()


class Hub(Booted):
    """The coordinator's machine."""

    def commits(self) -> list[dict[str, Any]]:
        """The newest, as the page has them; none while no coordinator answers."""
        done = self.run("curl --silent --fail --max-time 10 http://127.0.0.1:7701/status.json")
        found: list[dict[str, Any]] = json.loads(done.stdout)["commits"] if done.returncode == 0 else []
        return found

    def wait_for_a_commit_of(self, *names: str) -> None:
        """That is newer than those that are there now."""
        newest = max((commit["commit"] for commit in self.commits()), default=0)
        wanted = set(names)
        self.until(lambda: any(c["commit"] > newest and wanted == set(c["contributors"]) for c in self.commits()))


def use(machine: Booted, lines: list[str]) -> None:
    for line in lines:
        machine.type(line)


def drop_in(machine: Booted, unit: str, text: str) -> None:
    machine.type(
        f"mkdir -p /etc/systemd/system/{unit}.d && cat > /etc/systemd/system/{unit}.d/test.conf <<'END'\n{text}\nEND"
    )
    machine.type("systemctl daemon-reload")


def hand(source: Booted, target: Booted, name: str) -> None:
    """Copy a file of root's home."""
    text = source.type(f"cat {name}")
    target.type(f"cat > {name} <<'END'\n{text}END")


def wait_for_a_restart(machine: Booted, unit: str) -> None:
    machine.until(lambda: machine.shown(unit, "NRestarts") != "0")


def wait_for_a_good_end(machine: Booted, unit: str) -> None:
    wanted = ("inactive", "success")
    machine.until(lambda: (machine.shown(unit, "ActiveState"), machine.shown(unit, "Result")) == wanted)


def test_services_start_come_back_when_they_are_killed_or_hang_and_end(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(tmp_path / "hub"))
        berlin, oslo = (stack.enter_context(Booted(tmp_path / name, hub)) for name in ("berlin", "oslo"))
        for machine in (hub, berlin, oslo):
            use(machine, EVERY)
        settings = "--data numbers --min-sites 2 --steps 1000000 --sync-every 5 --time-limits local"
        hub.type(f"{ATOLL} init /etc/atoll/run.toml {settings}")
        drop_in(hub, "atoll-coordinator.service", f"[Service]\nWatchdogSec={WATCHDOG_S}")
        use(hub, COORDINATOR)
        hand(hub, berlin, "berlin.invite")
        use(berlin, SITE[:-1])
        berlin.type(f"echo 'OPTIONS={SCRIPT}' > /etc/atoll/berlin.env")
        use(berlin, SITE[-1:])
        # Another way to the same: it writes a unit for this machine, which root's systemd runs.
        hub.type(f"{ATOLL} invite {STORE} --site oslo > oslo.invite")
        hand(hub, oslo, "oslo.invite")
        said = oslo.type(f"{ATOLL} join oslo.invite --install --home /var/lib/oslo {SCRIPT}")
        use(oslo, re.findall(r"^ *(systemctl .+)$", said, re.MULTILINE))
        hub.wait_for_a_commit_of("berlin", "oslo")
        capabilities = oslo.type("grep CapBnd /proc/$(systemctl show --value -p MainPID atoll-oslo)/status").split()[1]
        assert int(capabilities, 16) == CAPABILITIES, "of root it has no more than files and ports"

        berlin.type("systemctl kill --signal=KILL --kill-whom=main atoll-node@berlin")
        wait_for_a_restart(berlin, "atoll-node@berlin")
        hub.wait_for_a_commit_of("berlin", "oslo")

        drop_in(oslo, "atoll-oslo.service", f"[Service]\nWatchdogSec={WATCHDOG_S}")
        oslo.type("systemctl restart atoll-oslo")
        hub.wait_for_a_commit_of("berlin", "oslo")
        for stuck, unit in ((oslo, "atoll-oslo"), (hub, "atoll-coordinator")):
            stuck.type(f"systemctl kill --signal=STOP --kill-whom=main {unit}")
        for stuck, unit in ((oslo, "atoll-oslo"), (hub, "atoll-coordinator")):
            wait_for_a_restart(stuck, unit)
            stuck.wait_for_text(unit, "Watchdog timeout")
        hub.wait_for_a_commit_of("berlin", "oslo")

        oslo.type("systemctl stop atoll-oslo")
        wait_for_a_good_end(oslo, "atoll-oslo")
        oslo.wait_for_text("atoll-oslo", "SIGTERM")
        oslo.type("systemctl start atoll-oslo")
        hub.wait_for_a_commit_of("berlin", "oslo")
        use(hub, END)
        wait_for_a_good_end(berlin, "atoll-node@berlin")
        wait_for_a_good_end(oslo, "atoll-oslo")
        use(hub, AFTER)
        wait_for_a_good_end(hub, "atoll-coordinator")


def test_a_relay_a_root_from_credentials_and_what_units_leave_out(tmp_path: Path) -> None:
    with Hub(tmp_path / "hub") as hub:
        use(hub, EVERY)
        hub.type("mkdir /srv/texts && seq 1 20000 > /srv/texts/numbers.txt")
        hub.type(f"{ATOLL} init /etc/atoll/run.toml --model nano --data numbers --min-sites 1 --sync-every 5")
        use(hub, COORDINATOR)
        hub.type(f"{ATOLL} invite {STORE} --relay hub > hub.invite")
        use(hub, RELAY)
        hub.wait_for_text("atoll-relay", "listening")

        example = PAGE.parent / "systemd" / "atoll-coordinator.service.d" / "credentials.conf.example"
        use(hub, re.findall(r"^#   (.+)$", example.read_text().replace("\\\n#", ""), re.MULTILINE))
        hub.until(lambda: hub.run(f"sudo -u atoll {ATOLL} health {STORE}").returncode == 0)
        hub.type(f"{ATOLL} invite {STORE} --site berlin > berlin.invite")  # signed by that root
        use(hub, SITE)
        hub.wait_for_a_commit_of("berlin")  # of the built-in trainer
        hub.type("systemctl stop atoll-node@berlin")

        command = f"[Service]\nType=oneshot\nExecStart=\nExecStart=/opt/atoll/bin/python -c '{NOT_ALLOWED}'"
        for unit in ("atoll-coordinator", "atoll-node@try", "atoll-relay"):
            hub.type("touch /etc/atoll/try.env")
            drop_in(hub, f"{unit}.service", command)
            hub.type(f"systemctl restart {unit}")
            hub.wait_for_text(unit, f"\n{errno.EPERM}\n")
