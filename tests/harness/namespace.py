"""A process or thread of tests that is to be on another host enters that network namespace before it does anything
else."""

from __future__ import annotations

import ctypes
import os

NAMESPACE = "ATOLL_TEST_NAMESPACE"
"""The variable with its name, as `ip netns` knows it. Needs root."""
CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """The thread that calls, and what it starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def enter_if_told() -> None:
    """The one that the environment names. Raises OSError."""
    if name := os.environ.pop(NAMESPACE, ""):
        enter(name)
