"""What each codec loses of a real pseudo-gradient, and what zstd gains behind it: bits a parameter and relative error.

The built-in model is trained on the text of the Python standard library at one site, for as many windows as `--windows`
says; of the last one each tensor's pseudo-gradient is encoded. The error is the squared one of the decoded values over
the squared values. Beside them the speed of zstd, in GB/s of fp32 input on one thread.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import numpy.typing as npt
import torch

from atoll.node.worker import data
from atoll.protocol.codecs import kernels, max_encoded_bytes
from atoll.protocol.codecs.table import CODECS, DENSE
from atoll.protocol.settings import RunSettings
from benchmarks import baselines

Floats = npt.NDArray[np.float32]
LEVELS = (1, 3)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks codec_gains", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--data", nargs="*", default=[], metavar="PATH")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    kernels.warm_up()
    found = pseudo_gradients(arguments.steps, arguments.windows, arguments.data)
    num = sum(values.size for values in found)
    print(f"{num} parameters in {len(found)} tensors, window {arguments.windows} of {arguments.steps} steps")
    levels = " | ".join(f"zstd {level} | GB/s" for level in LEVELS)
    print(f"| codec | bits | error | {levels} |\n| --- | --- | --- |" + " --- | --- |" * len(LEVELS))
    for codec in CODECS:
        plain_bytes = sum(max_encoded_bytes(codec, values.size) for values in found)
        cells = [f"{8 * plain_bytes / num:.3f}", f"{relative_error(codec, found):.3g}"]
        for level in LEVELS if codec in DENSE else ():
            num_bytes, plain_s = encoded(codec, found, 0)
            num_bytes, zstd_s = encoded(codec, found, level)
            speed = 4 * num / max(zstd_s - plain_s, 1e-9) / 1e9
            cells += [f"{8 * num_bytes / num:.3f} ({num_bytes / plain_bytes - 1:+.0%})", f"{speed:.2f}"]
        cells += ["never"] * (2 + 2 * len(LEVELS) - len(cells))
        print(f"| {codec} | {' | '.join(cells)} |", flush=True)
    return 0


def pseudo_gradients(steps: int, windows: int, paths: list[str]) -> list[Floats]:
    """Of each tensor, base minus local of the last window."""
    settings = RunSettings(run_id="codec-gains", seed=1, steps=steps * windows)
    corpus = data.load(data.list_files(paths))
    trainee, samples = baselines.Trainee(settings, settings.steps), baselines.Samples(settings, corpus, 1)
    base: list[torch.Tensor] = []
    for index in range(settings.steps):
        if index == settings.steps - steps:
            base = [parameter.detach().clone() for parameter in trainee.model.parameters()]
        trainee.step([samples.batch(0, index)])
    local = [parameter.detach() for parameter in trainee.model.parameters()]
    return [(b - p).numpy().reshape(-1) for b, p in zip(base, local, strict=True)]


def relative_error(codec: str, tensors: list[Floats]) -> float:
    lost = total = 0.0
    for values in tensors:
        out = np.empty_like(values)
        kernels.decode(kernels.encode(codec, values), codec, values.size, out)
        lost += float(np.sum((values.astype(np.float64) - out) ** 2))
        total += float(np.sum(values.astype(np.float64) ** 2))
    return lost / total


def encoded(codec: str, tensors: list[Floats], level: int) -> tuple[int, float]:
    """Bytes, and the seconds of the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        num_bytes = sum(len(kernels.encode(codec, values, zstd_level=level)) for values in tensors)
        best = min(best, time.perf_counter() - started)
    return num_bytes, best
