"""Frozen parameters and constant buffers keep the values of commit 0: other sites, a restart and the saved model have
those too.

A script that changes one of its own (a teacher, a target network) would train something that nobody else has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.node.worker.tensors import Held
from atoll.protocol.errors import ConfigError

LOOK_BYTES = 64 << 20
"""So many of a rank's frozen bytes are compared at a boundary, whatever torch says of them."""


class FrozenTensors:
    """`pairs`: each frozen slice of this rank, and its place in PUBLISH, where the run's values stay."""

    def __init__(self, pairs: Sequence[tuple[Held, Tensor]]) -> None:
        self._pairs = pairs
        self._versions = [_version(held) for held, _ in pairs]
        self._next = 0

    def take(self) -> None:
        """Put the run's values in place; says so where this site had other ones."""
        differing = [held.spec.name for held, publish in self._pairs if not _same(held.local(), publish)]
        for held, publish in self._pairs:
            held.local().copy_(publish)
        self._versions = [_version(held) for held, _ in self._pairs]
        if differing:
            sys.stderr.write(
                f"atoll: {len(differing)} frozen tensors took the run's values, which differed from this script's; "
                f"the first is {differing[0]!r}\n"
            )

    def check(self) -> None:
        """Raises ConfigError, naming it, for one that changed since then.

        Each that torch has seen a write to is compared, and of the others some at each call, because a write through
        `.data` is not seen.
        """
        versions = [_version(held) for held, _ in self._pairs]
        due = [index for index, version in enumerate(versions) if version != self._versions[index]]
        for index in dict.fromkeys(due + self._some()):
            held, publish = self._pairs[index]
            if not _same(held.local(), publish):
                if held.parameter is None:
                    raise ConfigError(
                        f'the buffer {held.spec.name!r} is "constant" by buffers= of atoll.join, but the script has '
                        "changed it since: the other sites, a restart and the saved model would keep its first "
                        'values. Leave it out of buffers= (it is averaged then), or say "lowest" or "local"'
                    )
                raise ConfigError(
                    f"{held.spec.name!r} is frozen (requires_grad = False), but the script has changed it since "
                    "atoll.join: the other sites, a restart and the saved model would keep its first values. Give it a "
                    f'policy, as a buffer has one: atoll.join(..., buffers={{"{held.spec.name}": "mean"}}) or "lowest" '
                    '(a pattern as "teacher.*" names all of a module), or keep a teacher or target network outside of '
                    "the modules given to atoll.join"
                )
        self._versions = versions

    def _some(self) -> list[int]:
        """The next of them in turn: at least one, and LOOK_BYTES together."""
        found: list[int] = []
        num_bytes = 0
        while len(found) < len(self._pairs) and num_bytes < LOOK_BYTES:
            found.append(self._next)
            num_bytes += self._pairs[self._next][1].nbytes
            self._next = (self._next + 1) % len(self._pairs)
        return found


def _version(held: Held) -> int:
    """Counts writes in place, but for those through `.data`."""
    tensor = held.parameter
    if tensor is None:
        return held.local()._version
    return tensor._local_tensor._version if isinstance(tensor, DTensor) else tensor._version


def _same(local: Tensor, publish: Tensor) -> bool:
    """Bit for bit: a NaN equals itself."""
    pair = [tensor.contiguous().view(-1) for tensor in (local, publish.to(local.device))]
    # Words where bytes fill them: torch compares those five times as fast.
    in_words = all(t.nbytes % 8 == 0 and t.storage_offset() * t.itemsize % 8 == 0 for t in pair)
    return torch.equal(*(t.view(torch.int64 if in_words else torch.uint8) for t in pair))
