"""What a rank measures of its machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from atoll.node.local_protocol import RankReadings
from atoll.node.worker import readings
from atoll.protocol.resources import Resources, measure, resident_bytes


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA A1000", 0),
        ("AMD Instinct MI300X", 0),
    ],
)
def test_the_peak_of_a_gpu_is_by_its_name(gpu: str, tflops: int) -> None:
    assert readings.peak_flops_per_s(gpu) == tflops * 1e12


def test_a_rank_without_a_gpu_says_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    found = readings.of_this_rank(7)
    assert found == RankReadings(memory_bytes=found.memory_bytes, trained_tokens=7)
    assert 1 << 20 < found.memory_bytes < 1 << 40


def test_a_rank_on_a_gpu_says_that_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        is_initialized=lambda: True, mem_get_info=lambda: (30, 100), get_device_name=lambda: "NVIDIA H100 80GB HBM3"
    )
    monkeypatch.setattr(torch, "cuda", fake)
    found = readings.of_this_rank(7)
    assert (found.gpu_used_bytes, found.gpu_total_bytes, found.peak_flops_per_s) == (70, 100, 989e12)


def test_what_a_process_uses_of_its_machine(tmp_path: object) -> None:
    found = measure(tmp_path)  # type: ignore[arg-type]
    assert 0 < found.disk_free_bytes <= found.disk_total_bytes
    assert abs(found.memory_bytes - resident_bytes()) < 1 << 30
    from pathlib import Path

    assert measure(Path("/nowhere/at/all")) == Resources(), "what cannot be read is not said"
