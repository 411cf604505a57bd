"""Write text as a folder of packed tokens, which a run trains on.

Reads text files, folders, .jsonl, .jsonl.gz, .jsonl.zst and .parquet. A row is a document, and so is a text file, or
each 64 Ki characters of a longer one. A data set of Hugging Face's hub is written to files first
(`dataset.to_parquet("rows.parquet")`). About one document in twenty is held out for evaluation, by the hash of its
text. What OUT then is, and what of it is promised: docs/data.md.

examples:
  atoll tokenize --tokenizer llama/tokenizer.json --out tokens ~/texts
  atoll tokenize --tokenizer llama --column content --out tokens part-*.jsonl.zst part-*.parquet
  atoll tokenize --verify tokens
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from atoll.cli.sample import require_extra
from atoll.protocol.errors import ConfigError

PROGRESS_EVERY_S = 5.0
MOST_SHARD_TOKENS = 1 << 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="PATH", help="files and folders, taken in order of their names")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="a tokenizer.json, or a folder with one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a folder that is not there, or empty")
    parser.add_argument("--column", default="text", metavar="NAME", help="of the text in rows (default: text)")
    parser.add_argument("--end", metavar="TOKEN", help="ends each document (default: <|endoftext|>, </s> or the like)")
    parser.add_argument(
        "--shard-tokens", type=int, default=1 << 28, metavar="N", help="of each file (default: 268435456)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="threads (default: one for each core)")
    parser.add_argument("--verify", type=Path, metavar="DIR", help="read all of a folder and compare its hashes")


def run(args: argparse.Namespace) -> int:
    from atoll.node.worker.token_index import open_packed

    if args.verify is not None:
        if args.files or args.tokenizer or args.out:
            raise ConfigError(f"--verify {args.verify} only reads that folder: leave out the other arguments")
        packed = open_packed(args.verify)
        packed.verify()
        print(f"{args.verify}: all {len(packed.index.shards)} shards are as they were written")
        return 0
    if args.tokenizer is None or args.out is None or not args.files:
        raise ConfigError("give --tokenizer PATH, --out DIR and the files and folders to read")
    if not 1 <= args.shard_tokens <= MOST_SHARD_TOKENS:
        raise ConfigError(f"--shard-tokens {args.shard_tokens}: must be from 1 to {MOST_SHARD_TOKENS}")
    if args.jobs is not None:
        if not 1 <= args.jobs <= 1024:
            raise ConfigError(f"--jobs {args.jobs}: must be from 1 to 1024")
        os.environ["RAYON_NUM_THREADS"] = str(args.jobs)  # of the library, which reads it once
    require_extra("atoll tokenize", "data")
    from atoll.node.worker.data import list_files
    from atoll.node.worker.documents import ROWS, documents
    from atoll.node.worker.packing import pack
    from atoll.node.worker.token_index import ShardRole
    from atoll.node.worker.tokenizer import end_token, load_tokenizer

    tokenizer, tokenizer_hash = load_tokenizer(args.tokenizer)
    end_name, end = end_token(tokenizer, args.end)
    listing = list_files(args.files, ROWS)
    begun = 0

    def texts() -> Iterator[str]:
        nonlocal begun
        for begun, file in enumerate(listing, 1):  # noqa: B007
            yield from documents(file.path, args.column)

    said_at_s = time.monotonic()

    def progress(num_tokens: int) -> None:
        nonlocal said_at_s
        if (now_s := time.monotonic()) >= said_at_s + PROGRESS_EVERY_S:
            said_at_s = now_s
            print(f"{num_tokens} tokens, file {begun} of {len(listing)}", file=sys.stderr)

    index = pack(texts(), tokenizer, tokenizer_hash, end, args.out, shard_tokens=args.shard_tokens, progress=progress)
    num_tokens, num_documents, num_bytes = index.totals(ShardRole)
    held_out, *_ = index.totals([ShardRole.HELD_OUT])
    print(
        f"wrote {args.out}: {num_tokens} tokens of {num_documents} documents, each ended by {end_name}; "
        f"{num_bytes / num_tokens:.2f} bytes a token; {held_out} tokens are held out; {index.dtype}, "
        f"{len(index.shards)} shards\n"
        f"a run on them needs model.vocab_size = {max(256, index.vocab_size)} or more"
    )
    if held_out == 0:
        print("nothing is held out of one document alone")
    return 0
