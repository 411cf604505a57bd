"""What ranks of a process group tell each other, where each rank is a thread of the test."""

from __future__ import annotations

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from atoll.node.worker.ranks_together import RanksTogether

LIMIT_S = 60.0
T = TypeVar("T")


class _Shared:
    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.said: list[Any] = [None] * world
        self.sent: defaultdict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)


class RankInThread(RanksTogether):
    """`received`: how many bytes came from other ranks."""

    def __init__(self, rank: int, world: int, shared: _Shared) -> None:
        self.rank, self.world, self._shared = rank, world, shared
        self.received = 0

    def told(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._all(json.dumps(value))]

    def all_say(self, *, yes: bool) -> bool:
        return all(self._all(yes))

    def send(self, data: Tensor, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._shared.sent[self.rank, rank].put(data.clone())

    def receive(self, num_bytes: int, rank: int) -> Tensor:
        data = self._shared.sent[rank, self.rank].get(timeout=LIMIT_S)
        assert data.numel() == num_bytes > 0
        self.received += num_bytes
        return data

    def _all(self, value: T) -> list[T]:
        self._shared.said[self.rank] = value
        self._shared.barrier.wait(LIMIT_S)
        said = list(self._shared.said)
        self._shared.barrier.wait(LIMIT_S)
        return said


def in_threads(world: int, run: Callable[[RankInThread], T]) -> tuple[list[T], list[RankInThread]]:
    """What `run` gives for each rank. Raises what the first rank raised; others are not waited for in vain."""
    shared = _Shared(world)
    ranks = [RankInThread(rank, world, shared) for rank in range(world)]
    found: dict[int, T] = {}
    raised: list[BaseException] = []

    def one(rank: RankInThread) -> None:
        try:
            found[rank.rank] = run(rank)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            raised.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if raised:
        raise raised[0]
    return [found[rank] for rank in range(world)], ranks
