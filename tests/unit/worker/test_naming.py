"""Names in the whole model of tensors that a rank has in parts of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.node.core.ranks.pieces import merge_ranks
from atoll.node.local_protocol import LocalJoin
from atoll.node.worker.naming import AS_SEEN, Naming
from atoll.node.worker.tensors import ModelTensors, find_tensors
from atoll.protocol.errors import ConfigError

TIED = {"head.weight": "embedding.weight"}


class Model(nn.Module):
    """Or a stage of it, as it is cut out of a list."""

    def __init__(self, blocks: range, *, is_first: bool = True, is_last: bool = True) -> None:
        super().__init__()
        if is_first:
            self.embedding = nn.Embedding(7, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in blocks)
        if is_last:
            self.head = nn.Linear(3, 7, bias=False)
        if is_first and is_last:
            self.head.weight = self.embedding.weight


def tensors(model: nn.Module, naming: Naming = AS_SEEN) -> ModelTensors:
    return find_tensors([model], [torch.optim.SGD(model.parameters(), lr=0.1)], naming=naming)


def offered(found: ModelTensors) -> LocalJoin:
    return LocalJoin(
        manifest=found.manifest,
        pieces=found.pieces,
        data_fingerprint=b"",
        data_rank=0,
        names_are_said=True,
        tied_here=found.tied_here,
    )


def test_stages_with_their_names_and_ties_are_the_model_of_one_rank() -> None:
    one = tensors(Model(range(4)))
    first = tensors(Model(range(2), is_last=False), Naming({}, tied=TIED))
    parts = {"layers.0": "layers.2", "layers.1": "layers.3"}
    last = tensors(Model(range(2, 4), is_first=False), Naming(parts, TIED))
    assert merge_ranks([offered(first), offered(last)]).manifest == one.manifest
    assert last.held[0].spec.name == "embedding.weight"
    assert last.held[0].parameter is not None


@pytest.mark.parametrize(
    ("said", "lacking"),
    [({"head.weight": "embeding.weight"}, "embeding.weight"), ({"haed.weight": "embedding.weight"}, "haed.weight")],
)
def test_a_tie_of_what_no_rank_has_is_refused(said: dict[str, str], lacking: str) -> None:
    """The two would be two tensors of the run, that nobody keeps alike."""
    stages = (Model(range(2), is_last=False), Model(range(0), is_first=False))
    found = [offered(tensors(stage, Naming({}, tied=said))) for stage in stages]
    with pytest.raises(ConfigError, match=f"names '{lacking}', which no rank has"):
        merge_ranks(found)


def test_what_is_tied_to_a_tied_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match='"middle" is both tied and tied to'):
        tensors(Model(range(1)), Naming({}, tied={"head.weight": "middle", "middle": "embedding.weight"}))


def test_the_direction_of_a_tie_does_not_matter() -> None:
    turned = {alias: name for name, alias in TIED.items()}
    stages = (Model(range(2), is_last=False), Model(range(0), is_first=False))
    found = [offered(tensors(stage, Naming({}, tied=turned))) for stage in stages]
    assert (
        merge_ranks(found).manifest
        == merge_ranks([offered(tensors(stage, Naming({}, tied=TIED))) for stage in stages]).manifest
    )


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("layers.1.weight", "layers.5.weight"),
        ("layers.10.weight", "layers.10.weight"),
        ("layers.1.norm.weight", "norms.1.weight"),
        ("head", "output"),
        ("header", "header"),
        ("other.layers.1", "other.layers.1"),
    ],
)
def test_the_longest_part_that_fits_names_it(own: str, name: str) -> None:
    naming = Naming({"layers.1": "layers.5", "layers.1.norm": "norms.1", "head": "output"}, {})
    assert naming.name(own) == name


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'names: nothing here is named "layer\.0"; did you mean "layers\.0'):
        tensors(Model(range(2)), Naming({"layer.0": "layers.4"}, {}))


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two tensors .* have the name 'layers\.1\.(weight|bias)'"):
        tensors(Model(range(2)), Naming({"layers.0": "layers.1"}, {}))
    untied = Model(range(1))
    untied.head.weight = nn.Parameter(torch.ones(7, 3))
    with pytest.raises(ConfigError, match=r"have the name '(embedding|head)\.weight'"):
        tensors(untied, Naming({}, tied=TIED))
