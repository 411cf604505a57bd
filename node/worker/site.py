"""What a training loop has of its run: steps are counted, samples come from leases, the outer parameters can be looked
at. This one is alone, without a node; `joined_site.py` has the one under a node."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from atoll.node.worker.connection import rank_and_world
from atoll.node.worker.draws import LeasedBatches
from atoll.node.worker.loader import SHARDS_AHEAD, Loader, batches_ahead, check_options, shards
from atoll.node.worker.logged_values import LoggedValues
from atoll.node.worker.run_length import RunLength
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import DataRange
from atoll.protocol.sample_order import GLOBAL_LINE, SampleOrder
from atoll.protocol.settings import RunSettings

DEFAULT_BUSY_LIMIT_S = 600.0
Item = TypeVar("Item")


class Step(NamedTuple):
    """What `Site.step` returns."""

    running: bool
    """False: the run is over or the site was told to leave; end the loop."""
    synced: bool
    """The parameters have just taken an outer update."""
    inner_step: int
    """Of the run, as `Site.inner_step`."""


class Mark(NamedTuple):
    """A moment of this rank's training: what it had done by then in this generation."""

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AmongSites:
    """The place of a site among those that train."""

    index: int
    num_sites: int


class Site:
    """A training process in its run. Made by `atoll.join`; alone, without a node, it only counts."""

    def __init__(self) -> None:
        self.rank, self.world = rank_and_world()
        self.site_id = 0
        """Given by the coordinator; 0 without a node."""
        self.seed = 0
        """For random choices of a script: differs between sites, between their ranks (but for those that see the same
        batch) and between starts of their workers."""
        self.settings: RunSettings | None = None
        """Of the run; None without a node."""
        self.running = True
        self.run_over = False
        """The run is complete; where `running` is False and this too, the site alone was told to leave."""
        self._num_data_ranks, self._reader = self.world, self.rank
        self._base_commit = 0  # whose values the local parameters are based on
        self._base_run_step = 0  # its run_step
        self._base_run_tokens = 0
        self._run_length = 0  # of the run, where an operator has changed it
        self._run = RunLength()
        self._among = AmongSites(0, 1)
        self._base = Mark(0, 0)  # what this rank has trained that is in the base, or undone
        self._steps = self._tokens = 0  # of this rank, in this generation
        self._batches: LeasedBatches | None = None
        self._logged = LoggedValues(lambda values: None)
        self._holds_outer = False  # instead of the local parameters
        self._divides_data = False  # the script has asked for a part of them

    @property
    def inner_step(self) -> int:
        """Steps of the run: those of the commit that the parameters are based on, and this site's own since."""
        return self._base_run_step + self._steps - self._base.steps

    @property
    def commit(self) -> int:
        """Of the run: the last one that the parameters have taken. 0 before the first, and without a node."""
        return self._base_commit

    @property
    def run_length(self) -> int | None:
        """Inner steps from the start of the run to its end, for schedules. It changes where an operator sets it
        (`atoll set`).

        Of a run whose length is in tokens it is an estimate, by the tokens of a step so far: all of the run's up to
        the last commit, or this site's own times `run.min_sites` before the first. It is held until it is off by a
        tenth, so a schedule that is built once from it ends early or late; before the first step it is the number of
        tokens, an upper bound. `run_share` is exact. None without a node.
        """
        if self.settings is None:
            return None
        length = self._length
        if self.settings.steps:
            return length
        if self._base_run_step:
            tokens_per_step = self._base_run_tokens / self._base_run_step
        else:
            own_steps = max(1, self._steps - self._base.steps)
            own_tokens = self._tokens - self._base.tokens
            tokens_per_step = own_tokens / own_steps * self._num_data_ranks * self.settings.min_sites
        return self._run.in_steps(length, tokens_per_step)

    @property
    def run_share(self) -> float | None:
        """The part of the run that is done, 0 to 1, in what its length is in: for schedules that fit a run in tokens
        as well as one in steps, `LambdaLR(optimizer, lambda _: 1 - site.run_share)`.

        Exact at each commit. In between, a run in tokens counts as if all `num_sites` trained as this one does. It
        never falls while this process trains. None without a node.
        """
        if self.settings is None:
            return None
        if self.settings.steps:
            return self._run.share(self.inner_step, self._length)
        own_tokens = (self._tokens - self._base.tokens) * self._num_data_ranks
        return self._run.share(self._base_run_tokens + own_tokens * self.num_sites, self._length)

    @property
    def _length(self) -> int:
        """Of the run, in steps or tokens."""
        assert self.settings is not None
        return self._run_length or self.settings.steps or self.settings.tokens

    @property
    def num_sites(self) -> int:
        """How many sites train, as the last commit tells that this site has taken: those that contributed to it, and
        this one. Before one is known, `run.min_sites`; 1 without a node."""
        return self._among.num_sites

    @property
    def index(self) -> int:
        """Place of this site among them, by site id: from 0 to `num_sites` - 1. It changes when sites come and go."""
        return self._among.index

    @property
    def evaluates(self) -> bool:
        """Whether this is the one site that evaluates for all, best within `outer_parameters`: the first one, and there
        its rank 0. The next one takes its place where it is lost."""
        return self.index == 0 and self.rank == 0

    @property
    def has_outer_parameters(self) -> bool:
        """Whether `outer_parameters` can be used now."""
        return True

    def step(self, tokens: int | None = None, loss: Tensor | float | None = None) -> Step:
        """Call once after each `optimizer.step()`.

        `tokens`: in this rank's own batches of this step; the site's weight in the average, so it must be given.
        `loss`: its mean over them, a scalar; it stays on its device until a boundary. One that is not finite is left
        out and counted. Raises ConfigError without tokens and within `outer_parameters`, NonFiniteError where
        `max_skipped` of them come in a row, RefusedError if the node or the coordinator does not want this site any
        more.
        """
        del loss
        self._count(tokens)
        return Step(True, False, self.inner_step)

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Values of this moment, by name: `site.log({"val_loss": loss})`. They are curves of this site on the run's
        page, in its metrics and in the site's journal. What is logged within `outer_parameters` is a curve of its own,
        of the parameters that all sites share. After the site has left, nobody hears of it: that is said.

        A name has at most 64 letters, digits and _ - . /; a site has 16 of them. What is not finite is left out, with a
        line in the log. Any rank may log; of several that log a name at one step, one is kept. A tensor is a scalar,
        and is waited for. Raises ConfigError for what is no name or no number.
        """
        step = self._base_run_step if self._holds_outer else self.inner_step
        self._logged.log(values, step, of_outer=self._holds_outer)

    def loader(
        self, dataset: Dataset[Any], batch_size: int, *, by_pass: bool = False, **options: Any
    ) -> Loader | DataLoader[Any]:
        """A torch DataLoader over samples that are leased to this site: every sample of a pass counts once in the run.

        `dataset`: anything with __len__ and __getitem__, the same at all sites (with data = "local" each site's own).
        `batch_size`: of this rank. `options`: of the DataLoader (num_workers, pin_memory, collate_fn, ...), but for
        those that decide order and batches. It ends with the run, not with a pass; its batches are full, and may span
        two passes. With `by_pass` each loop over it ends with a pass of the run, in which all sites together see every
        sample once, as `for epoch in range(n): for batch in loader` means it; a batch is of the pass that it begins in.
        It has `dataset`, `batch_size`, and how many batches a pass is about: `len`, or `steps_per_pass`.

        A batch counts with the first `step` after the loader has given it out, however much is fetched
        ahead. One such loader a site, at every data rank.

        An IterableDataset gets an ordinary DataLoader: one stream for each site and start, which the data set divides
        among ranks itself. Nothing is leased then: sites may see the same samples, a restart begins the stream again,
        and there is no account. `shards` leases the parts of a stream.

        Raises ConfigError for options and data sets that cannot be leased.
        """
        check_options(dataset, batch_size, options)
        self._divides_data = True
        if isinstance(dataset, IterableDataset):
            if by_pass:
                raise ConfigError(f"site.loader got by_pass, and {type(dataset).__name__} has no passes; leave it out")
            return DataLoader(dataset, batch_size=batch_size, **options)
        self._check_first("site.loader")
        assert isinstance(dataset, Sized)
        self._batches = self._lease(len(dataset), batch_size, batches_ahead(options))
        return Loader(dataset, self._batches, self, options, by_pass=by_pass)

    def shards(self, num_shards: int) -> Iterator[int]:
        """Numbers from 0 to `num_shards` - 1, leased as samples of `loader` are: each shard of a stream counts once a
        pass over all of them, in the whole run. The iterator ends with the run, not with a pass.

            for shard in site.shards(len(urls)):
                for batch in stream(urls[shard]):  # webdataset.WebDataset(url), parquet, a streamed data set
                    ...
                    if not site.step(tokens=batch.numel(), loss=loss).running:
                        break

        A shard counts with the first `step` after the loop has asked for the next one, so a shard should be much less
        than a pass for each site. Of a site that is lost, the shard in progress is drawn again from its beginning, by
        whichever site; what was trained of it and is in a commit stays there. Data ranks draw different shards, and
        those of one round count when all ranks are through with theirs.

        Raises ConfigError for no shards, for a second call, and where all of them come to an end without a step.
        """
        if num_shards < 1:
            raise ConfigError(
                f"site.shards got num_shards = {num_shards}; it is the number of shards of the whole data"
            )
        self._check_first("site.shards")
        self._divides_data = True
        self._batches = self._lease(num_shards, 1, SHARDS_AHEAD, of_shards=True)
        return shards(self._batches, num_shards, lambda: self.running)

    def shard(self, stream: Iterable[Item], *, by_site: bool = False) -> Iterator[Item]:
        """This rank's items of a stream that all sites read alike: one in `num_sites` times the data ranks of a site.
        `by_site`: one in `num_sites`, where the ranks of a site have divided the stream among themselves.

        Nothing is leased: the division changes when `num_sites` does, a restart begins the stream again, and no account
        is kept. Where each sample is to count once, use `shards` or `loader`.
        """
        self._divides_data = True
        for place, item in enumerate(stream):
            if not self.running:
                return
            num_readers, reader = (1, 0) if by_site else (self._num_data_ranks, self._reader)
            if place % (self.num_sites * num_readers) == self.index * num_readers + reader:
                yield item

    def _check_first(self, what: str) -> None:
        if self._batches is not None:
            raise ConfigError(
                f"{what} was called, and site.loader or site.shards was before: a site has one of them, once; for "
                "evaluation use a torch DataLoader"
            )

    def _say_if_undivided(self) -> None:
        """Once, in a run that counts samples: that it does not count this site's."""
        if self._divides_data or self.rank > 0 or self.settings is None or self.settings.data == "local":
            return
        self._divides_data = True
        sys.stderr.write(
            "atoll: the script draws its samples itself, so sites may train the same ones, and the run does not count "
            'them: read by site.loader, site.shards or site.shard; or say data = "local" in the run\'s run.toml, and '
            "seed what draws with site.seed\n"
        )

    def _lease(self, num_samples: int, batch_size: int, ahead: int, *, of_shards: bool = False) -> LeasedBatches:
        """Alone, everything is this site's."""
        del ahead, of_shards
        order = SampleOrder(self.seed, GLOBAL_LINE, num_samples)

        def draw(epoch: int, first: int, count: int) -> tuple[DataRange, ...]:
            del epoch
            return (DataRange(first=first, num_samples=count),)

        return LeasedBatches(draw, order, batch_size, reader=self.rank, num_readers=self.world, epoch=0)

    def _count(self, tokens: int | None) -> None:
        """One step more. Raises ConfigError."""
        if tokens is None:
            raise ConfigError(
                "site.step got no tokens: give the number of tokens, or of samples, in this rank's own batches of the "
                "step, which is the site's weight in the average: site.step(tokens=batch.numel(), loss=loss)"
            )
        if self._holds_outer:
            raise ConfigError(
                "site.step was called within site.outer_parameters(), where nothing is trained; call it after the block"
            )
        if self._batches is not None:
            self._batches.step()
        self._steps += 1
        self._tokens += int(tokens)  # a tensor would change in place, and with it what is remembered of a snapshot

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Within it the model holds the outer parameters, which all sites share; the local ones come back after it.

        Evaluate these, best when a step says `synced`. Raises NotYetError when this site does not have them, until the
        next sync: it took one without having been part of it, or they are just changing. See `has_outer_parameters`.
        """
        with self._holding_outer():
            yield

    @contextmanager
    def _holding_outer(self) -> Iterator[None]:
        self._holds_outer = True
        try:
            yield
        finally:
            self._holds_outer = False

    @contextmanager
    def busy(self, what: str, limit_s: float = DEFAULT_BUSY_LIMIT_S) -> Iterator[None]:
        """Announce work between steps (evaluation, a checkpoint), so that the silence is not taken for a hang."""
        del what, limit_s
        yield

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run, as the end of a `with` block does; for callbacks of a trainer. `error`: why training ends."""
        self.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
