"""Runs a script of torchtitan on the CPU, which torchtitan takes for no device:

    python -m tests.trainers.torchtitan_on_cpu SCRIPT ...

Three things stand in for a GPU's: the name of the device, its memory's figures, and what `torch.cpu` has no functions
for. Model, trainer, optimizers, parallelism (over gloo) and data are torchtitan's own."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
import torch._utils

NO_FIGURES = 0.0


class NoMemoryMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> object:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(NO_FIGURES, NO_FIGURES, NO_FIGURES, NO_FIGURES, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics

    metrics.build_device_memory_monitor = NoMemoryMonitor
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
