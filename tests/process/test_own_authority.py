"""A whole run whose root is a company's own, which another one above it has signed."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import pytest
import trustme

from atoll.coordinator import admin
from atoll.coordinator.authority import Authority
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates
from atoll.protocol.trust.names import Kind
from atoll.protocol.trust.security import Shown
from tests.harness.local_run import LocalRun
from tests.harness.own_authority import write_authority
from tests.process.test_pages_elsewhere import Browser
from tests.process.test_rotation import of_a_day, refusal_by, shown_of
from tests.process.test_secured_runs import FOREVER, LIMIT_S, MODEL, atoll, count_contributors

pytestmark = pytest.mark.timeout(400)


def test_sites_and_viewers_know_a_run_by_a_companys_own_authority(tmp_path: Path) -> None:
    company = trustme.CA(path_length=1, organization_name="A Company")
    for name in ("own", "other"):
        write_authority(tmp_path / name, company.create_child_ca())
    other = Authority.opened(tmp_path / "other", "secret-run", Machine())
    with LocalRun(tmp_path, FOREVER, secured=True) as run:
        trust = ["--trust", str(tmp_path / "own")]
        coordinator = run.start_coordinator(extra=[*trust, "--http-listen", "0.0.0.0:0", "--http-name", "run.example"])
        port = int(coordinator.wait_for_line(r"status page https://0\.0\.0\.0:(\d+)/", LIMIT_S).group(1))
        for name in "ab":
            run.start_node(name, MODEL)
        run.wait(lambda s: s["last_commit"] > 1 and count_contributors(s, 2), LIMIT_S)

        address = next(site["address"] for site in run.status()["sites"] if site["name"] == "b")
        of_a = of_a_day(run, "a", shown_of(run, "a"))
        assert refusal_by(address, of_a, "b") is not grpc.StatusCode.UNAVAILABLE
        key = certificates.new_key()
        forged = certificates.from_der(other.certify(key.public_key(), Kind.SITE, "a"))
        chain = certificates.to_pem(forged, other.root.certificate) + company.cert_pem.bytes()
        assert refusal_by(address, Shown(of_a.roots, chain, certificates.key_to_pem(key)), "b") is (
            grpc.StatusCode.UNAVAILABLE
        ), "whom the company has signed besides is nobody here"

        token = atoll(run, "token", str(run.toml), "--viewer", "anna").lines[-1]
        shows = {"Authorization": f"Bearer {token}"}
        browser = Browser(run, port, "run.example", tmp_path / "own" / "root.pem")
        assert browser.asks("/status.json", **shows).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            Browser(run, port, "run.example", tmp_path / "other" / "root.pem").asks("/status.json", **shows)

        admin.ask(run.store_path, "stop", reason="the test is over")
        assert run.wait_all(LIMIT_S) == {"a": 0, "b": 0}
        assert len(set(run.hashes(run.status()["last_commit"]).values())) == 1
