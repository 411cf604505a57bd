"""What whoever wants a certificate sends, and what a coordinator that lies may answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.core import events as e
from atoll.coordinator.core.core import Core
from atoll.coordinator.enrolment import Enrolment
from atoll.protocol.addresses import parse_address
from atoll.protocol.dates import date_of
from atoll.protocol.errors import AtollError, InvalidMessage
from atoll.protocol.trust import certificates, joining, watching
from atoll.protocol.trust.invites import MAX_ADDRESSES
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import Caller
from atoll.protocol.trust.tokens import MAX_ID_CHARACTERS
from atoll.protocol.v1 import session_pb2
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.fuzzing import fuzz

KEY = certificates.key_from_bytes(bytes(31) + b"\7")
ROOT = certificates.Root.made(bytes(16), certificates.CLOCKS_DIFFER_BY, date_of(1.764e9))
SITE = Subject("run", Kind.SITE, "a")
REQUEST = certificates.request(KEY)
CERTIFICATE = certificates.to_der(ROOT.sign(KEY.public_key(), SITE, certificates.CLOCKS_DIFFER_BY, date_of(1.764e9)))


class Refused(Exception):
    pass


class Context:
    def peer(self) -> str:
        return "unix:"

    async def abort(self, code: object, details: str) -> None:
        assert len(details) <= 1024
        raise Refused(details)


def bytes_like(whole: bytes) -> st.SearchStrategy[bytes]:
    """It, any other, and it with a bit changed or its end cut off."""
    places = st.integers(0, 8 * len(whole) - 9)
    return st.one_of(
        st.just(whole),
        st.binary(max_size=64),
        places.map(lambda n: whole[: n // 8]),
        places.map(lambda n: whole[: n // 8] + bytes([whole[n // 8] ^ 1 << n % 8]) + whole[n // 8 + 1 :]),
    )


class Coordinator:
    """The calls on a core, by whoever shows a certificate that is in order."""

    def __init__(self) -> None:
        self.caller = Caller(SITE, bytes(32))
        story = Story(some_settings(min_sites=2))
        self.core: Core = story.core
        story.happens(e.InviteAsked(role="site", name="a", invite_id="i1", request=1))
        self.signed: list[tuple[Kind, str]] = []

        async def ask(asked: e.Asked) -> e.Answer:
            outputs = story.happens(replace(asked, request=2))
            return next((output for output in outputs if isinstance(output, e.Answer)), e.Answer(0, "no answer"))

        def certify(key: object, kind: Kind, name: str) -> bytes:
            self.signed.append((kind, name))
            return CERTIFICATE

        machine = SimpleNamespace(wall_time=lambda: 1e9)
        authority: Any = SimpleNamespace(machine=machine, certify=certify, roots=[b"root"])
        security: Any = SimpleNamespace(caller=lambda context: self.caller)
        self.enrolment = Enrolment(authority, security, self.core, ask)

    def call(self, method: Any, request: Any, subject: Subject) -> bool:
        """Whether it was answered."""
        self.caller = Caller(subject, bytes(32))
        try:
            asyncio.run(method(request, Context()))
        except Refused:
            return False
        return True


@fuzz(200)
@given(bytes_like(REQUEST), st.sampled_from(["i1", "i2"]))
def test_any_request_for_a_certificate_is_signed_for_whom_it_is_or_refused(data: bytes, invite: str) -> None:
    run = Coordinator()
    joined = run.call(
        run.enrolment.join, session_pb2.JoinRequest(signing_request=data), Subject("run", Kind.INVITE, invite)
    )
    renewed = run.call(
        run.enrolment.renew, session_pb2.RenewRequest(signing_request=data), Subject("run", Kind.SITE_IDENTITY, "a")
    )
    assert run.signed == [(Kind.SITE_IDENTITY, "a")] * joined + [(Kind.SITE, "a")] * renewed
    if data == REQUEST:
        assert (joined, renewed) == (invite == "i1", True)


@fuzz(200)
@given(
    st.lists(st.one_of(bytes_like(certificates.to_der(ROOT.certificate)), st.just(CERTIFICATE)), max_size=10),
    st.lists(st.text(max_size=8), max_size=3),
    st.lists(st.one_of(st.text(max_size=8), st.just("a.example:7700")), max_size=MAX_ADDRESSES + 1),
    st.one_of(st.none(), st.lists(st.text(max_size=MAX_ID_CHARACTERS + 1), max_size=3)),
)
def test_whatever_a_coordinator_says_of_roots_and_bans_is_heeded_or_refused(
    roots: list[bytes], names: list[str], addresses: list[str], tokens: list[str] | None
) -> None:
    said = session_pb2.WatchResponse(roots=roots, banned=names, coordinators=addresses)
    if tokens is not None:
        said.tokens.ids.extend(tokens)
    try:
        news = watching.read(said)
    except InvalidMessage:
        return
    assert len({certificates.salt_of(root) for root in news.roots}) == 1
    assert len(news.roots) == len(roots) <= joining.MAX_ROOTS
    assert news.banned == tuple(names)
    assert news.coordinators == tuple(addresses)
    assert news.tokens == (None if tokens is None else frozenset(tokens))
    assert all(len(token) <= MAX_ID_CHARACTERS for token in news.tokens or ())
    assert len(addresses) <= MAX_ADDRESSES
    for address in addresses:
        parse_address(address)


@fuzz(200)
@given(bytes_like(CERTIFICATE), st.lists(st.binary(max_size=8), max_size=10), st.booleans())
def test_any_answer_is_the_certificate_that_was_asked_for_or_refused(
    certificate: bytes, roots: list[bytes], is_join: bool
) -> None:
    kind = session_pb2.JoinResponse if is_join else session_pb2.RenewResponse
    answer = kind(certificate=certificate, roots=roots)
    try:
        joining.check(answer, KEY.public_key(), SITE)
    except InvalidMessage:
        return
    except AtollError as error:
        raise AssertionError(error) from None
    assert certificates.subject_of(certificates.from_der(certificate)) == SITE
    assert 1 <= len(roots) <= joining.MAX_ROOTS
