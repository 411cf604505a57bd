"""How far a rotation of the run's root has come, as coordinators that share a store tell each other. Pure; the keys of
roots are in no store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from atoll.protocol.errors import ConfigError, StateError


@dataclass(frozen=True, slots=True)
class Stage:
    """Roots by the digests of their keys, in hex."""

    trusted: tuple[str, ...] = ()
    """The oldest first; none in plain text."""
    signing: str = ""
    since_s: float = 0.0
    """When this stage began, in seconds since 1970."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Stage:
        """Raises StateError."""
        try:
            words = json.loads(text)
            found = cls(tuple(map(str, words["trusted"])), str(words["signing"]), float(words["since_s"]))
        except (ValueError, LookupError, TypeError) as error:
            raise StateError(f"{text[:100]!r} says no roots of a run: {error}") from None
        if found.signing not in (*found.trusted, ""):
            raise StateError(f"{text[:100]!r}: the root that signs is not trusted")
        return found


class Roots(Protocol):
    """Those that one coordinator has."""

    told: list[Callable[[], None]]
    """They hear when others are in force."""

    @property
    def stage(self) -> Stage: ...

    def held(self) -> frozenset[str]:
        """The digests of all whose certificate and key are here, trusted or not."""

    def follow(self, stage: Stage) -> bool:
        """Of the coordinator that leads. Whether that is another one. Raises ConfigError where a root is not here, and
        HostError."""


class NoRoots:
    """In plain text."""

    def __init__(self) -> None:
        self.told: list[Callable[[], None]] = []
        self.stage = Stage()

    def held(self) -> frozenset[str]:
        return frozenset()

    def follow(self, stage: Stage) -> bool:
        check_held(stage, self.stage, frozenset())
        return False


def check_held(stage: Stage, own: Stage, held: frozenset[str]) -> None:
    """Raises ConfigError unless a coordinator of stage `own` that holds these can go on from `stage`."""
    if lacking := [digest for digest in stage.trusted if digest not in held]:
        wanted = f"root {lacking[0][:16]}"
    elif own.trusted and not stage.trusted:
        wanted = "none (plain text)"
    else:
        return
    has = f"root {own.signing[:16]}" if own.trusted else "none (plain text)"
    raise ConfigError(
        f"the run's root is another one: {wanted}, this coordinator has {has}. Sites would not know it: give it the "
        "files of the coordinator that leads (root.pem and root.key, after `atoll rotate` root-2.pem and root-2.key "
        "too) in the folder of its own root (--trust DIR)"
    )
