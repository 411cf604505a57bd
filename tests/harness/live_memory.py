"""How much memory torch's tensors have at a moment, and at most."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are there, each counted once, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves(out):
            leaf = item._local_tensor if isinstance(item, DTensor) else item
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.count(leaf)
        return out
