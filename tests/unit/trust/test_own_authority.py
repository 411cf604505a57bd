"""An authority that somebody else's tools have made is the root of a run, also where one above it has signed it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from atoll.coordinator.authority import Authority
from atoll.node.exchange.peers.listener import listen
from atoll.node.relay import greeting
from atoll.protocol import transport
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import Root
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import MutualTls, Shown
from tests.harness.own_authority import write_authority
from tests.unit.trust.test_security import probed, tls
from tests.unit.trust.test_server_tls import shake_hands


def alone() -> tuple[trustme.CA, trustme.CA]:
    return trustme.CA(path_length=0), trustme.CA(path_length=0)


def below_a_companys() -> tuple[trustme.CA, trustme.CA]:
    company = trustme.CA(path_length=1, organization_name="A Company")
    return company.create_child_ca(), company.create_child_ca()


@pytest.fixture(params=[alone, below_a_companys])
def roots(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Root, Root]:
    """Of the run, and another one: of somebody else, or the same company's for something else."""
    make: Callable[[], tuple[trustme.CA, trustme.CA]] = request.param
    for name, authority in zip(("own", "other"), make(), strict=True):
        write_authority(tmp_path / name, authority)
    own, other = (Authority.opened(tmp_path / name, "run", Machine()).root for name in ("own", "other"))
    return own, other


def site_a(root: Root, trusted: Root) -> MutualTls:
    """Shows what `root` has signed, and the authority itself."""
    found = tls(Kind.SITE, "a", root=root).shown
    chain = found.certificate + certificates.to_pem(root.certificate)
    return MutualTls("run", Shown(certificates.to_pem(trusted.certificate), chain, found.key))


def test_sites_know_each_other_by_it(roots: tuple[Root, Root]) -> None:
    own, other = roots

    async def answer(asked: bytes, context: Any) -> bytes:
        return b"b"

    async def main() -> list[grpc.StatusCode]:
        handlers: dict[str, Any] = {"Probe": grpc.unary_unary_rpc_method_handler(answer)}
        server, port = await listen("127.0.0.1:0", handlers, security=tls(Kind.SITE, "b", root=own))
        salt = certificates.salt_of(own.certificate)
        try:
            found = []
            for shows, trusts, name in ((own, own, "b"), (own, own, "c"), (other, own, "b"), (own, other, "b")):
                expected = Subject("run", Kind.SITE, name).dns_name(salt)
                credentials = site_a(shows, trusts).towards(Kind.SITE, name).credentials
                found.append(await probed(port, transport.Handshake(credentials, expected)))
            return found
        finally:
            await server.stop(None)

    assert asyncio.run(main()) == [grpc.StatusCode.OK, *[grpc.StatusCode.UNAVAILABLE] * 3]


def test_a_relay_and_its_sites_know_each_other_by_it(roots: tuple[Root, Root]) -> None:
    own, other = roots
    relay = tls(Kind.RELAY, root=own)
    expected = relay.towards(Kind.RELAY).expected

    def meet(shows: Root, trusts: Root) -> None:
        client = greeting._context(ssl.PROTOCOL_TLS_CLIENT, site_a(shows, trusts))
        shake_hands(greeting._context(ssl.PROTOCOL_TLS_SERVER, relay), client, expected)

    meet(own, own)
    for shows, trusts in ((other, own), (own, other)):
        with pytest.raises(ssl.SSLCertVerificationError):
            meet(shows, trusts)
