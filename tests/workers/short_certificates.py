"""The `atoll` command with certificates of seconds, which are renewed as those of a day are."""

from __future__ import annotations

import sys
from datetime import timedelta

from atoll.__main__ import run
from atoll.coordinator import authority
from atoll.protocol.trust import renewing

authority.SESSION_LIFE = timedelta(seconds=12)
renewing.LOOK_EVERY_S = 0.5

if __name__ == "__main__":
    sys.exit(run())
