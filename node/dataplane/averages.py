"""The average of contributions to a chunk: of the site that reduces it, and of whoever computes it once more.

Nothing here looks at the outer state: the same contributions give the same bits at every site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from atoll.node.dataplane.bases import base_of
from atoll.node.dataplane.error_feedback import leave_over
from atoll.node.dataplane.trimming import trimmed_mean
from atoll.protocol import clipping
from atoll.protocol.codecs import arithmetic, bundles, kernels, scratch, unchanged
from atoll.protocol.codecs.table import UNCHANGED
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.spec import Aggregation, Way

Floats = npt.NDArray[np.float32]
LARGEST = np.finfo(np.float32).max
Contributions = Sequence[tuple[int, bytes | Callable[[], bytes]]]
"""Tokens, or where the way is by influence that, and what is encoded or reads it."""


def read(contribution: bytes | Callable[[], bytes]) -> bytes:
    return contribution() if callable(contribution) else contribution


def weights_of(contributions: Contributions) -> list[float]:
    """`tokens_i / sum`. Raises InvalidMessage for tokens of 0, or where there is nothing."""
    total = sum(tokens for tokens, _ in contributions)
    if not contributions or any(tokens <= 0 for tokens, _ in contributions):
        raise InvalidMessage("a reduction in which not every contributor has tokens above 0")
    return [tokens / total for tokens, _ in contributions]


def add_up(way: Way, contributions: Contributions, weights: Sequence[float], average: Floats) -> list[float]:
    """`average := 0 + w_0*v_0 + w_1*v_1 + ...`; the norm of each."""
    average.fill(0)
    added = zip(contributions, weights, strict=True)
    return [kernels.accumulate(read(of), way.up, np.float32(weight), average) for (_, of), weight in added]


def make_robust(
    way: Way, contributions: Contributions, weights: Sequence[float], factors: Sequence[float], average: Floats
) -> None:
    """Changes the average where contributions are clipped, each by its factor, or trimmed; what is trimmed leaves out
    the highest norms first."""
    if way.trim:
        places = clipping.counted(factors, way.trim)
        values = scratch.floats("contributions", len(places) * average.size).reshape(len(places), -1)
        for row, place in zip(values, places, strict=True):
            kernels.decode(read(contributions[place][1]), way.up, average.size, row)
        trimmed_mean(values, [weights[place] for place in places], way.trim, average)
    elif way.clipped and min(factors) < 1:
        clipped = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        add_up(way, contributions, clipped, average)


def encode(way: Way, average: Floats, error: Floats = arithmetic.NOTHING) -> bytes:
    """The payload, with what was lost of averages before. Raises NonFiniteError."""
    return kernels.encode(way.down, average, error=error, beta=np.float32(way.error_beta_down))


def bundle(way: Way, num_elements: int, parts: Sequence[bytes]) -> bytes:
    """What all sites average, and clip, as they apply it."""
    over_all = way.aggregation is Aggregation.BUNDLE_OVER_ALL
    return bundles.join(num_elements, parts, over_all=over_all, clip=way.clipped)


def recomputed(
    way: Way,
    num_elements: int,
    contributions: Contributions,
    error: Floats = arithmetic.NOTHING,
    left: Floats = arithmetic.NOTHING,
) -> bytes:
    """The payload of these contributions, which are encoded chunks of so many elements, to the bit. `error`: what its
    reducer added; `left`: where what its codec loses is written, if it is not empty. Raises InvalidMessage,
    NonFiniteError."""
    if way.aggregation.is_bundle:
        return bundle(way, num_elements, [read(of) for _, of in contributions])
    average, weights = scratch.floats("average", num_elements), weights_of(contributions)
    norms = add_up(way, contributions, weights, average)
    if way.robust != "off":
        make_robust(way, contributions, weights, clipping.factors(norms, way.clip), average)
    payload = encode(way, average, error)
    if left.size:
        lose(way, average, payload, error, left)
    return payload


def recomputed_buffer(
    way: Way, num_elements: int, dtype: str, contributions: Contributions, base: Callable[[], Floats]
) -> bytes:
    """The same, of a buffer's chunk, whose tensor has that dtype. `base`: what the sites held, for who says that it is
    unchanged where others do not. Raises as it does too."""
    parts, weights = [read(of) for _, of in contributions], weights_of(contributions)
    if way.aggregation is Aggregation.LOWEST:
        return parts[0]
    are_unchanged = [way.codec_in(part, way.up) == UNCHANGED for part in parts]
    if all(are_unchanged):
        return unchanged(num_elements, "F32")
    held = base() if any(are_unchanged) else arithmetic.NOTHING
    average, value = scratch.floats("average", num_elements), scratch.floats("value", num_elements)
    average.fill(0)
    for part, weight, is_unchanged in zip(parts, weights, are_unchanged, strict=True):
        if not is_unchanged:
            kernels.decode(part, way.up, num_elements, value)
        arithmetic.add(base_of(held, dtype) if is_unchanged else value, np.float32(weight), average)
    if arithmetic.is_finite(held):
        np.clip(average, -LARGEST, LARGEST, out=average)
    return encode(way, average)


def lose(way: Way, average: Floats, payload: bytes, error: Floats, left: Floats) -> None:
    """`left := average + beta * error - decode(payload)`."""
    np.copyto(left, average)
    leave_over(way.down, payload, error, np.float32(way.error_beta_down), left)
