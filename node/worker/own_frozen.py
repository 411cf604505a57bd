"""Frozen parameters that every site has by itself, as the base of a LoRA: compared by hash, never carried.

The manifest lists one empty tensor whose name has the hash of them all, so a site with another base is refused at the
door by what refuses another model. They are in memory once, where the model has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.protocol.digest import Digest
from atoll.protocol.errors import ConfigError

PIECE_BYTES = 64 << 20
"""Of a tensor, hashed at once: so much memory is taken where it is on a GPU."""
MARK = "frozen-base"


class OwnFrozen(nn.Module):
    """What stands for `tensors`, by their canonical names: a module with one empty buffer."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        if not tensors:
            raise ConfigError(
                'atoll.join(..., frozen="own"): no parameter is frozen (requires_grad = False); leave it out, or '
                "freeze the base before"
            )
        self._tensors = dict(sorted(tensors.items(), key=lambda item: item[0].encode()))
        self._hashes = {name: _hash(name, tensor) for name, tensor in self._tensors.items()}
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        digest = Digest("atoll/frozen-base/v1").uint(len(self._hashes))
        for name, found in self._hashes.items():
            digest.text(name).data(found)
        self.key = digest.finish().hex()
        self.mark = torch.empty(0, dtype=torch.uint8)
        self.register_buffer(self.key, self.mark)

    @property
    def name(self) -> str:
        """In the manifest."""
        return f"{MARK}.{self.key}"

    def check(self) -> None:
        """Raises ConfigError, naming it, for one that a script has changed since `atoll.join`, where torch has seen
        the write."""
        for name, tensor in self._tensors.items():
            if tensor._version != self._versions[name] and _hash(name, tensor) != self._hashes[name]:
                raise ConfigError(
                    f'{name!r} is frozen (requires_grad = False) and of atoll.join(..., frozen="own"), but the script '
                    "has changed it: the other sites keep its first values; train it, or leave it as it is"
                )
            self._versions[name] = tensor._version


def _hash(name: str, tensor: Tensor) -> bytes:
    """Over dtype, shape and values, in little-endian bytes."""
    if isinstance(tensor, DTensor):
        raise ConfigError(
            f'{name!r} is frozen and spread over ranks, which frozen="own" cannot compare; leave it out: the tensor '
            "then travels once, with the starting state"
        )
    digest = Digest("atoll/frozen-tensor/v1").text(str(tensor.dtype)).text(str(list(tensor.shape))).uint(tensor.nbytes)
    for piece in _pieces(tensor.detach()):
        digest.more(piece)
    return digest.finish()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.reshape(-1)
    num_at_once = max(1, PIECE_BYTES // flat.itemsize)
    for first in range(0, flat.numel(), num_at_once):
        yield flat[first : first + num_at_once].view(torch.uint8).cpu().numpy().data
