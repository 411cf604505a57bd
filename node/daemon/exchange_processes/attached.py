"""The exchange processes of a host, as its node knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.node import process_protocol as processes
from atoll.node.daemon.rank_connection import RankConnection
from atoll.node.daemon.shared_exchanges import Changes
from atoll.node.daemon.shared_products import AttemptKey
from atoll.node.host_protocol import HostBeat
from atoll.protocol import messages as m


@dataclass(slots=True, kw_only=True, eq=False)
class AttachedProcess:
    """From its start until it has ended."""

    number: int
    words: str  # for people
    connection: RankConnection
    is_laid_out: bool = False  # it can take part in exchanges
    has_worked: bool = False  # in an exchange
    beat: HostBeat | None = None  # the last
    done: dict[AttemptKey, m.Done] = field(default_factory=dict)

    def say(self, message: processes.ProcessTold, descriptors: tuple[int, ...] = ()) -> None:
        self.connection.send_frame(processes.told(message), descriptors)


class Processes(Changes, dict[int, AttachedProcess]):
    """By number: those that are ready. `until` wakes when any of them has changed."""

    def __init__(self, num: int) -> None:
        """`num`: beside the node itself."""
        super().__init__()
        self.numbers = range(1, num + 1)

    @property
    def not_ready(self) -> list[int]:
        """Those that cannot take part in an exchange now."""
        return [number for number in self.numbers if number not in self or not self[number].is_laid_out]

    def is_here(self, part: AttachedProcess) -> bool:
        """Not lost, and not started anew since."""
        return self.get(part.number) is part
