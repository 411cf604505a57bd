"""First values of a model that a script gives one after the other, so that no rank has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from atoll.protocol.errors import ConfigError


class GivenValues:
    def __init__(
        self, give: Callable[[], Iterable[tuple[str, Tensor]]], whole: nn.Module, device: torch.device
    ) -> None:
        """`whole`: the model on the meta device. `device`: of buffers."""
        self._give, self._device = give, device
        self._of = {
            **dict(whole.named_parameters(remove_duplicate=False)),
            **dict(whole.named_buffers(remove_duplicate=False)),
        }
        self._names: dict[int, list[str]] = {}  # of one tensor, which is known by several where it is tied
        for name, tensor in self._of.items():
            self._names.setdefault(id(tensor), []).append(name)
        self._waiting: dict[str, list[Tensor]] = {}

    def buffer(self, name: str) -> Tensor:
        """Memory for it, which gets its value in `tensors`."""
        buffer = torch.empty_like(self._of[name], device=self._device)
        self._waiting.setdefault(name, []).append(buffer)
        return buffer

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each under all its names. Raises ConfigError for what is no name with a tensor, for a name or a shape that
        the model does not have, and at the end for the first tensor without a value."""
        left = dict(self._names)
        for item in self._give():
            if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor)):
                raise ConfigError(
                    f"atoll.share: values gives {item!r:.100}, no name with a tensor: of a dict give items(), of "
                    "arrays tensors"
                )
            given, value = item
            del item
            if given not in self._of:
                raise ConfigError(f"atoll.share: values gives {given!r}, which the model does not have")
            known = self._of[given]
            if value.shape != known.shape:
                raise ConfigError(
                    f"atoll.share: values gives {given!r} with shape {tuple(value.shape)}, and the model has it with "
                    f"{tuple(known.shape)}"
                )
            left.pop(id(known), None)
            for name in self._names[id(known)]:
                for buffer in self._waiting.get(name, ()):
                    buffer.copy_(value)
                yield name, value
            del value  # before the next one is made
        if left:
            name = min(min(names) for names in left.values())
            raise ConfigError(f"atoll.share: values gives no {name!r}; it gives all parameters and buffers")
