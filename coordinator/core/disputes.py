"""Sites that hold different states of one commit, as many on each side: they check their own bytes, and whose are
damaged is wrong. If that does not tell, the run is paused and names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.coordinator.core.membership import Site


@dataclass(slots=True)
class Dispute:
    commit: int
    until: float  # a run that is told to stop does not wait for answers any longer
    asked: dict[int, int] = field(default_factory=dict)  # site id -> stream on which it was asked
    damaged: dict[int, int] = field(default_factory=dict)  # site id -> chunks that are not what they should be

    def to_ask(self, tied: Sequence[Site]) -> list[Site]:
        """Who is to hear Verify now; each stream once."""
        found = [s for s in tied if s.stream is not None and s.site_id not in self.damaged]
        found = [s for s in found if self.asked.get(s.site_id) != s.stream]
        for site in found:
            assert site.stream is not None
            self.asked[site.site_id] = site.stream
        return found

    def wrong(self, tied: Sequence[Site]) -> list[Site]:
        """Those whose bytes are damaged, once all have answered; none if all are, because then nobody is right."""
        if not all(s.site_id in self.damaged for s in tied):
            return []
        damaged = [s for s in tied if self.damaged[s.site_id]]
        return damaged if len(damaged) < len(tied) else []

    def is_over(self, tied: Sequence[Site], now: float) -> bool:
        """Whether no answer can decide it any more, or none came in time."""
        return now >= self.until or all(s.site_id in self.damaged for s in tied)

    def in_words(self, tied: Sequence[Site]) -> str:
        sides: dict[bytes, list[str]] = {}
        for site in tied:
            sides.setdefault(site.state_hash, []).append(site.label)
        hold = ", ".join(f"{' and '.join(names)} {value.hex()[:12]}" for value, names in sides.items())
        text = f"sites hold different states of commit {self.commit} ({hold})"
        if not all(s.site_id in self.damaged for s in tied):
            return f"{text}; their bytes are being checked"
        which = "none" if not any(self.damaged[s.site_id] for s in tied) else "all"
        which += " of them find damage: keep those out that you do not trust (atoll evict NAME --keep-out)"
        return f"{text}, and {which}"
