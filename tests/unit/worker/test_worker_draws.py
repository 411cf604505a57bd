"""Which samples a rank draws, and which of them count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from atoll.node.worker.draws import LeasedBatches, samples_at
from atoll.protocol.messages import DataRange
from atoll.protocol.sample_order import SampleOrder

QUEUE = [DataRange(first=990, num_samples=30), DataRange(first=5, num_samples=3), DataRange(first=200, num_samples=67)]
POSITIONS = [p for r in QUEUE for p in range(r.first, r.end)]
ORDER = SampleOrder(1, 0, 1000)


class Queue:
    """The node's side: gives what it has from a place on, at most `most` intervals of it."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.asked: list[tuple[int, int, int]] = []

    def draw(self, epoch: int, first: int, num_samples: int) -> tuple[DataRange, ...]:
        self.asked.append((epoch, first, num_samples))
        found: list[DataRange] = []
        place = 0
        for item in QUEUE:
            skipped = min(max(first - place, 0), item.num_samples)
            if skipped < item.num_samples and (
                len(found) < self.most or sum(f.num_samples for f in found) < num_samples
            ):
                found.append(DataRange(first=item.first + skipped, num_samples=item.num_samples - skipped))
            place += item.num_samples
        return tuple(found)


def batches(queue: Queue, batch_size: int, reader: int = 0, num_readers: int = 1) -> LeasedBatches:
    return LeasedBatches(queue.draw, ORDER, batch_size, reader=reader, num_readers=num_readers, epoch=0)


def test_many_positions_at_once_are_the_same_as_one_by_one() -> None:
    for num_samples in (1, 3, 10, 1000, 12345):
        order = SampleOrder(9, 2, num_samples)
        positions = np.array([0, 1, 2, 9, 10, 11, 999, 1000, 5000, 12344, 12345, 50000], dtype=np.int64)
        assert samples_at(order, positions).tolist() == [order.sample(int(p)) for p in positions]


@pytest.mark.parametrize("most", [1, 100])
@pytest.mark.parametrize(("batch_size", "num_readers"), [(10, 1), (5, 2), (2, 5)])
def test_the_sites_batch_is_the_same_for_any_number_of_ranks(batch_size: int, num_readers: int, most: int) -> None:
    ranks = [batches(Queue(most), batch_size, reader, num_readers) for reader in range(num_readers)]
    for step in range(10):
        found = Counter(sample for rank in ranks for sample in rank.next_batch().tolist())
        assert found == Counter(ORDER.sample(p) for p in POSITIONS[10 * step : 10 * step + 10])


def test_a_rank_asks_only_when_it_knows_of_no_more() -> None:
    queue = Queue()
    rank = batches(queue, 10)
    for _ in range(10):
        rank.next_batch()
    assert queue.asked == [(0, 0, 10)]


def test_what_was_fetched_and_not_trained_on_is_drawn_again() -> None:
    rank = batches(Queue(), 10)
    first = [rank.next_batch().tolist() for _ in range(5)]
    assert rank.give_out()
    rank.step()
    assert rank.give_out()
    assert rank.num_samples_used == 10, "given out is not trained on"
    rank.rewind()
    assert rank.next_batch().tolist() == first[1]
    assert rank.give_out()
    assert rank.next_batch().tolist() == first[2]
    assert rank.give_out()
    rank.step()
    assert rank.num_samples_used == 30, "several batches in one step"


def test_batches_of_an_older_epoch_are_left_out() -> None:
    queue = Queue()
    rank = batches(queue, 10)
    first = rank.next_batch().tolist()
    rank.next_batch()
    assert rank.give_out()
    rank.step()
    rank.begin_epoch(0)
    assert rank.num_samples_used == 10, "the same epoch goes on"
    rank.begin_epoch(3)
    assert rank.num_samples_used == 0
    assert not rank.give_out()
    assert rank.next_batch().tolist() == first
    assert queue.asked[-1] == (3, 0, 10)
    assert rank.give_out()


def test_an_epoch_that_begins_while_a_draw_waits() -> None:
    queue = Queue()
    rank = batches(queue, 10)

    def draw(epoch: int, first: int, num_samples: int) -> tuple[DataRange, ...]:
        if epoch == 0:
            rank.begin_epoch(1)
            return (DataRange(first=0, num_samples=num_samples),)  # of no use
        return queue.draw(epoch, first, num_samples)

    rank.draw = draw
    assert rank.next_batch().tolist() == [ORDER.sample(p) for p in POSITIONS[:10]]
    assert rank.give_out()
