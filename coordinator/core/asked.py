"""What people ask of a run, and those who come by an invite. A `request` that is not 0 is answered; no other one has
the number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopAsked:
    """End the run with the sync that is open now."""

    reason: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class RollbackAsked:
    """An operator gives up the commits that nobody who is here can reach; or, with `to`, all commits after that one."""

    reason: str
    to: int | None = None
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictAsked:
    """A person does not want this site in the run; with `keep_out` never again."""

    name: str
    reason: str
    keep_out: bool
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LetInAsked:
    """A site that is kept out may come back."""

    name: str
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetAsked:
    """Before training: the model and the starting state are taken back."""

    reason: str
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteAsked:
    """Somebody may come in once, by that invite. Times are seconds since 1970, by this machine's clock."""

    role: str
    name: str
    life_s: float = 86_400.0
    addresses: tuple[str, ...] = ()
    """Of the coordinator, for whoever is invited; without them, those that it knows itself."""
    invite_id: str = ""
    now_s: float = 0.0
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAsked:
    """Somebody shows an invite, and a key to be certified."""

    invite_id: str
    key_digest: bytes
    now_s: float
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBackAsked:
    """Nobody is, or comes in as, that any more by the invites that there are."""

    role: str
    name: str
    request: int = 0


Asked = StopAsked | RollbackAsked | EvictAsked | LetInAsked | ResetAsked | InviteAsked | JoinAsked | TakeBackAsked
