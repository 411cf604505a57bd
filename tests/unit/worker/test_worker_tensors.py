"""What a model is to the other sites: names, roles, ties, and what is refused."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from atoll.node.worker.tensors import ModelTensors, find_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Role, TiedName
from tests.harness.fake_group import fake_rank


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.a = nn.Linear(4, 2, bias=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def find(model: nn.Module, **arguments: object) -> ModelTensors:
    return find_tensors([model], [torch.optim.SGD(model.parameters(), lr=0.1)], **arguments)  # type: ignore[arg-type]


def test_what_tells_copies_of_a_tensor_from_others() -> None:
    net, other = nn.Linear(40, 50), nn.Linear(40, 50)
    other.load_state_dict(net.state_dict())
    net.bias.requires_grad_(False)
    pieces, same = (
        {piece.name: piece.first_values for piece in found.pieces_with_first_values()}
        for found in (find_tensors([model], [torch.optim.SGD(model.parameters(), lr=0.1)]) for model in (net, other))
    )
    assert pieces["weight"] == same["weight"] != b""
    assert pieces["bias"] == b"", "it is not trained"
    with torch.no_grad():
        other.weight.add_(1)
    moved = find_tensors([other], [torch.optim.SGD(other.parameters(), lr=0.1)]).pieces_with_first_values()
    assert same["weight"] not in [piece.first_values for piece in moved]


def test_names_roles_and_order() -> None:
    net = Net()
    net.a.weight.requires_grad_(False)
    found = find(net)
    assert {t.name: t.role for t in found.manifest.tensors} == {
        "a.weight": Role.FROZEN,
        "b.0.bias": Role.TRAINABLE,
        "b.0.weight": Role.TRAINABLE,
        "b.1.bias": Role.TRAINABLE,
        "b.1.num_batches_tracked": Role.BUFFER_LOWEST,
        "b.1.running_mean": Role.BUFFER_MEAN,
        "b.1.running_var": Role.BUFFER_MEAN,
        "b.1.weight": Role.TRAINABLE,
    }
    assert [p.name for p in found.pieces] == [t.name for t in found.manifest.tensors]


def test_wrappers_leave_no_trace() -> None:
    plain = find(Net()).manifest
    wrapped = Net()
    wrapped.b[0] = checkpoint_wrapper(wrapped.b[0])
    compiled = torch.compile(wrapped, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert find(compiled).manifest.digest == plain.digest
    with fake_rank(0, 2):
        assert find(DistributedDataParallel(Net())).manifest.digest == plain.digest
    own = nn.Module()  # an attribute of the user's own that is called module keeps its name
    own.module = nn.Linear(1, 1)
    assert [t.name for t in find(own).manifest.tensors] == ["module.bias", "module.weight"]


def test_dtype_of_the_worker_is_in_the_piece_only() -> None:
    found = find(Net().to(torch.bfloat16))
    spec = next(t for t in found.manifest.tensors if t.name == "a.weight")
    piece = next(p for p in found.pieces if p.name == "a.weight")
    assert (spec.dtype, piece.dtype) == ("F32", "BF16")
    buffer = next(t for t in found.manifest.tensors if t.name == "b.1.running_mean")
    assert buffer.dtype == "BF16"


def test_tied_weights_are_listed_once() -> None:
    net = nn.ModuleDict({"head": nn.Linear(4, 8, bias=False), "embedding": nn.Embedding(8, 4)})
    net["head"].weight = net["embedding"].weight
    found = find(net)
    assert [t.name for t in found.manifest.tensors] == ["embedding.weight"]
    assert found.manifest.tied == (TiedName(alias="head.weight", name="embedding.weight"),)
    shared_memory = nn.ModuleDict({"head": nn.Linear(4, 8, bias=False), "embedding": nn.Embedding(8, 4)})
    shared_memory["head"].weight.data = shared_memory["embedding"].weight.data
    assert find(shared_memory).manifest.digest == found.manifest.digest


def test_a_buffer_on_the_memory_of_a_parameter_is_refused() -> None:
    """It would be averaged as a buffer, without the outer optimizer."""
    net = Net()
    net.register_buffer("view", net.a.weight.data)
    with pytest.raises(ConfigError, match=r"the buffer 'view' is the memory of the parameter 'a\.weight'.*persistent"):
        find(net)
    net.register_buffer("view", net.a.weight.data, persistent=False)
    assert "view" not in [t.name for t in find(net).manifest.tensors]


def test_a_frozen_name_of_a_trained_parameter_is_refused() -> None:
    """Which of the names comes first would decide whether it is trained."""
    net = Net()
    net.a.register_parameter("alias", nn.Parameter(net.a.weight.data, requires_grad=False))
    with pytest.raises(ConfigError, match=r"'a\.alias' is frozen .* the memory of 'a\.weight', which is trained"):
        find(net)


def memory(how: str) -> nn.Module:
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    net = nn.ModuleDict({"a": a, "b": b})
    whole = torch.zeros(64)
    match how:
        case "transpose":
            b.weight.data = a.weight.data.t()
        case "part":
            b.weight = nn.Parameter(a.weight.data[1:3])
        case "another dtype":
            b.weight = nn.Parameter(a.weight.data.view(torch.bfloat16))
        case "a buffer of a part":
            a.register_buffer("row", a.weight.data[0])
        case "columns":
            a.weight, b.weight = (nn.Parameter(part) for part in whole.view(4, 16).tensor_split((6,), dim=1))
        case "rows":
            a.weight, b.weight = (nn.Parameter(part) for part in whole.view(4, 16).tensor_split((1,), dim=0))
        case "frozen":
            b.weight = nn.Parameter(whole.view(8, 8).t(), requires_grad=False)
            net.register_parameter("c", nn.Parameter(whole.view(8, 8), requires_grad=False))
    return net


@pytest.mark.parametrize("how", ["transpose", "part", "another dtype"])
def test_weights_that_share_memory_in_another_shape_are_refused(how: str) -> None:
    with pytest.raises(ConfigError, match=r"'a\.weight' and 'b\.weight' share memory.*a\.weight = b\.weight"):
        find(memory(how))


def test_a_buffer_of_a_part_of_a_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a\.row' and 'a\.weight' share memory"):
        find(memory("a buffer of a part"))


@pytest.mark.parametrize("how", ["columns", "rows", "frozen"])
def test_parts_of_one_memory_that_do_not_overlap_pass(how: str) -> None:
    """As fused projections are kept; and frozen ones, which are written once."""
    assert len(find(memory(how)).manifest.tensors) == (3 if how == "frozen" else 2)


def test_an_expanded_buffer_is_refused() -> None:
    """It cannot be written to in place."""
    net = Net()
    net.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    with pytest.raises(ConfigError, match=r"'mask' is expanded"):
        find(net)
    assert find(net, buffers={"mask": "local"})


def test_buffer_policies() -> None:
    found = find(Net(), buffers={"*.running_var": "local", "b.*": "lowest"})
    roles = {t.name: t.role for t in found.manifest.tensors}
    assert roles["b.1.running_var"] is Role.BUFFER_LOCAL
    assert roles["b.1.running_mean"] is Role.BUFFER_LOWEST
    with pytest.raises(
        ConfigError, match=r'no buffer and no frozen parameter is named "b.1.runing_mean".*b.1.running_mean'
    ):
        find(Net(), buffers={"b.1.runing_mean": "mean"})
    with pytest.raises(ConfigError, match=r"'men'.*mean"):
        find(Net(), buffers={"*": "men"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_buffer_that_cannot_be_averaged_is_named(dtype: torch.dtype) -> None:
    net = Net()
    net.register_buffer("count", torch.zeros(2, dtype=dtype))
    with pytest.raises(ConfigError, match=r"'count'.*another policy"):
        find(net, buffers={"count": "mean"})


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), "dtype torch.complex64"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    ],
)
def test_a_buffer_of_no_known_kind_is_left_to_each_site(buffer: torch.Tensor, words: str) -> None:
    net = Net()
    net.register_buffer("freqs", buffer)
    net.a.register_buffer("same", buffer)
    with pytest.raises(ConfigError, match=rf"'a\.same' has the {words}.*buffers=\{{\"a\.same\": \"local\"}}"):
        find(net)
    assert find(net, buffers={"a.same": "local"}).manifest.digest == find(Net()).manifest.digest


def test_a_complex_parameter_is_refused() -> None:
    net = Net()
    net.a.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match=r"'a\.phase' has the dtype torch\.complex64, which cannot be synchronized$"):
        find(net)


def test_buffers_without_a_mean_are_known_by_name() -> None:
    net = Net()
    net.register_buffer("mask", torch.full((2,), -math.inf))
    net.register_buffer("least", torch.full((2,), torch.finfo(torch.float32).min))
    net.register_buffer("own", torch.tensor(math.nan))
    net.a.weight.data[0, 0] = math.nan
    assert find(net, buffers={"own": "local"}).mean_buffers_not_finite() == ["mask"]


def test_refused_by_name() -> None:
    net = Net()
    with pytest.raises(ConfigError, match=r"no optimizer .* holds the trainable parameter 'b\.0"):
        find_tensors([net], [torch.optim.SGD(net.a.parameters(), lr=0.1)])
    with pytest.raises(ConfigError, match=r"SGD trains a parameter of shape \[4, 3\] \(group 0\) that is in no module"):
        find_tensors([net.a], [torch.optim.SGD(net.parameters(), lr=0.1)])
    with pytest.raises(ConfigError, match="AveragedModel"):
        find(AveragedModel(net))
    with pytest.raises(ConfigError, match=r"'weight' is trained as torch\.float64"):
        find(nn.Linear(1, 1, bias=False).double())
    with pytest.raises(ConfigError, match="meta device"):
        find(nn.Linear(1, 1, device="meta"))
    twin = copy.deepcopy(net)
    optimizer = torch.optim.SGD([*net.parameters(), *twin.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="ModuleDict"):
        find_tensors([net, twin], [optimizer])
    with pytest.raises(ConfigError, match="no trainable parameter"):
        find(Net().requires_grad_(False))


def test_optimizers_with_parameters_of_their_own_are_refused() -> None:
    class Masters(torch.optim.SGD):
        fp32_groups_flat = (torch.zeros(1),)

    net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"Masters would overwrite.*DeepSpeed"):
        find_tensors([net], [Masters(net.parameters(), lr=0.1)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight]["z"] = torch.zeros(2, 2)
    find_tensors([net], [optimizer])  # a name is no proof
    for is_on in (True, False):
        optimizer.param_groups[0]["train_mode"] = is_on
        with pytest.raises(ConfigError, match="schedule-free"):
            find_tensors([net], [optimizer])
    with pytest.raises(ConfigError, match="got a Wrapper"):
        find_tensors([net], [type("Wrapper", (), {})()])


VALUES = torch.zeros(2, 2)


@pytest.mark.parametrize("where", ["group", "state", "attribute"])
@pytest.mark.parametrize(
    ("ema", "is_refused"),
    [(0.99, False), (None, False), (False, False), ("none", False), ((0.9, 0.99), False), (torch.tensor(0.99), False),
     (VALUES, True), ({"weight": VALUES}, True), ([[VALUES]], True), (nn.Linear(2, 2), True), (True, True)],
)  # fmt: skip
def test_averaged_weights_are_told_by_what_they_are_and_not_by_a_name(
    ema: object, is_refused: bool, where: str
) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    match where:
        case "group":
            optimizer.param_groups[0]["ema"] = ema
        case "state":
            optimizer.state[net.weight]["ema"] = ema
        case "attribute":
            vars(optimizer)["ema"] = ema
    with pytest.raises(ConfigError, match="keeps averaged weights: 'ema'") if is_refused else nullcontext():
        find_tensors([net], [optimizer])


@pytest.mark.parametrize(
    "cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Muon]
)
def test_ordinary_optimizers_pass_before_and_after_steps(cls: type[torch.optim.Optimizer]) -> None:
    net = nn.Linear(2, 2, bias=False)
    optimizer = cls(net.parameters(), lr=0.1)  # type: ignore[call-arg]
    find_tensors([net], [optimizer])
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    find_tensors([net], [optimizer])
