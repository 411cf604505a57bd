"""`atoll doctor` beside a real coordinator and a real peer: links are measured, and the peer dials back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.local_run import LocalRun
from tests.harness.sockets import free_address
from tests.process.test_reach import closed_port
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll, count_contributors

pytestmark = pytest.mark.timeout(150)
SPEED = r"[\d.]+ ms there and back, [\d.e+]+ Mbit/s up, [\d.e+]+ Mbit/s down"


def test_links_are_measured_and_a_peer_dials_this_machine(tmp_path: Path) -> None:
    with LocalRun(tmp_path, replace(FOREVER, min_sites=1), secured=True) as run:
        run.start_coordinator()
        run.start_node("b", MODEL)
        home = str(run.home("a"))
        joined = atoll(run, "join", str(run.invite("a")), "--home", home, "--enrol-only")
        assert joined.popen.returncode == 0, joined.lines
        run.wait(lambda s: count_contributors(s, 1), LIMIT_S)

        def looks(*more: str) -> list[str]:
            process = atoll(run, "doctor", "--home", home, *more)
            assert process.popen.returncode == 0, process.lines
            return process.lines

        lines = looks("--listen", free_address())
        assert any(re.match(rf"   ok  link         to the coordinator {SPEED}$", line) for line in lines), lines
        assert any(re.match(rf"   ok  link to b    {SPEED}; a sync sends .* s$", line) for line in lines), lines
        assert any(re.match(r"   ok  dial-back    b reaches 127\.0\.0\.1:\d+$", line) for line in lines), lines
        nowhere = closed_port()
        lines = looks("--listen", free_address(), "--advertise", nowhere)
        (at,) = [n for n, line in enumerate(lines) if f"    !  dial-back    b cannot reach {nowhere}" in line]
        assert "open its port" in lines[at + 1]
        assert run.status()["num_evicted"] == 0, "the node b is in syncs meanwhile"
