"""Which outer optimizer suits a run of this length: DiLoCo simulated in one process, over several seeds.

All candidates run on the first seed, the best `--finalists` of them on the others too. Prints a Markdown table of
held-out bits per byte beside one site alone and data parallel. One thread; nothing here is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys

import torch

from atoll.node.worker import data
from atoll.protocol.settings import RunSettings
from benchmarks import baselines
from benchmarks.diloco import simulate_diloco


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outer_optimizer", description=__doc__)
    parser.add_argument(
        "--candidates", nargs="+", default=["1.0/0", "1.0/0.2", "1.0/0.5", "0.9/0.3", "0.7/0.5", "0.7/0.9"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--finalists", type=int, default=2, help="candidates that run on all seeds")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--data", nargs="*", default=[], metavar="PATH")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    corpus = data.load(data.list_files(arguments.data))

    def settings(seed: int, candidate: str = "1.0/0") -> RunSettings:
        base = RunSettings(run_id="outer-optimizer", seed=seed, steps=arguments.steps)
        rate, momentum = (float(part) for part in candidate.split("/"))
        return dataclasses.replace(
            base,
            sync=dataclasses.replace(base.sync, every=arguments.sync_every),
            outer=dataclasses.replace(base.outer, optimizer="nesterov", learning_rate=rate, momentum=momentum),
        )

    results: dict[str, dict[int, float]] = {}

    def record(name: str, seed: int, result: baselines.Comparison) -> None:
        results.setdefault(name, {})[seed] = result.bits_per_byte_after
        print(f"{name}, seed {seed}: {result.bits_per_byte_after:.4f}", file=sys.stderr, flush=True)

    first, *others = arguments.seeds
    for candidate in arguments.candidates:
        record(candidate, first, simulate_diloco(settings(first, candidate), corpus, arguments.sites))
    ranked = sorted(arguments.candidates, key=lambda candidate: results[candidate][first])
    for seed in arguments.seeds:
        record("one site alone", seed, baselines.train_data_parallel(settings(seed), corpus, 1))
    for seed in others:
        for candidate in ranked[: arguments.finalists]:
            record(candidate, seed, simulate_diloco(settings(seed, candidate), corpus, arguments.sites))
    record("data parallel", first, baselines.train_data_parallel(settings(first), corpus, arguments.sites))

    print(f"| rate/momentum | {' | '.join(f'seed {seed}' for seed in arguments.seeds)} | mean |")
    print("| --- |" + " --- |" * (len(arguments.seeds) + 1))
    for name, found in results.items():
        cells = [f"{found[seed]:.3f}" if seed in found else "" for seed in arguments.seeds]
        print(f"| {name} | {' | '.join(cells)} | {statistics.fmean(found.values()):.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
