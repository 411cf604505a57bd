"""The run's root: made at the first start, kept beside the store, and what it signs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from atoll.coordinator.core.events import InviteAsked
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


def folder_of(store_path: Path) -> Path:
    return store_path.with_name(store_path.name + ".trust")


@dataclass(frozen=True, slots=True)
class Authority:
    run_id: str
    root: Root
    machine: Machine

    @classmethod
    def opened(cls, folder: Path, run_id: str, machine: Machine) -> Authority:
        """What lies in `folder`, which is made if nothing is there. Raises HostError, and ConfigError for what is no
        root."""
        key_file, root_file = folder / "root.key", folder / "root.pem"
        try:
            if not root_file.exists():
                _make(folder, key_file, root_file, machine)
            if not key_file.exists():
                raise HostError(f"{root_file} is there without {key_file.name}: restore it from a copy")
            if folder.stat().st_mode & PRIVATE or key_file.stat().st_mode & PRIVATE:
                raise HostError(
                    f"{key_file} can be read by other users, who could let anybody into the run: "
                    f"run `chmod -R go= {folder}`"
                )
            key = certificates.key_from_pem(key_file.read_bytes())
            (certificate,) = certificates.from_pem(root_file.read_bytes())
            certificates.salt_of(certificate)
        except OSError as error:
            raise HostError(f"{folder}: {error.strerror}") from None
        except (InvalidMessage, ValueError) as error:
            raise ConfigError(f"{folder}: {error}; restore it from a copy") from None
        if certificates.digest_of(certificate) != certificates.key_digest(key.public_key()):
            raise ConfigError(f"{key_file} is not the key of {root_file.name}; restore both from a copy")
        return cls(run_id, Root(key, certificate), machine)

    def invite(self, asked: InviteAsked, addresses: tuple[str, ...]) -> str:
        """The text of an invite that the run knows."""
        key, subject = certificates.new_key(), Subject(self.run_id, Kind.INVITE, asked.invite_id)
        life, now = timedelta(seconds=asked.life_s), date_of(self.machine.wall_time())
        certificate = self.root.sign(key.public_key(), subject, life, now)
        return to_text(Invite(self.run_id, asked.role, asked.name, addresses, self.root.certificate, certificate, key))

    def token(self, asked: InviteAsked) -> str:
        """The text of a viewer's token that the run knows."""
        expires_s = int(self.machine.wall_time() + asked.life_s)
        return tokens.to_text(
            Token(self.run_id, asked.name, asked.invite_id, expires_s, asked.is_of_nodes), self.root.key
        )

    def token_of(self, text: str) -> Token | None:
        """One for the coordinator's page that was given out and has not expired."""
        try:
            token = tokens.from_text(text, [self.root.certificate])
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
        certificate = self.root.sign(key.public_key(), Subject(self.run_id, kind), SESSION_LIFE, now, hosts)
        return Shown(
            roots=certificates.to_pem(self.root.certificate),
            certificate=certificates.to_pem(certificate),
            key=certificates.key_to_pem(key),
        )

    @property
    def secret(self) -> bytes:
        """What nobody has who has not the root's key."""
        return certificates.key_to_bytes(self.root.key)

    @property
    def roots(self) -> list[bytes]:
        return [certificates.to_der(self.root.certificate)]

    def new_invite_id(self) -> str:
        return self.machine.token_bytes(INVITE_ID_BYTES).hex()


def _make(folder: Path, key_file: Path, root_file: Path, machine: Machine) -> None:
    make_folder(folder)
    os.chmod(folder, 0o700)
    root = Root.made(machine.token_bytes(SALT_BYTES), ROOT_LIFE, date_of(machine.wall_time()))
    machine.disk.write_whole(key_file, certificates.key_to_pem(root.key), fsync=True)
    machine.disk.write_whole(root_file, certificates.to_pem(root.certificate), fsync=True)
    sync_folder(folder.parent)
