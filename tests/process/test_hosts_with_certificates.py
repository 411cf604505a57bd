"""A site of several hosts, each with a certificate of its own: what is between them is for them alone."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from atoll.coordinator import admin
from atoll.node import host_protocol as hosts
from atoll.protocol import PROTOCOL_VERSION, transport
from atoll.protocol.errors import AtollError, PeerError, RefusedError
from atoll.protocol.status import from_rpc_error
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust import enrolled
from atoll.protocol.trust.joining import renew
from atoll.protocol.trust.names import OF_A_DAY, Kind, Subject
from atoll.protocol.trust.security import PLAIN, MutualTls, Security
from atoll.protocol.v1 import hosts_pb2
from tests.harness.calls import write
from tests.harness.local_run import GUARDED, LocalRun
from tests.process.test_endpoints import LIMIT_S, SETTINGS, Sites, addresses_of_hosts, committed
from tests.process.test_rotation import refusal_by

pytestmark = pytest.mark.timeout(150)


async def greeted(address: str, security: Security, site: str, **said: Any) -> AtollError | hosts.HostTold:
    """What host 0 answers to a host that says Hello and shows that, or what comes of it."""
    hello = hosts.HostHello(
        protocol_version=PROTOCOL_VERSION, site_name=site, host=1, num_hosts=2, num_ranks=1, machine="m", process=b"p"
    )
    channel = transport.open_channel(
        address, handshake=security.towards(Kind.HOST, f"{site}/0"), max_message_bytes=hosts.MAX_MESSAGE_BYTES
    )
    try:
        attach: Any = channel.stream_stream(
            hosts.ATTACH_METHOD,
            request_serializer=hosts_pb2.AttachRequest.SerializeToString,
            response_deserializer=hosts_pb2.AttachResponse.FromString,
        )
        call = attach(timeout=60)
        await write(call, hosts.said(replace(hello, **said)))
        return hosts.heard_of_leader(await call.read())
    except grpc.RpcError as error:
        return from_rpc_error(error, "host 0")
    finally:
        await channel.close()


def test_hosts_of_a_site_have_certificates_and_take_nobody_else(tmp_path: Path) -> None:
    settings = replace(
        SETTINGS, min_sites=2, steps=100_000, time_limits="wan", sync=SyncSettings(every=10, chunk_elements=500)
    )
    with LocalRun(tmp_path, settings, secured=True) as run:
        run.start_coordinator()
        sites = Sites(run, {"one": 1, "two": 2}, "--step-delay-s", "0.01")
        sites.start_all()
        run.wait(committed(1), LIMIT_S)
        leader = sites.leader_address("two")

        def shown(daemon: str) -> MutualTls:
            found = enrolled.load(run.home(daemon) / enrolled.FOLDER)
            assert found is not None
            subject = Subject("hosts", OF_A_DAY[found.subject.kind], found.subject.name)
            tls = MutualTls("hosts", found.shown)
            return MutualTls("hosts", asyncio.run(renew(tls, [run.address], subject)))

        async def answers() -> list[AtollError | hosts.HostTold]:
            return [
                await greeted(leader, PLAIN, "two"),
                await greeted(leader, one, "two"),
                await greeted(leader, other, "two"),
                await greeted(leader, leads, "two"),
                await greeted(leader, host, "two", host=2),
                await greeted(leader, host, "two"),
            ]

        for name in ("one-host1", "away"):
            words = ["join", str(run.invite(name)), "--home", str(run.home(name)), "--enrol-only"]
            joined = run.start("join", [sys.executable, *GUARDED, *words])
            assert joined.wait(LIMIT_S) == 0, joined.lines
        one, leads, host, other = (shown(name) for name in ("one", "two", "two-host1", "one-host1"))
        plain, by_site, by_other, by_own, as_another, same = asyncio.run(answers())
        assert type(plain) is PeerError, "host 0 speaks no plain text"
        assert isinstance(by_site, RefusedError)
        assert "site one of run hosts may not call Attach" in str(by_site)
        assert isinstance(by_other, RefusedError)
        assert "host one/1 of run hosts is no host of two" in str(by_other)
        assert "may not call Attach" in str(by_own), "host 0 is no follower of its own"
        assert "host two/1 of run hosts says to be host 2" in str(as_another)
        assert "another process is host 1 of this site" in str(same), "with its certificate it is heard"

        last = run.status()["last_commit"]
        run.wait(committed(last + 2), LIMIT_S)
        assert not [line for name in ("two", "two-host1") for line in run.nodes[name].lines if "is lost" in line]
        assert run.status()["num_evicted"] == 0
        (address,), away = addresses_of_hosts(run.status(), "two"), shown("away").shown
        assert refusal_by(address, away, "two", "hosts") is None, "to others a host is its site"
        admin.ask(run.store_path, "ban", name="away", reason="it lies")
        run.wait(lambda _: refusal_by(address, away, "two", "hosts") is grpc.StatusCode.PERMISSION_DENIED, LIMIT_S)
        sites.stop()
