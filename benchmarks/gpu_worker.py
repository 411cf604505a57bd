"""The training that `gpu.py` measures: the built-in model in bf16, as many steps by itself as with syncs."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import atoll
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import next_byte_loss
from atoll.protocol.model_settings import ModelSettings

BATCH_SIZE, SEQUENCE = 8, 2048
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Dense bf16, by the vendor's datasheets."""


def main(result: Path, num_layers: int, num_syncs: int) -> None:
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    large = ModelSettings(dim=2048, num_heads=16, num_kv_heads=16, ffn_dim=5632)
    settings = replace(large if use_gpu else ModelSettings(), num_layers=num_layers, max_sequence=SEQUENCE)
    batch_size, sequence = (BATCH_SIZE, SEQUENCE) if use_gpu else (1, 64)
    model = Transformer(settings, 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=use_gpu)
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(0, 256, (batch_size, sequence + 1), generator=generator).to(device)
    tokens = batch_size * sequence
    num_parameters = sum(p.numel() for p in model.parameters())

    def train() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = next_byte_loss(model, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    def wait() -> float:
        if use_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    with atoll.join(model, optimizer) as site:
        for _ in range(5):
            site.step(tokens=tokens, loss=train())
        while not site.step(tokens=tokens, loss=train()).synced:
            pass
        num_taken, began_s = 0, wait()
        stopped_s = []  # in each site.step: what a GPU has in its queue is waited for at a boundary
        while num_taken < num_syncs:
            loss = train()
            called_s = time.perf_counter()
            num_taken += site.step(tokens=tokens, loss=loss).synced
            stopped_s.append(time.perf_counter() - called_s)
        attached_s = (wait() - began_s) / len(stopped_s)
        with site.busy("the same steps without atoll", 600):
            began_s, num_steps = wait(), min(len(stopped_s), 80)
            for _ in range(num_steps):
                train()
            plain_s = (wait() - began_s) / num_steps
        name = torch.cuda.get_device_name() if use_gpu else "cpu"
        found = {
            "num_parameters": num_parameters,
            "tokens": tokens,
            "flops_per_token": 6 * num_parameters + 6 * settings.num_layers * settings.dim * sequence,
            "peak_flops": PEAK_FLOPS.get(name, 0),
            "num_syncs": num_syncs,
            "attached_s": attached_s,
            "plain_s": plain_s,
            "stopped_s": {step: s for step, s in enumerate(stopped_s) if s > plain_s / 10},
        }
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
