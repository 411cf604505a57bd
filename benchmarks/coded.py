"""Payloads as a run's sites and reducers code them, with the product's kernels: each key keeps its own error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.node.dataplane.error_feedback import leave_over
from atoll.protocol.codecs import kernels
from atoll.protocol.codecs.arithmetic import NOTHING, Floats

REDUCER = -1


class Key(NamedTuple):
    site: int
    """REDUCER for the error of an average."""
    place: int
    """Of the tensor, among the model's."""


class Coder:
    def __init__(self) -> None:
        self._errors: dict[Key, Floats] = {}

    def encode(self, codec: str, key: Key, value: Floats, beta: float, width: int = 1) -> bytes:
        """`value` and beta times the key's error; if beta is not zero, the error is then what the codec has lost."""
        error, factor = self._errors.get(key, NOTHING) if beta else NOTHING, np.float32(beta)
        sent = kernels.encode(codec, value, error=error, beta=factor, width=width)
        if beta:
            left = value.copy()
            leave_over(codec, sent, error, factor, left)
            self._errors[key] = left
        return sent
