"""What overlap and fragments cost in held-out loss: DiLoCo simulated in one process, over several seeds.

Each update is taken as late as `sync.overlap_steps` lets it: the worst case. Beside it the share of the time in which
sites train where a blocking sync takes 30 % of a window, computed. Prints a Markdown table. One thread; nothing here is
timed, and the figures are the same on any machine that rounds alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import torch

from atoll.node.worker import data
from atoll.protocol.settings import RunSettings, validate
from atoll.protocol.sync_settings import SyncSettings
from benchmarks.diloco import simulate_diloco

SHARE = 0.3
"""Of a window of H steps that a blocking sync of the whole model takes."""


def variants(every: int) -> dict[str, SyncSettings]:
    blocking = SyncSettings(every=every)
    found = {"blocking": blocking}
    for steps in (1, every // 4, every):
        found[f"overlap of {steps}, keep"] = replace(blocking, overlap_steps=steps)
        found[f"overlap of {steps}, mix 0.5"] = replace(blocking, overlap_steps=steps, merge="mix", alpha=0.5)
    four = replace(blocking, fragments=4)
    found["4 fragments, blocking"] = four
    for steps in (every // 4, every):
        found[f"4 fragments, overlap of {steps}, keep"] = replace(four, overlap_steps=steps)
        found[f"4 fragments, overlap of {steps}, mix 0.5"] = replace(four, overlap_steps=steps, merge="mix", alpha=0.5)
    return found


def utilization(sync: SyncSettings) -> float:
    """Of a site whose syncs take `SHARE` of H steps, each fragment its part of that."""
    waits = max(0.0, SHARE * sync.every / sync.fragments - sync.overlap_steps)
    window = sync.every / sync.fragments
    return window / (window + waits)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks overlap_loss", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--outer", default="1.0/0", metavar="RATE/MOMENTUM")
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose name has it")
    parser.add_argument("--data", nargs="*", default=[], metavar="PATH")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    corpus = data.load(data.list_files(arguments.data))
    rate, momentum = (float(part) for part in arguments.outer.split("/"))
    base = RunSettings(run_id="overlap-loss", steps=arguments.steps)
    base = replace(base, outer=replace(base.outer, optimizer="nesterov", learning_rate=rate, momentum=momentum))
    print(f"| {arguments.outer} | {' | '.join(f'seed {seed}' for seed in arguments.seeds)} | mean | trains |")
    print("| --- |" + " --- |" * (len(arguments.seeds) + 2))
    chosen = {name: sync for name, sync in variants(arguments.sync_every).items() if arguments.only in name}
    for name, sync in chosen.items():
        found = []
        for seed in arguments.seeds:
            settings = replace(base, seed=seed, sync=sync)
            validate(settings)
            found.append(simulate_diloco(settings, corpus, arguments.sites).bits_per_byte_after)
        cells = " | ".join(f"{bits:.3f}" for bits in found)
        print(f"| {name} | {cells} | {statistics.fmean(found):.3f} | {utilization(sync):.0%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
