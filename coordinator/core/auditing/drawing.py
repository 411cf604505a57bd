"""Which chunk of a commit is audited, and by whom: drawn from the payloads' digest and a secret of the coordinator.
Pure.

The digest is fixed before anything is drawn, so no payload is made to fit a draw; without the secret no reducer knows
which of its chunks will be looked at, nor which site might be persuaded.
"""

from __future__ import annotations

from atoll.protocol.digest import Digest


def draw(secret: bytes, payload_digest: bytes, purpose: str, number: int, num_choices: int) -> int:
    """One of so many, each as likely as another one: 256 bits leave no bias that counts. `number`: of the draw, where
    there are several for one purpose."""
    digest = Digest("atoll/audit/v1").data(secret).data(payload_digest).text(purpose).uint(number)
    return int.from_bytes(digest.finish(), "little") % num_choices


def odds_of_finding(*, num_reducers: int, num_audits: int, num_syncs: int, share_of_lies: float = 1.0) -> float:
    """That a reducer which lies in this share of its chunks is found, where all reducers have as many chunks."""
    return 1 - (1 - share_of_lies / num_reducers) ** (num_audits * num_syncs)
