"""What a rank measures of its machine, for people."""

from __future__ import annotations

import torch

from atoll.node.local_protocol import RankReadings
from atoll.protocol.resources import resident_bytes

PEAK_FLOPS_PER_S = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
}
"""By words in the GPU's name, the first that fits: dense, in bfloat16 (V100: float16), by NVIDIA's data sheets."""


def peak_flops_per_s(gpu: str) -> float:
    """0 for one that is not known."""
    words = gpu.replace("-", " ").split()
    for name, peak in PEAK_FLOPS_PER_S.items():
        wanted = name.split()
        if all(word in words for word in wanted):
            return peak
    return 0.0


def of_this_rank(trained_tokens: int, skipped_steps: int = 0) -> RankReadings:
    """The GPU is the one that is current here, where there is one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return RankReadings(memory_bytes=resident_bytes(), trained_tokens=trained_tokens, skipped_steps=skipped_steps)
    free, total = torch.cuda.mem_get_info()
    return RankReadings(
        memory_bytes=resident_bytes(),
        trained_tokens=trained_tokens,
        skipped_steps=skipped_steps,
        gpu_used_bytes=total - free,
        gpu_total_bytes=total,
        peak_flops_per_s=peak_flops_per_s(torch.cuda.get_device_name()),
    )
