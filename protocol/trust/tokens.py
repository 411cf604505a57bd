"""A viewer's token, for what speaks HTTP and has no certificate: the run's root has signed it, so that every part of
the run can check it. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.protocol.errors import InvalidMessage
from atoll.protocol.trust import certificates
from atoll.protocol.trust.certificates import Certificate, PrivateKey

CONTEXT = b"atoll/viewer-token/v1\0"
"""In front of what is signed: no certificate begins so."""
MAX_CHARACTERS = 1024
MAX_TOKENS = 4096
"""That a run knows."""
MAX_ID_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Token:
    run_id: str
    name: str
    """Of the viewer."""
    token_id: str
    expires_s: int
    """In seconds since 1970."""
    is_of_nodes: bool = False
    """For the metrics of nodes, to which a Prometheus shows it: no member may look at the run by what it is shown."""


def to_text(token: Token, root_key: PrivateKey) -> str:
    said = json.dumps(
        [token.run_id, token.name, token.token_id, token.expires_s, token.is_of_nodes], separators=(",", ":")
    ).encode()
    return f"{_text(said)}.{_text(certificates.signature(root_key, CONTEXT + said))}"


def from_text(text: str, roots: Sequence[Certificate]) -> Token:
    """Raises InvalidMessage for what none of these roots has signed. Whether it has expired is not looked at."""
    if len(text) > MAX_CHARACTERS:
        raise InvalidMessage(f"a token of {len(text)} characters, at most {MAX_CHARACTERS} may be")
    said, _, signature = text.partition(".")
    try:
        data, signed = _bytes(said), _bytes(signature)
    except (ValueError, binascii.Error):
        raise InvalidMessage("not a token") from None
    if not any(certificates.is_signature(root, CONTEXT + data, signed) for root in roots):
        raise InvalidMessage("a token that this run has not given out")
    return Token(*json.loads(data))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
