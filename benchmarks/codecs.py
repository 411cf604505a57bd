"""Codec speed on one thread in GB/s of fp32 values, beside memcpy in the same run."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from atoll.node.dataplane import kernels as outer_kernels
from atoll.protocol.codecs import kernels, max_encoded_bytes
from atoll.protocol.codecs.table import CODECS
from atoll.protocol.layout import DEFAULT_CHUNK_ELEMENTS, chunk_hash

ELEMENTS = DEFAULT_CHUNK_ELEMENTS


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks codecs", description=__doc__)
    parser.add_argument("--chunks", type=int, default=32, help=f"chunks of {ELEMENTS} elements a round")
    parser.add_argument("--rounds", type=int, default=5, help="the best one counts")
    args = parser.parse_args(argv)
    kernels.warm_up()
    outer_kernels.warm_up()
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(ELEMENTS, dtype=np.float32) for _ in range(args.chunks)]
    local = [value + np.float32(1e-3) * value[::-1] for value in values]
    out, acc = np.empty(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
    # One target is used again, as in a node, except for memcpy, which shall show the memory's speed.
    copies = [np.empty_like(value) for value in values]

    def report(name: str, work: Callable[[int], object], note: str = "") -> None:
        seconds = min(_seconds(work, args.chunks) for _ in range(args.rounds))
        speed = 4 * ELEMENTS * args.chunks / seconds / 1e9
        print(f"{name:<38} {speed:7.2f} GB/s   {note}".rstrip())

    print(f"{args.chunks} chunks of {ELEMENTS} values, one thread, best of {args.rounds} rounds")
    report("memcpy", lambda i: np.copyto(copies[i], values[i]))
    for codec in CODECS:
        for level in (0, 1):
            data = [kernels.encode(codec, v, minus=m, zstd_level=level) for v, m in zip(values, local, strict=True)]
            full = max_encoded_bytes(codec, ELEMENTS)
            ratio = f"{4 * ELEMENTS * args.chunks / sum(map(len, data)):.2f} times smaller than fp32"
            name = f"{codec}{' + zstd 1' if level else ''}"
            report(
                f"{name}: subtract and encode",
                lambda i: kernels.encode(codec, values[i], minus=local[i], zstd_level=level),  # noqa: B023
                ratio if level or full < 4 * ELEMENTS else "",
            )
            report(f"{name}: decode", lambda i: kernels.decode(data[i], codec, ELEMENTS, out))  # noqa: B023
            report(
                f"{name}: decode and accumulate",
                lambda i: kernels.accumulate(data[i], codec, np.float32(0.25), acc),  # noqa: B023
            )
    rate, momentum, slot = np.float32(0.7), np.float32(0.9), np.empty(ELEMENTS, np.float32)
    report(
        "outer update (nesterov)",
        lambda i: outer_kernels.nesterov(values[i], local[i], values[i - 1], rate, momentum, out, slot),
    )
    report("base of bf16 parameters", lambda i: outer_kernels.round_to_bf16(values[i], out))
    report("hash of a chunk (BLAKE3)", lambda i: chunk_hash(values[i].view(np.uint8).data))
    return 0


def _seconds(work: Callable[[int], object], num_chunks: int) -> float:
    started = time.perf_counter()
    for i in range(num_chunks):
        work(i)
    return time.perf_counter() - started
