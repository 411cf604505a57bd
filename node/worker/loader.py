"""A torch DataLoader whose samples are leased, `Site.loader`; leased shards of a stream, `Site.shards`."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, IterableDataset

from atoll.node.worker.draws import LeasedBatches
from atoll.protocol.errors import ConfigError
from atoll.protocol.sample_order import GLOBAL_LINE

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


class RunningSite(Protocol):
    """What a loader asks its site."""

    running: bool

    @property
    def num_sites(self) -> int: ...


class Loader:
    """Batches until the run is over, or, `by_pass`, until the pass is in which the iterator began. One iterator at a
    time; a new one begins after the last batch that was trained on."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: LeasedBatches,
        site: RunningSite,
        options: dict[str, Any],
        *,
        by_pass: bool,
    ) -> None:
        self._batches = batches
        self._site = site
        self._by_pass = by_pass
        self._num_iterators = 0
        self._next: tuple[Iterator[Any], Any] | None = None  # the first batch of the next pass, and what it came from
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)

    @property
    def dataset(self) -> Dataset[Any]:
        return self._loader.dataset

    @property
    def batch_size(self) -> int:
        """Of this rank."""
        return self._batches.batch_size

    @property
    def steps_per_pass(self) -> int:
        """About how many batches this rank is given in one pass over the data: its share, by the number of sites that
        are in the run now. An estimate: the faster of two sites trains on more of a pass."""
        order = self._batches.order
        num_sites = self._site.num_sites if order.line == GLOBAL_LINE else 1
        return math.ceil(order.num_samples / (self.batch_size * self._batches.num_readers * num_sites))

    def __len__(self) -> int:
        """As `steps_per_pass`."""
        return self.steps_per_pass

    def __iter__(self) -> Iterator[Any]:
        self._num_iterators += 1
        number = self._num_iterators
        waiting, self._next = self._next, None
        if waiting is None:
            self._batches.rewind()
        if not self._site.running:
            if number > 1 and not self._by_pass:
                _say_that_passes_are_within()
            return  # the loader's workers would draw at once
        fetched = iter(self._loader) if waiting is None else waiting[0]
        number_of_pass: int | None = None
        while self._site.running:
            if number != self._num_iterators:
                raise ConfigError(
                    "an iterator of site.loader goes on after a newer iterator began, which draws the same samples; "
                    "use one at a time"
                )
            batch = next(fetched) if waiting is None else waiting[1]
            waiting = None
            # Samples that a lost site had are drawn again, and may be of an earlier pass.
            begins_in = self._batches.next_pass
            ends = begins_in is not None and number_of_pass is not None and begins_in > number_of_pass
            if self._by_pass and ends:
                self._next = fetched, batch
                return
            if self._batches.give_out():
                number_of_pass = begins_in if number_of_pass is None else number_of_pass
                yield batch


@functools.cache
def _say_that_passes_are_within() -> None:
    sys.stderr.write(
        "atoll: a loop over site.loader began after the run was over. One loop goes through all passes; for a loop "
        "over epochs, of a pass each, say site.loader(..., by_pass=True)\n"
    )


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
