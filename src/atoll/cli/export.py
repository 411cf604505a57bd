"""Write a saved model of the built-in kind in another format.

hf: a folder that Hugging Face's transformers loads, by AutoModelForCausalLM.from_pretrained. There is no tokenizer
in it.

example:
  atoll export atoll-demo/model --format hf --to model-hf
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from atoll.protocol.errors import ConfigError
from atoll.protocol.strict import nearest
from atoll.protocol.text import byte_count

FORMATS = ("hf",)
GB = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with model.safetensors and manifest.json")
    parser.add_argument("--format", required=True, metavar="NAME", help="hf")
    parser.add_argument("--to", type=Path, metavar="OUT", help="a folder that is not there, or empty (default: DIR-hf)")
    parser.add_argument(
        "--max-shard-gb", type=float, default=5.0, metavar="GB", help="of each file, in 10^9 bytes (default: 5)"
    )


def run(args: argparse.Namespace) -> int:
    from atoll.node.dataplane.hugging_face_export import export
    from atoll.node.dataplane.saved_manifest import where_saved

    if args.format not in FORMATS:
        raise ConfigError(f'--format "{args.format}"; {nearest(args.format, FORMATS)}')
    if not 0 < args.max_shard_gb < 1e6:
        raise ConfigError(f"--max-shard-gb {args.max_shard_gb}: must be more than 0 and less than a million")
    folder = Path(os.path.abspath(args.folder))
    if not where_saved(folder).is_dir():
        raise ConfigError(f"{args.folder}: no such folder; runs save their model where `atoll node` says at the end")
    to = args.to or folder.parent / f"{folder.name}-{args.format}"
    found = export(folder, to, int(args.max_shard_gb * GB))
    files = "1 file" if found.num_files == 1 else f"{found.num_files} files"
    print(f"wrote {to}: {found.num_tensors} tensors, {byte_count(found.num_bytes)}, in {files}")
    return 0
