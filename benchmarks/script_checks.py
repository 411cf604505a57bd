"""What watching a script costs: the share of a step's time, while an update is watched and after that."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from atoll.node.worker.script_checks import ScriptChecks
from atoll.node.worker.taken_back import NUM_STEPS, NUM_UPDATES
from atoll.node.worker.tensors import find_tensors


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks script_checks", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    inputs = torch.randn(options.batch, options.width)

    def step() -> None:
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()

    def share(checks: ScriptChecks) -> float:
        """Of the time of some steps, what the checks took: both in one loop, whatever else the machine does."""
        step_s = check_s = 0.0
        for _ in range(NUM_STEPS):
            begin_s = time.perf_counter()
            step()
            stepped_s = time.perf_counter()
            checks.is_step()
            step_s, check_s = step_s + stepped_s - begin_s, check_s + time.perf_counter() - stepped_s
        return check_s / step_s

    watched, after = [], []
    for _ in range(options.rounds):
        checks = ScriptChecks(find_tensors([net], [optimizer]), [optimizer])
        step()
        checks.is_step()
        for _ in range(NUM_UPDATES):
            with checks.update():
                pass
            watched.append(share(checks))
        after.append(share(checks))
        checks.close()
    print(
        f"checks of {options.layers} layers of {options.width}, in each step: {median(watched):.2%} of the step while"
    )
    print(f"an update is watched, as {NUM_UPDATES} are, and {median(after):.3%} after that")
    return 0
