"""A saved model of a run: load it, and let it write."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from atoll.node.dataplane.saved_manifest import MANIFEST_NAME, MODEL_NAME, load_manifest, settings_of, where_saved
from atoll.node.worker.model import Transformer
from atoll.node.worker.tokenizer import load_tokenizer, vocab_size_of
from atoll.protocol.errors import ConfigError

BYTES_VOCAB = 256


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
def sample_text(
    folder: Path | str,
    prompt: str,
    num_tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    *,
    tokenizer: str = "",
) -> str:
    """`prompt` and `num_tokens` more, drawn one by one; `temperature` 0 takes the likeliest. `tokenizer`: its file or
    folder, or "bytes"; where the model has no more tokens than bytes, it needs none. Raises ConfigError."""
    if num_tokens < 0 or temperature < 0:
        raise ConfigError(f"sampling {num_tokens} tokens at temperature {temperature}: both must be at least 0")
    model = load_model(folder)
    vocab_size = model.settings.vocab_size
    if not tokenizer and vocab_size != BYTES_VOCAB:
        raise ConfigError(
            f"{folder} has a vocabulary of {vocab_size} tokens: say which with --tokenizer PATH, or --tokenizer bytes "
            "if it was trained on text without one"
        )
    encode, decode, known = _codec(tokenizer)
    if known > vocab_size:
        raise ConfigError(
            f"--tokenizer {tokenizer} has {known} tokens, the model {vocab_size}: it was trained with another one"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt) or encode("\n") or [0]
    longest = model.settings.max_sequence
    for _ in range(num_tokens):
        context = torch.tensor([tokens[-longest:]])  # (1, seq)
        logits = model(context)[0, -1, :known].float()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            chances = torch.softmax(logits / temperature, dim=-1)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return decode(tokens)


def _codec(tokenizer: str) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], int]:
    """Text to tokens, tokens to text, and how many tokens there are."""
    if tokenizer in ("", "bytes"):
        return lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace"), BYTES_VOCAB
    found, _ = load_tokenizer(Path(tokenizer))
    return (
        lambda text: list(found.encode(text, add_special_tokens=False).ids),
        lambda tokens: str(found.decode(tokens, skip_special_tokens=False)),
        vocab_size_of(found),
    )
