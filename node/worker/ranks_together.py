"""What the ranks of a site tell each other by themselves, in the process group that the script made. All of them do the
same of it, in the same order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.protocol.errors import HostError

MAX_TEXT_BYTES = 256 << 20
"""Of one rank: the descriptions of its host's files."""


class RanksTogether:
    """The process group of all ranks must be there."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where this rank's model is."""
        kinds = [of.partition(":")[0] for of in dist.get_backend_config().split(",")]  # "cpu:gloo,cuda:nccl"
        kind = "cpu" if "cpu" in kinds else kinds[0]
        self.device = device if device.type == kind else torch.device(kind)
        """By which this rank talks: by the host's memory if the group takes that, and by a GPU if it takes no other,
        though the model may be offloaded."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def told(self, value: Any) -> list[Any]:
        """What each rank says, as JSON, by rank. Raises HostError, on all ranks, if that is too long."""
        data = json.dumps(value).encode()
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        sizes = [torch.empty_like(size) for _ in range(self.world)]
        dist.all_gather(sizes, size)
        if (longest := max(map(int, sizes))) > MAX_TEXT_BYTES:
            raise HostError(f"the descriptions of a host's files have {longest} bytes, at most {MAX_TEXT_BYTES} go")
        own, said = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device), []
        for rank in range(self.world):  # one after the other: together they may be large
            text = own if rank == self.rank else torch.empty(int(sizes[rank]), dtype=torch.uint8, device=self.device)
            dist.broadcast(text, rank)
            said.append(json.loads(text.cpu().numpy().tobytes()))
        return said

    def all_say(self, *, yes: bool) -> bool:
        """Whether all ranks say yes."""
        said = torch.tensor([int(yes)], dtype=torch.int64, device=self.device)
        dist.all_reduce(said, dist.ReduceOp.MIN)
        return bool(said)

    def send(self, data: Tensor, ranks: Iterable[int]) -> None:
        """Bytes, of which there are some, in host memory."""
        there = data.to(self.device)
        for rank in ranks:
            dist.send(there, rank)

    def receive(self, num_bytes: int, rank: int) -> Tensor:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        dist.recv(data, rank)
        return data.cpu()


def ranks_together(here: range, world: int, device: torch.device, *, is_wanted: bool) -> RanksTogether | None:
    """All ranks call this. None if the site has one host, if its script has no process group of all ranks, or one that
    numbers them otherwise than hosts do, or if one rank does not want it."""
    if len(here) == world or not dist.is_initialized() or dist.get_world_size() != world:
        return None
    together = RanksTogether(device)
    return together if together.all_say(yes=is_wanted and together.rank in here) else None
