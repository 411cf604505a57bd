"""Tokenizers and packed tokens, made on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atoll.node.worker.packing import pack
from atoll.node.worker.token_index import TokenIndex
from atoll.node.worker.tokenizer import end_token, load_tokenizer

END = "<|endoftext|>"
WORDS = [a + b for a in ("the", "quick", "brown", "fox", "jumps") for b in ("over", "a", "lazy", "dog")]
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 30)) + f"\n{i}\n" for i in range(120)]


def make_tokenizer(folder: Path, vocab_size: int = 300) -> Path:
    """Byte-level BPE: 256 bytes, the end, and pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_packed(out: Path, tokenizer: Path, texts: Iterable[str] = TEXTS, shard_tokens: int = 1 << 20) -> TokenIndex:
    loaded, hash_ = load_tokenizer(tokenizer)
    _, end = end_token(loaded, None)
    return pack(texts, loaded, hash_, end, out, shard_tokens=shard_tokens, progress=lambda _: None)
