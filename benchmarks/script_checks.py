"""What watching a script costs a step: checks on, while an update is watched and after that, beside none."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
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

    def seconds(checks: ScriptChecks | None) -> float:
        begin_s = time.perf_counter()
        for _ in range(NUM_STEPS):
            step()
            if checks is not None:
                checks.is_step()
        return (time.perf_counter() - begin_s) / NUM_STEPS

    def watched(checks: ScriptChecks) -> float:
        with checks.update():
            pass
        return seconds(checks)

    found: dict[str, list[float]] = {"alone": [], "watched": [], "after": []}
    seconds(None)
    for _ in range(options.rounds):
        checks = ScriptChecks(find_tensors([net], [optimizer]), [optimizer])
        step()
        checks.is_step()
        rows: list[tuple[str, Callable[[], float]]] = [("alone", lambda: seconds(None))]
        rows += [("watched", lambda checks=checks: watched(checks))] * NUM_UPDATES  # type: ignore[misc]
        rows += [("after", lambda checks=checks: seconds(checks))]  # type: ignore[misc]
        for name, measure in rows:
            found[name].append(measure())
        checks.close()
    alone_s = median(found["alone"])
    print(f"{options.layers} layers of {options.width}: {1e3 * alone_s:.1f} ms a step alone")
    for name in ("watched", "after"):
        print(f"{name:8s} {median(found[name]) / alone_s:.3f} of it")
    return 0
