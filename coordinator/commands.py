"""What an operator says to a coordinator, on its own machine (admin.py) or from elsewhere: one line of JSON, which has
the command and the fields of its event (core/asked.py). `{"command": "stop", "reason": "..."}`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from atoll.coordinator.core.events import (
    Asked,
    AuditAsked,
    BanAsked,
    DrainAsked,
    EvictAsked,
    InviteAsked,
    LiftBanAsked,
    PauseAsked,
    ResetAsked,
    ResumeAsked,
    RollbackAsked,
    RotateAsked,
    SetAsked,
    StopAsked,
    TakeBackAsked,
)
from atoll.protocol import strict
from atoll.protocol.errors import ConfigError
from atoll.protocol.line_socket import MAX_LINE_BYTES
from atoll.protocol.text import clean

MAX_TEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusAsked:
    """The run, as on /status.json."""

    data_ranges: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupAsked:
    """A copy of the store, whole as of one moment; on the coordinator's own machine alone."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthAsked:
    """Whether it can do its work."""


COMMANDS: dict[str, type[Asked] | type[StatusAsked] | type[HealthAsked] | type[BackupAsked]] = {
    "stop": StopAsked,
    "pause": PauseAsked,
    "resume": ResumeAsked,
    "set": SetAsked,
    "drain": DrainAsked,
    "rollback": RollbackAsked,
    "evict": EvictAsked,
    "ban": BanAsked,
    "lift-ban": LiftBanAsked,
    "reset": ResetAsked,
    "invite": InviteAsked,
    "take-back": TakeBackAsked,
    "rotate": RotateAsked,
    "audit": AuditAsked,
    "status": StatusAsked,
    "health": HealthAsked,
    "backup": BackupAsked,
}
NOT_ASKED_FOR = frozenset({"by", "request", "invite_id", "since_s"})
"""Fields of events that the coordinator fills in."""


def read(line: bytes, by: str) -> Asked | StatusAsked | HealthAsked | BackupAsked:
    """What that person asks for, with texts as they can be kept and sent: a terminal of another encoding types what is
    none. Raises ConfigError for what is no command."""
    try:
        request = json.loads(line) if len(line) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from None
    if not isinstance(request, dict) or request.get("command") not in list(COMMANDS):
        raise ConfigError(f"commands are {', '.join(COMMANDS)}")
    command = request.pop("command")
    if taken := NOT_ASKED_FOR & request.keys():
        raise ConfigError(f"{', '.join(sorted(taken))} cannot be said")
    fields = {key: clean(value)[:MAX_TEXT] if isinstance(value, str) else value for key, value in request.items()}
    asked = strict.build(COMMANDS[command], fields, command)
    return replace(asked, by=by) if isinstance(asked, Asked) else asked


def line_of(command: str, **fields: object) -> bytes:
    """What `read` reads."""
    return json.dumps({"command": command, **fields}).encode()
