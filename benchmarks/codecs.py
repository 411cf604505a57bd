"""Codec speed in GB/s of fp32 values, on one thread and on two, beside memcpy in the same run.

Encoding subtracts the local parameters from the base and adds what earlier contributions left over, in the same pass.
The goal of a codec is a share of memcpy's speed on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from atoll.node.dataplane import kernels as outer_kernels
from atoll.protocol.codecs import bundles, kernels
from atoll.protocol.codecs.table import BUNDLE, CODECS, DENSE, TABLE
from atoll.protocol.layout import DEFAULT_CHUNK_ELEMENTS, chunk_hash

ELEMENTS = DEFAULT_CHUNK_ELEMENTS
WIDTH = 1024
"""Of the matrix that a chunk is a part of."""
GOALS = {"int8": 0.35, "int4": 0.35, "sign1": 0.35}
OTHERS = 0.2
SPARSE_GOALS = {"topk2": 0.5}
"""GB/s of codecs that carry some of the values, in place of a share."""
SITES = 4
"""Of a bundle."""
BETA = np.float32(0.95)


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
    error = [np.float32(1e-3) * value[1:][::-1].copy() for value in values]
    error = [np.append(e, np.float32(0)) for e in error]
    # Of each thread one target, used again as in a node, except for memcpy, which shall show the memory's speed.
    copies = [np.empty_like(value) for value in values]
    outs = [np.zeros(ELEMENTS, np.float32) for _ in range(args.chunks)]

    def speed(work: Callable[[int], object], num_threads: int) -> float:
        seconds = min(_seconds(work, args.chunks, num_threads) for _ in range(args.rounds))
        return 4 * ELEMENTS * args.chunks / seconds / 1e9

    def report(name: str, work: Callable[[int], object], goal: float = 0.0, goal_gbs: float = 0.0) -> None:
        one, two = speed(work, 1), speed(work, 2)
        share = f"{one / memcpy:5.2f} of memcpy, goal {goal}" if goal else ""
        share = f"goal {goal_gbs} GB/s" if goal_gbs else share
        print(f"{name:<44} {one:7.2f} {two:7.2f}   {share}".rstrip(), flush=True)

    print(f"{args.chunks} chunks of {ELEMENTS} values, best of {args.rounds} rounds, GB/s on one thread and on two")
    memcpy = speed(lambda i: np.copyto(copies[i], values[i]), 1)
    report("memcpy", lambda i: np.copyto(copies[i], values[i]))
    for codec in CODECS:

        def encode(i: int, level: int | None = 0, codec: str = codec) -> bytes:
            terms = {"minus": local[i], "error": error[i], "beta": BETA}
            return kernels.encode(codec, values[i], **terms, zstd_level=level, width=WIDTH)

        data = [encode(i) for i in range(args.chunks)]
        share = GOALS.get(codec, OTHERS) if codec in DENSE else 0.0
        report(f"{codec}: encode with error feedback", encode, share, SPARSE_GOALS.get(codec, 0.0))
        if TABLE[codec].zstd_level:
            report(f"{codec}: the same and zstd", lambda i: encode(i, None))
        report(f"{codec}: decode", lambda i: kernels.decode(data[i], codec, ELEMENTS, outs[i]))  # noqa: B023
        if codec in DENSE:
            report(
                f"{codec}: decode, weigh and accumulate",
                lambda i: kernels.accumulate(data[i], codec, np.float32(0.25), outs[i]),  # noqa: B023
            )
            continue
        bundle = bundles.join(ELEMENTS, data[:SITES], over_all=False)
        report(
            f"{codec}: average of a bundle of {SITES}",
            lambda i: kernels.decode(bundle, BUNDLE, ELEMENTS, outs[i], tokens=(1,) * SITES),  # noqa: B023
        )
        report(
            f"{codec}: check of a bundle of {SITES}",
            lambda i: kernels.check(bundle, BUNDLE, ELEMENTS),  # noqa: B023
        )
    rate, momentum = np.float32(0.7), np.float32(0.9)
    report(
        "outer update (nesterov)",
        lambda i: outer_kernels.nesterov(values[i], local[i], values[i - 1], rate, momentum, outs[i], copies[i]),
    )
    report("base of bf16 parameters", lambda i: outer_kernels.round_to_bf16(values[i], outs[i]))
    report("hash of a chunk (BLAKE3)", lambda i: chunk_hash(values[i].view(np.uint8).data))
    return 0


def _seconds(work: Callable[[int], object], num_chunks: int, num_threads: int) -> float:
    def one(i: int) -> None:
        work(i)  # what it returns is dropped, as by a node that has sent it

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(one, range(num_threads)))  # the threads are there
        started = time.perf_counter()
        list(pool.map(one, range(num_chunks)))
        return time.perf_counter() - started
