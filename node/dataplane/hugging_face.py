"""Folders as Hugging Face's transformers has them, of the family of the built-in model: what `config.json` says, and
the tensors' names. Needs neither torch nor numpy, so the coordinator's host can read one."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, where_saved
from atoll.protocol.errors import ConfigError
from atoll.protocol.model_settings import ModelSettings
from atoll.protocol.strict import build, check

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 1 << 26
HEAD = "lm_head.weight"
"""Also in folders of tied embeddings, now and then."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of the built-in model, as (out, in) in both; the halves of a rotated head are the same in both too."""

    name: str
    hf_name: str
    shape: tuple[int, ...]


def tensors_of(model: ModelSettings) -> tuple[Tensor, ...]:
    """All, in the order of the model; of tied embeddings the one. Raises ConfigError for a model with experts."""
    if model.num_experts:
        raise ConfigError(
            f"the model has {model.num_experts} experts a block, and Hugging Face's Llama has none: load "
            "model.safetensors with atoll, or with a script of your own"
        )
    dim, ffn_dim = model.dim, model.ffn_dim
    kv_dim = dim // model.num_heads * model.num_kv_heads
    block = (
        ("attention_norm", "input_layernorm", (dim,)),
        ("attention.wq", "self_attn.q_proj", (dim, dim)),
        ("attention.wk", "self_attn.k_proj", (kv_dim, dim)),
        ("attention.wv", "self_attn.v_proj", (kv_dim, dim)),
        ("attention.wo", "self_attn.o_proj", (dim, dim)),
        ("feed_forward_norm", "post_attention_layernorm", (dim,)),
        ("feed_forward.gate", "mlp.gate_proj", (ffn_dim, dim)),
        ("feed_forward.up", "mlp.up_proj", (ffn_dim, dim)),
        ("feed_forward.down", "mlp.down_proj", (dim, ffn_dim)),
    )
    vocabulary = (model.vocab_size, dim)
    head = () if model.tie_embeddings else (Tensor("head.weight", HEAD, vocabulary),)
    return (
        Tensor("embedding.weight", "model.embed_tokens.weight", vocabulary),
        *(
            Tensor(f"layers.{number}.{name}.weight", f"model.layers.{number}.{hf_name}.weight", shape)
            for number in range(model.num_layers)
            for name, hf_name, shape in block
        ),
        Tensor("norm.weight", "model.norm.weight", (dim,)),
        *head,
    )


# --- config.json


def to_config(model: ModelSettings) -> dict[str, Any]:
    """What transformers loads the exported tensors with."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.dim // model.num_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_sequence,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """Of config.json what decides how the tensors are computed with; defaults are those of transformers."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict | None = None  # type: ignore[type-arg]
    rope_parameters: dict | None = None  # type: ignore[type-arg]
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    quantization_config: dict | None = None  # type: ignore[type-arg]


def is_folder(folder: Path) -> bool:
    """Whether it is one of Hugging Face's, and no saved model."""
    return (folder / CONFIG_NAME).is_file() and not (where_saved(folder) / MANIFEST_NAME).is_file()


def read_model(folder: Path) -> ModelSettings:
    """What `config.json` there says; not whether a run takes it, see `settings.validate`.

    Raises ConfigError for another family, and for what the built-in model cannot compute.
    """
    path = folder / CONFIG_NAME
    config = build(_Config, read_table(path), str(path), unknown=[])
    heads, head_dim = config.num_attention_heads, config.head_dim
    for is_other, what in (
        (config.model_type != "llama", f'model_type is "{config.model_type}", and not "llama"'),
        (config.hidden_act not in ("silu", "swish"), f'hidden_act is "{config.hidden_act}", and not "silu"'),
        (config.attention_bias or config.mlp_bias, "attention_bias or mlp_bias is true: it has no biases"),
        (config.quantization_config is not None, "its tensors are quantized"),
        (
            head_dim is not None and head_dim * heads != config.hidden_size,
            f"head_dim is {head_dim}, and not hidden_size / num_attention_heads = {config.hidden_size} / {heads}",
        ),
    ):
        if is_other:
            raise ConfigError(f"{path}: the built-in model cannot be that: {what}")
    return ModelSettings(
        dim=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=heads if config.num_key_value_heads is None else config.num_key_value_heads,
        ffn_dim=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_sequence=config.max_position_embeddings,
        tie_embeddings=config.tie_word_embeddings,
        rope_base=_rope_base(path, config),
        norm_eps=config.rms_norm_eps,
    )


def _rope_base(path: Path, config: _Config) -> float:
    """Up to version 4 of transformers it stands by itself, since 5 in a table. Raises ConfigError for any scaling."""
    rope = config.rope_parameters or config.rope_scaling or {}
    for key, value in rope.items():
        if key != "rope_theta" and (key, value) not in (
            ("rope_type", "default"),
            ("type", "default"),
            ("partial_rotary_factor", 1.0),
        ):
            raise ConfigError(f"{path}: the built-in model scales no rotary embedding: {key} is {json.dumps(value)}")
    base = rope.get("rope_theta", config.rope_theta)
    return 10_000.0 if base is None else float(check(float, base, f"{path}: rope_theta"))


def check_same(folder: Path, model: ModelSettings) -> None:
    """Raises ConfigError if the folder's model is not that of a run. The longest sequence is not part of a model:
    nothing is stored for it."""
    found = read_model(folder)
    for item in fields(ModelSettings):
        theirs, ours = getattr(found, item.name), getattr(model, item.name)
        if item.name != "max_sequence" and theirs != ours:
            raise ConfigError(
                f"{folder}: its {item.name} is {theirs}, and the run's model.{item.name} = {ours}; make the run's file "
                f"with: atoll init --from-hf {folder}"
            )


def read_table(path: Path, of: str = "a folder of Hugging Face's transformers") -> dict[str, Any]:
    """A JSON object of a file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name {of}") from None
    if len(data) > MAX_JSON_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return table
