"""What whoever has joined a run keeps in a folder: its key, the certificate of it, the roots, and where the coordinator
is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.addresses import parse_address
from atoll.protocol.dates import utc
from atoll.protocol.disk import Disk, make_folder
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import PrivateKey
from atoll.protocol.trust.invites import Invite, check_addresses
from atoll.protocol.trust.names import Subject
from atoll.protocol.trust.security import Shown

FOLDER = "trust"
"""In a node's home."""
IDENTITY, ROOTS, COORDINATOR = "identity.pem", "roots.pem", "coordinator.json"
"""The first one has certificate and key, so that they are replaced together."""
WARN_BEFORE_S = 30 * 86_400
"""The end of an identity."""


@dataclass(frozen=True, slots=True)
class Enrolled:
    subject: Subject
    shown: Shown
    """To the coordinator."""
    invited_to: tuple[str, ...]
    """Addresses of the coordinator, of the invite."""
    invite_id: str
    """By which it joined."""
    learned: tuple[str, ...] = ()
    """Addresses of all that may serve the run, as the coordinator said last."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of coordinators that may serve the run."""
        return tuple(dict.fromkeys((*self.invited_to, *self.learned)))

    @property
    def expires_s(self) -> float:
        """In seconds since 1970."""
        return certificates.from_pem(self.shown.certificate)[0].not_valid_after_utc.timestamp()


def key_for(folder: Path, invite_id: str, disk: Disk) -> PrivateKey:
    """The key of whoever joins with this folder by that invite, made and kept before it is shown to anybody: an answer
    that is lost can be asked for again. Another invite gets another key: the old one may be known to others. Raises
    HostError, and ConfigError for what is no key."""
    known, path = load(folder), pending(folder, invite_id)
    # A pending key comes first: a `keep` that was cut off may have left this invite beside the identity of another one.
    if known is not None and known.invite_id == invite_id and not path.exists():
        return certificates.key_from_pem(known.shown.key)
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


def pending(folder: Path, invite_id: str) -> Path:
    """Where the key lies until the invite has been answered."""
    return folder / f"{invite_id}.key"


def keep(
    folder: Path,
    invite: Invite,
    key: PrivateKey,
    *,
    certificate: bytes,
    roots: Sequence[bytes],
    disk: Disk,
) -> None:
    """What came of the invite; the identity last, by which all of it counts. `certificate` and `roots` are DER. Raises
    InvalidMessage or HostError."""
    found = [certificates.from_der(root) for root in roots]
    for root in found:
        certificates.salt_of(root)
    disk.write_whole(folder / ROOTS, certificates.to_pem(*found), fsync=True)
    words = {"addresses": invite.addresses, "invite": invite.invite_id}
    disk.write_whole(folder / COORDINATOR, json.dumps(words).encode(), fsync=True)
    identity = certificates.to_pem(certificates.from_der(certificate)) + certificates.key_to_pem(key)
    disk.write_whole(folder / IDENTITY, identity, fsync=True)
    for path in folder.glob("*.key"):
        path.unlink()


def keep_shown(folder: Path, shown: Shown, disk: Disk) -> None:
    """In place of what whoever has joined showed. The roots first: with the old ones a new identity is of no use.
    Raises HostError."""
    disk.write_whole(folder / ROOTS, shown.roots, fsync=True)
    disk.write_whole(folder / IDENTITY, shown.certificate + shown.key, fsync=True)


def keep_learned(folder: Path, coordinators: Sequence[str], disk: Disk) -> None:
    """In place of those that were learned before: addresses of all that may serve the run. Raises HostError, and
    ConfigError or InvalidMessage for what is no address."""
    check_addresses(coordinators)
    path = folder / COORDINATOR
    try:
        words = json.loads(path.read_bytes()) | {"learned": list(coordinators)}
    except (OSError, ValueError) as error:
        raise HostError(f"{path}: {error}") from None
    disk.write_whole(path, json.dumps(words).encode(), fsync=True)


def load(folder: Path) -> Enrolled | None:
    """None if nobody has joined with it. Raises HostError, and ConfigError for what is damaged."""
    if not (folder / IDENTITY).exists():
        return None
    try:
        identity = (folder / IDENTITY).read_bytes()
        roots, words = (folder / ROOTS).read_bytes(), json.loads((folder / COORDINATOR).read_bytes())
        certificate, key = certificates.from_pem(identity)[0], certificates.key_from_pem(_key_in(identity))
        certificates.salt_of(certificates.from_pem(roots)[0])
        if certificates.digest_of(certificate) != certificates.key_digest(key.public_key()):
            raise InvalidMessage(f"{IDENTITY} has a key that is not of its certificate")
        addresses, learned = (tuple(map(str, words.get(key, ()))) for key in ("addresses", "learned"))
        for address in (*addresses, *learned):
            parse_address(address)
        if not addresses:
            raise InvalidMessage(f"{COORDINATOR} names no coordinator")
        shown = Shown(roots, certificates.to_pem(certificate), certificates.key_to_pem(key))
        return Enrolled(certificates.subject_of(certificate), shown, addresses, str(words["invite"]), learned)
    except OSError as error:
        raise HostError(f"{error.filename}: {error.strerror}") from None
    except (InvalidMessage, ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: {error}; remove it, and join with a new invite") from None


def joined(home: Path) -> Enrolled:
    """The same, of whoever has this folder for its home. Raises ConfigError if nobody has joined with it."""
    found = load(home / FOLDER)
    if found is None:
        raise ConfigError(f"nobody has joined a run with {home}: `atoll join`, with an invite, does")
    return found


def _key_in(identity: bytes) -> bytes:
    """Behind the certificate."""
    _, begin, rest = identity.partition(b"-----BEGIN PRIVATE KEY-----")
    return begin + rest


def check_dates(found: Enrolled, now_s: float) -> str:
    """What to warn of, if its end is near; else empty. Raises ConfigError after it."""
    until_s = found.expires_s
    if now_s > until_s:
        raise ConfigError(
            f"the certificate of {found.subject} has expired at {utc(until_s)}, and this machine's clock says "
            f"{utc(now_s)}: join with a new invite"
        )
    near = f"the certificate of {found.subject} expires at {utc(until_s)}: a node or relay that runs renews it"
    return near if now_s > until_s - WARN_BEFORE_S else ""
