"""How long a run is, for schedules: in steps, and as the part of it that is done. Pure.

A run that ends by tokens has no number of steps: how many tokens a step has changes as sites come and go. Its length in
steps is an estimate that is held until it is off by a tenth; the part that is done is exact at each commit.
"""

from __future__ import annotations

import math

SLACK = 0.1
"""A schedule that was built with the estimate before is then off by so much of its length."""


class RunLength:
    """Of one process, in a run of any kind."""

    def __init__(self) -> None:
        self._of_tokens = self._steps = 0
        self._share = 0.0

    def in_steps(self, num_tokens: int, tokens_per_step: float) -> int:
        """Of a run of so many tokens. Before a step is known no step has more than all tokens: that is an upper
        bound, and is not held."""
        if not tokens_per_step:
            return num_tokens
        found = max(1, math.ceil(num_tokens / tokens_per_step))
        if num_tokens != self._of_tokens or abs(found - self._steps) > SLACK * self._steps:
            self._of_tokens, self._steps = num_tokens, found
        return self._steps

    def share(self, done: float, length: int) -> float:
        """0 to 1; it does not fall, though fewer sites may have contributed to a commit than was thought."""
        self._share = max(self._share, min(1.0, done / length))
        return self._share
