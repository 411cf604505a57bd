"""What a process shows is replaced in time, while all goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import Protocol

from atoll.protocol.dates import utc
from atoll.protocol.errors import AtollError
from atoll.protocol.trust import certificates
from atoll.protocol.trust.security import Shown

log = logging.getLogger(__name__)

RENEWED_AFTER = 2 / 3
"""Of its life."""
LOOK_EVERY_S = 30.0
"""By the wall clock: a machine that was suspended finds out when it is back."""


def due_s(shown: Shown) -> float:
    """When it is to be replaced, in seconds since 1970."""
    until_s = certificates.from_pem(shown.certificate)[0].not_valid_after_utc.timestamp()
    return until_s - (1.0 - RENEWED_AFTER) * _life_s(shown)


def _life_s(shown: Shown) -> float:
    certificate = certificates.from_pem(shown.certificate)[0]
    made = certificate.not_valid_before_utc + certificates.CLOCKS_DIFFER_BY
    return (certificate.not_valid_after_utc - made).total_seconds()


class Renewed(Protocol):
    """What shows a certificate: MutualTls, ServerTls."""

    @property
    def shown(self) -> Shown:
        """What it shows now."""

    def show(self, shown: Shown) -> None:
        """From now on."""


def _is_of_first_root(shown: Shown) -> bool:
    """Which signs now."""
    certificate = certificates.from_pem(shown.certificate)[0]
    return certificates.is_signed_by(certificate, certificates.from_pem(shown.roots)[0])


async def keep_in_force(
    tls: Renewed,
    renew: Callable[[], Awaitable[Shown]],
    wall_time: Callable[[], float],
    wake: asyncio.Event | None = None,
) -> None:
    """Until it is cancelled. It is due at its time by the wall clock, or as much later by this process's own, whichever
    comes first: a wall clock may be set back; and when another root signs. A renewal that fails is said, and tried
    again. `wake`: look now."""
    own_time, wake = asyncio.get_running_loop().time, wake or asyncio.Event()
    due, problem = due_s(tls.shown), ""
    due_at = own_time() + max(0.0, due - wall_time())
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await wake.wait()
        wake.clear()
        if wall_time() < due and own_time() < due_at and _is_of_first_root(tls.shown):
            continue
        try:
            shown = await renew()
            tls.show(shown)
        except Exception as error:  # whatever it is: without a renewal nobody is reached any more
            if (words := str(error) or type(error).__name__) != problem:
                problem = words
                until = certificates.from_pem(tls.shown.certificate)[0].not_valid_after_utc.timestamp()
                is_fault = not isinstance(error, AtollError)
                log.log(
                    logging.ERROR if is_fault else logging.WARNING,
                    "the certificate, which holds until %s, is not renewed yet: %s",
                    utc(until), problem, exc_info=is_fault,
                )  # fmt: skip
            continue
        due, problem = due_s(shown), ""
        due_at = own_time() + RENEWED_AFTER * _life_s(shown)
        log.info("the certificate is renewed")
        if wall_time() >= due:
            log.warning("this machine's clock says %s, when a new certificate would be old: set it", utc(wall_time()))
            due = inf
