"""Why an exchange failed, as a site says it to the coordinator, and a host to the leader of its site. Pure."""

from __future__ import annotations

import sys

from atoll.node.core.exchange_events import Outlying
from atoll.protocol import messages as m
from atoll.protocol.errors import AtollError, AverageError, NoRoomError, PeerError, StateError

MOST = sys.float_info.max
"""The wire carries finite numbers alone."""
LOCAL, HOLDING, AVERAGING = "local", "holding contributions", "averaging"
"""Phases of what is no peer's fault."""


def failure_of(plan: m.Plan, error: Exception, site_id: int) -> m.ExchangeFailed:
    """Whose failure it is: of a peer, of this site that has no room, of an average, or of this machine."""
    direction, phase, peer, tensor = m.Direction.RECEIVING, LOCAL, 0, ""
    outliers: tuple[m.Outlier, ...] = ()
    match error:
        case PeerError():
            direction = m.Direction.SENDING if error.sending else direction
            phase, peer = error.phase, error.peer_site_id
        case NoRoomError():
            phase, peer = HOLDING, site_id
        case AverageError():
            phase, tensor = AVERAGING, error.tensor
            outliers = tuple(outlier_of(outlying) for outlying in error.outliers)
    return m.ExchangeFailed(
        sync=plan.sync,
        attempt=plan.attempt,
        term=plan.term,
        peer_site_id=peer,
        direction=direction,
        phase=phase[:64],
        text=str(error)[:1024],
        tensor=tensor[:1024],
        outliers=outliers,
    )


def error_of(failed: m.ExchangeFailed, who: str, site_id: int) -> AtollError:
    """The inverse, of what `who` said, a host of this site."""
    text = f"{who}: {failed.text}"
    if failed.phase == HOLDING:
        return NoRoomError(text)
    if failed.phase == AVERAGING:
        return AverageError(text, failed.tensor, tuple((o.site_id, o.norm, o.limit) for o in failed.outliers))
    if failed.peer_site_id not in (0, site_id):
        sending = failed.direction is m.Direction.SENDING
        return PeerError(text, failed.peer_site_id, sending=sending, phase=failed.phase)
    return StateError(text)


def outlier_of(found: Outlying) -> m.Outlier:
    """As it travels."""
    site_id, norm, limit = found
    return m.Outlier(site_id=site_id, norm=min(norm, MOST), limit=min(limit, MOST))
