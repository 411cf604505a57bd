"""A feed-forward of experts: what it computes, which loads it counts, and how its biases move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from atoll.node.dataplane.hugging_face import check_same
from atoll.node.dataplane.hugging_face_export import export
from atoll.node.parallel.mesh import Mesh
from atoll.node.parallel.parallelize import parallelize
from atoll.node.parallel.passes import WholeModel
from atoll.node.parallel.settings import ParallelSettings, parse
from atoll.node.parallel.tensor import share_matrices
from atoll.node.plan.tensors import active_parameters, manifest_of, shapes
from atoll.node.worker.experts import BUFFERS, MixtureOfExperts, Router, balance
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import make_optimizer, token_loss
from atoll.node.worker.sample import load_model, sample_text
from atoll.node.worker.tensors import find_tensors
from atoll.node.worker.trainer import train_step
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import MODELS, ModelSettings, TrainerSettings, check_model
from atoll.protocol.settings import RunSettings
from tests.harness.saved_built_in import save

SETTINGS = ModelSettings(
    dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    ffn_dim=24,
    max_sequence=16,
    num_experts=6,
    experts_per_token=2,
    num_shared_experts=1,
)


def mixture(seed: int = 3) -> MixtureOfExperts:
    found = Transformer(SETTINGS, seed).layers["0"].feed_forward
    assert isinstance(found, MixtureOfExperts)
    return found


def token_by_token(block: MixtureOfExperts, x: Tensor) -> Tensor:
    """The definition: x: (tokens, dim)."""
    rows, experts = [], block.experts
    for token in x:
        scores = (block.router.weight @ token).sigmoid()
        chosen = (scores + block.router.bias).argsort(descending=True)[: SETTINGS.experts_per_token]
        row = torch.zeros_like(token)
        for number in chosen:
            hidden = F.silu(experts.gate[number] @ token) * (experts.up[number] @ token)
            row = row + scores[number] / scores[chosen].sum() * (experts.down[number] @ hidden)
        rows.append(row)
    out = torch.stack(rows)
    return out if block.shared is None else out + block.shared(x)


def favour(router: Router, *experts: int) -> None:
    router.bias[list(experts)] = 10.0


@pytest.mark.parametrize("favoured", [(), (1, 4)], ids=["uneven loads", "all tokens to two experts"])
def test_it_is_its_definition_with_its_gradients(favoured: tuple[int, ...]) -> None:
    block = mixture()
    favour(block.router, *favoured)
    x = torch.randn(2, 9, SETTINGS.dim, generator=torch.Generator().manual_seed(1))
    given, expected = list[Tensor | None](), list[Tensor | None]()
    for result, compute in ((given, block), (expected, lambda y: token_by_token(block, y.flatten(0, 1)))):
        y = x.clone().requires_grad_()
        block.zero_grad()
        out = compute(y).view_as(x)
        out.square().sum().backward()
        result += [out, y.grad, *(p.grad for p in block.parameters())]
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    idle = {*range(SETTINGS.num_experts)} - {*favoured}
    if favoured:
        gradient = block.experts.gate.grad
        assert gradient is not None
        assert not gradient[sorted(idle)].any(), "experts without a token have a gradient, of zero"


def test_a_bias_decides_who_is_chosen_and_not_the_weight() -> None:
    router = mixture().router
    x = torch.randn(1, 5, SETTINGS.dim)
    scores = F.linear(x, router.weight).sigmoid()
    favour(router, 0, 5)
    weights, chosen = router(x)
    assert {*chosen.flatten().tolist()} == {0, 5}
    torch.testing.assert_close(weights, scores.gather(-1, chosen) / scores[..., [0, 5]].sum(-1, keepdim=True))


def loads(model: nn.Module) -> list[list[int]]:
    return [
        torch.stack(module.loads).sum(0).tolist()
        for module in model.modules()
        if isinstance(module, Router) and module.loads
    ]


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_token_counts_once_in_a_step(checkpointing: str) -> None:
    settings = ParallelSettings(checkpointing=checkpointing, accumulation=2)
    model = parallelize(
        Transformer(SETTINGS, 1), settings, None, partial(share_matrices, is_tied=False, by_positions=False)
    )
    tokens = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(2))
    WholeModel(model, token_loss, settings)(tokens[:, :-1], tokens[:, 1:])
    counted = loads(model)
    assert [sum(of_router) for of_router in counted] == [4 * 8 * SETTINGS.experts_per_token] * SETTINGS.num_layers
    with torch.no_grad():
        model(tokens[:, :-1])
    model.eval()(tokens[:, :-1])
    assert loads(model) == counted, "only what is trained on counts"


def test_biases_move_once_a_step_against_the_load() -> None:
    model = Transformer(SETTINGS, 1)
    passes = WholeModel(model, token_loss, ParallelSettings())
    windows = torch.randint(0, 256, (4, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    routers = [module for module in model.modules() if isinstance(module, Router)]
    passes(windows[:, :-1].long(), windows[:, 1:].long())
    (first, _), share = loads(model), 4 * 8 * SETTINGS.experts_per_token / SETTINGS.num_experts
    routers[0].loads, routers[1].loads = [], []
    train_step(passes, make_optimizer(model.parameters(), TrainerSettings()), windows, 1.0, None)
    rate = SETTINGS.router_bias_rate
    assert routers[0].bias.tolist() == pytest.approx([rate if n < share else -rate if n > share else 0 for n in first])
    assert loads(model) == []


def test_loads_become_even() -> None:
    """A router of this seed sends two thirds more tokens to one expert than is its share."""
    block = MixtureOfExperts(replace(SETTINGS, router_bias_rate=0.01), None)
    nn.init.normal_(block.router.weight, std=0.25, generator=torch.Generator().manual_seed(4))
    for p in block.experts.parameters():
        nn.init.zeros_(p)
    x = torch.randn(1, 600, SETTINGS.dim, generator=torch.Generator().manual_seed(5)) + 1.0
    worst = []
    for _ in range(100):
        block(x)
        worst.append(block.router.loads[0].max().item() / (600 * 2 / 6))
        balance([block], None)
    assert worst[0] > 1.5
    assert worst[-1] < 1.1


def test_positions_that_fill_a_sequence_up_do_not_count() -> None:
    block = mixture()
    block.router.num_real = 5
    block(torch.randn(2, 8, SETTINGS.dim))
    assert sum(loads(block)[0]) == 2 * 5 * SETTINGS.experts_per_token


@pytest.fixture
def pipeline() -> Iterator[Mesh]:
    """Of two ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield Mesh.of_site(torch.device("cpu"), parse("pp=2,microbatches=2").resolved(2))
    finally:
        dist.destroy_process_group()


def test_of_a_pipeline_the_microbatches_of_the_step_count(pipeline: Mesh) -> None:
    """torch runs a stage once more before its first step, to learn shapes."""
    block = mixture()
    rate = SETTINGS.router_bias_rate
    block.router.loads = [torch.tensor(load) for load in ([0, 0, 0, 90, 0, 0], [3, 1, 2, 0, 2, 4], [3, 1, 2, 0, 2, 4])]
    balance([block], pipeline)
    assert block.router.bias.tolist() == pytest.approx([-rate, rate, 0, rate, 0, -rate])


def test_experts_that_get_no_token_at_all_have_gradients_of_zero() -> None:
    """Of a rank that shares them, whose part in the sums of gradients others wait for."""
    experts = mixture().experts
    x = torch.zeros(0, SETTINGS.dim, requires_grad=True)
    out = experts(x, torch.zeros(SETTINGS.num_experts, dtype=torch.int64))
    assert out.shape == (0, SETTINGS.dim)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_the_router_computes_in_fp32() -> None:
    block, x = mixture(), torch.randn(2, 8, SETTINGS.dim)
    exact, _ = block.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        weights, _ = block.router(x)
        assert block(x).dtype is torch.bfloat16
    assert torch.equal(weights, exact)


def test_biases_are_buffers_whose_mean_sites_take() -> None:
    model = Transformer(SETTINGS, 1)
    found = find_tensors([model], [make_optimizer(model.parameters(), TrainerSettings())], {BUFFERS: "mean"})
    assert found.manifest == manifest_of(SETTINGS)


@pytest.mark.parametrize(
    ("name", "millions", "active"),  # as their papers say; deepseek's has one dense block, and 16.4 billion
    [("olmoe-1b-7b", 6919, 1282), ("deepseek-moe-16b", 16880, 2831), ("mixtral-8x7b", 46703, 12880)],
)
def test_named_mixtures_have_the_size_of_their_namesakes(name: str, millions: int, active: int) -> None:
    with torch.device("meta"):
        built = Transformer(MODELS[name])
    assert round(sum(p.numel() for p in built.parameters()) / 1e6) == millions
    assert round(active_parameters(MODELS[name]) / 1e6) == active


def test_a_token_goes_through_all_of_a_dense_model() -> None:
    assert active_parameters(MODELS["tiny"]) == sum(torch.Size(shape).numel() for _, shape in shapes(MODELS["tiny"]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"experts_per_token": 7}, "model.experts_per_token = 7 of model.num_experts = 6: choose at most as many"),
        ({"num_experts": 0}, "model.num_shared_experts = 1 with model.num_experts = 0: .*say num_experts"),
    ],
)
def test_what_contradicts_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(replace(SETTINGS, **changed), TrainerSettings(sequence=16))


def test_a_saved_one_writes_text_and_is_no_llama(tmp_path: Path) -> None:
    settings = RunSettings(run_id="r", model=SETTINGS, trainer=TrainerSettings(sequence=16))
    model = Transformer(SETTINGS, 1)
    favour(next(module for module in model.modules() if isinstance(module, Router)), 2, 3)
    folder = save(tmp_path, settings, model)
    loaded = load_model(folder)
    assert all(torch.equal(values, loaded.state_dict()[name]) for name, values in model.state_dict().items())
    assert sample_text(folder, "the ", 5).startswith("the ")
    with pytest.raises(ConfigError, match="the model has 6 experts a block, and Hugging Face's Llama has none"):
        export(folder, tmp_path / "hf", 1 << 30)


def test_a_run_with_experts_does_not_start_from_a_llama(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, '
        '"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "rms_norm_eps": 1e-5}'
    )
    check_same(tmp_path, replace(SETTINGS, num_experts=0, num_shared_experts=0))
    with pytest.raises(ConfigError, match=r"its num_experts is 0, and the run's model.num_experts = 6"):
        check_same(tmp_path, SETTINGS)
