"""`site.loader`: ordinary torch data sets, leased samples. Against a node in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker import join as join_module
from atoll.node.worker.site import Site
from atoll.protocol.errors import ConfigError
from atoll.protocol.sample_order import SampleOrder
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, in_memory

SETTINGS = RunSettings(run_id="r", steps=100)
ORDER = SampleOrder(1, 0, 50)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index


def samples(first: int, count: int, order: SampleOrder = ORDER) -> list[int]:
    return [order.sample(p) for p in range(first, first + count)]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    return in_memory(monkeypatch, SETTINGS)


def joined() -> Site:
    net = nn.Linear(2, 1)
    return atoll.join(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_counts_when_it_is_trained_on_however_much_is_fetched(node: FakeNode, num_workers: int) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 3, fresh=True)), (3, SNAPSHOT), (3, STOP)]
    seen: list[list[int]] = []
    with joined() as site:
        for batch in site.loader(Numbers(), 4, num_workers=num_workers):
            assert isinstance(batch, Tensor)
            seen.append(batch.tolist())
            site.step(tokens=4)
    assert seen == [samples(0, 4), samples(4, 4), samples(8, 4)], "and the loop ends with the run"
    assert node.said("data") == [
        {"num_samples": 50, "batch_size": 4, "batches_ahead": 2 * num_workers, "of_shards": False}
    ]
    assert len(node.said("draw")) >= 3 + 2 * num_workers
    assert node.said("sealed")[0]["num_samples_used"] == 12


def test_several_batches_in_one_step(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 2, fresh=True)), (2, SNAPSHOT), (2, STOP)]
    with joined() as site:
        batches = iter(site.loader(Numbers(), 4))
        while site.running:
            for _ in range(3):
                next(batches)
            site.step(tokens=12)
    assert node.said("sealed")[0]["num_samples_used"] == 24


def test_a_new_iterator_goes_on_where_training_stopped(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    site = joined()
    loader = site.loader(Numbers(), 4)
    for place, batch in enumerate(loader):
        if place == 2:
            break  # given out, not trained on
        site.step(tokens=4)
        del batch
    assert next(iter(loader)).tolist() == samples(8, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_that_goes_on_after_a_newer_one_began_is_refused(node: FakeNode, num_workers: int) -> None:
    """The newer one began after the last batch that was trained on: what this one gives would be trained on twice."""
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    loader = joined().loader(Numbers(), 4, num_workers=num_workers)
    older, newer = iter(loader), iter(loader)
    assert next(older).tolist() == samples(0, 4)
    assert next(newer).tolist() == samples(0, 4)
    with pytest.raises(ConfigError, match="newer iterator"):
        next(older)
    assert next(newer).tolist() == samples(4, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_is_made_after_the_run_is_over_draws_nothing(node: FakeNode, num_workers: int) -> None:
    """Of a late joiner, which is told to stop when it joins: the node would refuse to hear of its data."""
    node.script = [(0, apply(MergeMode.REPLACE, 0, fresh=True)), (0, STOP)]
    with joined() as site:
        assert not site.running
        assert list(site.loader(Numbers(), 4, num_workers=num_workers)) == []
    assert not node.said("data")
    assert not node.said("draw")


def test_a_new_iterator_after_the_end_draws_nothing(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 1, fresh=True)), (1, STOP)]
    with joined() as site:
        loader = site.loader(Numbers(), 4, num_workers=1)
        for _ in loader:
            site.step(tokens=4)
        drawn = len(node.said("draw"))
        assert list(loader) == []
    assert len(node.said("draw")) == drawn


def test_what_was_fetched_before_an_eviction_is_left_out(node: FakeNode) -> None:
    node.script = [
        (0, apply(MergeMode.REPLACE, 2, fresh=True)),
        (2, apply(MergeMode.REPLACE, 4, data_epoch=3)),
        (4, SNAPSHOT),
        (4, STOP),
    ]
    seen: list[list[int]] = []
    with joined() as site:
        for batch in site.loader(Numbers(), 4, num_workers=1):
            seen.append(batch.tolist())
            site.step(tokens=4)
    assert seen == [samples(0, 4), samples(4, 4), samples(3000, 4), samples(3004, 4)]
    assert node.said("sealed")[0]["num_samples_used"] == 8


def test_local_data_has_an_order_for_each_site(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    local = RunSettings(run_id="r", steps=100, data="local")
    monkeypatch.setattr(join_module, "connect", lambda: node.connection(local))
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    batch = next(iter(joined().loader(Numbers(), 4)))
    assert batch.tolist() == samples(0, 4, SampleOrder(1, 7, 50))


def test_alone_it_is_the_same_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    site = Site()
    seen = [x for batch in itertools.islice(site.loader(Numbers(), 10), 10) for x in batch.tolist()]
    assert sorted(seen[:50]) == sorted(seen[50:]) == list(range(50)), "two passes"
    assert seen[:50] != seen[50:]


def test_options_reach_torch(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    data = TensorDataset(torch.arange(50))
    loader = joined().loader(data, 2, collate_fn=lambda items: [int(item[0]) for item in items])
    assert next(iter(loader)) == samples(0, 2)


def test_an_iterable_is_one_ordinary_stream(node: FakeNode) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    node.script = [(0, apply(MergeMode.REPLACE, 9, fresh=True))]
    loader = joined().loader(Stream(), 3, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    assert not node.said("data")


class Keyless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "batch_size", "options", "text"),
    [
        (Numbers(), 4, {"shuffle": True}, "leave out shuffle"),
        (Numbers(), 4, {"drop_last": True}, "leave out drop_last"),
        (Numbers(), 4, {"in_order": False}, "in_order"),
        (Numbers(), 0, {}, "batch_size = 0"),
        (Keyless(), 4, {}, "__len__"),
        (TensorDataset(torch.zeros(0)), 4, {}, "empty TensorDataset"),
    ],
)
def test_what_cannot_be_leased_is_refused(
    dataset: Dataset[Any], batch_size: int, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Site().loader(dataset, batch_size, **options)


def test_a_site_has_one_loader() -> None:
    site = Site()
    site.loader(Numbers(), 4)
    with pytest.raises(ConfigError, match="one of them, once"):
        site.loader(Numbers(), 4)
    with pytest.raises(ConfigError, match="one of them, once"):
        site.shards(4)


# --- shards


def test_a_shard_counts_with_the_first_step_after_the_next_one_was_asked_for(node: FakeNode) -> None:
    """Over several windows it is in progress, and in no report."""
    node.script = [
        (0, apply(MergeMode.REPLACE, 2, fresh=True)),
        *((step, SNAPSHOT if ask == 0 else apply(MergeMode.REPLACE, step + 2)) for step in (2, 4, 6) for ask in (0, 1)),
        (8, SNAPSHOT),
        (8, STOP),
    ]
    seen: list[int] = []
    with joined() as site:
        for shard in site.shards(50):
            seen.append(shard)
            for _ in range(3):
                site.step(tokens=1)
    assert seen == samples(0, 3), "the run ended in the third"
    assert node.said("data") == [{"num_samples": 50, "batch_size": 1, "batches_ahead": 2, "of_shards": True}]
    assert [sealed["num_samples_used"] for sealed in node.said("sealed")] == [0, 1, 1, 2]


def test_a_shard_that_ends_with_a_window_is_listed_with_the_next_one(node: FakeNode) -> None:
    node.script = [(0, apply(MergeMode.REPLACE, 3, fresh=True)), (3, SNAPSHOT), (3, apply(MergeMode.REPLACE, 4))]
    node.script += [(4, SNAPSHOT), (4, STOP)]
    with joined() as site:
        for _ in site.shards(50):
            for _ in range(3):
                if not site.step(tokens=1).running:
                    break
    assert [sealed["num_samples_used"] for sealed in node.said("sealed")] == [0, 1]


def test_a_shard_that_was_begun_before_an_eviction_counts_no_longer(node: FakeNode) -> None:
    node.script = [
        (0, apply(MergeMode.REPLACE, 2, fresh=True)),
        (2, apply(MergeMode.REPLACE, 7, data_epoch=3)),
        (7, SNAPSHOT),
        (7, STOP),
    ]
    seen: list[int] = []
    with joined() as site:
        for shard in site.shards(50):
            seen.append(shard)
            for _ in range(3):
                site.step(tokens=1)
    assert seen == [*samples(0, 1), *samples(3000, 2)]
    assert node.said("sealed")[0]["num_samples_used"] == 1


def test_alone_each_shard_comes_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    site = Site()
    seen: list[int] = []
    for shard in itertools.islice(site.shards(7), 14):
        seen.append(shard)
        site.step(tokens=1)
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))


def test_shards_of_which_nothing_is_read() -> None:
    given: list[int] = []
    with pytest.raises(ConfigError, match=r"7 shards.*without a site\.step"):
        given.extend(Site().shards(7))
    with pytest.raises(ConfigError, match="num_shards = 0"):
        Site().shards(0)
