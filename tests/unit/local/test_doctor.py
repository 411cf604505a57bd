"""What is said of a machine: the figure, and what to do where it is wrong."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from atoll.cli import doctor as command
from atoll.cli import doctor_links
from atoll.node.daemon import doctor
from atoll.node.daemon.doctor import Finding, Verdict
from atoll.node.exchange.peers.dialer import Dialer
from atoll.protocol.errors import HostError, PeerError
from atoll.protocol.machine import Machine
from atoll.protocol.measuring import Speed
from atoll.protocol.messages import Member
from atoll.protocol.settings import RunSettings, settings_to_json
from atoll.protocol.trust.enrolled import Enrolled
from atoll.protocol.trust.names import Kind
from tests.harness.sockets import free_address
from tests.unit.trust.test_security import tls

OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
SLOW = Speed(0.1, 50e3, 9e9)


@pytest.mark.parametrize(
    ("finding", "verdict", "says"),
    [
        (doctor.versions("1.2", "1.2"), OK, "as at the coordinator"),
        (doctor.versions("1.2", "1.3"), WARN, "the coordinator has 1.3"),
        (doctor.coordinator("c:1", 0.004, "1"), OK, "c:1 answers in 4 ms"),
        (doctor.coordinator("c:1", 0.08, "1"), WARN, "c:1 answers in 80 ms"),
        (doctor.coordinator("c:1", 0.08, "0"), OK, "c:1 answers in 80 ms"),
        (doctor.clock(0.2, 0.3), OK, "as the coordinator's"),
        (doctor.clock(-4.0, 0.3), OK, "4.0 s behind"),
        (doctor.clock(9.0, 0.3), WARN, "9.0 s ahead of"),
        (doctor.clock(-3601.0, 0.3), FAIL, "3601.0 s behind"),
        (doctor.certificate(1.764e9, 1.765e9), FAIL, "has expired at 2025-11-24"),
        (doctor.certificate(1.764e9, 1.763e9), WARN, "holds until 2025-11-24"),
        (doctor.certificate(1.764e9, 1.7e9), OK, "holds until 2025-11-24"),
        (doctor.disk(99, 100, 7, "/h"), FAIL, "99 B free at /h; the run needs 100 B there, and at the most 7 B for"),
        (doctor.disk(110, 100, 7, "/h"), WARN, "110 B free"),
        (doctor.disk(121, 100, 7, "/h"), OK, "121 B free"),
        (doctor.disk(121, 100, 22, "/h"), WARN, "121 B free"),
        (doctor.disk_kind("nfs4", "/h"), WARN, "/h is on a network file system (nfs4)"),
        (doctor.disk_kind("tmpfs", "/h"), WARN, "/h is in memory (tmpfs)"),
        (doctor.disk_kind("ext4", "/h"), OK, "ext4"),
        (doctor.disk_speed(20e6, 200_000_000), WARN, "10.0 s a commit"),
        (doctor.disk_speed(2e9, 200_000_000), OK, "0.1 s a commit"),
        (doctor.memory(99, 100, "a cgroup"), FAIL, "99 B free (a cgroup)"),
        (doctor.memory(99, 100, "a cgroup", 60), FAIL, "the node needs 100 B, 60 B of it for files"),
        (doctor.memory(100, 100, "a cgroup"), OK, "100 B free"),
        (doctor.descriptors(1023), WARN, "1023 file descriptors"),
        (doctor.descriptors(1024), OK, "1024 file descriptors"),
        (doctor.listens("a:1", "in use"), FAIL, "a:1: in use"),
        (doctor.listens("a:1", ""), OK, "a:1 can be listened on"),
        (doctor.peer("b", "b:1", None), WARN, "cannot be dialled at b:1"),
        (doctor.peer("b", "b:1", 0.05), OK, "b:1 answers in 50 ms"),
        (doctor.is_dialled(["a", "c"]), WARN, "a, c cannot dial this site"),
        (doctor.is_dialled([]), OK, "others reach this site"),
        (doctor.coordinators_link(Speed(0.0123, 1e6, 2e6)), OK, "12.3 ms there and back, 8 Mbit/s up, 16 Mbit/s down"),
        (doctor.link("b", Speed(0.09, 1e6, 2e6), 3_000_000, 64 << 10), OK, "a sync sends 2.9 MiB: 3.0 s"),
        (
            doctor.link("b", Speed(0.09, 1e6, 2e6), 0, 64 << 10),
            OK,
            "90.0 ms there and back, 8 Mbit/s up, 16 Mbit/s down",
        ),
        (doctor.link("b", Speed(0.09, 1e6, 60e3), 0, 64 << 10), WARN, "0.48 Mbit/s down"),
        (doctor.all_links([SLOW, Speed(0.1, 60e3, 9e9)], 64 << 10)[0], FAIL, "0.48 Mbit/s at best"),
        (doctor.dialled_back("b", "a:1", ""), OK, "b reaches a:1"),
        (doctor.dialled_back("b", "a:1", "no answer"), WARN, "b cannot reach a:1: no answer"),
        (doctor.gpus([], "", is_here=True), WARN, "torch finds none"),
        (doctor.gpus([], "", is_here=False), OK, "none on this machine: its ranks train on CPUs"),
        (doctor.gpus(["H100", "H100"], "", is_here=True), FAIL, "2 x H100, torch without NCCL"),
        (doctor.gpus(["H100"], "", is_here=True), OK, "1 x H100"),
        (doctor.gpus(["H100", "H100"], "2.27.3", is_here=True), OK, "2 x H100, NCCL 2.27.3"),
    ],
)
def test_a_finding_says_the_figure_and_a_remedy_where_it_is_wrong(
    finding: Finding, verdict: Verdict, says: str
) -> None:
    assert (finding.verdict, bool(finding.remedy)) == (verdict, verdict is not OK)
    assert says in finding.found


def test_what_would_surely_fail_is_an_error_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    command.show([Finding(WARN, "GPU", "none", "get one"), Finding(OK, "clock", "right")])
    assert capsys.readouterr().out == (
        "    !  GPU          none\n                     -> get one\n   ok  clock        right\n"
    )
    with pytest.raises(HostError, match="2 of these would surely fail"):
        command.show([Finding(FAIL, "a", "x", "y"), Finding(OK, "b", "x"), Finding(FAIL, "c", "x\n\x1b[2J", "y")])
    assert "\x1b" not in capsys.readouterr().out


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    assert command._written_bytes_per_s(tmp_path) > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        command._written_bytes_per_s(tmp_path / "nowhere")


def test_ports_are_tried() -> None:
    import socket

    address = free_address()
    assert command._bound(address) == ""
    assert command._dialled_s(address) is None
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        assert "in use" in command._bound(address)
        assert command._dialled_s(address) is not None


def test_one_slow_link_of_several_is_that_sites_own() -> None:
    assert doctor.all_links([SLOW, Speed(0.1, 70e3, 9e9)], 64 << 10) == []


def test_a_disk_that_takes_nothing_is_one_finding_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(home: Path) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "_written_bytes_per_s", full)
    settings = json.loads(settings_to_json(RunSettings(run_id="run", steps=40)))
    document = {"settings": settings, "num_parameters": 0, "atoll_version": "1.2"}
    *_, last = command._of_run(command._Answer(document, "c:1", 0.01, 0.0), tmp_path)
    assert (last.verdict, last.found) == (FAIL, f"{tmp_path} cannot be written: No space left on device")
    assert last.remedy


def test_a_few_sites_alone_are_asked_to_dial_this_machine() -> None:
    """Each that does not answer takes its time, and a run may have a thousand."""
    sites = [{"site_id": n, "name": f"s{n}", "address": f"s{n}:1", "connected": True} for n in range(1, 50)]
    asked: list[str] = []

    class Nobody:
        async def channel(self, member: Member, purpose: object) -> NoReturn:
            asked.append(member.name)
            raise PeerError(f"{member.name} does not answer")

    async def found() -> Finding:
        about = doctor_links.Asked(
            joined=cast(Enrolled, SimpleNamespace(subject=SimpleNamespace(run_id="run", name="a"))),
            coordinator="127.0.0.1:1",
            document={"sites": sites},
            machine=Machine(),
            listen=free_address(),
            advertise="",
        )
        return await doctor_links._dialled_back(about, cast(Dialer, Nobody()), tls(Kind.SITE, "a"))

    finding = asyncio.run(found())
    assert (finding.verdict, len(asked)) == (Verdict.UNKNOWN, doctor_links.MOST_ASKED)
    assert "does not answer" in finding.found


@pytest.mark.parametrize(
    ("device", "is_here"), [("", False), ("nvidia0", True), ("kfd", True), ("dxg", True), ("nvram", False)]
)
def test_a_gpu_is_seen_by_its_device_also_where_torch_does_not_find_it(
    device: str, is_here: bool, tmp_path: Path
) -> None:
    if device:
        (tmp_path / device).touch()
    assert command.has_gpu(tmp_path) is is_here
