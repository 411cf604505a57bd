"""Names, certificates and invites; who may call what."""

from __future__ import annotations

import importlib
import pkgutil
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

import atoll.protocol.v1
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage, RefusedError
from atoll.protocol.trust import access, certificates, invites, joining
from atoll.protocol.trust.certificates import Root
from atoll.protocol.trust.invites import Invite
from atoll.protocol.trust.names import NAMELESS, OF_HOSTS, ROLES, Kind, Subject, parse_uri
from atoll.protocol.trust.security import PLAIN, Caller, MutualTls, Security, Shown
from atoll.protocol.v1 import session_pb2

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
DAY = timedelta(days=1)
SALT = bytes(range(16))
ROOT = Root.made(SALT, 3650 * DAY, NOW)
KEY = certificates.new_key()
SITE = Subject("run", Kind.SITE, "berlin")


def an_invite(**changed: Any) -> Invite:
    certificate = ROOT.sign(KEY.public_key(), Subject("run", Kind.INVITE, "0123abcd"), DAY, NOW)
    values: dict[str, Any] = {
        "run_id": "run",
        "role": "site",
        "name": "berlin",
        "addresses": ("10.0.0.1:7700", "[::1]:7700"),
        "root": ROOT.certificate,
        "certificate": certificate,
        "key": KEY,
    }
    return Invite(**values | changed)


def signed(subject: Subject, key: certificates.PrivateKey = KEY, root: Root = ROOT) -> certificates.Certificate:
    return root.sign(key.public_key(), subject, DAY, NOW)


REQUEST = certificates.request(KEY)
CERTIFICATE = certificates.to_der(signed(SITE))

# --- names


def named(kind: Kind, name: str) -> str:
    """A name of one of that kind."""
    return f"{name}/3" if kind in OF_HOSTS else name


@pytest.mark.parametrize("kind", Kind)
def test_a_uri_says_whom_it_is_of_and_is_read_back(kind: Kind) -> None:
    subject = Subject("my-run.2", kind, "" if kind in NAMELESS else named(kind, "berlin_1"))
    assert parse_uri(subject.uri) == subject
    assert subject.uri.startswith("spiffe://my-run.2/")


@pytest.mark.parametrize(
    "text",
    ["", "spiffe://", "spiffe://run", "spiffe://run/", "spiffe://run/site", "spiffe://run/site/", "spiffe://run/site/a/b",
     "spiffe:///site/a", "https://run/site/a", "spiffe://run/coordinator/x", "spiffe://run/king/a",
     "spiffe://run/sites/a", "spiffe://run/identity/a", f"spiffe://run/site/{'a' * 65}", "spiffe://ru n/site/a",
     "spiffe://run/site/a\n", "spiffe://run/host/a", "spiffe://run/host/a/0", "spiffe://run/host/a/01",
     "spiffe://run/host/a/x", "spiffe://run/host/a/1/2", "spiffe://run/host//1", "spiffe://run/identity/host/a"],
)  # fmt: skip
def test_what_names_nobody_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="names nobody"):
        parse_uri(text)


def test_the_name_in_a_handshake_says_nothing_and_differs_by_all_that_it_is_made_of() -> None:
    name = SITE.dns_name(SALT)
    assert "run" not in name
    assert "berlin" not in name
    others = [
        Subject("run", Kind.SITE, "berlim").dns_name(SALT),
        Subject("rum", Kind.SITE, "berlin").dns_name(SALT),
        Subject("run", Kind.COORDINATOR).dns_name(SALT),
        SITE.dns_name(bytes(16)),
    ]
    assert len({name, *others}) == 5


# --- certificates


@pytest.mark.parametrize("kind", Kind)
def test_a_certificate_serves_only_where_others_dial(kind: Kind) -> None:
    found = signed(Subject("run", kind, "" if kind in NAMELESS else named(kind, "a")))
    assert certificates.subject_of(found).kind is kind
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    serves = ExtendedKeyUsageOID.SERVER_AUTH in usages
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert (
        serves
        == bool(names.get_values_for_type(x509.DNSName))
        == (kind in (Kind.COORDINATOR, Kind.SITE, Kind.HOST, Kind.RELAY, Kind.PAGE))
    )
    assert (found.not_valid_before_utc, found.not_valid_after_utc) == (NOW - timedelta(hours=1), NOW + DAY)


def test_hosts_of_a_site_serve_others_as_the_site_and_host_0_alone_serves_them_as_it() -> None:
    def serves(name: Subject) -> list[bool]:
        of = [Subject("run", Kind.SITE, "a"), Subject("run", Kind.HOST, "a/1"), Subject("run", Kind.SITE, "b")]
        names = [signed(one).extensions.get_extension_for_class(x509.SubjectAlternativeName).value for one in of]
        return [name.dns_name(SALT) in found.get_values_for_type(x509.DNSName) for found in names]

    assert serves(Subject("run", Kind.SITE, "a")) == [True, True, False]
    assert serves(Subject("run", Kind.HOST, "a/0")) == [True, False, False]
    assert serves(Subject("run", Kind.HOST, "a/1")) == [False, True, False]
    assert serves(Subject("run", Kind.HOST, "b/0")) == [False, False, True]


def test_a_certificate_does_not_outlive_its_root() -> None:
    root = Root.made(SALT, DAY, NOW)
    assert root.sign(KEY.public_key(), SITE, 5 * DAY, NOW).not_valid_after_utc == NOW + DAY


def test_a_request_shows_that_its_sender_has_the_key() -> None:
    data = certificates.request(KEY)
    assert certificates.key_digest(certificates.requested_key(data)) == certificates.key_digest(KEY.public_key())
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(InvalidMessage, match="signing request"):
        certificates.requested_key(damaged)
    with pytest.raises(InvalidMessage, match="at most 4096"):
        certificates.requested_key(b"x" * 4097)


@pytest.mark.parametrize("curve", ["P384", "RSA", "Ed25519"])
def test_a_request_for_another_kind_of_key_is_refused(curve: str) -> None:
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    key: Any = {
        "P384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "RSA": lambda: rsa.generate_private_key(65537, 2048),
        "Ed25519": ed25519.Ed25519PrivateKey.generate,
    }[curve]()
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    found = builder.sign(key, None if curve == "Ed25519" else hashes.SHA256())
    with pytest.raises(InvalidMessage, match="not of the curve P-256"):
        certificates.requested_key(found.public_bytes(serialization.Encoding.DER))


def test_a_certificate_of_a_curve_that_nobody_knows_is_refused() -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256K1())
    der = certificates.to_der(signed(SITE))
    own = certificates.from_der(der)
    other = (
        x509.CertificateBuilder()
        .subject_name(own.subject)
        .issuer_name(own.issuer)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + DAY)
        .sign(ROOT.key, hashes.SHA256())
    )
    with pytest.raises(InvalidMessage, match="P-256"):
        certificates.digest_of(other)
    # The same with a number of the curve that is of none.
    known, unknown = bytes.fromhex("2b8104000a"), bytes.fromhex("2b8104007f")
    damaged = certificates.to_der(other).replace(known, unknown)
    with pytest.raises(InvalidMessage, match="cannot be read"):
        certificates.digest_of(certificates.from_der(damaged))


@pytest.mark.parametrize(
    ("part", "other", "text"),
    [
        (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x03", "3 is not a valid X509 version"),
        (b"20650124052000Z", b"00000124052000Z", "year 0"),
        (b"20650225042000Z", b"00000225042000Z", "year 0"),
    ],
    ids=["of a version that is none", "from a year that is none", "until a year that is none"],
)
def test_a_certificate_of_an_odd_version_or_date_is_refused(part: bytes, other: bytes, text: str) -> None:
    """Else whoever asks for its dates later would fail, and not by an error of atoll's."""
    late = datetime(2065, 1, 24, 6, 20, tzinfo=UTC)  # years from 2050 on are written with four digits
    root = Root.made(SALT, 3650 * DAY, late)
    certificate = root.sign(KEY.public_key(), SITE, 32 * DAY - timedelta(hours=2), late)
    whole = certificates.to_der(certificate)
    assert whole.count(part) == 1
    assert certificates.from_der(whole) == certificate
    with pytest.raises(InvalidMessage, match=text):
        certificates.from_der(whole.replace(part, other))


def test_nothing_is_signed_after_the_end_of_a_root() -> None:
    with pytest.raises(HostError, match="root has expired, or this machine's clock is wrong"):
        ROOT.sign(KEY.public_key(), SITE, DAY, NOW + 4000 * DAY)


@given(st.binary(max_size=600))
def test_any_bytes_are_a_request_and_a_certificate_or_refused(data: bytes) -> None:
    for read in (certificates.requested_key, certificates.from_der, certificates.from_pem, certificates.key_from_pem):
        try:
            read(data)
        except InvalidMessage:
            pass


@given(st.data())
def test_a_damaged_request_or_certificate_is_read_or_refused(data: st.DataObject) -> None:
    for whole, read in (
        (REQUEST, certificates.requested_key),
        (CERTIFICATE, lambda der: certificates.subject_of(certificates.from_der(der))),
    ):
        place = data.draw(st.integers(0, 999)) * len(whole) // 1000  # a signature has one byte more or less each time
        damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
        try:
            read(damaged[: len(whole) - data.draw(st.integers(0, 40))])
        except InvalidMessage:
            pass


def test_of_a_run_all_roots_have_one_salt_and_names_of_their_own() -> None:
    another = Root.made(SALT, DAY, NOW, 2)
    assert certificates.salt_of(another.certificate) == certificates.salt_of(ROOT.certificate) == SALT
    assert another.certificate.subject != ROOT.certificate.subject, "TLS finds a root by its name"
    with pytest.raises(InvalidMessage, match="a root that is no authority"):
        certificates.salt_of(signed(SITE))


# --- invites


def test_an_invite_is_one_line_that_is_read_back() -> None:
    invite = an_invite()
    text = invites.to_text(invite)
    assert len(text) < 1000
    assert text.isprintable()
    assert " " not in text
    folded = f"  {text[:100]}\r\n\t{text[100:]}\n"
    read = invites.from_text(folded)
    assert read.addresses == invite.addresses
    assert read.subject == Subject("run", Kind.SITE_IDENTITY, "berlin")
    assert (read.invite_id, read.expires_s) == ("0123abcd", (NOW + DAY).timestamp())
    assert certificates.key_to_bytes(read.key) == certificates.key_to_bytes(KEY)


def test_an_invite_that_was_cut_or_changed_anywhere_is_refused() -> None:
    text = invites.to_text(an_invite())
    for place in range(len(text)):
        changed = "B" if text[place] == "A" else "A"
        for other in (text[:place], text[:place] + changed + text[place + 1 :], text[:place] + text[place + 1 :]):
            with pytest.raises(ConfigError, match="invite"):
                invites.from_text(other)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"addresses": ("no address",)}, "not an address"),
        ({"addresses": ("a:1",) * 9}, "9 addresses of a coordinator"),
        ({"role": "king"}, "no role"),
        ({"name": "a/b"}, "no role and name"),
        ({"role": "host"}, "no role and name"),
        ({"run_id": "another"}, "certificate is that of the bearer of invite 0123abcd of run run"),
        ({"certificate": signed(SITE)}, "certificate is that of site berlin"),
        ({"key": certificates.new_key()}, "key is not that of its certificate"),
        ({"root": signed(SITE)}, "is no authority"),
    ],
)
def test_an_invite_that_contradicts_itself_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        invites.from_text(invites.to_text(an_invite(**changed)))


def test_a_small_text_that_unpacks_to_a_huge_one_is_refused() -> None:
    import zlib

    data = bytes([invites.VERSION]) + zlib.compress(bytes(1 << 22), 9)
    bomb = invites.PREFIX + invites._coded(data + invites._checksum(data))
    assert len(bomb) <= invites.MAX_CHARACTERS
    with pytest.raises(ConfigError, match="cannot be used"):
        invites.from_text(bomb)
    with pytest.raises(ConfigError, match="at most 8192"):
        invites.from_text(invites.PREFIX + "x" * 8193)


def test_an_invite_of_a_newer_atoll_is_refused_by_its_version() -> None:
    data = bytes([9]) + b"whatever"
    with pytest.raises(ConfigError, match="version 9, this atoll reads 1"):
        invites.from_text(invites.PREFIX + invites._coded(data + invites._checksum(data)))


# --- what a coordinator's answer must be


@pytest.mark.parametrize(
    ("subject", "key", "num_roots", "text"),
    [
        (Subject("run", Kind.SITE, "paris"), KEY, 1, "is for site paris of run run, not for site berlin"),
        (Subject("run", Kind.SITE_IDENTITY, "berlin"), KEY, 1, "not for"),
        (SITE, certificates.new_key(), 1, "for another key"),
        (SITE, KEY, 0, "0 roots"),
        (SITE, KEY, 9, "9 roots"),
    ],
)
def test_another_certificate_than_was_asked_for_is_refused(
    subject: Subject, key: certificates.PrivateKey, num_roots: int, text: str
) -> None:
    answer = session_pb2.JoinResponse(
        certificate=certificates.to_der(signed(subject, key)),
        roots=[certificates.to_der(ROOT.certificate)] * num_roots,
    )
    with pytest.raises(InvalidMessage, match=text):
        joining.check(answer, KEY.public_key(), SITE)


# --- who may call what


def methods() -> list[str]:
    """Of all services of the protocol."""
    found = []
    for module in pkgutil.iter_modules(atoll.protocol.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"atoll.protocol.v1.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                found += [f"{service.full_name}/{method.name}" for method in service.methods]
    return found


def test_every_method_of_every_service_is_in_the_table() -> None:
    assert sorted(access.MAY_CALL) == sorted(methods())
    assert len(methods()) == 20


def caller(kind: Kind, name: str = "a") -> Caller:
    return Caller(Subject("run", kind, "" if kind in NAMELESS else named(kind, name)), bytes(32))


@pytest.mark.parametrize("method", sorted(access.MAY_CALL))
@pytest.mark.parametrize("kind", Kind)
def test_only_what_the_table_names_may_call(method: str, kind: Kind) -> None:
    if kind in access.MAY_CALL[method]:
        access.check(method, caller(kind))
        with pytest.raises(RefusedError, match="banned"):
            access.check(method, caller(kind), lambda _: "banned")
    else:
        with pytest.raises(RefusedError, match="may not call"):
            access.check(method, caller(kind))


@pytest.mark.parametrize("method", sorted({*access.MAY_CALL, *access.WITHIN_SITE}))
@pytest.mark.parametrize("kind", Kind)
def test_within_a_site_its_hosts_alone_may_call(method: str, kind: Kind) -> None:
    def may(table: Any) -> bool:
        try:
            access.check(method, caller(kind), may_call=table)
        except RefusedError:
            return False
        return True

    service, _, name = method.rpartition("/")
    is_within = service == access.HOST or name in ("FetchState", "FetchPayloads")
    asks_hosts = name == "FetchPayloads" and kind is Kind.SITE  # host 0, for what they keep for audits
    assert may(access.WITHIN_SITE) == ((is_within and kind is Kind.HOST) or asks_hosts)
    if kind is Kind.HOST:  # before other sites it has its part of exchanges
        assert may(access.MAY_CALL) == (name == "Exchange")


def test_operators_alone_command_the_run() -> None:
    assert access.MAY_CALL[f"{access.COORDINATOR}/Operate"] == {Kind.OPERATOR}


def test_nobody_may_call_what_is_not_in_the_table() -> None:
    for kind in Kind:
        with pytest.raises(RefusedError, match="may not call Dance"):
            access.check(f"{access.PEER}/Dance", caller(kind))


def context(*certificate: certificates.Certificate) -> Any:
    return SimpleNamespace(auth_context=lambda: {"x509_pem_cert": [certificates.to_pem(c) for c in certificate]})


def test_whoever_calls_is_whom_the_certificate_names_and_of_this_run() -> None:
    tls = MutualTls(
        "run",
        Shown(certificates.to_pem(ROOT.certificate), certificates.to_pem(signed(SITE)), certificates.key_to_pem(KEY)),
    )
    found = tls.caller(context(signed(SITE)))
    assert (found.subject, found.key_digest) == (SITE, certificates.key_digest(KEY.public_key()))
    with pytest.raises(RefusedError, match="site a of run another, this is run run"):
        tls.caller(context(signed(Subject("another", Kind.SITE, "a"))))
    for nobody in (context(), context(ROOT.certificate), SimpleNamespace(auth_context=dict)):
        with pytest.raises(RefusedError, match="says of nobody"):
            tls.caller(nobody)
    security: Security = PLAIN
    assert security.caller(context()) is None


def test_roles_are_those_of_certificates() -> None:
    identities = {kind for kind in Kind if kind.value.startswith("identity/")}
    assert set(ROLES.values()) == identities
    assert {f"identity/{role}": kind.value for role, kind in ROLES.items()} == {k.value: k.value for k in identities}
