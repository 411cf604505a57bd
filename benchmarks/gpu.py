"""On a GPU: copies to and from the shared buffers, int8 and sign1, and a training loop beside the same one alone."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from atoll.node.core.events import MergeMode
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.worker import copies
from atoll.node.worker.client import JoinedLayout
from atoll.node.worker.pieces import SharedTensors
from atoll.node.worker.tensors import ModelTensors, find_tensors
from atoll.protocol.codecs import HEADER_BYTES, kernels
from atoll.protocol.codecs.arithmetic import Floats
from atoll.protocol.layout import DEFAULT_CHUNK_ELEMENTS as CHUNK
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from benchmarks import gpu_encode
from tests.harness.fake_node import FakeNode
from tests.harness.local_run import PLAIN, LocalRun

WORKER = Path(__file__).parent / "gpu_worker.py"
WIDTH = 4096
PIECE = 64 * CHUNK
MODES = (MergeMode.REPLACE, MergeMode.MERGE)
PARTS = ("copies", "codecs", "training")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--parameters", type=int, default=1 << 30, help="of copies and codecs")
    parser.add_argument("--layers", type=int, default=20, help="of the model that is trained: 2048 wide, 51 M each")
    parser.add_argument("--every", type=int, default=80, help="steps between two syncs")
    parser.add_argument("--syncs", type=int, default=2)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return 0
    print(f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"Python {platform.python_version()}", flush=True)  # fmt: skip
    if "copies" in args.only:
        measure_copies(args.parameters)
    if "codecs" in args.only:
        measure_codecs(args.parameters)
    gc.collect()
    torch.cuda.empty_cache()
    if "training" in args.only:
        train(args.layers, args.every, args.syncs)
    return 0


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """The median."""
    found = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found[1:])


# --- copies


def measure_copies(num_parameters: int) -> None:
    rows = 64 << 10
    num_matrices = max(1, num_parameters // (rows * WIDTH))
    print(f"\n{num_matrices} matrices, {4 * num_matrices * rows * WIDTH / 1e9:.1f} GB in fp32: GB/s, medians of 5")
    down, up = memcpy_speeds()
    print(f"cudaMemcpy, pinned memory of torch: to the host {down:.1f}, to the GPU {up:.1f}", flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        net = nn.ParameterList(
            nn.Parameter(torch.ones(rows, WIDTH, device="cuda", dtype=dtype)) for _ in range(num_matrices)
        )
        tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
        joined = joined_with(tensors)
        for is_registered in (False, True):
            report_copies(tensors, joined, dtype, is_registered)
        del tensors, net, joined
        gc.collect()
        torch.cuda.empty_cache()


def memcpy_speeds() -> tuple[float, float]:
    on_gpu, pinned = torch.empty(1 << 28, device="cuda"), torch.empty(1 << 28, pin_memory=True)
    down_s = seconds(lambda: pinned.copy_(on_gpu, non_blocking=True))
    up_s = seconds(lambda: on_gpu.copy_(pinned, non_blocking=True))
    return pinned.nbytes / down_s / 1e9, pinned.nbytes / up_s / 1e9


def joined_with(tensors: ModelTensors) -> JoinedLayout:
    """Under a node in memory, but with buffers as a real node has them."""
    joined = FakeNode(manifest=tensors.manifest).joined(len(tensors.pieces))
    snapshot, publish = (SharedBuffer(joined.layout.buffer_bytes, name).view for name in ("snapshot", "publish"))
    return replace(joined, snapshot=snapshot, publish=publish)


def report_copies(tensors: ModelTensors, joined: JoinedLayout, dtype: torch.dtype, is_registered: bool) -> None:
    began_s = time.perf_counter()
    with nullcontext() if is_registered else patch.object(copies, "page_ranges", return_value=[]):
        shared = SharedTensors(tensors, joined, SyncSettings())
    how = f"registered in {time.perf_counter() - began_s:.2f} s" if is_registered else "not registered"
    gb = joined.layout.buffer_bytes / 1e9
    snapshot = gb / seconds(lambda: shared.write_snapshot(0, with_frozen=False))
    replaced, merged = (gb / seconds(partial(shared.apply, 0, mode, fresh=False)) for mode in MODES)
    print(f"{str(dtype)[6:]}, {how}: snapshot {snapshot:.1f}, replace {replaced:.1f}, merge {merged:.1f}", flush=True)
    shared.close()


# --- codecs


def measure_codecs(num_parameters: int) -> None:
    """Encoding of `base - local`: of what is on the GPU, with the base brought there, and by the node's kernels."""
    kernels.warm_up()
    num_elements = PIECE * max(1, num_parameters // PIECE)
    print(f"\nencoding {num_elements:,} parameters: GB/s of fp32")
    generator = torch.Generator("cuda").manual_seed(1)
    local = torch.randn(num_elements, device="cuda", generator=generator)
    base = local + 1e-3 * torch.randn(num_elements, device="cuda", generator=generator)
    pinned, host = base.cpu().pin_memory(), local.cpu()
    for codec, encode in gpu_encode.ENCODERS.items():
        there, brought = (gpu_speed(encode, source, local) for source in (base, pinned))
        num_threads = os.cpu_count() or 1
        one, all_threads = (kernel_speed(codec, pinned.numpy(), host.numpy(), n) for n in (1, num_threads))
        for first in range(0, num_elements, 16 * CHUNK):
            at = slice(first, first + CHUNK)
            expected = kernels.encode(codec, pinned[at].numpy(), minus=host[at].numpy())[HEADER_BYTES:]
            assert encode(base[at], local[at]).cpu().numpy().tobytes() == expected, f"{codec}: other bits on the GPU"
        print(
            f"{codec}: on the GPU, base there {there:.0f}, base brought {brought:.1f}; by the node's kernels, "
            f"1 thread {one:.2f}, {num_threads} threads {all_threads:.1f}; the bits are equal",
            flush=True,
        )


def gpu_speed(encode: gpu_encode.Encoder, base: Tensor, local: Tensor) -> float:
    """Piece by piece, to pinned memory."""
    out = torch.empty(encode(base[:PIECE].cuda(), local[:PIECE]).numel(), dtype=torch.uint8, pin_memory=True)

    def work() -> None:
        for source, minus in zip(*(torch.split(tensor, PIECE) for tensor in (base, local)), strict=True):
            out.copy_(encode(source.cuda(non_blocking=True), minus), non_blocking=True)

    return base.nbytes / seconds(work, 3) / 1e9


def kernel_speed(codec: str, values: Floats, minus: Floats, num_threads: int) -> float:
    firsts = range(0, min(values.size, 64 * num_threads * CHUNK), CHUNK)

    def one(first: int) -> None:
        at = slice(first, first + CHUNK)
        kernels.encode(codec, values[at], minus=minus[at])

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(one, firsts[: 4 * num_threads]))
        began_s = time.perf_counter()
        list(pool.map(one, firsts))
        return 4 * len(firsts) * CHUNK / (time.perf_counter() - began_s) / 1e9


# --- training


def train(num_layers: int, every: int, num_syncs: int) -> None:
    sync = SyncSettings(every=every, overlap_steps=every // 2, codec="int8", log_commits=4, snapshots=0)  # little disk
    settings = RunSettings(run_id="bench", steps=1 << 20, data="local", time_limits="wan", sync=sync)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name, LocalRun(Path(name), settings, PLAIN) as run:
        result = Path(name) / "result.json"
        run.start_coordinator()
        script = [str(WORKER), str(result), str(num_layers), str(num_syncs)]
        threads = str(max(1, (os.cpu_count() or 2) - 2))
        run.start_node("a", script, launcher="python", extra=["--threads", threads])
        if run.wait_all(300)["a"] != 0:
            raise SystemExit(run.story())
        found = json.loads(result.read_text())
        syncs = [(line["exchange_s"], line["apply_s"]) for line in run.journal("a", "commit") if line["commit"] > 1]
    ratio = found["plain_s"] / found["attached_s"]
    print(f"\n{found['num_parameters']:,} parameters, bf16 autocast, {found['tokens']} tokens a step, every = {every}, "
          f"overlap_steps = {every // 2}, int8")  # fmt: skip
    for how in ("plain", "attached"):
        tokens_per_s = found["tokens"] / found[f"{how}_s"]
        flops = tokens_per_s * found["flops_per_token"]
        share = f", {flops / found['peak_flops']:.3f} of its peak" if found["peak_flops"] else ""
        print(f"{how}: {tokens_per_s:,.0f} tokens/s, {flops / 1e12:.0f} TFLOP/s{share}")
    print(f"attached beside plain: {ratio:.3f} over {found['num_syncs']} syncs (goal 0.98)")
    stopped = ", ".join(f"{float(s) * 1e3:.0f} ms at {step}" for step, s in found["stopped_s"].items())
    print(f"the longest calls of site.step, by step: {stopped}")
    print(f"seconds that a sync took at the node, beside the training: {syncs}", flush=True)
