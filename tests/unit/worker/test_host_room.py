"""Room in host memory for a copy of an optimizer's state."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.node.daemon.shared_memory import RESERVE_BYTES, MemoryLimit
from atoll.node.worker import copies, host_room
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


class Registrations:
    """In place of the driver: the views of each part, in the order in which it gets to know them."""

    def __init__(self) -> None:
        self.parts: list[list[Tensor]] = []

    def __call__(self, views: Sequence[Tensor], devices: Iterable[torch.device], what: str) -> Registrations:
        assert not views
        return self

    def add(self, views: list[Tensor]) -> None:
        self.parts.append(views)


def test_the_driver_gets_to_know_it_in_parts_that_share_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Registrations()
    monkeypatch.setattr(copies, "Registration", known)
    monkeypatch.setattr(host_room, "PART_BYTES", 3 * mmap.PAGESIZE)
    room, num_elements = HostRoom(), mmap.PAGESIZE - 100
    state = {name: torch.full((num_elements,), float(at)) for at, name in enumerate("abcde")}  # almost four pages
    state |= {"small": torch.ones(3), "last": torch.ones(5)}
    room.register_part()
    room.prepare(state)
    room._wait()
    assert not known.parts
    for at in range(2):
        room.register_part()
        assert [len(part) for part in known.parts] == [1] * (at + 1)
    copied = room.copy(state)
    assert [len(part) for part in known.parts] == [1, 1, 1, 1, 1, 2]
    assert sorted(addresses(copied)) == sorted(view.data_ptr() for part in known.parts for view in part)
    pages = [copies.page_ranges(part) for part in known.parts]
    assert all(len(ranges) == 1 for ranges in pages)
    assert all(before[0][1] <= after[0][0] for before, after in pairwise(pages))
    for name, value in state.items():
        assert torch.equal(copied[name], value)
    room.register_part()
    room.copy(state)
    assert len(known.parts) == 6


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
    room.register_part()
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
            patch.setattr(host_room, "_parts", lambda layout: [].pop())
            words = "no host memory for a copy of 7 tensors: pop from empty list"
        room.prepare(state)
        with pytest.raises(HostError, match=words):
            room.copy(state)
        with pytest.raises(HostError, match=words):
            room.copy(state)
    assert torch.equal(room.copy(state)["momentum"], state["momentum"])


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
