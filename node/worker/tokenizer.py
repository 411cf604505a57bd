"""Tokenizers of Hugging Face's library, from a file: nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from atoll.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
MAX_TOKENIZER_BYTES = 1 << 28
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


def load_tokenizer(path: Path) -> tuple[Tokenizer, str]:
    """`path`: a tokenizer.json or a folder with one. The tokenizer cuts nothing off and adds nothing, and takes the
    name of a special token in a text for text; and the hash of its file.

    Raises ConfigError if it cannot be read, or the library is not installed.
    """
    path = path / TOKENIZER_NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--tokenizer {path}: {error.strerror}; name a {TOKENIZER_NAME} or its folder") from None
    if len(data) > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"--tokenizer {path}: larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError('--tokenizer needs tokenizers: pip install "atoll[data]"') from None
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"--tokenizer {path}: not a {TOKENIZER_NAME}: {error}") from None
    if not tokenizer.get_vocab():
        raise ConfigError(f"--tokenizer {path}: its vocabulary is empty")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer, blake3(data).hexdigest()


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """One more than the highest token: some vocabularies have holes."""
    return max(tokenizer.get_vocab().values()) + 1


def end_token(tokenizer: Tokenizer, asked: str | None) -> tuple[str, int]:
    """What ends a document: `asked`, or the first of the usual ones that the tokenizer has. Raises ConfigError."""
    for name in USUAL_ENDS if asked is None else (asked,):
        if (token := tokenizer.token_to_id(name)) is not None:
            return name, token
    if asked is None:
        raise ConfigError(f"the tokenizer has none of {', '.join(USUAL_ENDS)}; name what ends a document with --end")
    raise ConfigError(f'--end "{asked}": the tokenizer has no such token')
