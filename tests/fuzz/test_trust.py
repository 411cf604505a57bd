"""What whoever wants a certificate sends, what a coordinator that lies may answer, and invites of anybody's making."""

from __future__ import annotations

import asyncio
import re
import zlib
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.core import events as e
from atoll.coordinator.core.core import Core
from atoll.coordinator.enrolment import Enrolment
from atoll.protocol.addresses import parse_address
from atoll.protocol.dates import date_of, utc
from atoll.protocol.errors import AtollError, ConfigError, InvalidMessage
from atoll.protocol.trust import certificates, invites, joining, watching
from atoll.protocol.trust.invites import MAX_ADDRESSES
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import Caller
from atoll.protocol.trust.tokens import MAX_ID_CHARACTERS
from atoll.protocol.v1 import session_pb2
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.fuzzing import damaged, fuzz, peak_bytes

# A certificate with a negative number, which `cryptography` will refuse one day.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
KEY = certificates.key_from_bytes(bytes(31) + b"\7")
ROOT = certificates.Root.made(bytes(16), certificates.CLOCKS_DIFFER_BY, date_of(1.764e9))
SITE = Subject("run", Kind.SITE, "a")
REQUEST = certificates.request(KEY)
CERTIFICATE = certificates.to_der(ROOT.sign(KEY.public_key(), SITE, certificates.CLOCKS_DIFFER_BY, date_of(1.764e9)))
LONG = timedelta(days=36500)
ROOT_DER = certificates.to_der(certificates.Root.made(bytes(16), LONG, date_of(3e9)).certificate)
OF_INVITE = Subject("run", Kind.INVITE, "0123abcd")
CERTIFICATE_OF_INVITE = certificates.to_der(
    certificates.Root.made(bytes(16), LONG, date_of(3e9)).sign(KEY.public_key(), OF_INVITE, LONG, date_of(3e9))
)


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


# --- invites: what lies behind the checksum, which stops whatever is cut or mistyped

FIELDS = (b"run", b"site/a", b"a.example:7700", ROOT_DER, CERTIFICATE_OF_INVITE, certificates.key_to_bytes(KEY))
WHOLE = b"".join(len(field).to_bytes(2, "big") + field for field in FIELDS)
MOST_BYTES = 4 << 20
"""That reading one may take, a few hundred times the longest text."""


def text_of(packed: bytes, version: int = invites.VERSION) -> str:
    """As somebody writes it who wants it to be read."""
    data = bytes([version]) + packed
    return invites.PREFIX + invites._coded(data + zlib.crc32(data).to_bytes(4, "big"))


def is_read(text: str) -> bool:
    """Whether it is an invite of which all can be asked; else it was refused."""
    try:
        invite = invites.from_text(text)
    except ConfigError:
        return False
    assert invite.subject.run_id == invite.run_id
    assert utc(invite.expires_s).endswith(" UTC")
    assert 1 <= len(invite.addresses) <= MAX_ADDRESSES
    for address in invite.addresses:
        parse_address(address)
    assert certificates.key_to_pem(invite.key)
    assert invite.invite_id
    return True


@st.composite
def dated(draw: st.DrawFn) -> bytes:
    """The certificate of an invite with another end: both dates are in the long form, of fifteen characters."""
    date = draw(
        st.one_of(
            st.sampled_from([b"00000101000000Z", b"00010101000000Z", b"19491231235959Z", b"99991231235959Z"]),
            st.from_regex(rb"[0-9]{14}Z", fullmatch=True),
            st.binary(min_size=15, max_size=15),
        )
    )
    places = [found.start() + 2 for found in re.finditer(rb"\x18\x0f", CERTIFICATE_OF_INVITE)]
    place = draw(st.sampled_from(places))
    return CERTIFICATE_OF_INVITE[:place] + date + CERTIFICATE_OF_INVITE[place + 15 :]


TEXT_FIELDS = st.one_of(st.binary(max_size=80), st.text(max_size=80).map(str.encode))
OTHERS = (
    st.one_of(st.just(FIELDS[0]), TEXT_FIELDS),
    st.one_of(st.sampled_from([b"site/a", b"host/a/1", b"host/a", b"viewer/", b"/"]), TEXT_FIELDS),
    st.one_of(st.just(FIELDS[2]), TEXT_FIELDS, st.lists(TEXT_FIELDS, max_size=12).map(b",".join)),
    st.one_of(bytes_like(ROOT_DER), st.just(CERTIFICATE)),
    st.one_of(bytes_like(CERTIFICATE_OF_INVITE), dated(), st.sampled_from([CERTIFICATE, ROOT_DER])),
    st.one_of(st.just(FIELDS[5]), st.binary(max_size=40), st.sampled_from([bytes(32), b"\xff" * 32])),
)


@fuzz(400)
@given(st.data())
def test_an_invite_of_any_fields_is_read_or_refused(data: st.DataObject) -> None:
    fields = list(FIELDS)
    for place in data.draw(st.sets(st.sampled_from([0, 1, 2, 3, 4, 4, 5]), max_size=2)):
        fields[place] = data.draw(OTHERS[place])
    joined = b"".join(len(field).to_bytes(2, "big") + field for field in fields)
    found = is_read(text_of(zlib.compress(joined)))
    assert found or fields != list(FIELDS)


@fuzz(200)
@given(st.one_of(damaged(WHOLE), st.binary(max_size=200)), st.sampled_from([0, 1, 1, 1, 2, 255]))
def test_whatever_an_invite_unpacks_to_is_read_or_refused(plain: bytes, version: int) -> None:
    found = is_read(text_of(zlib.compress(plain), version))
    assert found or (plain, version) != (WHOLE, 1)
    assert not found or version == 1


@fuzz(200)
@given(damaged(zlib.compress(WHOLE, 9)), st.sampled_from([b"", b"?", bytes(1 << 12)]))
def test_whatever_an_invite_was_packed_to_is_read_or_refused(packed: bytes, rest: bytes) -> None:
    is_read(text_of(packed + rest))


@fuzz(30)
@given(
    st.sampled_from([b"", b"\0", b"\0\1", b"\0\1x", b"\xff\xff", WHOLE]),
    st.sampled_from([1 << 10, 1 << 14, 1 << 20, 1 << 22]),
    st.binary(max_size=8),
)
def test_a_large_content_of_an_invite_takes_little_memory(unit: bytes, num_bytes: int, end: bytes) -> None:
    text = text_of(zlib.compress(unit * (num_bytes // max(1, len(unit))) + end, 9))
    assert peak_bytes(lambda: is_read(text)) < MOST_BYTES
