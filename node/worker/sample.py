"""A saved model of a run: load it, and let it write."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from atoll.node.worker.model import Transformer
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.settings import RunSettings, settings_from_json

MAX_MANIFEST_BYTES = 1 << 28
VALUES_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"


def read_settings(folder: Path) -> RunSettings:
    """Of the run that saved `folder`. Raises ConfigError if there is no complete saved model."""
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ConfigError(f"{path} is larger than any manifest; is this a saved model?")
        table = json.loads(path.read_text())
        return settings_from_json(json.dumps(table["settings"]))
    except OSError as error:
        raise ConfigError(
            f"no saved model in {folder}: {path.name} cannot be read ({error.strerror}); it is written last, "
            "so an interrupted save has none"
        ) from None
    except (ValueError, KeyError, TypeError, InvalidMessage) as error:
        raise ConfigError(f"{path} is not the manifest of a saved model: {error}") from None


def load_model(folder: Path | str) -> Transformer:
    """The built-in model with the outer parameters saved in `folder`, in evaluation mode.

    Raises ConfigError if the folder holds no complete saved model, or that of a script of one's own.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    try:
        values = load_file(folder / VALUES_NAME)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / VALUES_NAME} cannot be read: {error}") from None
    model = Transformer(settings.model, settings.seed)
    expected = {name: p.shape for name, p in model.named_parameters()}
    if {name: v.shape for name, v in values.items()} != expected:
        raise ConfigError(
            f"{folder} holds another model than the built-in one ({len(values)} tensors); "
            "load model.safetensors with the script that trained it"
        )
    model.load_state_dict(values, strict=False)  # tied names are not saved twice
    return model.eval()


@torch.no_grad()
def sample_text(folder: Path | str, prompt: str, num_bytes: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
    """`prompt` and `num_bytes` more, drawn byte by byte; `temperature` 0 takes the likeliest. Raises ConfigError."""
    if num_bytes < 0 or temperature < 0:
        raise ConfigError(f"sampling {num_bytes} bytes at temperature {temperature}: both must be at least 0")
    model = load_model(folder)
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt.encode() or b"\n")
    longest = model.settings.max_sequence
    for _ in range(num_bytes):
        context = torch.tensor([list(text[-longest:])])  # (1, seq)
        logits = model(context)[0, -1, :256].float()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            chances = torch.softmax(logits / temperature, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text).decode(errors="replace")
