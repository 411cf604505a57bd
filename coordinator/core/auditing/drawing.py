"""Which chunk of a commit is audited, and by whom: drawn from the payloads' digest and a secret of the coordinator.
Pure.

The digest is fixed before anything is drawn, so no payload is made to fit a draw; without the secret no reducer knows
which of its chunks will be looked at, nor which site might be persuaded. The secret's digest is in the audit log before
the first draw and the secret itself after the last, so whoever looks later knows that no draw was chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from atoll.protocol.digest import Digest
from atoll.protocol.sync_settings import AUDITED_STEPS, SyncSettings


def draw(secret: bytes, payload_digest: bytes, purpose: str, number: int, num_choices: int) -> int:
    """One of so many, each as likely as another one: 256 bits leave no bias that counts. `number`: of the draw, where
    there are several for one purpose."""
    digest = Digest("atoll/audit/v1").data(secret).data(payload_digest).text(purpose).uint(number)
    return int.from_bytes(digest.finish(), "little") % num_choices


def is_drawn(secret: bytes, payload_digest: bytes, sync: SyncSettings) -> bool:
    """Whether a commit is audited. Not by how many audits are open: who keeps them open would know when to lie."""
    return not sync.steps_at_nodes or not draw(secret, payload_digest, "commit", 0, AUDITED_STEPS)


COMMITTED, REVEALED = "draw audits digest=", "drew audits secret="
"""Entries of the audit log, before the hexadecimal digits."""
_DRAWN = re.compile(
    r"audit: draw (\d{1,9}) of commit \d+, secret ([0-9a-f]{64}), payloads ([0-9a-f]{64}): "
    r"place (\d+) of ([1-9]\d{0,9})\b"
)


def secret_digest(secret: bytes) -> bytes:
    """What is said of it before it is used."""
    return Digest("atoll/audit-secret/v1").data(secret).finish()


def drawn_in_words(  # noqa: PLR0917
    secret: bytes, commit: int, payload_digest: bytes, number: int, place: int, num_choices: int
) -> str:
    """A line of the log: which of the chunks that have a payload is audited."""
    return (
        f"audit: draw {number} of commit {commit}, secret {secret_digest(secret).hex()}, payloads "
        f"{payload_digest.hex()}: place {place} of {num_choices}"
    )


def check_draws(entries: Iterable[str], lines: Iterable[str]) -> tuple[int, int]:
    """How many draws in the lines of a coordinator's log come of secrets that the audit log says in `entries`, and how
    many are of a secret that it does not say yet. Raises ValueError for a draw that was chosen, or a secret whose
    digest was not said before."""
    committed: set[str] = set()
    secrets: dict[str, bytes] = {}
    for entry in entries:
        if entry.startswith(COMMITTED):
            committed.add(entry.removeprefix(COMMITTED))
        elif entry.startswith(REVEALED):
            secret = bytes.fromhex(entry.removeprefix(REVEALED))
            secrets[secret_digest(secret).hex()] = secret
            if not committed.issuperset(secrets):
                raise ValueError(f"the digest of the secret {secret.hex()} was not said before its draws")
    num_right = num_open = 0
    for line in lines:
        if (found := _DRAWN.search(line)) is None:
            continue
        number, digest, payloads, place, num_choices = found.groups()
        if digest not in committed:
            raise ValueError(f"a draw with a secret whose digest was not said before: {line.strip()}")
        if (known := secrets.get(digest)) is None:
            num_open += 1
        elif draw(known, bytes.fromhex(payloads), "chunk", int(number), int(num_choices)) == int(place):
            num_right += 1
        else:
            raise ValueError(f"a draw that was chosen: {line.strip()}")
    return num_right, num_open


def odds_of_finding(*, num_reducers: int, num_audits: int, num_syncs: int, share_of_lies: float = 1.0) -> float:
    """That a reducer which lies in this share of its chunks is found, where all reducers have as many chunks."""
    return 1 - (1 - share_of_lies / num_reducers) ** (num_audits * num_syncs)
