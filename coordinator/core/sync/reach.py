"""Who can dial whom: which peers each site probes, and what their reports mean for a plan. Pure.

A contributor dials the reducers and nobody dials it, so a site that cannot be dialled contributes; it reduces nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.protocol import messages as m

MAX_NAMED = 8
"""Sites in one reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`problem`: why there can be no sync of these sites now."""

    contributors: list[Site]
    not_reducing: frozenset[int] = frozenset()
    left_out: str = ""
    problem: str = ""


Fits = Callable[[list[Site], frozenset[int]], bool]
"""Whether these contributors can reduce a sync of theirs without those who may not."""


def choose(
    contributors: list[Site],
    quorum: int,
    fits: Fits = lambda contributors, not_reducing: True,
    held_back: frozenset[int] = frozenset(),
) -> Choice:
    """Who reduces nothing because another contributor cannot dial it.

    If nobody is left to reduce, or too little memory, the fewest sites are left out, so that one can be dialled by all
    the others. Where that does not help, the first of these is chosen. Who is `held_back` is to reduce only if no
    others can, and does not become the one who reduces by its own word that it cannot dial these, while they can dial
    each other.
    """
    blind = _blind(contributors)
    undialled = frozenset(r for r, sites in blind.items() if sites)
    if undialled and held_back and all(s.site_id in undialled or s.site_id in held_back for s in contributors):
        said = held_back & set[int]().union(*blind.values())
        rest = [s for s in contributors if s.site_id not in said]
        found = choose(rest, quorum, fits) if said and len(rest) >= max(2, quorum) else None
        if found is not None and not found.problem and not found.left_out:
            who = ", ".join(s.label for s in contributors if s.site_id in said)
            return replace(found, left_out=f"; without {who}, who cannot dial those who reduce")
    everybody = Choice(contributors=contributors, not_reducing=undialled)
    some_reduce = len(undialled) < len(contributors)
    if not undialled or (some_reduce and fits(contributors, undialled)):
        return everybody
    choices = [everybody] if some_reduce else []
    names = {s.site_id: s.label for s in contributors}
    for best in sorted(undialled, key=lambda r: (len(blind[r]), r)):
        rest = [s for s in contributors if s.site_id not in blind[best]]
        if len(rest) < max(2, quorum):
            break  # as it would be without those who are next
        choice = Choice(
            contributors=rest,
            not_reducing=frozenset(r for r, sites in _blind(rest).items() if sites),
            left_out=f"; without {', '.join(names[i] for i in sorted(blind[best]))}, who cannot dial {names[best]}",
        )
        if fits(rest, choice.not_reducing):
            return choice
        choices.append(choice)
    return choices[0] if choices else Choice(contributors=contributors, problem=_nobody(contributors, blind))


def _blind(contributors: Sequence[Site]) -> dict[int, set[int]]:
    """Of each contributor: the others that cannot dial it."""
    blind: dict[int, set[int]] = {s.site_id: set() for s in contributors}
    for site in contributors:
        for peer in site.unreachable_site_ids:
            if peer in blind and peer != site.site_id:
                blind[peer].add(site.site_id)
    return blind


def _nobody(contributors: Sequence[Site], blind: dict[int, set[int]]) -> str:
    names = {s.site_id: s.name for s in contributors}
    parts = [
        f"{s.name} at {s.address} not by {', '.join(names[i] for i in sorted(blind[s.site_id])[:MAX_NAMED])}"
        for s in contributors[:MAX_NAMED]
    ]
    more = "; ..." if len(contributors) > MAX_NAMED else ""
    return (
        f"no site can be dialled by the others ({'; '.join(parts)}{more}); open one to the others, with --listen and "
        "--advertise HOST:PORT"
    )


def not_dialled_by(run: Run) -> dict[int, tuple[str, ...]]:
    """Of each site that is here: who says that it cannot dial it. For people."""
    found: dict[int, list[str]] = {}
    for site in run.members.live():
        for peer in site.unreachable_site_ids:
            found.setdefault(peer, []).append(site.name)
    return {site_id: tuple(names) for site_id, names in found.items()}


# --- who probes whom


class Roster:
    """What each stream was told. Every site probes the ones after it in the order of ids, so that each is probed by as
    many others, and a change of one site is news for few."""

    def __init__(self) -> None:
        self._members: dict[int, m.Member] = {}
        self._seen: list[tuple[int, int, str, tuple[m.Endpoint, ...], int | None]] = []
        self._told: dict[int, tuple[m.Member, ...]] = {}  # by stream

    def tell(self, run: Run) -> None:
        """Peers to those for whom they have changed, or whose stream is new."""
        sites = run.members.live()
        seen = [(s.site_id, s.incarnation, s.address, s.endpoints, s.stream) for s in sites]
        if seen == self._seen:
            return
        self._seen = seen
        ring = [self._member(site) for site in sites]
        self._members = {member.site_id: member for member in ring}
        told: dict[int, tuple[m.Member, ...]] = {}
        count = min(m.MAX_PROBED, len(ring) - 1)
        ring += ring[:count]
        for place, site in enumerate(sites):
            if site.stream is None:
                continue
            peers = told[site.stream] = tuple(ring[place + 1 : place + 1 + count])
            if peers != self._told.get(site.stream, ()):
                run.send(site, m.Peers(members=peers))
        self._told = told

    def _member(self, site: Site) -> m.Member:
        """The same object while nothing about it has changed: comparing a thousand lists takes no time then."""
        known = self._members.get(site.site_id)
        now = site.incarnation, site.address, site.endpoints
        if known is not None and (known.incarnation, known.address, known.endpoints) == now:
            return known
        return site.member()
