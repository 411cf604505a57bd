"""What travels in a sync, and what is made of it: pure, of the run's settings, so that all parties compute the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from atoll.protocol.codecs import max_encoded_bytes, peek_codec
from atoll.protocol.codecs.table import CODECS, UNCHANGED
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Role
from atoll.protocol.settings import SyncSettings

Data = bytes | bytearray | memoryview


class Contribution(Enum):
    DELTA = "base minus local"
    VALUE = "the value itself, or that it is what the base has"


class Aggregation(Enum):
    MEAN = "weighted by tokens"
    LOWEST = "the bytes of the lowest contributor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the chunks with one role travel."""

    up: str
    """Codec of contributions."""
    down: str
    """Codec of payloads."""
    contribution: Contribution
    aggregation: Aggregation

    def codec_in(self, data: Data, codec: str) -> str:
        """Of `data`, which must be `codec`, unless it may say that nothing has changed. Raises InvalidMessage if it
        names no codec."""
        is_unchanged = self.contribution is Contribution.VALUE and peek_codec(data) == UNCHANGED
        return UNCHANGED if is_unchanged else codec


_BUFFERS = {
    Role.BUFFER_MEAN: Way(up="fp32", down="fp32", contribution=Contribution.VALUE, aggregation=Aggregation.MEAN),
    Role.BUFFER_LOWEST: Way(up="raw", down="raw", contribution=Contribution.VALUE, aggregation=Aggregation.LOWEST),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Of one sync."""

    trainable: Way

    def of(self, role: Role) -> Way:
        return self.trainable if role is Role.TRAINABLE else _BUFFERS[role]

    def max_bytes(self, role: Role, num_elements: int, itemsize: int) -> int:
        """The most that a contribution or payload of such a chunk has."""
        way = self.of(role)
        return max(max_encoded_bytes(codec, num_elements, itemsize) for codec in (way.up, way.down))


def spec_of(settings: SyncSettings, base_commit: int, fragment: int) -> Spec:
    """Of the sync of `fragment` that starts from `base_commit`, as its plan says."""
    return Spec(
        trainable=Way(
            up=settings.codec_up,
            down=settings.codec_down,
            contribution=Contribution.DELTA,
            aggregation=Aggregation.MEAN,
        )
    )


# --- payloads that are at hand without the settings of their run


def payload_codec(role: Role, data: Data) -> str:
    """Raises InvalidMessage if no run has such a payload."""
    codec = peek_codec(data)
    if role is not Role.TRAINABLE:
        return _BUFFERS[role].codec_in(data, _BUFFERS[role].down)
    if codec not in CODECS:
        raise InvalidMessage(f"encoded chunk: codec {codec} carries no pseudo-gradient")
    return codec


def max_payload_bytes(role: Role, num_elements: int, itemsize: int) -> int:
    codecs = CODECS if role is Role.TRAINABLE else (_BUFFERS[role].down,)
    return max(max_encoded_bytes(codec, num_elements, itemsize) for codec in codecs)
