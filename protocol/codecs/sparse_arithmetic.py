"""The arithmetic of a codec that carries some of the values, from its form and its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.protocol.codecs.arithmetic import Bytes, Floats, Terms
from atoll.protocol.codecs.blocks import check_scales
from atoll.protocol.codecs.jit import Kernel
from atoll.protocol.codecs.picking import entries_are_right
from atoll.protocol.codecs.sparse import BEYOND, Sparse
from atoll.protocol.errors import InvalidMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseArithmetic:
    """Of chunks of so many elements that are so many columns wide."""

    encode: Callable[[Terms, int, Bytes], bool]
    """As that of `Arithmetic`."""
    scatter: Callable[[Bytes, int, int, np.float32, np.float32, Floats, Floats], float]
    """With two weights, of the values and of their site: `acc = acc + weight * value` where there is one, and `weights
    = weights + of_site`, but not where they are empty; the norm of the values, the same bits everywhere. Raises
    InvalidMessage if there is no such place."""
    check: Callable[[Bytes, int, float], None]
    """As that of `Arithmetic`; InvalidMessage too if an entry has no place."""
    largest_scale: Callable[[Bytes, int], float]
    """Also one that no value has."""
    kernels: tuple[Kernel, ...]
    golden: str
    finish: Callable[[Floats, int, Floats], None] | None = None
    """Elements of what was scattered; None: that is what they are."""


def arithmetic_of(
    form: Sparse,
    pack: Callable[..., Any],
    scatter_kernel: Callable[..., Any],
    *,
    kernels: tuple[Kernel, ...],
    golden: str,
    finish: Callable[[Floats, int, Floats], None] | None = None,
) -> SparseArithmetic:
    def split(body: Bytes, num_elements: int) -> tuple[Floats, Bytes, Bytes]:
        scales, entries, _ = form.parts_bytes(num_elements)
        return body[:scales].view(np.float32), body[scales : scales + entries], body[scales + entries :]

    def encode(terms: Terms, columns: int, body: Bytes) -> bool:
        return bool(pack(*terms, columns, *split(body, terms.values.size)))

    def scatter(  # noqa: PLR0917
        body: Bytes,
        num_elements: int,
        columns: int,
        weight: np.float32,
        of_site: np.float32,
        acc: Floats,
        weights: Floats,
    ) -> float:
        squares = scatter_kernel(*split(body, num_elements), num_elements, columns, weight, of_site, acc, weights)
        if squares < 0:
            raise InvalidMessage(BEYOND)
        return math.sqrt(squares)

    def check(body: Bytes, num_elements: int, below: float) -> None:
        scales, entries, buckets = split(body, num_elements)
        check_scales(scales, below)
        num_buckets = form.num_buckets(num_elements)
        rest = form.num_values(num_elements) - (num_buckets - 1) * form.bucket
        sizes = form.block_entries, form.block_buckets, num_buckets, form.bucket, rest
        if not entries_are_right(entries, buckets, *sizes):
            raise InvalidMessage("encoded chunk: entries that are out of order or beyond its end")

    def largest_scale(body: Bytes, num_elements: int) -> float:
        return float(np.max(split(body, num_elements)[0], initial=0))

    return SparseArithmetic(
        encode=encode,
        scatter=scatter,
        check=check,
        largest_scale=largest_scale,
        kernels=(*kernels, entries_are_right),
        golden=golden,
        finish=finish,
    )
