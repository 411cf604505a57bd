"""What the codec has lost of this site's contributions, chunk by chunk: added, times beta, to the next ones.

    a = (base - local) + beta * e        contribution = encode(a)        e' = a - decode(contribution)

Each operation is rounded to fp32 by itself (arXiv 1901.09847; the order is that of arXiv 2508.15706: nothing that was
sent is left over). Which commit advanced the error of a fragment, and whether it still counts, is the core's affair
(`node/core/errors.py`): what is here refuses any other. docs/decisions/0044-error-feedback.md says why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from atoll.node.dataplane import store_files
from atoll.node.dataplane.chunk_store import ChunkStore, Records
from atoll.node.dataplane.places import SPARES, error_sizes
from atoll.node.dataplane.store_files import Bytes, StoreKind
from atoll.node.threads import each
from atoll.protocol.codecs import kernels, scratch
from atoll.protocol.codecs.arithmetic import NOTHING, Floats, norm
from atoll.protocol.digest import Digest
from atoll.protocol.disk import Disk
from atoll.protocol.errors import NonFiniteError, StateError
from atoll.protocol.layout import Layout, Role
from atoll.protocol.settings import RunSettings

log = logging.getLogger("atoll.node")

_FORMAT = 1
_NAME = "error"


def leave_over(codec: str, sent: bytes, error: Floats, beta: np.float32, out: Floats) -> float:
    """What the codec has lost of `a`, which is `out + beta * error`: `out := a - decode(sent)`; the norm of `a`."""
    if error.size:
        out += beta * error
    found = norm(out)
    decoded = scratch.floats("sent", out.size)
    kernels.decode(sent, codec, out.size, decoded)
    out -= decoded
    return found


def kind_of(layout: Layout, settings: RunSettings) -> StoreKind:
    digest = Digest("atoll/error-feedback/v1").text(settings.run_id).data(layout.manifest.digest)
    return StoreKind(
        name=_NAME,
        what="error feedback",
        identity={"format": _FORMAT, "run": settings.run_id, "manifest": layout.manifest.digest.hex()},
        key=digest.uint(layout.chunk_elements).finish(),
        record_bytes=error_sizes(layout),
        name_of=layout.name_of,
    )


class Errors(Protocol):
    """As they are added to what is sent."""

    @property
    def beta(self) -> np.float32: ...

    def of(self, chunk: int, commit: int) -> AbstractContextManager[Floats]:
        """See `ErrorFeedback.of`."""
        ...


@contextmanager
def error_in(store: Records, layout: Layout, chunk: int, commit: int) -> Iterator[Floats]:
    """See `ErrorFeedback.of`."""
    if not commit or not layout.chunks[chunk].num_elements:
        yield NOTHING
        return
    with store.pinned(chunk) as pin:
        if pin.entry.version != commit:
            raise StateError(
                f"{store.folder}: the error feedback of chunk {chunk} is of commit {pin.entry.version}, that of commit "
                f"{commit} is needed"
            )
        yield pin.data.view(np.float32)


@dataclass(eq=False)
class ErrorFeedback:
    """Of one site, in a folder of its home."""

    layout: Layout
    beta: np.float32
    store: ChunkStore
    disk: Disk

    @classmethod
    def create(
        cls, folder: Path, layout: Layout, settings: RunSettings, disk: Disk, num_spares: int = SPARES
    ) -> ErrorFeedback:
        """Without any error, in place of what is there. Raises HostError if the disk has no room."""
        store = ChunkStore.create(folder, kind_of(layout, settings), disk, num_spares)
        return cls(layout, np.float32(settings.sync.error_feedback), store, disk)

    @classmethod
    def found(
        cls, folder: Path, layout: Layout, settings: RunSettings, disk: Disk, num_threads: int
    ) -> ErrorFeedback | None:
        """What an earlier start left; None if there is nothing, or only parts of files."""
        if not settings.sync.error_feedback or not store_files.exists(folder, _NAME):
            return None
        try:
            store = ChunkStore.open(folder, kind_of(layout, settings))
        except StateError:
            log.warning("error feedback in %s is not whole, or of another run: it begins anew", folder)
            return None
        store.verify(num_threads)
        return cls(layout, np.float32(settings.sync.error_feedback), store, disk)

    def commits(self, own: range | None = None) -> tuple[int | None, ...]:
        """Of each fragment, the commit that has advanced all of it, or what of it is in `own`; 0 if none has, None if
        one has advanced a part."""
        versions, found = self.store.versions, list[int | None]()
        for chunks in self.layout.fragments:
            its_own = chunks if own is None else [chunk for chunk in chunks if chunk in own]
            of_it = {versions[c] or 0 for c in its_own if self.store.kind.record_bytes[c]} or {0}
            found.append(of_it.pop() if len(of_it) == 1 else None)
        return tuple(found)

    def roll_back(self, commit: int) -> None:
        """Nothing stays of later commits, whose numbers others have soon, not even after a power cut: such a chunk has
        no error any more. Raises OSError."""
        void = [chunk for chunk, version in enumerate(self.store.versions) if version is not None and version > commit]
        for chunk in void:
            self.store.relabel(chunk, 0)
        if void:
            self.disk.sync(self.store.index_path)

    def of(self, chunk: int, commit: int) -> AbstractContextManager[Floats]:
        """As that commit left it; empty if it is 0. Raises StateError if it is another one's."""
        return error_in(self.store, self.layout, chunk, commit)

    def advance(
        self, chunks: Iterable[int], commit: int, left_over: Callable[[int, Floats], float], pool: Executor | None
    ) -> float:
        """What that commit leaves of those of the chunks that are trained; its norm over that of what was to be sent.
        `pool` shares the work, if given. Raises NonFiniteError if it is more than a number can say."""
        norms: dict[int, tuple[float, float]] = {}

        def advanced(chunk: int) -> None:
            def into(record: Bytes) -> None:
                values = record.view(np.float32)
                whole = left_over(chunk, values)
                if not np.isfinite(values).all():
                    raise NonFiniteError(f"the error feedback of {self.layout.name_of(chunk)!r} is not finite")
                norms[chunk] = norm(values), whole

            self.store.replace(chunk, commit, into)

        each(advanced, [c for c in chunks if self.layout.chunks[c].role is Role.TRAINABLE], pool)
        left, whole = (math.hypot(*both) for both in zip(*norms.values(), strict=True)) if norms else (0.0, 0.0)
        return left / whole if whole else 0.0
