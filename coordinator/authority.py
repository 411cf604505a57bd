"""The run's roots: the first one is made at the first start, kept beside the store or given, and what they sign.

While one root takes the place of another, both are trusted. Who was away knows the older one alone: so the coordinator
shows what the oldest root that is trusted has signed, and others get what the root has signed that signs now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from atoll.coordinator.core.events import InviteAsked
from atoll.coordinator.stage import Stage, check_held
from atoll.protocol.dates import date_of
from atoll.protocol.disk import make_folder, sync_folder
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates, tokens
from atoll.protocol.trust.certificates import SALT_BYTES, PublicKey, Root
from atoll.protocol.trust.invites import Invite, to_text
from atoll.protocol.trust.names import NAMELESS, OF_A_DAY, Kind, Subject
from atoll.protocol.trust.security import Shown
from atoll.protocol.trust.tokens import Token

ROOT_LIFE = timedelta(days=3650)
IDENTITY_LIFE = timedelta(days=365)
SESSION_LIFE = timedelta(hours=24)
"""Of what the coordinator shows itself, too."""
INVITE_ID_BYTES = 8
PRIVATE = 0o077
OF_SYSTEMD = "CREDENTIALS_DIRECTORY"
"""Where LoadCredential= puts files for this service alone (systemd.exec(5)). It lets the service's user read them by
access lists, whose bits look like those of a group."""
FIRST = "root"
"""The files of the first root, with .pem and .key; those of later ones are root-2 and so on."""
ROTATION = "rotation.json"
"""Which roots are trusted, the oldest first, which one signs, and since when; without it the first alone."""


def folder_of(store_path: Path) -> Path:
    return store_path.with_name(store_path.name + ".trust")


class Authority:
    """What lies in a folder. `told` hear when the roots have changed."""

    def __init__(self, folder: Path, run_id: str, machine: Machine) -> None:
        """Raises HostError, and ConfigError for what is no root."""
        self.run_id = run_id
        self.machine = machine
        self.told: list[Callable[[], None]] = []
        self.folder = folder
        self._in_folder: dict[str, Root] = {}
        try:
            words = json.loads((folder / ROTATION).read_bytes()) if (folder / ROTATION).exists() else {}
            names = [str(name) for name in words.get("trusted", [FIRST])]
            self.since_s = float(words.get("since_s", 0.0))
            self._trusted = {name: _read(folder, name) for name in names}
            self._signing = str(words.get("signing", FIRST))
            self.root = self._trusted[self._signing]
            key_file = folder / f"{FIRST}.key"
            seal = certificates.key_from_pem(key_file.read_bytes()) if key_file.exists() else self.root.key
        except OSError as error:
            raise HostError(f"{folder}: {error.strerror}") from None
        except (InvalidMessage, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder}: {error}; restore it from a copy") from None
        self.secret = certificates.key_to_bytes(seal)
        """What nobody has who has not the key of the run's first root: a rotation changes it not, or what sites have
        kept would count for nothing."""
        self._check_dates()

    @classmethod
    def opened(cls, folder: Path, run_id: str, machine: Machine) -> Authority:
        """A root is made if nothing is there. Raises as the class does."""
        try:
            if not (folder / f"{FIRST}.pem").exists() and not (folder / ROTATION).exists():
                make_folder(folder)
                os.chmod(folder, 0o700)
                _keep(folder, FIRST, machine.token_bytes(SALT_BYTES), machine)
                sync_folder(folder.parent)
        except OSError as error:
            raise HostError(f"{folder}: {error.strerror}") from None
        return cls(folder, run_id, machine)

    def _check_dates(self) -> None:
        """Raises ConfigError for a root that was given, and cannot sign now."""
        now, certificate = date_of(self.machine.wall_time()), self.root.certificate
        if not certificate.not_valid_before_utc <= now + certificates.CLOCKS_DIFFER_BY:
            raise ConfigError(f"{self.folder}: the root holds from {certificate.not_valid_before_utc} on alone")
        if now > certificate.not_valid_after_utc:
            raise ConfigError(f"{self.folder}: the root has expired at {certificate.not_valid_after_utc}")

    # --- what it signs

    def invite(self, asked: InviteAsked, addresses: tuple[str, ...]) -> str:
        """The text of an invite that the run knows."""
        key, subject = certificates.new_key(), Subject(self.run_id, Kind.INVITE, asked.invite_id)
        life, now = timedelta(seconds=asked.life_s), date_of(self.machine.wall_time())
        certificate = self.root.sign(key.public_key(), subject, life, now)
        oldest = self._oldest.certificate
        return to_text(Invite(self.run_id, asked.role, asked.name, addresses, oldest, certificate, key))

    def token(self, asked: InviteAsked) -> str:
        """The text of a viewer's token that the run knows."""
        expires_s = int(self.machine.wall_time() + asked.life_s)
        return tokens.to_text(
            Token(self.run_id, asked.name, asked.invite_id, expires_s, asked.is_of_nodes), self.root.key
        )

    def token_of(self, text: str) -> Token | None:
        """One for the coordinator's page that was given out and has not expired."""
        try:
            token = tokens.from_text(text, [root.certificate for root in self._trusted.values()])
        except InvalidMessage:
            return None
        is_good = token.run_id == self.run_id and not token.is_of_nodes and token.expires_s > self.machine.wall_time()
        return token if is_good else None

    def certify(self, key: PublicKey, kind: Kind, name: str) -> bytes:
        """A certificate of an identity, or of what it shows to sites; DER."""
        life = SESSION_LIFE if kind in OF_A_DAY.values() else IDENTITY_LIFE
        subject = Subject(self.run_id, kind, "" if kind in NAMELESS else name)
        return certificates.to_der(self.root.sign(key, subject, life, date_of(self.machine.wall_time())))

    def shown(self) -> Shown:
        """What the coordinator shows for the next while, with a key of its own."""
        return self._shown(Kind.COORDINATOR, ())

    def shown_on_pages(self, hosts: Sequence[str]) -> Shown:
        """The same, to browsers that come by these names."""
        return self._shown(Kind.PAGE, hosts)

    def _shown(self, kind: Kind, hosts: Sequence[str]) -> Shown:
        key, now = certificates.new_key(), date_of(self.machine.wall_time())
        certificate = self._oldest.sign(key.public_key(), Subject(self.run_id, kind), SESSION_LIFE, now, hosts)
        return Shown(
            roots=self.roots_pem,
            certificate=certificates.to_pem(certificate),
            key=certificates.key_to_pem(key),
        )

    def new_invite_id(self) -> str:
        return self.machine.token_bytes(INVITE_ID_BYTES).hex()

    # --- roots

    @property
    def _oldest(self) -> Root:
        return next(iter(self._trusted.values()))

    @property
    def roots(self) -> list[bytes]:
        """Those that are trusted, DER; the first one signs."""
        others = [root for root in self._trusted.values() if root is not self.root]
        return [certificates.to_der(root.certificate) for root in (self.root, *others)]

    @property
    def roots_pem(self) -> bytes:
        """The same, the oldest first."""
        return certificates.to_pem(*(root.certificate for root in self._trusted.values()))

    @property
    def has_next(self) -> bool:
        """Another root is trusted, and does not sign yet."""
        return self.root is not list(self._trusted.values())[-1]

    @property
    def has_old(self) -> bool:
        """Another root is trusted, and signs no more."""
        return self.root is not self._oldest

    @property
    def stage(self) -> Stage:
        digests = {name: root_digest(root) for name, root in self._trusted.items()}
        return Stage(tuple(digests.values()), digests[self._signing], self.since_s)

    def make_next(self) -> str:
        """A root that may take this one's place; the one that was made before, if it is not trusted yet. Its digest.
        Raises HostError, and ConfigError for a root that was given."""
        newest = max(map(number_of, self._trusted))
        if not certificates.is_made_by_atoll(self.root.certificate):
            raise ConfigError("the root of this run was given, and atoll makes no other in its place")
        for name, root in self._found().items():
            if number_of(name) > newest:
                return root_digest(root)
        salt = certificates.salt_of(self.root.certificate)
        try:
            return root_digest(_keep(self.folder, f"{FIRST}-{newest + 1}", salt, self.machine, newest + 1))
        except OSError as error:
            raise HostError(f"{self.folder}: {error.strerror}") from None

    def name_of(self, digest: str) -> str:
        """Of the files of a root that is here."""
        return next(name for name, root in self._found().items() if root_digest(root) == digest)

    def after(self, step: str) -> Stage:
        """The stage that follows by that step of a rotation. Raises as `make_next`."""
        now, since_s = self.stage, self.machine.wall_time()
        if step == "make":
            return Stage((*now.trusted, self.make_next()), now.signing, since_s)
        if step == "sign":
            return Stage(now.trusted, now.trusted[-1], since_s)
        return Stage((now.signing,), now.signing, since_s)

    def held(self) -> frozenset[str]:
        return frozenset(map(root_digest, self._found().values()))

    def follow(self, stage: Stage) -> bool:
        if stage == self.stage:
            return False
        names = {root_digest(root): (name, root) for name, root in self._found().items()}
        check_held(stage, self.stage, frozenset(names))
        trusted = dict(names[digest] for digest in stage.trusted)
        signing = names[stage.signing][0]
        words = {"trusted": list(trusted), "signing": signing, "since_s": stage.since_s}
        try:
            self.machine.disk.write_whole(self.folder / ROTATION, json.dumps(words).encode(), fsync=True)
        except OSError as error:
            raise HostError(f"{self.folder}: {error.strerror}") from None
        self._trusted, self._signing, self.root, self.since_s = trusted, signing, trusted[signing], stage.since_s
        return True

    def _found(self) -> dict[str, Root]:
        """In the folder, by name, with their keys; read anew when others lie there. Raises HostError, ConfigError."""
        try:
            names = sorted(path.stem for path in self.folder.glob(f"{FIRST}*.pem") if path.with_suffix(".key").exists())
            if names != list(self._in_folder):
                self._in_folder = {name: _read(self.folder, name) for name in names}
        except OSError as error:
            raise HostError(f"{self.folder}: {error.strerror}") from None
        except InvalidMessage as error:
            raise ConfigError(f"{self.folder}: {error}; restore it from a copy") from None
        return self._in_folder


def number_of(name: str) -> int:
    """Of the files of a root."""
    return int(name.partition("-")[2] or 1)


def root_digest(root: Root) -> str:
    return certificates.digest_of(root.certificate).hex()


def _read(folder: Path, name: str) -> Root:
    """Raises HostError, ConfigError, OSError, InvalidMessage."""
    key_file, root_file = folder / f"{name}.key", folder / f"{name}.pem"
    if not key_file.exists():
        raise HostError(f"{root_file} is there without {key_file.name}: restore it from a copy")
    may_others_read = folder.stat().st_mode & PRIVATE or key_file.stat().st_mode & PRIVATE
    if may_others_read and str(folder) != os.environ.get(OF_SYSTEMD):
        raise HostError(
            f"{key_file} can be read by other users, who could let anybody into the run: run `chmod -R go= {folder}`"
        )
    key = certificates.key_from_pem(key_file.read_bytes())
    (certificate,) = certificates.from_pem(root_file.read_bytes())
    certificates.check_authority(certificate)
    if certificates.digest_of(certificate) != certificates.key_digest(key.public_key()):
        raise ConfigError(f"{key_file} is not the key of {root_file.name}; restore both from a copy")
    return Root(key, certificate)


def _keep(folder: Path, name: str, salt: bytes, machine: Machine, number: int = 1) -> Root:
    """A root that is made. Raises OSError."""
    root = Root.made(salt, ROOT_LIFE, date_of(machine.wall_time()), number)
    machine.disk.write_whole(folder / f"{name}.key", certificates.key_to_pem(root.key), fsync=True)
    machine.disk.write_whole(folder / f"{name}.pem", certificates.to_pem(root.certificate), fsync=True)
    return root
