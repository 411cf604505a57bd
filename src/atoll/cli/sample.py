"""Print text from a saved model of the built-in kind.

examples:
  atoll sample atoll-demo/model "def " --bytes 400
  atoll sample tokens-model "Once" --tokenizer llama/tokenizer.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.node.dataplane.saved_manifest import where_saved
from atoll.protocol.errors import ConfigError
from atoll.protocol.text import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder with model.safetensors and manifest.json")
    parser.add_argument("prompt", nargs="?", default="", help="what the text begins with")
    parser.add_argument(
        "--bytes", "--tokens", type=int, default=200, dest="num_tokens", metavar="N", help="length (default: 200)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--tokenizer", default="", metavar="PATH", help="of a model that was trained on tokens; or the word bytes"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")


def run(args: argparse.Namespace) -> int:
    if not where_saved(args.folder).is_dir():
        raise ConfigError(f"{args.folder}: no such folder; runs save their model where `atoll node` says at the end")
    require_extra("atoll sample")
    from atoll.node.worker.sample import sample_text

    # A model may say anything, and others have trained it.
    text = sample_text(args.folder, args.prompt, args.num_tokens, args.temperature, args.seed, tokenizer=args.tokenizer)
    print(clean(text))
    return 0


EXTRAS = {
    "node": ("torch", "numpy", "numba", "safetensors", "zstandard"),
    "data": ("numpy", "tokenizers"),
}


def require_extra(what: str, extra: str = "node") -> None:
    """Raises ConfigError where atoll is installed without it: for a coordinator only, for example."""
    from importlib.util import find_spec

    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'atoll[{extra}]'")
