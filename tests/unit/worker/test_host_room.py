"""Room in host memory for a copy of an optimizer's state."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.node.daemon.shared_memory import RESERVE_BYTES, MemoryLimit
from atoll.node.worker import host_room
from atoll.node.worker.host_room import ALIGNMENT_BYTES, HostRoom
from atoll.protocol.errors import HostError
from tests.harness.devices import DEVICES


def a_state(device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "count": torch.tensor(7.0),
        "momentum": torch.randn(5, 3, generator=generator).to(device),
        "half": torch.randn(3, generator=generator).to(device, torch.bfloat16),
        "nothing": torch.empty(0, 3, device=device),
        "ordered": torch.randn(2, 3, 4, 4, generator=generator).to(device).to(memory_format=torch.channels_last),
        "flags": torch.tensor([True, False, True], device=device),
        "last": torch.arange(9, device=device),
    }


def addresses(copied: dict[str, Tensor]) -> list[int]:
    return [value.data_ptr() for value in copied.values()]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_have_the_bits_of_each_tensor_in_one_piece_of_memory(device: str) -> None:
    room, state = HostRoom(), a_state(device)
    copied = room.copy(state)
    assert list(copied) == list(state)
    for name, value in state.items():
        assert copied[name].device.type == "cpu"
        assert copied[name].dtype == value.dtype
        assert copied[name].is_contiguous()
        assert torch.equal(copied[name], value.cpu()), name
        assert copied[name].data_ptr() % ALIGNMENT_BYTES == 0 or not value.numel()
        assert copied[name].is_pinned() == (device == "cuda") or not value.numel()
    before = addresses(copied)
    state["momentum"].add_(1)
    copied = room.copy(state)
    assert torch.equal(copied["momentum"], state["momentum"].cpu())
    assert addresses(copied) == before


def test_it_is_made_beside_the_caller_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    makers: list[threading.Thread] = []
    may_go_on, real = threading.Event(), host_room._make

    def make(*arguments: Any) -> None:
        makers.append(threading.current_thread())
        assert may_go_on.wait(60)
        real(*arguments)

    monkeypatch.setattr(host_room, "_make", make)
    room, state = HostRoom(), a_state()
    room.prepare(state)  # returns before it is made
    may_go_on.set()
    copied = room.copy(state)
    assert torch.equal(copied["momentum"], state["momentum"])
    room.prepare(state)
    room.copy(state)
    assert makers != [threading.current_thread()]
    assert len(makers) == 1
    state["momentum"] = state["momentum"].double()
    assert room.copy(state)["momentum"].dtype is torch.float64
    assert len(makers) == 2


@pytest.mark.parametrize("why", ["memory", "thread", "anything else"])
def test_room_that_cannot_be_made_is_said_and_asked_for_again(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    room, state = HostRoom(), a_state()
    with monkeypatch.context() as patch:
        if why == "memory":
            patch.setattr(host_room, "memory_limit", lambda: MemoryLimit(RESERVE_BYTES + 100, "a group of this test"))
            words = "are available, limited by a group of this test"
        elif why == "thread":
            patch.setattr(threading.Thread, "start", refuse)
            words = "can't start new thread"
        else:
            patch.setattr(host_room, "_places", lambda layout: [].pop())
            words = "no host memory for a copy of 7 tensors: pop from empty list"
        room.prepare(state)
        with pytest.raises(HostError, match=words):
            room.copy(state)
        with pytest.raises(HostError, match=words):
            room.copy(state)
    assert torch.equal(room.copy(state)["momentum"], state["momentum"])


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
