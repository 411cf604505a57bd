"""Runs a script of torchtitan on the CPU, which torchtitan takes for no device:

    python -m tests.trainers.torchtitan_on_cpu SCRIPT ...

What differs from a GPU: the name of the device, no figures of its memory, no other time limits of process groups after
the first step (for which torchtitan 0.3.0 wants a newer torch than 2.13), torchtitan's attention without masks in the
place of FlexAttention, which torch cannot train with on a CPU, and sums of gradients that several ranks scale before
they are sent, since gloo does not scale. The rest is torchtitan's own: trainer, model, optimizers, schedules, FSDP2
(over gloo) and data."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

NO_FIGURES = 0.0


class NoMemoryMonitor:
    device_name = "cpu"

    def get_peak_stats(self) -> object:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(NO_FIGURES, NO_FIGURES, NO_FIGURES, NO_FIGURES, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


set_divide_factor = FSDPModule.set_gradient_divide_factor


def divided_before_it_is_sent(module: FSDPModule, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)
    set_divide_factor(module, factor)


def main() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    metrics.build_device_memory_monitor = NoMemoryMonitor
    utils.set_pg_timeouts = lambda *_, **__: None
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    FSDPModule.set_gradient_divide_factor = divided_before_it_is_sent  # type: ignore[method-assign, assignment]
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
