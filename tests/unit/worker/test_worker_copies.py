"""Copies to and from the memory that ranks share with their node: in pieces, cast, registered."""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll.node.core.events import MergeMode
from atoll.node.daemon.shared_memory import SharedBuffer
from atoll.node.worker import copies
from atoll.node.worker.pieces import SharedTensors
from atoll.node.worker.tensors import find_tensors
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.devices import DEVICES
from tests.harness.fake_node import FakeNode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1000,), (9, 5), (3, 700), (4, 3, 2)], ids=str)
@pytest.mark.parametrize("size_bytes", [4, 64, 1 << 20])
def test_pieces_are_all_of_it_and_at_most_so_large(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], size_bytes: int
) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", size_bytes)
    one, other = torch.zeros(shape), numbers(*shape)
    rows = []
    for target, source in copies.pieces(one, other):
        assert target.shape == source.shape
        rows.append(target.shape[0] if shape else 1)
        row_bytes = 4 * (target[0].numel() if shape and target.numel() else 1)
        assert target.numel() * 4 <= max(size_bytes, row_bytes)
        target.add_(source)
    assert torch.equal(one, other)
    if other.numel() * 4 > 2 * size_bytes and shape:
        assert len(rows) > 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_strided", [False, True])
def test_copies_in_pieces_have_the_bits_of_one_of_all(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str, is_strided: bool
) -> None:
    monkeypatch.setattr(copies, "PIECE_BYTES", 100)
    whole = torch.zeros(40, 12)
    shared = whole[:, 3:9] if is_strided else whole[4:31]
    values = numbers(*shared.shape)
    local = values.to(device, dtype)
    copies.to_host(local, shared)
    assert torch.equal(shared, values.to(dtype).float())
    outside = whole.clone()
    (outside[:, 3:9] if is_strided else outside[4:31]).zero_()
    assert not outside.any()
    shared.copy_(numbers(*shared.shape, seed=2))
    copies.to_local(shared, local)
    assert torch.equal(local.cpu(), numbers(*shared.shape, seed=2).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [MergeMode.REPLACE, MergeMode.MERGE, MergeMode.MIX, MergeMode.SHIFT])
def test_a_merge_in_pieces_has_the_bits_of_one_of_all(
    monkeypatch: pytest.MonkeyPatch, device: str, mode: MergeMode
) -> None:
    found = []
    for size_bytes in (1 << 20, 100):
        monkeypatch.setattr(copies, "PIECE_BYTES", size_bytes)
        net = nn.Linear(6, 50).to(device, torch.bfloat16)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(numbers(*parameter.shape))
        tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
        node = FakeNode(manifest=tensors.manifest)
        shared = SharedTensors(tensors, node.joined(len(tensors.pieces)), SyncSettings(alpha=0.25))
        shared.write_snapshot(0, with_frozen=False)
        with torch.no_grad():
            net.weight.mul_(1.5)
        node.values(node.publish, "weight")[:] = numbers(300, seed=3).numpy()
        shared.apply(0, mode, fresh=False)
        found.append(net.weight.detach().cpu())
    assert torch.equal(*found)
    assert not torch.equal(found[0], (numbers(50, 6).to(torch.bfloat16) * 1.5))


def test_pages_of_tensors_beside_each_other_are_registered_once() -> None:
    page = mmap.PAGESIZE
    buffer = torch.frombuffer(mmap.mmap(-1, 10 * page), dtype=torch.uint8)
    start = buffer.data_ptr()
    assert start % page == 0
    square = buffer[5 * page + 8 : 7 * page + 8].view(2, page)[:, : page // 2]  # ends in the middle of a page
    views = [buffer[10 : page + 5], square, buffer[page + 5 : page + 10], buffer[9 * page : 9 * page + 1], buffer[:0]]
    expected = [(0, 2 * page), (5 * page, 7 * page), (9 * page, 10 * page)]
    assert copies.page_ranges(views) == [(start + first, start + last) for first, last in expected]
    words = buffer.view(torch.float32)
    assert copies.page_ranges([words[1:page]]) == [(start, start + 4 * page)]


class Runtime:
    """CUDA's, of a GPU that is not there."""

    cudaError = int

    def __init__(self, refuses_from: int) -> None:
        self.registered: list[int] = []
        self.on: list[torch.device] = []
        self._num_asked, self._refuses_from = 0, refuses_from

    def cudart(self) -> Runtime:
        return self

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        self.on.append(device)
        return nullcontext()

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
        self._num_asked += 1
        if self._num_asked > self._refuses_from:
            return 712
        self.registered.append(start)
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        self.registered.remove(start)
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "part of it is already mapped"


CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The GPUs whose last error was asked for."""
    found: list[torch.device] = []
    monkeypatch.setattr(copies, "_forget_error", found.append)
    return found


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("refuses_from", [0, 1, 2])
def test_a_driver_that_refuses_is_said_and_nothing_stays_registered(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forgotten: list[torch.device],
    refuses_from: int,
    in_parts: bool,
) -> None:
    runtime = Runtime(refuses_from)
    monkeypatch.setattr(torch, "cuda", runtime)
    page = mmap.PAGESIZE
    buffer = torch.frombuffer(mmap.mmap(-1, 4 * page), dtype=torch.uint8)
    views = [buffer[:8], buffer[2 * page : 2 * page + 8]]
    made = copies.Registration(views[: 0 if in_parts else 2], [CPU, GPU], "a buffer")
    for view in views if in_parts else ():
        made.add([view])
    said = capsys.readouterr().err
    if refuses_from == 2:
        assert runtime.registered == [buffer.data_ptr(), buffer.data_ptr() + 2 * page]
        assert not said
        assert not forgotten
        made.end()
    else:
        assert forgotten == [GPU]
        assert said.count("does not register") == 1
        assert f"register {page} bytes of a buffer (error 712: part of it is already mapped): copies" in said
    assert runtime.registered == []
    assert set(runtime.on) == {GPU}
    made.end()


def test_without_a_gpu_nothing_is_registered() -> None:
    buffer = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    assert not copies.Registration([buffer], [CPU], "a buffer")._ranges


def test_what_nobody_refers_to_is_not_registered_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(1)
    monkeypatch.setattr(torch, "cuda", runtime)
    views = [torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)]
    made = copies.Registration(views, [GPU], "a buffer")
    assert runtime.registered == [views[0].data_ptr()]
    del made
    assert runtime.registered == []


def test_a_fork_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(1)
    monkeypatch.setattr(torch, "cuda", runtime)
    made = copies.Registration([torch.frombuffer(mmap.mmap(-1, 8), dtype=torch.uint8)], [GPU], "a buffer")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    made.end()
    assert len(runtime.registered) == 1


@pytest.mark.gpu
def test_torch_goes_on_after_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    views, gpu = [torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)], torch.device("cuda", 0)
    first = copies.Registration(views, [gpu], "a buffer")
    assert len(first._ranges) == 1
    second = copies.Registration(views, [gpu], "a buffer")  # these pages are registered
    assert not second._ranges
    assert "does not register" in capsys.readouterr().err
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert views[0].is_pinned()


@pytest.mark.gpu
def test_what_a_rank_shares_is_registered_until_it_leaves() -> None:
    net = nn.Linear(4096, 4096, bias=False).to("cuda")
    tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    node = FakeNode(manifest=tensors.manifest)
    assert node.layout is not None
    buffers = [SharedBuffer(node.layout.buffer_bytes, name) for name in ("SNAPSHOT", "PUBLISH")]
    node.snapshot, node.publish = (buffer.view for buffer in buffers)
    shared = SharedTensors(tensors, node.joined(1), SyncSettings())
    values = torch.from_numpy(node.values(node.publish, "weight"))
    assert values.is_pinned()
    assert torch.from_numpy(node.values(node.snapshot, "weight")).is_pinned()
    values.copy_(numbers(values.numel()))
    shared.apply(0, MergeMode.REPLACE, fresh=True)
    shared.write_snapshot(0, with_frozen=False)
    np.testing.assert_array_equal(node.values(node.snapshot, "weight"), values.numpy())
    shared.close()
    assert not values.is_pinned()
    values.add_(1)
    saved = shared.swap_in()
    assert torch.equal(net.weight.detach().cpu().flatten(), values)
    shared.swap_back(saved)


@pytest.mark.gpu
def test_a_captured_graph_runs_with_the_values_of_a_commit() -> None:
    net = nn.Linear(3, 2, bias=False).to("cuda")
    x = torch.ones(1, 3, device="cuda")
    tensors = find_tensors([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    node = FakeNode(manifest=tensors.manifest)
    shared = SharedTensors(tensors, node.joined(1), SyncSettings())
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        net(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = net(x)
    node.values(node.publish, "weight")[:] = range(6)
    shared.apply(0, MergeMode.REPLACE, fresh=True)
    graph.replay()
    assert y.tolist() == [[3.0, 12.0]]
