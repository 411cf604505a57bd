"""A torch DataLoader whose samples are leased, `Site.loader`; leased shards of a stream, `Site.shards`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from atoll.node.worker.draws import LeasedBatches
from atoll.protocol.errors import ConfigError

NOT_OPTIONS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
"""What a leased loader decides by itself: the order is the run's, every batch is full, and there is no end."""
SHARDS_AHEAD = 2
"""The shard in progress, and the next one, which is there when the coordinator is away."""


def batches_ahead(options: dict[str, Any]) -> int:
    """How many batches a DataLoader with these options draws before they are needed."""
    return int(options.get("num_workers", 0)) * int(options.get("prefetch_factor") or 2)


def check_options(dataset: Dataset[Any], batch_size: int, options: dict[str, Any]) -> None:
    """Raises ConfigError for what cannot be leased."""
    if batch_size < 1:
        raise ConfigError(
            f"site.loader got batch_size = {batch_size}; it is the number of samples a batch of this rank"
        )
    if isinstance(dataset, IterableDataset):
        return
    for name in NOT_OPTIONS:
        if name in options:
            raise ConfigError(f"site.loader draws samples in the run's own order: leave out {name}")
    if not options.get("in_order", True):
        raise ConfigError("site.loader counts batches in the order in which they were drawn: leave out in_order=False")
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"site.loader needs a data set with __len__ and __getitem__, or an IterableDataset; "
            f"{type(dataset).__name__} is neither"
        )
    if not len(dataset):
        raise ConfigError(f"site.loader got an empty {type(dataset).__name__}")


class Loader:
    """Batches until the run is over. One iterator at a time; a new one begins after the last batch that was trained
    on."""

    def __init__(
        self, dataset: Dataset[Any], batches: LeasedBatches, running: Callable[[], bool], options: dict[str, Any]
    ) -> None:
        self._batches = batches
        self._running = running
        self._num_iterators = 0
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)

    def __iter__(self) -> Iterator[Any]:
        self._batches.rewind()
        if not self._running():
            return  # the loader's workers would draw at once
        self._num_iterators += 1
        number = self._num_iterators
        fetched = iter(self._loader)
        while self._running():
            if number != self._num_iterators:
                raise ConfigError(
                    "an iterator of site.loader goes on after a newer iterator began, which draws the same samples; "
                    "use one at a time"
                )
            batch = next(fetched)
            if self._batches.give_out():
                yield batch


def shards(batches: LeasedBatches, num_shards: int, running: Callable[[], bool]) -> Iterator[int]:
    """Each is given out, for the next step to count, when the loop asks for the one after it."""
    while running():
        (shard,) = batches.next_batch()
        yield int(shard)
        batches.give_out()
        if batches.num_given_out >= num_shards:
            raise ConfigError(
                f"{num_shards} shards of site.shards came to their end without a site.step: nothing was read from them"
            )
