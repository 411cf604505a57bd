"""What a process shows is replaced in time, while all goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
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
    certificate = certificates.from_pem(shown.certificate)[0]
    made = certificate.not_valid_before_utc + certificates.CLOCKS_DIFFER_BY
    return made.timestamp() + RENEWED_AFTER * (certificate.not_valid_after_utc - made).total_seconds()


class Renewed(Protocol):
    """What shows a certificate: MutualTls, ServerTls."""

    @property
    def shown(self) -> Shown:
        """What it shows now."""

    def show(self, shown: Shown) -> None:
        """From now on."""


async def keep_in_force(
    tls: Renewed,
    renew: Callable[[], Awaitable[Shown]],
    wall_time: Callable[[], float],
) -> None:
    """Until it is cancelled. A renewal that fails is said, and tried again."""
    due, problem = due_s(tls.shown), ""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if wall_time() < due:
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
        log.info("the certificate is renewed")
