"""The built-in model as a folder of Hugging Face's transformers, and such a folder as the first values of a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from atoll.cli.coordinator import prepare
from atoll.cli.main import main, make_parser
from atoll.node.dataplane import hugging_face_export
from atoll.node.dataplane.hugging_face import check_same, read_model, tensors_of, to_config
from atoll.node.dataplane.hugging_face_weights import restore
from atoll.node.dataplane.outer_state import OuterState
from atoll.node.dataplane.safetensors_file import Reader
from atoll.node.dataplane.saved_manifest import former_of
from atoll.node.worker.model import Transformer
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Layout
from atoll.protocol.model_settings import ModelSettings, TrainerSettings
from atoll.protocol.settings import RunSettings
from tests.harness.chunks import elements_of
from tests.harness.data_plane import values_of
from tests.harness.saved_built_in import save

PLAIN = ModelSettings(dim=24, num_layers=3, num_heads=4, num_kv_heads=4, ffn_dim=40, max_sequence=32)
GROUPED = dataclasses.replace(PLAIN, num_kv_heads=2)
TIED = dataclasses.replace(GROUPED, tie_embeddings=True)
OTHER_CONSTANTS = dataclasses.replace(GROUPED, rope_base=77.0, norm_eps=0.03)
MODELS = {"plain": PLAIN, "grouped": GROUPED, "tied": TIED, "other constants": OTHER_CONSTANTS}
CLOSE = 1e-5


def uneven(settings: ModelSettings) -> Transformer:
    """With norms that are not 1, so that it is seen which is which."""
    model = Transformer(settings, seed=9)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


@pytest.fixture(name="saved", params=list(MODELS))
def _saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Transformer]:
    return saved_of(tmp_path, MODELS[request.param])


def saved_of(tmp_path: Path, settings: ModelSettings) -> tuple[Path, Transformer]:
    folder = tmp_path / "model"
    folder.mkdir()
    model = uneven(settings)
    return save(folder, RunSettings(run_id="r", model=settings, trainer=TrainerSettings(sequence=32)), model), model


def exported(folder: Path, *words: str) -> Path:
    assert main(["export", str(folder), "--format", "hf", *words]) == 0
    return folder.with_name("model-hf")


def tokens() -> Tensor:
    return torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))


# --- from here to Hugging Face


def values_in(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert {key: name for name, file in files.items() for key in file} == weight_map
    return {key: value for file in files.values() for key, value in file.items()}


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def reference(folder: Path, ids: Tensor) -> Tensor:
    """LlamaForCausalLM, written down from its paper and its names; nothing of the built-in model is in it."""
    config, w = json.loads((folder / "config.json").read_text()), values_in(folder)
    heads, kv_heads, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    width, length = config["hidden_size"] // heads, ids.shape[1]
    inverse = 1.0 / config["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), inverse).repeat(1, 2)  # (seq, width)
    hidden_future = torch.full((length, length), -torch.inf).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def by_head(x: Tensor, name: str, count: int) -> Tensor:
        return (x @ w[f"{name}.weight"].T).view(*x.shape[:2], count, width).transpose(1, 2)

    x = w["model.embed_tokens.weight"][ids]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        h = norm(x, f"{layer}.input_layernorm")
        q = by_head(h, f"{layer}.self_attn.q_proj", heads)
        k = by_head(h, f"{layer}.self_attn.k_proj", kv_heads)
        v = by_head(h, f"{layer}.self_attn.v_proj", kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        q, k = (y * angles.cos() + rotate_half(y) * angles.sin() for y in (q, k))
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        share = torch.softmax(q @ k.transpose(-1, -2) / width**0.5 + hidden_future, dim=-1)
        x = x + (share @ v).transpose(1, 2).flatten(2) @ w[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head].T


@pytest.mark.parametrize("words", [(), ("--max-shard-gb", "0.000012")], ids=["one file", "shards"])
@torch.no_grad()
def test_an_independent_llama_computes_the_same_from_the_folder(
    saved: tuple[Path, Transformer], words: tuple[str, ...]
) -> None:
    folder, model = saved
    found = exported(folder, *words)
    assert (found / "model.safetensors").exists() is not bool(words)
    torch.testing.assert_close(reference(found, tokens()), model(tokens()), rtol=0, atol=CLOSE)


@pytest.mark.more
@torch.no_grad()
def test_transformers_computes_the_same_from_the_folder(saved: tuple[Path, Transformer]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-more")
    folder, model = saved
    for words in ((), ("--max-shard-gb", "0.000012")):
        found = exported(folder, *words)
        theirs, told = transformers.AutoModelForCausalLM.from_pretrained(found, output_loading_info=True)
        assert type(theirs).__name__ == "LlamaForCausalLM"
        assert not any(told.values()), told
        torch.testing.assert_close(theirs(tokens()).logits, model(tokens()), rtol=0, atol=CLOSE)
        assert read_model(found) == model.settings
        again = folder.with_name("saved by transformers")
        theirs.save_pretrained(again)
        assert read_model(again) == model.settings
        for name, value in seeded(again, model, again.with_name("outer")).items():
            assert torch.equal(value, model.get_parameter(name)), name
        for used in (found, again, again.with_name("outer")):
            shutil.rmtree(used)


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_names_and_shapes_are_those_of_the_model(settings: ModelSettings) -> None:
    found = {tensor.name: tensor.shape for tensor in tensors_of(settings)}
    assert found == {name: tuple(p.shape) for name, p in Transformer(settings).named_parameters()}


def test_files_are_no_larger_than_asked_for_and_readable_by_others(tmp_path: Path) -> None:
    folder, model = saved_of(tmp_path, GROUPED)
    found = exported(folder, "--max-shard-gb", "0.00002")
    index = json.loads((found / "model.safetensors.index.json").read_text())
    num_values = sum(p.numel() for p in model.parameters())
    assert index["metadata"] == {"total_size": 4 * num_values}
    names = sorted(set(index["weight_map"].values()))
    assert names == sorted(path.name for path in found.glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert names[-1] == f"model-{len(names):05}-of-{len(names):05}.safetensors"
    for name in names:
        values = load_file(found / name)
        assert sum(4 * value.numel() for value in values.values()) <= 20_000 or len(values) == 1
    largest = max(len(load_file(found / name)) for name in names)
    assert largest > 1, "small tensors share a file"


def test_a_piece_of_a_tensor_is_in_memory_and_not_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved_of(tmp_path, GROUPED)
    read, sizes = Reader.read, []

    def noted(self: Reader, name: str, first_byte: int, num_bytes: int) -> bytes:
        sizes.append(num_bytes)
        return read(self, name, first_byte, num_bytes)

    monkeypatch.setattr(Reader, "read", noted)
    monkeypatch.setattr(hugging_face_export, "PIECE_BYTES", 1000)
    values = values_in(exported(folder))
    assert max(sizes) == 1000
    assert torch.equal(values["lm_head.weight"], load_file(folder / "model.safetensors")["head.weight"])


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(list(argv)) == ConfigError.exit_code
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    return err


def test_what_cannot_be_exported_is_said_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved_of(tmp_path, GROUPED)

    def told(*words: str, place: Path = folder) -> str:
        return failure(capsys, "export", str(place), *(words or ("--format", "hf")))

    assert '--format "gguf"; known are hf' in told("--format", "gguf")
    assert 'did you mean "hf"?' in told("--format", "hff")
    assert "more than 0" in told("--format", "hf", "--max-shard-gb", "0")
    assert "no such folder" in told(place=tmp_path / "none")
    used = tmp_path / "used"
    used.mkdir()
    assert "manifest.json" in told(place=used)
    (used / "mine").write_text("")
    assert "is not empty; name another folder" in told("--format", "hf", "--to", str(used))
    assert [path.name for path in used.iterdir()] == ["mine"]
    assert "no place for a new folder" in told("--format", "hf", "--to", str(used / "mine"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])
    assert "outside the file" in told()
    save(folder, RunSettings(run_id="r"), torch.nn.Linear(2, 2))
    assert "another model than the built-in one (2 tensors)" in told()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "used"]


def test_an_empty_folder_is_taken_and_a_model_between_two_renames_found(tmp_path: Path) -> None:
    folder, model = saved_of(tmp_path, TIED)
    folder.rename(former_of(folder))
    (tmp_path / "model-hf").mkdir()
    assert read_model(exported(folder)) == model.settings


# --- from Hugging Face to a run


def seeded(folder: Path, model: Transformer, place: Path) -> dict[str, Tensor]:
    """Commit 0 of a run of this model's settings, by tensor; small chunks, so that they are of parts of rows too."""
    manifest = find_tensors([model], [torch.optim.SGD(model.parameters(), lr=0.1)]).manifest
    layout = Layout(manifest, 100)
    outer = OuterState.create(place, layout, ("momentum",), "r")
    restore(folder, model.settings, outer)
    assert outer.commit == 0
    found = {spec.name: np.full(spec.num_elements, np.nan, np.float32) for spec in manifest.tensors}
    for chunk in layout.chunks:
        found[layout.name_of(chunk.index)][elements_of(chunk)] = values_of(outer, chunk.index)
        with outer.pinned(chunk.index) as record:
            assert record.data.nbytes == 2 * chunk.num_bytes
            assert not np.any(record.data[chunk.num_bytes :]), "slots are zero"
    return {spec.name: torch.from_numpy(found[spec.name]).reshape(spec.shape) for spec in manifest.tensors}


@pytest.mark.parametrize("words", [(), ("--max-shard-gb", "0.000012")], ids=["one file", "shards"])
def test_a_run_starts_from_the_values_of_the_folder(
    tmp_path: Path, saved: tuple[Path, Transformer], words: tuple[str, ...]
) -> None:
    folder, model = saved
    found = exported(folder, *words)
    assert read_model(found) == model.settings
    for name, value in seeded(found, model, tmp_path / "outer").items():
        assert torch.equal(value, model.get_parameter(name)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, model = saved_of(tmp_path, TIED)
    found = exported(folder)
    rounded = {name: value.to(dtype) for name, value in values_in(found).items()}
    extra = {
        "lm_head.weight": rounded["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    save_file(rounded | extra, found / "model.safetensors")
    for name, value in seeded(found, model, tmp_path / "outer").items():
        assert torch.equal(value, model.get_parameter(name).to(dtype).float()), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, 'model_type is "qwen2"'),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"attention_bias": True}, "it has no biases"),
        ({"mlp_bias": True}, "it has no biases"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 'rope_type is "llama3"'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'type is "linear"'),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 'rope_type is "yarn"'),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_theta": "big"}, "rope_theta must be a number"),
        ({"hidden_size": "24"}, "hidden_size must be an integer"),
    ],
)
def test_what_the_built_in_model_cannot_compute_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_config(PLAIN) | change))
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta")
    table = {key: value for key, value in to_config(GROUPED).items() if key not in left_out}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(table))
    expected = dataclasses.replace(GROUPED, num_kv_heads=4, max_sequence=2048, norm_eps=1e-6)
    assert read_model(tmp_path) == expected
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    path.write_text(json.dumps(table | rope))
    assert read_model(tmp_path) == dataclasses.replace(expected, rope_base=5e5)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_model(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_model(tmp_path)


def test_weights_that_are_not_of_the_model_are_refused(tmp_path: Path) -> None:
    folder, model = saved_of(tmp_path, GROUPED)
    found = exported(folder)
    values, place = values_in(found), iter(range(100))

    def told(message: str, model: torch.nn.Module = model) -> None:
        manifest = find_tensors([model], [torch.optim.SGD(model.parameters(), lr=0.1)]).manifest
        outer = OuterState.create(tmp_path / f"outer{next(place)}", Layout(manifest, 100), (), "r")
        with pytest.raises(ConfigError, match=message):
            restore(found, GROUPED, outer)

    def put(**changes: Tensor) -> None:
        save_file(values | changes, found / "model.safetensors")

    put(**{"model.norm.bias": torch.ones(24)})
    told(r"the built-in model has no 'model\.norm\.bias'")
    put(**{"model.norm.weight": torch.ones(24, dtype=torch.float64)})
    told(r"'model\.norm\.weight' is of F64, expected F32 or BF16 or F16")
    name = "model.layers.1.mlp.up_proj.weight"
    put(**{name: values[name].T.contiguous()})
    told(r"does not have the shape \[40, 24\]")
    save_file({key: value for key, value in values.items() if key != name}, found / "model.safetensors")
    told(f"{name}' and 0 more tensors are not there")
    put()
    told("only the built-in trainer", torch.nn.Linear(2, 2))
    put(**{name: torch.full_like(values[name], torch.inf)})
    told(f"{name}' holds values that are not finite")
    put()
    index = found / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: "../model/model.safetensors"}}))
    told("are both there; leave the one that is meant")
    (found / "model.safetensors").rename(found / "one.safetensors")
    told("does not name files of this folder")
    save_file(values, found / "two.safetensors")
    index.write_text(json.dumps({"weight_map": {name: "one.safetensors", "lm_head.weight": "two.safetensors"}}))
    told("is in one.safetensors too")
    index.unlink()
    told("other formats are not read")


def test_the_run_must_have_the_folders_model_but_for_its_longest_sequence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_config(PLAIN)))
    check_same(tmp_path, dataclasses.replace(PLAIN, max_sequence=16))
    with pytest.raises(ConfigError, match=r"num_kv_heads is 4, and the run's model\.num_kv_heads = 2.*--from-hf"):
        check_same(tmp_path, GROUPED)


def test_from_the_folder_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = exported(saved_of(tmp_path, OTHER_CONSTANTS)[0])
    path = tmp_path / "run.toml"
    assert main(["init", str(path), "--from-hf", str(found)]) == 0
    assert f"--resume {found}" in capsys.readouterr().out
    words = ["coordinator", str(path), "--resume"]
    for place in (found, found / "config.json"):
        settings, _, parent = prepare(make_parser().parse_args([*words, str(place)]))
        assert settings.model == OTHER_CONSTANTS
        assert settings.trainer.sequence == 32, "no longer than the model's"
        assert parent == {"run_id": "model-hf", "commit": 0, "run_step": 0, "run_tokens": 0}
    (found / "config.json").write_text(json.dumps(to_config(PLAIN)))
    assert "num_kv_heads is 4" in failure(capsys, *words, str(found))
    node = ["node", "--insecure", "--coordinator", "127.0.0.1:1", "--name", "a", "--from", str(found)]
    assert "only the built-in trainer" in failure(capsys, *node, "--", __file__)
    (found / "config.json").write_text(json.dumps(to_config(PLAIN) | {"model_type": "gpt2"}))
    assert 'model_type is "gpt2"' in failure(capsys, *node)
