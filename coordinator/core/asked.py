"""What people ask of a run, and those who come by an invite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A `request` that is not 0 is answered; no other one has the number."""

    by: str = ""
    """The person, for the audit log; what nobody asked for by name is not in it."""
    request: int = 0


@dataclass(frozen=True, slots=True)
class StopAsked(Asked):
    """End the run with the sync that is open now."""

    reason: str


@dataclass(frozen=True, slots=True)
class PauseAsked(Asked):
    """No more commits until the run is resumed; exchanges under way end in theirs."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResumeAsked(Asked):
    """The run that is paused goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAsked(Asked):
    """A setting of the run has another value from the next commit on."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked(Asked):
    """A site is to leave after the sync under way, as on SIGTERM to its node."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RollbackAsked(Asked):
    """An operator gives up the commits that nobody who is here can reach; or, with `to`, all commits after that one."""

    reason: str
    to: int | None = None
    skip_samples: bool = False
    """With `to`: samples of the commits that are given up count as done, and nobody draws them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictAsked(Asked):
    """A person does not want this site in the run now; it may come back."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BanAsked(Asked):
    """A person does not want this site in the run, by its name or its key."""

    name: str
    reason: str
    until_s: float = 0.0
    """Seconds since 1970; 0: until the ban is lifted."""
    for_s: float = 0.0
    """In place of it: from now on, by the coordinator's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiftBanAsked(Asked):
    """A site that is banned may come back."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetAsked(Asked):
    """Before training: the model and the starting state are taken back."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteAsked(Asked):
    """Somebody may come in once, by that invite."""

    role: str
    name: str
    life_s: float = 86_400.0
    addresses: tuple[str, ...] = ()
    """Of the coordinator, for whoever is invited; without them, those that it knows itself."""
    invite_id: str = ""
    is_token: bool = False
    """For HTTP: it is shown as often as its owner likes, and nobody joins by it."""
    is_of_nodes: bool = False
    """A token for the metrics of nodes, and not for the coordinator's page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAsked(Asked):
    """Somebody shows an invite, and a key to be certified."""

    invite_id: str
    key_digest: bytes
    came_from: str = ""
    """The address of the connection; empty if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewAsked(Asked):
    """Somebody who is in asks for another certificate of the same key."""

    role: str
    name: str
    key_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateAsked(Asked):
    """A person wants the next step in which another root takes the place of the run's."""

    step: str
    """make: the next root is trusted; sign: it signs; retire: the old one is trusted no more."""
    at_once: bool = False
    """What the old root has signed may be in use still."""
    since_s: float = 0.0
    """When the next root began to sign, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBackAsked(Asked):
    """Nobody is, or comes in as, that any more by the invites that there are."""

    role: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditAsked(Asked):
    """The entries of the audit log after that one. Looking is not in the log."""

    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteAsked(Asked):
    """What the shell did or refused is to be in the audit log."""

    what: str
    outcome: str
