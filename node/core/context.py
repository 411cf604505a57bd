"""What the parts of the core share while one event is handled: the site's state, the clock, what is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.node.core.events import Event, WorkersJoined
from atoll.node.core.outputs import Output, Report, Send
from atoll.node.core.ranks.generations import Generations
from atoll.node.core.state import SiteState
from atoll.protocol.messages import Hello, SiteMessage
from atoll.protocol.settings import RunSettings
from atoll.protocol.time_limits import TimeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteIdentity:
    """What does not change of this start of the node."""

    hello: Hello
    """But for what it holds."""
    incarnation: int
    bandwidth_bytes_per_s: int = 0
    start_limit_s: float = 0.0
    """Of its workers, up to their first step, in place of the run's; 0: the run's."""


@dataclass(slots=True, kw_only=True)
class Context:
    identity: SiteIdentity
    settings: RunSettings
    limits: TimeLimits
    site: SiteState
    ranks: Generations
    now: float
    settings_json: str = ""  # as in Welcome
    joined: WorkersJoined | None = None  # what the workers are, and the site offers
    inbox: list[Event] = field(default_factory=list)  # the event that is handled, and what follows from it
    out: list[Output] = field(default_factory=list)

    def begin(self, event: Event, now: float) -> None:
        """What was before is handled."""
        self.now, self.inbox = now, [event]

    def happens(self, event: Event) -> None:
        """Handled after all that was before."""
        self.inbox.append(event)

    def emit(self, output: Output) -> None:
        """Wanted after all that was before."""
        self.out.append(output)

    def take(self) -> list[Output]:
        """What is wanted, once."""
        out, self.out = self.out, []
        return out

    def send(self, message: SiteMessage) -> None:
        """To the coordinator; dropped while there is none: everything is said again when the session is back."""
        if self.site.connected:
            self.emit(Send(message))

    def report(self, level: int, text: str) -> None:
        """A line for a person."""
        self.emit(Report(level, text))
