"""A generation of ranks, as a node's core begins one."""

from __future__ import annotations

import asyncio

from atoll.node.core.ranks.group import WorkerGroup
from atoll.node.core.ranks.liveness import StepTimes


def a_group(generation: int, num_ranks: int) -> WorkerGroup:
    return WorkerGroup(generation, num_ranks, asyncio.get_running_loop().time(), StepTimes())
