"""A model of a script's own: what `atoll.share` and `atoll.join` refuse by name, and what a rank alone has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.settings import parse
from atoll.node.worker import join, own_model
from atoll.node.worker.local_steps import local_of
from atoll.node.worker.own_model import Names, own
from atoll.node.worker.shared_model import share
from atoll.node.worker.tensors import named_tensors, slice_of
from atoll.protocol.errors import ConfigError
from examples.own_model import BATCH, PARTS, SEQUENCE, Model, loss_of
from tests.harness.fake_group import fake_rank

CPU = torch.device("cpu")


def shareable(text: str = "", num_ranks: int = 1, **changed: Any) -> Any:
    return own(Model, loss_of, Names(**{**PARTS, **changed}), parse(text).resolved(num_ranks), CPU, seed=3)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"blocks": "layers"}, "name 'layers', which the model does not have"),
        ({"first": ["embeddings"]}, "name 'embeddings', which the model does not have"),
        ({"last": ["norm", "output"]}, "name 'output', which the model does not have"),
        ({"blocks": "embedding"}, "blocks names 'embedding', which is no ModuleList and no ModuleDict"),
    ],
)
def test_names_that_the_model_does_not_have_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shareable(**changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"columns": ["querys"]}, "a block has no module 'querys', which columns names"),
        ({"rows": ["norm"]}, "'norm' of rows is LayerNorm, and no nn.Linear"),
        ({"columns": ["queries", "odd"]}, "tp=2 does not divide the 3 of 'odd'; choose another tp"),
        ({"columns": ["queries", "mixed"]}, "'mixed' is among columns and among rows"),
    ],
)
def test_matrices_that_ranks_cannot_share_are_refused(changed: dict[str, Any], words: str) -> None:
    def odd() -> Model:
        model = Model()
        for block in model.blocks:
            block.register_module("odd", nn.Linear(64, 3))
        return model

    with fake_rank(0, 2):
        parallel = parse("tp=2").resolved(2)
        model = own(odd, loss_of, Names(**{**PARTS, **changed}), parallel, CPU)
        with pytest.raises(ConfigError, match=words):
            share(model, parallel, Mesh.of_site(CPU, parallel), CPU)


def test_more_stages_than_blocks_are_refused() -> None:
    with fake_rank(0, 8):
        parallel = parse("pp=8").resolved(8)
        with pytest.raises(
            ConfigError, match="8 stages of a pipeline, but the model has 4 blocks; choose a smaller pp"
        ):
            share(shareable(), parallel, Mesh.of_site(CPU, parallel), CPU)


def test_what_no_stage_has_is_refused_by_name() -> None:
    with fake_rank(0, 2):
        parallel = parse("pp=2").resolved(2)
        with pytest.raises(ConfigError, match=r"'norm\.weight' is neither in a block nor before or behind them"):
            share(shareable(last=["head"]), parallel, Mesh.of_site(CPU, parallel), CPU)


def test_a_stage_calls_its_blocks_as_the_whole_model_does() -> None:
    whole = {name for name, _ in Model().named_parameters(remove_duplicate=False)}
    found: dict[str, list[int]] = {}
    for rank in range(2):
        with fake_rank(rank, 2):
            parallel = parse("pp=2").resolved(2)
            passes = share(shareable(), parallel, Mesh.of_site(CPU, parallel), CPU)
            for part in passes.parts:
                for name, _ in part.named_parameters():
                    found.setdefault(name, []).append(rank)
    assert found.keys() == whole
    assert found["blocks.2.norm.weight"] == [1]
    assert found["embedding.tokens.weight"] == [0]
    assert found["head.weight"] == [1], "tied in the whole model, a copy here"


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_what_is_tied_is_one_parameter_also_where_ranks_share_it(layout: str) -> None:
    with fake_rank(0, 2):
        parallel = parse(layout).resolved(2)
        (part,) = share(shareable(), parallel, Mesh.of_site(CPU, parallel), CPU).parts
        assert part.get_parameter("head.weight") is part.get_parameter("embedding.tokens.weight")
        assert not part.get_buffer("embedding.angles").is_meta
        assert torch.equal(part.get_buffer("embedding.angles"), Model().get_buffer("embedding.angles"))


@pytest.mark.parametrize(
    ("text", "changed", "words"),
    [
        ("cp=2", {}, "cp=2 is of the built-in model; leave out cp"),
        ("dp_shard=2,ep=2", {}, "ep=2 is of the built-in model; leave out ep"),
        ("tp=2,sequence_parallel=1", {}, "sequence_parallel=1 is of the built-in model"),
        ("tp=2", {"columns": (), "rows": ()}, "say with columns= and rows= of atoll.share"),
        ("dp_replicate=2,zero=1", {}, "make a ZeroRedundancyOptimizer in the script"),
    ],
)
def test_settings_that_need_to_know_more_are_refused(text: str, changed: dict[str, Any], words: str) -> None:
    said = {"columns": PARTS["columns"], "rows": PARTS["rows"], **changed}
    with pytest.raises(ConfigError, match=words):
        own_model._check(parse(text), said["columns"], said["rows"])


def test_alone_it_is_the_model() -> None:
    torch.manual_seed(7)
    expected = Model()
    with atoll.share(Model, loss_of, **PARTS, seed=7) as model:
        assert [p.shape for p in model.parameters()] == [p.shape for p in expected.parameters()]
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, other)
        tokens = torch.randint(0, 256, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        plain = loss_of(expected(tokens[:, :-1]), tokens[:, 1:])
        plain.backward()  # type: ignore[no-untyped-call]
        assert loss is not None
        torch.testing.assert_close(loss, plain.detach())
        norm = model.clip(1e-3)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 1e-3))
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
        assert (model.data_rank, model.batch_size(BATCH)) == (0, BATCH)


def test_a_script_that_shares_its_model_itself_has_no_use_for_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException] = []

    class Connection:
        class greeting:
            parallel = "tp=2"

        tell = staticmethod(told.append)

    monkeypatch.setattr(join, "connect", Connection)
    net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"--parallel tp=2: the script does not share its model by atoll\.share"):
        atoll.join(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert len(told) == 1


class Inner(Model):
    """Two matrices of each block are one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 256, bias=False)
        for block in self.blocks:
            block.keys.weight = block.queries.weight  # type: ignore[union-attr]


class Across(Model):
    """Two blocks have a matrix in common."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].keys.weight = self.blocks[0].keys.weight  # type: ignore[union-attr]


class Counting(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


class Untouchable(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 4)]


class OneMask(Model):
    """A buffer that all blocks have in common."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(3)
        for block in self.blocks:
            block.register_buffer("mask", mask, persistent=False)


def shared(build: type[Model], text: str, rank: int = 0) -> Any:
    num_ranks = parse(text).num_ranks(1)
    with fake_rank(rank, num_ranks):
        parallel = parse(text).resolved(num_ranks)
        model = own(build, loss_of, Names(**PARTS), parallel, CPU)
        return share(model, parallel, Mesh.of_site(CPU, parallel), CPU)


def test_what_is_tied_within_a_stage_is_not_exchanged() -> None:
    for rank in range(2):
        passes = shared(Inner, "pp=2", rank)
        assert not passes.counted_elsewhere
        assert passes._tied is None
        for part in passes.parts:
            for block in part.blocks:
                assert block.keys.weight is block.queries.weight


@pytest.mark.parametrize(
    ("build", "layout", "words"),
    [
        (Across, "pp=2", r"'blocks\.3\.keys\.weight' and 'blocks\.0\.keys\.weight' are one parameter; stages can"),
        (Model, "pp=2,pp_schedule=zbv", "first and the last stage are on one rank, which would have it twice"),
        (Counting, "pp=2", "with the buffer 'seen': torch's pipeline goes forward once"),
        (Untouchable, "dp_shard=2", r"build does not work under torch\.device"),
    ],
)
def test_models_that_cannot_be_shared_so_are_refused(build: type[Model], layout: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shared(build, layout)


def first_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Under one name each, as files have them."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def given(values: Callable[[], Iterable[tuple[str, torch.Tensor]]], text: str, rank: int = 0) -> Any:
    """And the model is never built but on the meta device."""

    def build() -> Model:
        model = OneMask()
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        return model

    num_ranks = parse(text).num_ranks(1)
    parallel = parse(text).resolved(num_ranks)
    if num_ranks == 1:
        return share(own(build, loss_of, Names(**PARTS), parallel, CPU, values=values), parallel, None, CPU)
    with fake_rank(rank, num_ranks):
        model = own(build, loss_of, Names(**PARTS), parallel, CPU, values=values)
        return share(model, parallel, Mesh.of_site(CPU, parallel), CPU)


@pytest.mark.parametrize("layout", ["", "dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "dp_shard=2,tp=2"])
def test_first_values_are_taken_one_after_the_other(layout: str) -> None:
    whole = first_values(OneMask())
    alive = 0

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive
        for name, value in whole.items():
            tensor = value.clone()
            alive += 1
            weakref.finalize(tensor, gone)
            yield name, tensor
            del tensor
            assert alive <= 1, f"kept beside {name}"

    def gone() -> None:
        nonlocal alive
        alive -= 1

    found = set[str]()
    for rank in range(parse(layout).num_ranks(1)):
        for part in given(values, layout, rank).parts:
            for name, tensor in named_tensors(part):
                expected = whole["embedding.tokens.weight" if name == "head.weight" else name]
                offsets, sizes = slice_of(tensor, name)
                here = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                assert torch.equal(local_of(tensor), expected[here])
                found.add(name)
            for name, buffer in part.named_buffers(remove_duplicate=False):
                assert torch.equal(buffer, whole["blocks.0.mask" if name.endswith("mask") else "embedding.angles"])
    assert found >= {name for name, _ in Model().named_parameters()}


def without(name: str) -> dict[str, torch.Tensor]:
    values = first_values(OneMask())
    del values[name]
    return values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (without("norm.bias"), r"values gives no 'norm\.bias'"),
        (without("embedding.angles"), r"values gives no 'embedding\.angles'"),
        (
            {"norm.bias": torch.zeros(3)},
            r"values gives 'norm\.bias' with shape \(3,\), and the model has it with \(64,\)",
        ),
        ({"odd": torch.zeros(3)}, "values gives 'odd', which the model does not have"),
    ],
)
@pytest.mark.parametrize("layout", ["", "pp=2"])
def test_first_values_of_another_model_are_refused(values: dict[str, torch.Tensor], layout: str, words: str) -> None:
    """In a pipeline also by the rank that has no part of it."""
    for rank in range(parse(layout).num_ranks(1)):
        with pytest.raises(ConfigError, match=words):
            given(values.items, layout, rank)


@pytest.mark.parametrize("values", [first_values(OneMask()), [("norm.bias", torch.zeros(64).numpy())]])
def test_first_values_that_are_no_pairs_of_name_and_tensor_are_refused_by_what_they_are(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"no name with a tensor: of a dict give items\(\), of arrays tensors$"):
        given(lambda: values, "", 0)


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2", "pp=2"])
def test_a_buffer_that_blocks_have_in_common_is_in_each(layout: str) -> None:
    for rank in range(2):
        for part in shared(OneMask, layout, rank).parts:
            masks = [buffer for name, buffer in part.named_buffers(remove_duplicate=False) if name.endswith("mask")]
            assert len(masks) == (2 if layout == "pp=2" else 4)
            assert all(torch.equal(mask, torch.ones(3)) for mask in masks)
