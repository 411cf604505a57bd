"""An invite: one line of text with all that a machine needs to come into a run. Pure.

After a prefix, base64 (URL-safe, without padding) of a byte of version, of what zlib makes of the fields, each with its
length in two bytes (big-endian), and of the CRC-32 of all that. Fields: run id, role and name (as site/berlin, and of
its host 1 host/berlin/1), addresses (separated by commas), root, client certificate (both DER), and its private key,
32 bytes.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.protocol.addresses import is_plain, parse_address
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import Certificate, PrivateKey
from atoll.protocol.trust.names import ROLES, Kind, Subject, is_name

VERSION = 1
PREFIX = "atoll-invite-"
"""So that a person, and a scanner for leaked secrets, knows what it is."""
MAX_CHARACTERS = 8192
MAX_BYTES = 1 << 14
MAX_ADDRESSES = 8
CHECKSUM_BYTES = 4
_NUM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class Invite:
    run_id: str
    role: str
    name: str
    """What it is for; the coordinator knows, and says it again."""
    addresses: tuple[str, ...]
    """Of the coordinator, the first one first."""
    root: Certificate
    certificate: Certificate
    """Of kind `join`, once."""
    key: PrivateKey

    @property
    def subject(self) -> Subject:
        """Whose identity it is for."""
        return Subject(self.run_id, ROLES[self.role], self.name)

    @property
    def expires_s(self) -> float:
        """In seconds since 1970."""
        return self.certificate.not_valid_after_utc.timestamp()

    @property
    def invite_id(self) -> str:
        return certificates.subject_of(self.certificate).name


def to_text(invite: Invite) -> str:
    fields = (
        invite.run_id.encode(),
        f"{invite.role}/{invite.name}".encode(),
        ",".join(invite.addresses).encode(),
        certificates.to_der(invite.root),
        certificates.to_der(invite.certificate),
        certificates.key_to_bytes(invite.key),
    )
    joined = b"".join(len(field).to_bytes(2, "big") + field for field in fields)
    data = bytes([VERSION]) + zlib.compress(joined, 9)
    return PREFIX + _coded(data + _checksum(data))


def _coded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(text: str) -> Invite:
    """Of what a person has copied, with line breaks and spaces as they come. Raises ConfigError: what is wrong."""
    line = re.sub(r"\s", "", text[:MAX_CHARACTERS])
    if not line.startswith(PREFIX):
        raise ConfigError(f"that is no invite: one begins with {PREFIX} (`atoll invite` prints it)")
    if len(text) > MAX_CHARACTERS:  # no more than that was read of a file
        raise ConfigError(f"that is no invite: one has at most {MAX_CHARACTERS} characters")
    body = line.removeprefix(PREFIX)
    try:
        whole = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        whole = b""
    data, checksum = whole[:-CHECKSUM_BYTES], whole[-CHECKSUM_BYTES:]
    # The last character has bits that no byte takes.
    if not data or _coded(whole) != body or _checksum(data) != checksum:
        raise ConfigError("the invite is not whole: characters are missing or changed; copy all of it")
    if data[0] != VERSION:
        raise ConfigError(f"the invite is of version {data[0]}, this atoll reads {VERSION}: install the coordinator's")
    try:
        return _read(_fields(zlib.decompressobj().decompress(data[1:], MAX_BYTES)))
    except (zlib.error, InvalidMessage, ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"the invite cannot be used ({error}): ask for another one") from None


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "big")


def _fields(data: bytes) -> list[bytes]:
    fields = []
    while data:
        size = int.from_bytes(data[:2], "big")
        fields.append(data[2 : 2 + size])
        data = data[2 + size :]
    if len(fields) != _NUM_FIELDS:
        raise InvalidMessage(f"{len(fields)} fields, not {_NUM_FIELDS}")
    return fields


def _read(fields: list[bytes]) -> Invite:
    run_id, (role, _, name) = fields[0].decode(), fields[1].decode().partition("/")
    addresses = tuple(fields[2].decode().split(","))
    if role not in ROLES or not is_name(ROLES[role], name):
        raise InvalidMessage(f"{role!r} {name!r} is no role and name")
    check_addresses(addresses)
    root, certificate = certificates.from_der(fields[3]), certificates.from_der(fields[4])
    key = certificates.key_from_bytes(fields[5])
    certificates.salt_of(root)
    subject = certificates.subject_of(certificate)
    if subject.kind is not Kind.INVITE or subject.run_id != run_id:
        raise InvalidMessage(f"its certificate is that of {subject}")
    if certificates.digest_of(certificate) != certificates.key_digest(key.public_key()):
        raise InvalidMessage("its key is not that of its certificate")
    return Invite(run_id, role, name, addresses, root, certificate, key)


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ConfigError or InvalidMessage for what an invite cannot have."""
    if not 1 <= len(addresses) <= MAX_ADDRESSES:
        raise InvalidMessage(f"{len(addresses)} addresses of a coordinator, an invite has 1 to {MAX_ADDRESSES}")
    for address in addresses:
        parse_address(address)
        if not is_plain(address):
            raise InvalidMessage(f"{address!r} is no address of a coordinator")
