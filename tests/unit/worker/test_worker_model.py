"""The built-in model, its recipe, what it is compared with, and a saved one."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.cli.main import main
from atoll.node.dataplane.saved_manifest import former_of
from atoll.node.worker import data
from atoll.node.worker.evaluate import held_out_bits_per_byte
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import TextWindows, learning_rate, make_optimizer, next_byte_loss, optimizer_of
from atoll.node.worker.sample import load_model, sample_text
from atoll.node.worker.token_index import ShardRole
from atoll.node.worker.tokenizer import load_tokenizer
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings, validate
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import baselines
from benchmarks.diloco import Flight, Outer, follow, simulate_diloco, windows
from tests.harness.packed import make_tokenizer, write_packed
from tests.harness.saved_built_in import save
from tests.harness.zero import ZeroRedundancyOptimizer, rank_of_two

SMALL = ModelSettings(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, max_sequence=16)

SETTINGS = RunSettings(
    run_id="r",
    steps=6,
    model=SMALL,
    trainer=TrainerSettings(batch_size=4, sequence=16, warmup_steps=2),
    sync=SyncSettings(every=2),
    outer=OuterSettings(learning_rate=1.0, momentum=0.0),
)


@pytest.fixture
def corpus(tmp_path: Path) -> data.Corpus:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return data.load(data.list_files([str(tmp_path / "text")]))


def test_the_default_has_about_a_million_parameters() -> None:
    count = sum(p.numel() for p in Transformer(ModelSettings()).parameters())
    assert 900_000 <= count <= 1_000_000


def test_first_values_come_from_the_seed() -> None:
    one, same, other = (Transformer(SMALL, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert "cos" not in one  # computed, not part of the model's state


def test_a_byte_does_not_see_what_follows_it() -> None:
    model = Transformer(SMALL, 1)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = 0
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(tokens)[:, 9:], model(changed)[:, 9:])
    with pytest.raises(ConfigError, match="max_sequence"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_tied_embeddings() -> None:
    model = Transformer(dataclasses.replace(SMALL, tie_embeddings=True))
    assert model.head is not None
    assert model.embedding is not None
    assert model.head.weight is model.embedding.weight


def test_every_parameter_gets_a_gradient_and_a_place_in_the_optimizer(corpus: data.Corpus) -> None:
    model = Transformer(SMALL)
    optimizer = make_optimizer(model.parameters(), SETTINGS.trainer)
    windows = TextWindows(corpus.training, SETTINGS.trainer.sequence)
    loss = next_byte_loss(model, torch.stack([windows[i] for i in range(4)]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    assert abs(loss.item() / math.log(2) - 8) < 1.5


def test_schedule() -> None:
    trainer = TrainerSettings(learning_rate=1.0, warmup_steps=10)
    assert [learning_rate(trainer, step, 110) for step in (0, 9, 10, 60, 110, 500)] == pytest.approx(
        [0.1, 1.0, 1.0, 0.55, 0.1, 0.1]
    )
    assert learning_rate(dataclasses.replace(trainer, warmup_steps=0), 0, 10) == 1.0


def test_ranks_that_share_the_state_of_the_optimizer_do_the_same_steps() -> None:
    """Those of its own part, here; the others hand theirs in."""
    settings, moved = SETTINGS, 0
    one, two = Transformer(SMALL, 1), Transformer(SMALL, 1)
    with rank_of_two(0):
        shared = optimizer_of(two.parameters(), settings, shares_state=True)
        alone = optimizer_of(one.parameters(), settings)
        assert isinstance(shared, ZeroRedundancyOptimizer)
        assert type(shared.optim) is type(alone) is torch.optim.AdamW
        for _ in range(3):
            for model, optimizer in ((one, alone), (two, shared)):
                optimizer.zero_grad()
                next_byte_loss(model, torch.arange(17, dtype=torch.uint8).repeat(2, 1)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            mine = {id(p) for group in shared.optim.param_groups for p in group["params"]}
            for expected, found in zip(one.parameters(), two.parameters(), strict=True):
                if id(found) in mine:
                    assert torch.equal(expected, found)
                    moved += 1
                found.data.copy_(expected)
        assert 0 < moved < 3 * len(list(one.parameters()))
        assert shared.param_groups[0]["weight_decay"] == settings.trainer.weight_decay
    nodes = dataclasses.replace(settings, sync=SyncSettings(strategy="gradient", every=1))
    with pytest.raises(ConfigError, match="have no optimizer's state to share; leave out zero"):
        optimizer_of(one.parameters(), nodes, shares_state=True)


def test_evaluation(corpus: data.Corpus) -> None:
    model = Transformer(SMALL)
    assert model.head is not None
    torch.nn.init.zeros_(model.head.weight)
    assert held_out_bits_per_byte(model, corpus, 16) == pytest.approx(8.0)  # knows nothing: 8 bits a byte
    assert model.training
    with pytest.raises(ConfigError, match="held-out"):
        held_out_bits_per_byte(model, corpus, 10_000)


def test_bits_of_tokens_are_shared_by_the_bytes_that_they_stand_for(tmp_path: Path) -> None:
    index = write_packed(tmp_path / "packed", make_tokenizer(tmp_path))
    corpus = data.load(data.source_for_run("mine", [str(tmp_path / "packed")]))
    model = Transformer(dataclasses.replace(SMALL, vocab_size=512))
    torch.nn.init.zeros_(model.head.weight)  # type: ignore[union-attr]
    num_tokens, _, num_bytes = index.totals([ShardRole.HELD_OUT])
    assert held_out_bits_per_byte(model, corpus, 16) == pytest.approx(9.0 * num_tokens / num_bytes)


def test_baselines_start_alike_and_learn(corpus: data.Corpus) -> None:
    done: list[tuple[str, int]] = []
    results = [
        baselines.train_data_parallel(SETTINGS, corpus, 1),
        baselines.train_data_parallel(SETTINGS, corpus, 2),
        simulate_diloco(SETTINGS, corpus, 2, lambda name, steps: done.append((name, steps))),
    ]
    assert len({r.bits_per_byte_before for r in results}) == 1
    assert all(r.bits_per_byte_after < r.bits_per_byte_before for r in results)
    assert done == [("diloco nesterov 1/0", step) for step in (2, 4, 6)]


@pytest.mark.parametrize(
    "sync",
    [
        SyncSettings(every=2),
        SyncSettings(every=2, overlap_steps=2),
        SyncSettings(every=3, fragments=2),
        SyncSettings(every=4, fragments=4, overlap_steps=4),
    ],
)
def test_diloco_of_one_site_with_a_plain_mean_is_training_alone(corpus: data.Corpus, sync: SyncSettings) -> None:
    """Whatever is trained while the sites talk, and whichever fragment they talk of."""
    settings = dataclasses.replace(SETTINGS, sync=sync)
    alone = baselines.train_data_parallel(settings, corpus, 1).bits_per_byte_after
    assert simulate_diloco(settings, corpus, 1).bits_per_byte_after == pytest.approx(alone, abs=1e-4)


PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
IN_FLIGHT: list[dict[str, Any]] = json.loads(
    re.findall(r"```json in-flight-vector\n(.*?)```", PAGE.read_text(), re.S)[0]
)


@pytest.mark.parametrize("vector", IN_FLIGHT, ids=lambda v: f"{v['fragments']}-{v['overlap_steps']}-{v['alpha']}")
def test_with_several_syncs_in_flight_simulated_sites_take_what_the_vectors_say(vector: dict[str, Any]) -> None:
    num, alpha, step = vector["fragments"], vector["alpha"], 0
    sync = SyncSettings(
        every=vector["every"],
        fragments=num,
        overlap_steps=vector["overlap_steps"],
        merge="mix" if alpha else "keep",
        alpha=alpha,
    )
    settings = dataclasses.replace(
        SETTINGS,
        steps=vector["steps"],
        sync=sync,
        outer=OuterSettings(learning_rate=vector["rate"], momentum=vector["momentum"]),
    )
    validate(settings)
    names = [f"layers.{fragment}.w" for fragment in range(num)]
    outer = Outer(settings, {name: torch.zeros(1) for name in names})
    gains: list[list[float]] = vector["gains"]
    sites = [[torch.zeros(1) for _ in names] for _ in gains]
    found: list[list[Any]] = []

    def train(until: int) -> None:
        nonlocal step
        for site, gain in zip(sites, gains, strict=True):
            for value, of_a_step in zip(site, gain, strict=True):
                value.add_(of_a_step * (until - step))
        step = until

    def taken(flight: Flight) -> None:
        places = outer.places(flight.fragment)
        values = [[float(of[place]) for place in places] for of in (outer.values, *sites)]
        found.append([flight.fragment, flight.boundary, flight.taken_at, values[0], values[1:]])

    follow(outer, sites, train, taken)
    assert found == vector["taken"]
    newest = [boundary for _, boundary, *_ in found]
    num_open = [sum(b < t for b in newest[i:]) for i, (_, _, t, *_) in enumerate(found)]
    assert max(num_open) > 1, "several are sealed and not taken"


def test_simulated_windows_are_those_of_a_run() -> None:
    in_three = dataclasses.replace(SETTINGS, steps=20, sync=SyncSettings(every=10, fragments=3))
    assert windows(in_three) == [(0, 3), (1, 6), (2, 10), (0, 13), (1, 16), (3, 20)]
    assert windows(dataclasses.replace(SETTINGS, steps=5)) == [(0, 2), (0, 4), (0, 5)]


# --- a saved model


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_writes(tmp_path: Path, tied: bool) -> None:
    settings = dataclasses.replace(SETTINGS, model=dataclasses.replace(SMALL, tie_embeddings=tied))
    model = Transformer(settings.model, seed=9)
    folder = save(tmp_path, settings, model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.equal(load_model(folder)(tokens), model(tokens))
    text = sample_text(folder, "def ", num_tokens=20, seed=1)
    assert text.startswith("def ")
    assert text == sample_text(folder, "def ", num_tokens=20, seed=1)
    assert sample_text(folder, "def ", 20, temperature=0) == sample_text(folder, "def ", 20, temperature=0, seed=2)


def test_a_model_of_tokens_writes_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(tmp_path)
    settings = dataclasses.replace(SETTINGS, model=dataclasses.replace(SMALL, vocab_size=300))
    model = Transformer(settings.model, seed=9)
    folder = save(tmp_path, settings, model)
    loaded, _ = load_tokenizer(tokenizer)
    tokens = loaded.encode("the quick").ids
    for _ in range(5):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    text = sample_text(folder, "the quick", 5, temperature=0, tokenizer=str(tokenizer))
    assert text == loaded.decode(tokens, skip_special_tokens=False)
    assert main(["sample", str(folder), "--tokens", "5", "--tokenizer", str(tokenizer)]) == 0
    with pytest.raises(ConfigError, match=r"300 tokens: say which with --tokenizer PATH"):
        sample_text(folder, "the")
    assert len(sample_text(folder, "the", 5, tokenizer="bytes")) > 3, "one that was trained on bytes all the same"
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"has 400 tokens, the model 300"):
        sample_text(folder, "the", tokenizer=str(make_tokenizer(other, vocab_size=400)))


def test_a_model_between_the_two_renames_of_a_save_is_found_by_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    former = former_of(folder)
    former.mkdir()
    save(former, SETTINGS, Transformer(SMALL, seed=9))
    assert main(["sample", str(folder), "def ", "--bytes", "3"]) == 0
    assert capsys.readouterr().out == sample_text(former, "def ", 3) + "\n"


def test_what_is_no_saved_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="interrupted save"):
        load_model(tmp_path)
    save(tmp_path, SETTINGS, torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="another model"):
        load_model(tmp_path)
    save(tmp_path, dataclasses.replace(SETTINGS, run_id="-"), Transformer(SMALL))
    with pytest.raises(ConfigError, match=r"manifest\.json.*settings"):
        load_model(tmp_path)
    save(tmp_path, SETTINGS, Transformer(SMALL))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the manifest"):
        load_model(tmp_path)
