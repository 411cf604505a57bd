"""A loop over epochs: `site.loader(..., by_pass=True)` ends with each pass. What a loader says of itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker.loader import Loader, _say_that_passes_are_within
from atoll.node.worker.site import Site
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import DataRange
from atoll.protocol.sample_order import SampleOrder
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import STOP, FakeNode, apply, in_memory

SETTINGS = RunSettings(run_id="r", steps=100, min_sites=3, max_sites=8)


class Numbers(Dataset[int]):
    def __init__(self, number: int = 10) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def joined() -> Site:
    net = nn.Linear(2, 1)
    return atoll.join(net, torch.optim.SGD(net.parameters(), lr=0.1))


def by_pass(site: Site, num_workers: int = 0) -> Loader:
    loader = site.loader(Numbers(), 4, by_pass=True, num_workers=num_workers)
    assert isinstance(loader, Loader)
    return loader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_loop_is_a_pass_and_nothing_is_drawn_twice(node: FakeNode, num_workers: int) -> None:
    """Of 10 samples in batches of 4: the third batch spans two passes, and is of the one in which it begins."""
    node.script = [(0, apply(MergeMode.REPLACE, 7, fresh=True)), (7, STOP)]
    site = joined()
    loader, epochs = by_pass(site, num_workers), []
    for _ in range(4):
        seen: list[int] = []
        for batch in loader:
            seen += batch.tolist()
            site.step(tokens=4)
        epochs.append(seen)
    order = SampleOrder(1, 0, 10)
    places = [range(12), range(12, 20), range(20, 28), range(0)]
    assert epochs == [[order.sample(p) for p in of] for of in places], "the last one is after the end of the run"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_count_no_longer_end_no_pass(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """Of 20 samples: as the third of five batches is trained, positions 8 to 11 are to be drawn again. What was fetched
    ahead is left out, some of it of the pass after this one."""
    monkeypatch.setattr(
        node, "draw", lambda epoch, first, count: (DataRange(first=first + 8 * epoch, num_samples=count),)
    )
    node.script = [
        (0, apply(MergeMode.REPLACE, 3, fresh=True)),
        (3, apply(MergeMode.REPLACE, 6, data_epoch=1)),
        (6, STOP),
    ]
    site, order, seen = joined(), SampleOrder(1, 0, 20), []
    for batch in site.loader(Numbers(20), 4, by_pass=True, num_workers=num_workers):
        seen.append(batch[0].item())
        site.step(tokens=4)
    assert seen == [order.sample(p) for p in (0, 4, 8, 8, 12, 16)]


def test_what_was_given_out_before_the_end_of_a_pass_counts_with_the_next_step(node: FakeNode) -> None:
    """Gradients of batches that are accumulated over it."""
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    site = joined()
    loader, drawn = by_pass(site), []
    for _ in range(2):
        for batch in loader:
            drawn.append(batch.tolist())
            if len(drawn) == 5:
                site.step(tokens=20)
    assert len(drawn) == len({tuple(batch) for batch in drawn}) == 5
    assert site._batches is not None
    assert site._batches.num_samples_used == 20


def test_what_comes_back_of_an_earlier_pass_does_not_end_this_one(node: FakeNode) -> None:
    """A lost site's samples: positions 0 to 7 of the run come after 10 to 13."""
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    node.positions = [10, 11, 12, 13, *range(8), 20, 21, 22, 23]
    site = joined()
    order, firsts = SampleOrder(1, 0, 10), []
    for batch in by_pass(site):
        firsts.append(batch[0].item())
        site.step(tokens=4)
    assert firsts == [order.sample(p) for p in (10, 0, 4)]


def test_an_epoch_alone_is_the_data_set() -> None:
    """As a script's author knows it from torch: as many batches as `len` says, of every sample."""
    loader = Site().loader(Numbers(), 5, by_pass=True)
    epochs = [[sample for batch in loader for sample in batch.tolist()] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1]
    assert len(loader) == 2


def test_what_a_loader_says_of_itself(node: FakeNode) -> None:
    """A pass's share shrinks with the sites that the last commit had."""
    first = apply(MergeMode.REPLACE, 1, fresh=True)
    node.script = [(0, first), (1, apply(MergeMode.REPLACE, 9, version=1, site_index=4, num_sites=5))]
    site = joined()
    assert (site.index, site.num_sites) == (0, 3), "of run.min_sites: its id is 7"
    data = Numbers()
    loader = site.loader(data, 1)
    assert isinstance(loader, Loader)
    assert (loader.dataset, loader.batch_size, loader.steps_per_pass, len(loader)) == (data, 1, 4, 4)
    assert site.evaluates
    site.step(tokens=1)
    assert (site.index, site.num_sites, len(loader)) == (4, 5, 2)
    assert not site.evaluates


def test_a_loop_that_begins_after_the_run_is_named(node: FakeNode, capsys: pytest.CaptureFixture[str]) -> None:
    _say_that_passes_are_within.cache_clear()
    node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True)), (2, STOP)]
    site = joined()
    loader, num_steps = site.loader(Numbers(), 4), 0
    for _ in range(3):
        for _batch in loader:
            site.step(tokens=4)
            num_steps += 1
    assert num_steps == 2
    assert capsys.readouterr().err.count("by_pass=True") == 1


def test_a_stream_is_divided_by_sites_and_their_ranks(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 1, fresh=True)), (1, STOP)]
    node.num_readers, node.reader = 2, 1
    site = joined()
    taken: Iterator[int] = site.shard(range(100))
    assert [next(taken) for _ in range(3)] == [1, 7, 13], "of the first of three sites, of the second of its two ranks"
    of_site: Iterator[int] = site.shard(range(100), by_site=True)
    assert [next(of_site) for _ in range(3)] == [0, 3, 6], "of the first of three sites, whichever rank"
    site.step(tokens=1)
    assert list(taken) == [], "the run is over"
    assert list(Site().shard(range(4))) == [0, 1, 2, 3]


def test_a_stream_has_no_passes() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pytest.raises(ConfigError, match="Stream has no passes"):
        Site().loader(Stream(), 4, by_pass=True)


@pytest.mark.parametrize("error", [None, ConfigError("wrong")])
def test_a_callback_leaves_as_the_block_does(node: FakeNode, error: ConfigError | None) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    site = joined()
    site.step(tokens=1)
    site.close(error)
    (said,) = node.said("fatal" if error else "goodbye")
    assert said == ({"kind": "config", "text": "wrong"} if error else {"run_over": False})
    assert node.said("close")
