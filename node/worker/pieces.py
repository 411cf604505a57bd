"""Values between a rank's tensors and the buffers it shares with its node.

SNAPSHOT and PUBLISH hold full tensors in canonical layout; trainable tensors and averaged buffers as fp32, all others
as their own bytes. Local tensors change in place, in the storage they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from atoll.node.core.events import MergeMode
from atoll.node.local_protocol import PieceHash, piece_hash
from atoll.node.worker import copies
from atoll.node.worker.client import JoinedLayout
from atoll.node.worker.frozen import FrozenTensors
from atoll.node.worker.optimizer_copies import Copies
from atoll.node.worker.optimizers import NodeOptimizer
from atoll.node.worker.tensors import TORCH_DTYPES, Held, ModelTensors
from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.layout import FP32_ROLES, Role, fragments_of
from atoll.protocol.sync_settings import SyncSettings


class SharedTensors:
    """A rank's tensors beside their slices of SNAPSHOT and PUBLISH. Before each use they are to be resharded."""

    def __init__(
        self,
        tensors: ModelTensors,
        joined: JoinedLayout,
        sync: SyncSettings,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._optimizers = [o for o in optimizers if isinstance(o, NodeOptimizer)]
        self._alpha = sync.alpha
        self._fragments = fragments_of(joined.layout.manifest, sync.fragments)
        self._num_fragments = sync.fragments
        self._kept = frozenset(joined.told.kept_pieces)
        self._shared = joined.told.shared_pieces
        self._in_place = joined.in_place
        self._slices: list[tuple[Held, Tensor, Tensor]] = []  # held, of SNAPSHOT, of PUBLISH
        self.moments: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        """Momentum and variance in PUBLISH, where it has them."""
        layout = joined.layout
        places = {spec.name: i for i, spec in enumerate(layout.manifest.tensors)}
        for held in tensors.held:
            place = places.get(held.spec.name)
            if place is None or layout.manifest.tensors[place] != held.spec:
                raise InvalidMessage(f"the node's manifest does not list {held.spec.name!r} as this rank does")
            offset = layout.tensor_offsets_bytes[place]
            snapshot, publish = (_view(buffer, held, offset) for buffer in (joined.snapshot, joined.publish))
            self._slices.append((held, snapshot[held.slices], publish[held.slices]))
            if joined.moments and held.spec.role is Role.TRAINABLE and held.parameter is not None:
                offset = layout.moment_offsets_bytes[place]
                momentum, variance = (_view(buffer, held, offset)[held.slices] for buffer in joined.moments)
                self.moments[held.parameter] = momentum, variance
        self._frozen = FrozenTensors([(h, publish) for h, _, publish in self._slices if h.spec.role is Role.FROZEN])
        self._synced = [item for item in self._slices if item[0].spec.role not in (Role.BUFFER_LOCAL, Role.FROZEN)]
        moments = [moment for pair in self.moments.values() for moment in pair]
        views = [*(view for _, *both in self._slices for view in both), *moments]
        devices = (held.local().device for held, *_ in self._slices)
        self._registration = copies.Registration(views, devices, "the memory shared with the node")

    def close(self) -> None:
        """The rank leaves; outer parameters can still be asked for."""
        self._registration.end()

    @torch.no_grad()
    def check_frozen(self) -> None:
        """Raises ConfigError for a frozen tensor that was changed since `apply` gave it its values."""
        self._frozen.check()

    @torch.no_grad()
    def write_snapshot(self, fragment: int, *, with_frozen: bool) -> None:
        """Copy the slices of the fragment that are this rank's to write to SNAPSHOT; complete when this returns. Frozen
        ones are only wanted for commit 0, which is of all fragments."""
        for index, (held, snapshot, _) in enumerate(self._slices):
            if index not in self._kept or held.spec.role is Role.BUFFER_LOCAL:
                continue
            is_wanted = with_frozen if held.spec.role is Role.FROZEN else self._is_of(held, fragment)
            if is_wanted:
                copies.to_host(held.local() if with_frozen else self._contributed(held), snapshot)

    def _contributed(self, held: Held) -> Tensor:
        """This rank's slice of what a sync averages: values, or the gradient or momentum that an optimizer has."""
        if not self._optimizers or held.spec.role is not Role.TRAINABLE:
            return held.local()
        assert held.parameter is not None
        found = [part for o in self._optimizers if (part := o.contribution(held.parameter)) is not None]
        return found[0] if found else torch.zeros_like(held.local())

    @torch.no_grad()
    def hashes(self) -> tuple[PieceHash, ...]:
        """Of the slices that other ranks hold too, as SNAPSHOT would carry them."""
        found = []
        for index in self._shared:
            values = self._contributed(self._slices[index][0]).to("cpu", torch.float32).contiguous()
            found.append(PieceHash(piece=index, hash=piece_hash(values.view(-1).numpy().data.cast("B"))))
        return tuple(found)

    @torch.no_grad()
    def apply(self, fragment: int, mode: MergeMode, *, fresh: bool, copies_of: Copies | None = None) -> None:
        """Take what PUBLISH holds of the fragment. fp32 throughout, then cast to the tensor's own dtype. `copies_of`:
        what an optimizer has of parameters takes the same, to the bits that it keeps.

        A buffer that training changed since the snapshot stays: it has no sum of two values (a variance would become
        negative), and what it was at the snapshot is in the commit.
        """
        if fresh:
            self._frozen.take()
        while True:
            self._take_all(fragment, mode, copies_of or {})
            if self._in_place is None or self._in_place.is_current:
                return
            if mode is not MergeMode.REPLACE:
                raise StateError("the outer values were replaced while this rank took them, which cannot be done twice")
            self._in_place.refresh()  # damage was mended; what is there now are the values of the same version

    def _take_all(self, fragment: int, mode: MergeMode, copies_of: Copies) -> None:
        for held, snapshot, publish in (item for item in self._synced if self._is_of(item[0], fragment)):
            local, is_trained = held.local(), held.spec.role is Role.TRAINABLE
            for copy in copies_of.get(held.parameter, ()) if held.parameter is not None else ():
                self._take(mode, copy, snapshot, publish)
            is_added_to = held.is_summed and mode is not MergeMode.SHIFT
            if is_trained or is_added_to:
                self._take(mode, local, snapshot, publish)
            elif mode is MergeMode.REPLACE or (mode is not MergeMode.SHIFT and _is_as(snapshot, local)):
                copies.to_local(publish, local)

    def _take(self, mode: MergeMode, local: Tensor, snapshot: Tensor, publish: Tensor) -> None:
        if mode is MergeMode.REPLACE:
            copies.to_local(publish, local)
            return
        for mine, sealed, outer in copies.pieces(local, snapshot, publish):
            self._merge(mine, sealed, outer, mode)

    def _merge(self, local: Tensor, snapshot: Tensor, publish: Tensor, mode: MergeMode) -> None:
        new = publish.to(local.device, copy=True)
        kept = local.to(torch.float32)
        if mode is MergeMode.MIX:
            new.mul_(1 - self._alpha).add_(kept, alpha=self._alpha)
        else:  # MERGE keeps what was trained since the snapshot: exactly zero if nothing was
            new += kept - snapshot.to(local.device) if mode is MergeMode.MERGE else kept
        local.copy_(new)

    @torch.no_grad()
    def undo_steps(self) -> None:
        """The trained tensors have the values of PUBLISH again."""
        for held, _, publish in self._synced:
            if held.spec.role is Role.TRAINABLE:
                copies.to_local(publish, held.local())

    def _is_of(self, held: Held, fragment: int) -> bool:
        """Of one fragment, or of all."""
        return fragment in (self._fragments[held.spec.name], self._num_fragments)

    @torch.no_grad()
    def swap_in(self) -> list[Tensor | None]:
        """Put PUBLISH's trainable values and buffers in place; returns what was there, in CPU memory, and None of
        tensors that had these values, as all have that took them at this step."""
        saved: list[Tensor | None] = [None for _ in self._synced]
        try:
            for _ in self._looks():
                self._put_back(saved)
                self._swap_into(saved)
        except BaseException:  # a GPU without memory, which scripts go on from: nothing that was trained is lost
            self._put_back(saved)
            raise
        return saved

    def _swap_into(self, saved: list[Tensor | None]) -> None:
        for index, (held, _, publish) in enumerate(self._synced):
            local = held.local()
            saved[index] = None if copies.are_equal(publish, local) else local.to("cpu", copy=True)
            if saved[index] is not None:
                copies.to_local(publish, local)

    @torch.no_grad()
    def swap_back(self, saved: list[Tensor | None]) -> None:
        """What `swap_in` found is there again, also where a script has written into what it was shown."""
        self._put_back(saved)
        for _ in self._looks():
            for (held, _, publish), value in zip(self._synced, saved, strict=True):
                if value is None and not copies.are_equal(publish, held.local()):
                    copies.to_local(publish, held.local())

    def _looks(self) -> Iterator[None]:
        """At PUBLISH, until all of one has seen what was published: the node may move values while a rank looks, and
        since it looked last; where they lie then no commit replaces them."""
        while True:
            if self._in_place is not None:
                self._in_place.refresh()
            yield
            if self._in_place is None or self._in_place.is_current:
                return

    def _put_back(self, saved: list[Tensor | None]) -> None:
        for (held, _, _), value in zip(self._synced, saved, strict=True):
            if value is not None:
                held.local().copy_(value)


def _view(buffer: memoryview, held: Held, offset_bytes: int) -> Tensor:
    """The full tensor at `offset_bytes` of a shared buffer."""
    spec = held.spec
    dtype = torch.float32 if spec.role in FP32_ROLES else TORCH_DTYPES[spec.dtype]
    if spec.num_elements == 0:
        return torch.empty(spec.shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=spec.num_elements, offset=offset_bytes)
    return flat.view(spec.shape)


def _is_as(snapshot: Tensor, local: Tensor) -> bool:
    """Whether a buffer is what the snapshot holds."""
    return torch.equal(local.to("cpu", snapshot.dtype), snapshot)
