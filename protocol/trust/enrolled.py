"""What whoever has joined a run keeps in a folder: its key, the certificate of it, the roots, and where the coordinator
is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.addresses import parse_address
from atoll.protocol.disk import Disk, make_folder
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import PrivateKey
from atoll.protocol.trust.names import Subject
from atoll.protocol.trust.security import Shown

FOLDER = "trust"
"""In a node's home."""
KEY, CERTIFICATE, ROOTS, COORDINATOR = "identity.key", "identity.pem", "roots.pem", "coordinator.json"


@dataclass(frozen=True, slots=True)
class Enrolled:
    subject: Subject
    shown: Shown
    """To the coordinator."""
    addresses: tuple[str, ...]
    """Of the coordinator."""


def key_in(folder: Path, disk: Disk) -> PrivateKey:
    """The key of whoever joins with this folder, made and kept before it is shown to anybody: an answer that is lost
    can be asked for again. Raises HostError, and ConfigError for what is no key."""
    path = folder / KEY
    try:
        make_folder(folder.parent)  # the parents that `make_folder` makes are open to others
        make_folder(folder)
        if not path.exists():
            disk.write_whole(path, certificates.key_to_pem(certificates.new_key()), fsync=True)
        return certificates.key_from_pem(path.read_bytes())
    except OSError as error:
        raise HostError(f"{path}: {error.strerror}") from None
    except InvalidMessage as error:
        raise ConfigError(f"{path}: {error}; remove it, and join with a new invite") from None


def keep(folder: Path, certificate: bytes, roots: list[bytes], addresses: tuple[str, ...], disk: Disk) -> None:
    """Beside the key; the certificate last, by which all of it counts. `certificate` and `roots` are DER. Raises
    InvalidMessage or HostError."""
    found = [certificates.from_der(root) for root in roots]
    disk.write_whole(folder / ROOTS, certificates.to_pem(*found), fsync=True)
    disk.write_whole(folder / COORDINATOR, json.dumps({"addresses": addresses}).encode(), fsync=True)
    disk.write_whole(folder / CERTIFICATE, certificates.to_pem(certificates.from_der(certificate)), fsync=True)


def load(folder: Path) -> Enrolled | None:
    """None if nobody has joined with it. Raises HostError, and ConfigError for what is damaged."""
    if not (folder / CERTIFICATE).exists():
        return None
    try:
        certificate, key = (folder / CERTIFICATE).read_bytes(), (folder / KEY).read_bytes()
        roots, coordinator = (folder / ROOTS).read_bytes(), json.loads((folder / COORDINATOR).read_bytes())
        found = certificates.from_pem(certificate)[0]
        certificates.salt_of(certificates.from_pem(roots)[0])
        if certificates.digest_of(found) != certificates.key_digest(certificates.key_from_pem(key).public_key()):
            raise InvalidMessage(f"{KEY} is not the key of {CERTIFICATE}")
        addresses = tuple(str(address) for address in coordinator["addresses"])
        for address in addresses:
            parse_address(address)
        if not addresses:
            raise InvalidMessage(f"{COORDINATOR} names no coordinator")
        return Enrolled(certificates.subject_of(found), Shown(roots, certificate, key), addresses)
    except OSError as error:
        raise HostError(f"{error.filename}: {error.strerror}") from None
    except (InvalidMessage, ConfigError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: {error}; remove it, and join with a new invite") from None
