"""Keys, signing requests and certificates. Of P-256: grpc 1.85 takes no Ed25519 (NO_COMMON_SIGNATURE_ALGORITHMS)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.protocol.digest import Digest
from atoll.protocol.errors import HostError, InvalidMessage
from atoll.protocol.trust.names import Kind, Subject, host_of_site, parse_uri

MAX_DER_BYTES = 4096
"""Of a request, a certificate or a key of ours; the largest has some 700."""
CLOCKS_DIFFER_BY = timedelta(hours=1)
"""At most: a certificate is valid from so long before it was made."""
KEY_BYTES = 32
SALT_BYTES = 16
SALT = re.compile(rf"[0-9a-f]{{{2 * SALT_BYTES}}}")
DIALLED = frozenset({Kind.COORDINATOR, Kind.SITE, Kind.HOST, Kind.RELAY, Kind.PAGE})
"""Whose certificates serve, too."""

_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    InvalidSignature,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What `cryptography` raises for what it cannot read."""

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
Certificate = x509.Certificate


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_bytes(key: PrivateKey) -> bytes:
    """Its number alone, which is the shortest form."""
    return key.private_numbers().private_value.to_bytes(KEY_BYTES, "big")


def key_from_bytes(data: bytes) -> PrivateKey:
    """Raises InvalidMessage."""
    try:
        if len(data) != KEY_BYTES:
            raise ValueError(f"{len(data)} bytes, not {KEY_BYTES}")
        return ec.derive_private_key(int.from_bytes(data, "big"), ec.SECP256R1())
    except ValueError as error:
        raise InvalidMessage(f"not a key: {error}") from None


def key_to_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def key_from_pem(data: bytes) -> PrivateKey:
    """Raises InvalidMessage."""
    try:
        key = serialization.load_pem_private_key(data, None)
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidMessage("a key that is not of the curve P-256")
    return key


def key_digest(key: PublicKey) -> bytes:
    """32 bytes that stand for the key in what a coordinator keeps."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Digest("atoll/identity-key/v1").data(der).finish()


def signature(key: PrivateKey, data: bytes) -> bytes:
    """ECDSA with SHA-256, DER."""
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def is_signature(certificate: Certificate, data: bytes, signed: bytes) -> bool:
    """Whether the key of that certificate has signed it."""
    key = certificate.public_key()
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signed, data, ec.ECDSA(hashes.SHA256()))
            return True
    except InvalidSignature:
        pass
    return False


# --- requests


def request(key: PrivateKey) -> bytes:
    """Asks for a certificate of this key; who it is for is the coordinator's to say."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )


def requested_key(data: bytes) -> PublicKey:
    """The key of a request whose sender has it. Raises InvalidMessage."""
    if len(data) > MAX_DER_BYTES:
        raise InvalidMessage(f"a signing request of {len(data)} bytes, at most {MAX_DER_BYTES} may be")
    try:
        found = x509.load_der_x509_csr(data)
        key, is_signed = found.public_key(), found.is_signature_valid
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a signing request: {error}") from None
    if not is_signed:
        raise InvalidMessage("a signing request that is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidMessage("a signing request for a key that is not of the curve P-256")
    return key


# --- certificates


def to_der(certificate: Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def to_pem(*certificates: Certificate) -> bytes:
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def from_der(data: bytes) -> Certificate:
    """Raises InvalidMessage."""
    if len(data) > MAX_DER_BYTES:
        raise InvalidMessage(f"a certificate of {len(data)} bytes, at most {MAX_DER_BYTES} may be")
    try:
        certificate = x509.load_der_x509_certificate(data)
        _ = certificate.not_valid_before_utc, certificate.not_valid_after_utc  # a year that is none is found here alone
        return certificate
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a certificate: {error}") from None


def from_pem(data: bytes) -> list[Certificate]:
    """One or more. Raises InvalidMessage."""
    try:
        return x509.load_pem_x509_certificates(data)
    except _UNREADABLE as error:
        raise InvalidMessage(f"not a certificate: {error}") from None


def subject_of(certificate: Certificate) -> Subject:
    """Raises InvalidMessage."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, *_UNREADABLE):
        raise InvalidMessage("a certificate without a subject alternative name") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise InvalidMessage(f"a certificate of {len(uris)} URIs, one says whom it is of")
    return parse_uri(uris[0])


def digest_of(certificate: Certificate) -> bytes:
    """Of its key. Raises InvalidMessage."""
    try:
        key = certificate.public_key()
    except _UNREADABLE as error:
        raise InvalidMessage(f"a certificate of a key that cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidMessage("a certificate of a key that is not of the curve P-256")
    return key_digest(key)


def check_authority(root: Certificate) -> None:
    """Raises InvalidMessage for a certificate that cannot be the root of a run: a company's own may, if it signs
    certificates of P-256, and no other authorities."""
    digest_of(root)
    try:
        constraints = root.extensions.get_extension_for_class(x509.BasicConstraints).value
        usages = [found.value for found in root.extensions if isinstance(found.value, x509.KeyUsage)]
    except (x509.ExtensionNotFound, *_UNREADABLE):
        raise InvalidMessage("a root that is no authority: its certificate has no basic constraints") from None
    if not constraints.ca or not all(usage.key_cert_sign for usage in usages):
        raise InvalidMessage("a root that is no authority: it may sign no certificates")
    if constraints.path_length != 0:
        raise InvalidMessage("a root that may sign other authorities: have one made with path length 0")


def salt_of(root: Certificate) -> bytes:
    """The run's, which all roots that atoll makes for it carry as their name; of a root that was given, it comes of its
    key. See `Subject.dns_name`. Raises InvalidMessage."""
    check_authority(root)
    if is_made_by_atoll(root):
        return bytes.fromhex(str(root.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value))
    return Digest("atoll/salt-of-root/v1").data(digest_of(root)).finish()[:SALT_BYTES]


def is_made_by_atoll(root: Certificate) -> bool:
    """Raises InvalidMessage for names that cannot be read."""
    try:
        subject, issuer = root.subject, root.issuer
    except _UNREADABLE as error:
        raise InvalidMessage(f"a root of names that cannot be read: {error}") from None
    names = [str(found.value) for found in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return len(names) == 1 and SALT.fullmatch(names[0]) is not None and subject == issuer


def is_signed_by(certificate: Certificate, root: Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(root)
    except _UNREADABLE:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Root:
    """The run's authority, for the coordinator alone."""

    key: PrivateKey
    certificate: Certificate

    @classmethod
    def made(cls, salt: bytes, life: timedelta, now: datetime, number: int = 1) -> Root:
        """`number`: of the run's roots, which have names of their own: TLS finds the root of a certificate by its
        name."""
        numbered = [x509.NameAttribute(NameOID.SERIAL_NUMBER, str(number))] if number > 1 else []
        key, name = new_key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, salt.hex()), *numbered])
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        certificate = (
            _builder(name, name, key.public_key(), now, life)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    def sign(
        self, key: PublicKey, subject: Subject, life: timedelta, now: datetime, hosts: Sequence[str] = ()
    ) -> Certificate:
        """Who it is of alone is said in it: a URI, and where others dial it the DNS name of the handshake, and of a
        site or a relay that of its metrics. Before other sites each host of a site has the name of the site, before
        each other host 0 alone has that of host 0. `hosts`: by which names or numbers of a machine a browser may come
        to it."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(subject.uri)]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH] if subject.kind is not Kind.PAGE else []
        salt = salt_of(self.certificate)
        if subject.kind in DIALLED:
            names.append(x509.DNSName(subject.dns_name(salt)))
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        if subject.kind in (Kind.SITE, Kind.RELAY):
            names.append(x509.DNSName(Subject(subject.run_id, Kind.METRICS).dns_name(salt)))
        if subject.kind is Kind.SITE:
            leader = Subject(subject.run_id, Kind.HOST, host_of_site(subject.site, 0))
            names.append(x509.DNSName(leader.dns_name(salt)))
        if subject.kind is Kind.HOST:
            names.append(x509.DNSName(Subject(subject.run_id, Kind.SITE, subject.site).dns_name(salt)))
        names += [_host_name(host) for host in hosts]
        life = min(life, self.certificate.not_valid_after_utc - now)
        if life <= timedelta(0):
            raise HostError("the run's root has expired, or this machine's clock is wrong: nothing can be signed")
        return (
            _builder(x509.Name([]), self.certificate.subject, key, now, life)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self.key, hashes.SHA256())
        )


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER_BY)
        .not_valid_after(now + life)
    )
