"""The core of a node: a site's state machine, and the ranks of its workers with the deadlines that they have."""

from __future__ import annotations

import logging

from atoll.node.core import events as e
from atoll.node.core.context import SiteIdentity
from atoll.node.core.disk import Outer
from atoll.node.core.ranks.generations import Generations
from atoll.node.core.site import SiteCore
from atoll.protocol.settings import RunSettings


class NodeCore(SiteCore):
    """As `SiteCore`. What the ranks say goes to `ranks.group`, and what follows from it comes here as an event."""

    def __init__(
        self,
        identity: SiteIdentity,
        settings: RunSettings,
        held: Outer | None,
        now: float,
        *,
        branch: int,
        num_ranks: int,
    ) -> None:
        super().__init__(identity, settings, held, now, branch=branch)
        self.ranks = Generations(now)
        self._num_ranks = num_ranks

    def handle(self, event: e.Event, now: float) -> list[e.Output]:
        """Begins and ends generations as the site wants it. One that has crashed, or hangs, is described by the shell,
        which knows what it printed last."""
        self.ranks.seen(now, self.limits)
        workers = self.site.workers
        is_run = workers.running and self.site.exit is None
        match event:
            case e.Tick() if is_run and (text := self.ranks.overdue(now, self.limits)):
                self._crashed(workers.generation, text, has_exited=False)
            case e.WorkersLost():
                self.ranks.lost(event, now)
            case e.WorkersExited(generation=generation, code=code, text=text):
                self.ranks.exited(generation)
                if is_run:
                    self._crashed(generation, text, has_exited=True)
                else:
                    return [e.Report(logging.ERROR, f"after they had left the run {text}")] if code else []
            case e.WorkersFailed(generation=generation, kind=e.FailureKind.CRASHED):
                self.ranks.crashed(generation)
        outputs = super().handle(event, now)
        for output in outputs:
            if isinstance(output, e.StartWorkers):
                self.ranks.begin(output.generation, self._num_ranks, now)
            elif isinstance(output, e.StopWorkers):
                self.ranks.end()
        return outputs

    def _crashed(self, generation: int, text: str, *, has_exited: bool) -> None:
        num_steps = self.ranks.num_steps
        self.ctx.emit(e.DescribeCrash(generation=generation, text=text, num_steps=num_steps, has_exited=has_exited))

    def next_deadline(self) -> float | None:
        """Also that of the ranks, while they run."""
        site_s, ranks_s = super().next_deadline(), None
        if self.site.workers.running and self.site.exit is None:
            ranks_s = self.ranks.next_deadline(self.limits)
        return min((t for t in (site_s, ranks_s) if t is not None), default=None)
