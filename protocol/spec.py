"""What travels in a sync, and what is made of it: pure, of the run's settings, so that all parties compute the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from atoll.protocol.codecs import bundles, max_encoded_bytes, parse_header, peek_codec
from atoll.protocol.codecs.table import BUNDLE, DENSE, SPARSE, UNCHANGED
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Role
from atoll.protocol.sync_settings import SyncSettings

Data = bytes | bytearray | memoryview


class Contribution(Enum):
    DELTA = "base minus local"
    GRADIENT = "of the base"
    MOMENTUM = "the base's momentum, moved by a gradient of the base"
    LOCAL_MOMENTUM = "the mean of the momenta of steps that the site did by itself"
    VALUE = "the value itself, or that it is what the base has"


class Aggregation(Enum):
    MEAN = "weighted by tokens"
    LOWEST = "the bytes of the lowest contributor"
    BUNDLE = "over the sites that sent an element"
    """Weighted by tokens, by each site as it applies the contributions."""
    BUNDLE_OVER_ALL = "over all sites"

    @property
    def is_bundle(self) -> bool:
        return self in (Aggregation.BUNDLE, Aggregation.BUNDLE_OVER_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the chunks with one role travel."""

    up: str
    """Codec of contributions."""
    down: str
    """Codec of payloads."""
    contribution: Contribution
    aggregation: Aggregation
    robust: str = "off"
    """Of buffers always."""
    clip: float = 0.0
    """Times the median norm: a norm above that is high, unless `robust` is off."""
    trim: int = 0
    error_beta_down: float = 0.0
    """Of the error of an average that its reducer adds to its next one; 0: it is lost."""

    @property
    def clipped(self) -> float:
        """Times the median norm, at which contributions are clipped; 0: they are not."""
        return self.clip if self.robust == "clip" else 0.0

    @property
    def by_influence(self) -> bool:
        """Whether contributions are weighted by what the coordinator finds by their inner products, not by tokens."""
        return self.robust == "gram"

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
        """The most that one encoding of such a chunk has: a contribution or, unless it is a bundle, a payload."""
        way = self.of(role)
        codecs = [way.up] if way.aggregation.is_bundle else [way.up, way.down]
        return max(max_encoded_bytes(codec, num_elements, itemsize) for codec in codecs)

    def payload_bytes(self, role: Role, num_elements: int, itemsize: int, num_contributors: int) -> int:
        """The most that a payload of such a chunk has in a sync of so many contributors."""
        way = self.of(role)
        if way.aggregation.is_bundle:
            return bundles.max_bundle_bytes(way.up, num_elements, num_contributors, is_clipped=way.clipped > 0)
        return max_encoded_bytes(way.down, num_elements, itemsize)


_CONTRIBUTIONS = {
    "diloco": Contribution.DELTA,
    "gradient": Contribution.GRADIENT,
    "momentum": Contribution.MOMENTUM,
}


def spec_of(settings: SyncSettings, base_commit: int, fragment: int) -> Spec:
    """Of the sync of `fragment` that starts from `base_commit`, as its plan says."""
    aggregation = Aggregation.MEAN
    up, down, contribution = settings.codec_up, settings.codec_down, _CONTRIBUTIONS[settings.strategy]
    if settings.strategy == "momentum" and settings.phases.is_local(base_commit + 1):
        contribution = Contribution.LOCAL_MOMENTUM
    if moves_variance := settings.moves_variance(base_commit):
        up, down, contribution = settings.warmup_codec, settings.warmup_codec, Contribution.GRADIENT
    if settings.codec_down == BUNDLE:
        aggregation = Aggregation.BUNDLE_OVER_ALL if settings.mean_over == "all" else Aggregation.BUNDLE
    return Spec(
        trainable=Way(
            up=up,
            down=down,
            contribution=contribution,
            aggregation=aggregation,
            robust=settings.robust,
            clip=settings.clip,
            trim=settings.trim if settings.robust == "trim" else 0,
            error_beta_down=0.0 if moves_variance else settings.error_feedback_down,
        )
    )


def specs_of(settings: SyncSettings) -> tuple[Spec, ...]:
    """All that syncs of the run may have."""
    bases = 0, settings.warmup_commits, settings.warmup_commits + settings.local_doubling
    return tuple(dict.fromkeys(spec_of(settings, base, 0) for base in bases))


def codecs_of(settings: SyncSettings) -> tuple[str, str]:
    """Of trainable values, up and down, for people: `bf16+sign1` where syncs of the run have one or the other."""
    ways = [spec.trainable for spec in specs_of(settings)]
    return "+".join(dict.fromkeys(way.up for way in ways)), "+".join(dict.fromkeys(way.down for way in ways))


def most_bundled(codec: str) -> int:
    """The most sites whose links bundles keep busy for no longer than codec int4 in both directions. Of every element
    a site sends what it contributes, and as a reducer, of its share of them, the contributions of all to all."""
    one, dense = (max_encoded_bytes(name, 1 << 24) for name in (codec, "int4"))
    return 2 * dense // one - 1  # of n sites: one + n * one against 2 * dense, each times (n - 1) / n


def too_many_bundled(codec: str, num_sites: int) -> str:
    """Why so many sites had better have another codec, for a person; empty where they had not."""
    if codec not in SPARSE or num_sites <= (most := most_bundled(codec)):
        return ""
    return (
        f"with {num_sites} sites {codec} sends more than 4 bits a parameter in each direction would: each site gets "
        f"what all others send. Above {most} sites take codec int4, or up sign1"
    )


# --- payloads that are at hand without the settings of their run


def payload_codec(role: Role, data: Data) -> str:
    """Raises InvalidMessage if no run has such a payload."""
    codec = peek_codec(data)
    if role is not Role.TRAINABLE:
        return _BUFFERS[role].codec_in(data, _BUFFERS[role].down)
    if codec not in (*DENSE, BUNDLE):
        raise InvalidMessage(f"encoded chunk: codec {codec} carries no average of pseudo-gradients")
    return codec


def check_payload(role: Role, data: Data, num_elements: int, dtype: str) -> None:
    """Raises InvalidMessage unless `data` has the header and size of a payload of such a chunk in some run."""
    codec = payload_codec(role, data)
    if codec == BUNDLE:
        bundles.split(data, num_elements)
    else:
        parse_header(data, codec=codec, num_elements=num_elements, dtype=dtype)


@lru_cache(1024)
def max_payload_bytes(role: Role, num_elements: int, itemsize: int, num_contributors: int) -> int:
    codecs = DENSE if role is Role.TRAINABLE else (_BUFFERS[role].down,)
    dense = max(max_encoded_bytes(codec, num_elements, itemsize) for codec in codecs)
    bundled = max(bundles.max_bundle_bytes(codec, num_elements, num_contributors, is_clipped=True) for codec in SPARSE)
    return max(dense, bundled) if role is Role.TRAINABLE else dense
