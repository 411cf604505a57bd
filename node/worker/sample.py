"""A saved model of a run: load it, and let it write."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, MODEL_NAME, load_manifest, settings_of, where_saved
from atoll.node.worker.model import Transformer
from atoll.protocol.errors import ConfigError


def load_model(folder: Path | str) -> Transformer:
    """The built-in model with the outer parameters saved in `folder`, in evaluation mode.

    Raises ConfigError if the folder holds no complete saved model, or that of a script of one's own.
    """
    folder = where_saved(Path(folder))
    settings = settings_of(load_manifest(folder / MANIFEST_NAME), folder / MANIFEST_NAME)
    try:
        values = load_file(folder / MODEL_NAME)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / MODEL_NAME} cannot be read: {error}") from None
    model = Transformer(settings.model, settings.seed)
    kept = model.state_dict()
    expected = {n: t.shape for n, t in chain(model.named_parameters(), model.named_buffers()) if n in kept}
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
