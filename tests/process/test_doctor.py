"""`atoll doctor` beside a real coordinator and a real peer: links are measured, and the peer dials back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli import doctor_links
from atoll.cli.client import fetch_status
from atoll.node.daemon.doctor import Verdict
from atoll.protocol.machine import Machine
from atoll.protocol.trust import enrolled
from tests.harness.local_run import LocalRun
from tests.harness.sockets import free_address
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll, count_contributors

pytestmark = pytest.mark.timeout(400)
SPEED = r"[\d.]+ ms there and back, [\d.e+]+ Mbit/s up, [\d.e+]+ Mbit/s down"


def test_links_are_measured_and_a_peer_dials_this_machine(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(FOREVER, min_sites=1, time_limits="wan"), secured=True) as run:
        run.start_coordinator()
        run.start_node("b", MODEL)
        home = run.home("a")
        joined = atoll(run, "join", str(run.invite("a")), "--home", str(home), "--enrol-only")
        assert joined.popen.returncode == 0, joined.lines
        run.wait(lambda s: count_contributors(s, 1), LIMIT_S)

        process = atoll(run, "doctor", "--home", str(home), "--listen", free_address())
        assert process.popen.returncode == 0
        for shown in (
            rf"   ok  link         to the coordinator {SPEED}$",
            rf"   ok  link to b    {SPEED}; a sync sends .* s$",
            r"   ok  dial-back    b reaches 127\.0\.0\.1:\d+$",
        ):
            assert any(re.match(shown, line) for line in process.lines), process.lines

        found, nowhere = enrolled.joined(home), free_address()
        asked = doctor_links.Asked(
            joined=found,
            coordinator=run.address,
            document=fetch_status(run.address, found),
            machine=Machine(),
            listen=free_address(),
            advertise=nowhere,
        )
        *_, last = doctor_links.findings(asked)
        assert (last.what, last.verdict) == ("dial-back", Verdict.WARN)
        assert last.found.startswith(f"b cannot reach {nowhere}: cannot dial site 0 at {nowhere}")
        assert run.status()["num_evicted"] == 0, "syncs go on meanwhile"
