"""How many descriptors a process has, and how many of them it gives to connections from outside."""

from __future__ import annotations

import os
import subprocess
import sys

from atoll.protocol import descriptors

HARD = 700
RAISED = f"""
import resource
from atoll.protocol import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (300, {HARD}))
print(descriptors.raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISED], capture_output=True, text=True, check=True, env=os.environ, timeout=60
    )
    assert done.stdout.split() == [str(HARD), str(HARD)]


def test_some_are_kept_in_reserve() -> None:
    assert descriptors.for_connections(10_000, 100, "a test") == 100
    assert descriptors.for_connections(1024, 2000, "a test") == 1024 - descriptors.RESERVED
    assert descriptors.for_connections(300, 2000, "a test") == 150, "half of few"
