"""numba kernels with one fixed signature each: compiled at `compile()` or at first use, cached on disk where it can be.

Kernels release the interpreter lock. No fastmath: every operation is rounded by itself. Constants inside kernels are
`np.float32`, because a float literal computes in float64.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numba
from numba import types

log = logging.getLogger(__name__)

# Inputs may be read-only (a view of received bytes): one compiled form takes both.
f32_in = types.Array(types.float32, 1, "C", readonly=True)
u16_in = types.Array(types.uint16, 1, "C", readonly=True)
i8_in = types.Array(types.int8, 1, "C", readonly=True)
u8_in = types.Array(types.uint8, 1, "C", readonly=True)
f32_out = types.float32[::1]
u16_out = types.uint16[::1]
i8_out = types.int8[::1]
u8_out = types.uint8[::1]
f32 = types.float32

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def _probe() -> None:
    pass


def _can_cache() -> bool:
    try:
        numba.njit(cache=True)(_probe)
    except RuntimeError as error:  # numba raises at decoration if no folder can be written
        log.warning("compiled kernels are not cached (%s); each start compiles them again. Set NUMBA_CACHE_DIR", error)
        return False
    return True


CACHED = _can_cache()


class Kernel:
    """A function over 1-D contiguous arrays and scalars, compiled once for one signature."""

    def __init__(self, function: Callable[..., Any], signature: tuple[Any, ...]) -> None:
        self.name = function.__name__
        self._function = function
        self._signature = signature
        self._lock = threading.Lock()
        self._compiled: Any = None

    def compile(self) -> None:
        with self._lock:
            if self._compiled is not None:
                return
            try:
                compiled = numba.njit(cache=CACHED, **_OPTIONS)(self._function)
                compiled.compile(self._signature)
            except OSError as error:  # the cache folder was lost or is full
                log.warning("kernel %s is not cached: %s", self.name, error)
                compiled = numba.njit(**_OPTIONS)(self._function)
                compiled.compile(self._signature)
            compiled.disable_compile()
            self._compiled = compiled

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self.compile()
        return self._compiled(*args)


def kernel(*signature: Any) -> Callable[[Callable[..., Any]], Kernel]:
    return lambda function: Kernel(function, signature)


def compile_all(kernels: Iterable[Kernel]) -> None:
    for item in kernels:
        item.compile()
