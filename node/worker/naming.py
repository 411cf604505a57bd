"""What tensors are called in the whole model, where the modules of a rank do not show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from atoll.protocol.errors import ConfigError
from atoll.protocol.strict import nearest


@dataclass(frozen=True, slots=True)
class Naming:
    """`parts`: of a module or tensor here to its name in the whole model, as {"layers.0": "layers.4"} for the first
    block of a second stage. `tied`: of a tensor here to another of the whole model that has the same values, of which
    this rank may have none, as {"head.weight": "embedding.weight"}. Both in names without wrappers."""

    parts: Mapping[str, str]
    tied: Mapping[str, str]
    is_said: bool = False
    """The script says that with these the names are those of the whole model."""

    def name(self, own: str) -> str:
        """In the whole model. The longest name of `parts` that fits decides."""
        end = len(own)
        while end > 0:
            if (found := self.parts.get(own[:end])) is not None:
                return found + own[end:]
            end = own.rfind(".", 0, end)
        return own

    def also(self, name: str) -> set[str]:
        """All names that it has: they are tied in whatever direction they were said."""
        target = self.tied.get(name, name)
        return {target, *(alias for alias, other in self.tied.items() if other == target)}

    def check(self, own: Iterable[str]) -> None:
        """Raises ConfigError for a part that none of the tensors here is of, and for what is tied to a tied one."""
        known = set(own)
        if twice := sorted(self.tied.keys() & set(self.tied.values())):
            raise ConfigError(f'tied: "{twice[0]}" is both tied and tied to; name one tensor for all that are the same')
        for part in self.parts:
            if not any(name == part or name.startswith(f"{part}.") for name in known):
                raise ConfigError(f'names: nothing here is named "{part}"; {nearest(part, known)}')


AS_SEEN = Naming({}, {})


class SharedParts:
    """Modules that this rank has of a model, which calls them as all of it does. `atoll.join` takes it in their place,
    with its data rank and ties: `atoll.share` makes one."""

    def __init__(self, parts: Sequence[nn.Module], data_rank: int, tied: Mapping[str, str]) -> None:
        self.parts = parts
        self.data_rank = data_rank
        """The same on ranks that see the same batch."""
        self.naming = Naming({}, tied, is_said=True)
