"""What a node says of a crash."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.node.core.outputs import DescribeCrash
from atoll.node.daemon.worker_control import said_of_crash


class Printed:
    last_lines = ("[rank 0] all is well here",)


@pytest.mark.parametrize(
    ("rank", "has_exited", "line"),
    [
        (1, False, "[rank 0] all is well here"),
        (None, True, None),
        (2, False, "what it printed is in the log of host 1 of this site"),
        (5, False, "what it printed is in the log of host 2 of this site"),
    ],
)
def test_a_rank_of_another_host_is_not_described_by_what_those_of_this_one_printed(
    rank: int | None, has_exited: bool, line: str | None
) -> None:
    launcher: Any = Printed()
    crash = DescribeCrash(generation=1, text="rank lost", num_steps=0, has_exited=has_exited, rank=rank)
    assert said_of_crash(crash, 2, launcher) == ("rank lost",) + ((line,) if line else ())
