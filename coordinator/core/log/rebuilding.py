"""What is known of an older commit that the run is to go back to: who was asked for its state, and who has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.coordinator.core.sites.membership import Site
from atoll.protocol import messages as m


@dataclass(slots=True, kw_only=True)
class GoingBack:
    commit: int
    reason: str
    until: float
    """Given up then, if no site has the commit."""
    skip_samples: bool = False
    """Those of the commits that are given up."""
    without: int = 0
    """A site that is left out of the next sync; 0: none."""
    request: int
    """Of a person, who is told how it ends; 0: the core's own."""
    answers: dict[int, m.CommitRebuilt | None] = field(default_factory=dict)
    """By stream on which RebuildCommit was sent; None until it comes."""

    def answer_of(self, site: Site) -> m.CommitRebuilt | None:
        """On the stream that the site has; None while it has not answered there."""
        return None if site.stream is None else self.answers.get(site.stream)
