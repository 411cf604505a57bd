"""From what each rank holds to what the site holds: one manifest, and for each slice the rank that writes it. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.node.core.ranks.replicas import check_replicas
from atoll.node.local_protocol import LocalJoin, Piece
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import DTYPE_BYTES, FP32_ROLES, Manifest, Role, TensorSpec

FLOAT_DTYPES = ("F32", "BF16", "F16")

Box = tuple[tuple[int, int], ...]  # first and last + 1 of each dimension
_Slice = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True, slots=True)
class Holder:
    rank: int
    piece: int  # index into the rank's pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSlice:
    """A trainable slice that several ranks hold; each must hold the same bytes. `holders[0]` writes it."""

    name: str
    box: Box
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePieces:
    manifest: Manifest
    offered: tuple[tuple[Piece, ...], ...]
    """Of each rank, its pieces."""
    owned: tuple[tuple[int, ...], ...]
    """For each rank, indices into its pieces: what it writes of these is the site's."""
    kept: tuple[tuple[int, ...], ...]
    """For each rank, indices into its pieces: those that it owns, and what its host has no owner of. It writes these to
    the SNAPSHOT of its host, by which ranks there merge, and what the optimizer has of them to checkpoints."""
    shared: tuple[SharedSlice, ...]
    dtypes: dict[str, str]
    """The workers' own dtype of each tensor."""
    reads_in_place: bool = False
    """All ranks can, and are on one host."""

    def owned_by(self, rank: int) -> list[Piece]:
        """That it writes."""
        return [self.offered[rank][index] for index in self.owned[rank]]

    def shared_of(self, rank: int) -> tuple[int, ...]:
        """Indices into the rank's pieces of those that other ranks hold too."""
        return tuple(sorted(h.piece for s in self.shared for h in s.holders if h.rank == rank))


def site_pieces(ranks: Sequence[LocalJoin], ranks_a_host: int = 0) -> SitePieces | str:
    """What the ranks hold together, or why their pieces make no model."""
    try:
        return merge_ranks(ranks, ranks_a_host)
    except ConfigError as error:
        return str(error)


def merge_ranks(ranks: Sequence[LocalJoin], ranks_a_host: int = 0) -> SitePieces:
    """Give each distinct slice to a rank that has it: what is trained is shared out by elements among the ranks of the
    first host that has it, each of which copies over a link of its own; of the rest, which may differ, the lowest
    rank's counts. A pipeline rank's manifest lacks the tensors of other stages. `ranks_a_host`: each host keeps what
    its ranks hold; 0: all are on one host.

    Raises ConfigError, naming tensor and ranks, if ranks describe a tensor differently, or if the slices do not tile
    every tensor exactly once, or if what ranks seem to have in common may be two tensors. Uneven shards and empty
    pieces are legal.
    """
    specs = _merge_specs(ranks)
    tied = {t.alias: t for entry in ranks for t in entry.manifest.tied}
    for rank, entry in enumerate(ranks):
        for t in entry.manifest.tied:
            if tied[t.alias] != t:
                raise ConfigError(f"rank {rank} ties {t.alias!r} to {t.name!r}, another rank to {tied[t.alias].name!r}")
            if t.name not in specs or t.alias in specs:
                raise ConfigError(f"rank {rank} ties {t.alias!r} to {t.name!r}: only the latter may be a listed tensor")
    holders: dict[str, dict[_Slice, list[Holder]]] = {name: {} for name in specs}
    dtypes: dict[str, tuple[str, int]] = {}
    for rank, entry in enumerate(ranks):
        own = {spec.name for spec in entry.manifest.tensors}
        for index, piece in enumerate(entry.pieces):
            if piece.name not in own:
                raise ConfigError(f"rank {rank} has a piece of {piece.name!r}, which its manifest does not list")
            _check_piece(rank, piece, specs[piece.name])
            dtype, first_rank = dtypes.setdefault(piece.name, (piece.dtype, rank))
            if piece.dtype != dtype:
                raise ConfigError(
                    f"{piece.name!r} is {dtype} on rank {first_rank} and {piece.dtype} on rank {rank}; "
                    "all ranks of a site must hold a tensor in one dtype"
                )
            if not piece.is_empty:
                found = holders[piece.name].setdefault((piece.offsets, piece.sizes), [])
                if all(h.rank != rank for h in found):
                    found.append(Holder(rank, index))
    for name, slices in holders.items():
        _check_tiling(specs[name], slices)
    check_replicas(ranks, specs)
    owned: list[list[int]] = [[] for _ in ranks]
    kept: list[list[int]] = [[] for _ in ranks]
    num_kept = [0] * len(ranks)  # elements
    shared = []
    for name, slices in holders.items():
        for (offsets, sizes), found in slices.items():
            keepers = []
            is_trained = specs[name].role is Role.TRAINABLE
            for _, group in itertools.groupby(found, lambda holder: holder.rank // (ranks_a_host or len(ranks))):
                here = list(group)
                keeper = min(here, key=lambda holder: num_kept[holder.rank]) if is_trained else here[0]
                kept[keeper.rank].append(keeper.piece)
                num_kept[keeper.rank] += math.prod(sizes) if is_trained else 0
                keepers.append(keeper)
            writer = keepers[0]  # on the first host, or slices would go over the network between hosts
            owned[writer.rank].append(writer.piece)
            if len(found) > 1 and is_trained:
                others = (holder for holder in found if holder != writer)
                shared.append(SharedSlice(name=name, box=_box(offsets, sizes), holders=(writer, *others)))
    return SitePieces(
        manifest=Manifest.canonical(list(specs.values()), list(tied.values())),
        offered=tuple(entry.pieces for entry in ranks),
        owned=tuple(tuple(sorted(indices)) for indices in owned),
        kept=tuple(tuple(sorted(indices)) for indices in kept),
        shared=tuple(shared),
        # A tensor without elements may have no piece at all; then the manifest's dtype stands.
        dtypes={name: dtypes[name][0] if name in dtypes else spec.dtype for name, spec in specs.items()},
        reads_in_place=ranks_a_host in (0, len(ranks)) and all(entry.reads_in_place for entry in ranks),
    )


def _merge_specs(ranks: Sequence[LocalJoin]) -> dict[str, TensorSpec]:
    specs: dict[str, tuple[TensorSpec, int]] = {}
    for rank, entry in enumerate(ranks):
        for spec in entry.manifest.tensors:
            known, first_rank = specs.setdefault(spec.name, (spec, rank))
            if known != spec:
                raise ConfigError(
                    f"{spec.name!r} is {_words(known)} on rank {first_rank} and {_words(spec)} on rank {rank}; "
                    "all ranks of a site must build the same model"
                )
    return {name: spec for name, (spec, _) in specs.items()}


def _words(spec: TensorSpec) -> str:
    return f"{spec.role.name.lower()} {spec.dtype} {list(spec.shape)}"


def _check_piece(rank: int, piece: Piece, spec: TensorSpec) -> None:
    where = f"rank {rank}, {piece.name!r}"
    if piece.dtype not in DTYPE_BYTES:
        raise ConfigError(f"{where}: dtype {piece.dtype} is not supported")
    if spec.role in FP32_ROLES and piece.dtype not in FLOAT_DTYPES:
        raise ConfigError(f"{where}: {piece.dtype} cannot be averaged; supported are {', '.join(FLOAT_DTYPES)}")
    if spec.role not in FP32_ROLES and piece.dtype != spec.dtype:
        raise ConfigError(f"{where}: the manifest says {spec.dtype}, the piece is {piece.dtype}")
    inside = len(piece.offsets) == len(piece.sizes) == len(spec.shape) and all(
        offset + size <= full for offset, size, full in zip(piece.offsets, piece.sizes, spec.shape, strict=True)
    )
    if not inside:
        raise ConfigError(
            f"{where}: a piece at {list(piece.offsets)} of {list(piece.sizes)} is not inside {list(spec.shape)}"
        )


def _check_tiling(spec: TensorSpec, slices: dict[_Slice, list[Holder]]) -> None:
    if spec.num_elements == 0:
        return
    boxes = [(_box(*key), found[0].rank) for key, found in slices.items()]
    fault = _find_fault(spec.shape, boxes, ())
    if fault is None:
        return
    box, ranks = fault
    part = f"{spec.name!r} {list(spec.shape)}: {box_text(box)}"
    if ranks:
        raise ConfigError(f"{part} is in different slices of ranks {_listed(ranks)}; slices must not overlap")
    raise ConfigError(f"{part} is held by no rank; the ranks' slices must cover the tensor")


def _find_fault(
    shape: tuple[int, ...], boxes: list[tuple[Box, int]], prefix: Box
) -> tuple[Box, tuple[int, ...]] | None:
    """The first part of `shape` that is not in exactly one box, and the ranks whose boxes hold it.

    Sweeps along one dimension; between two cuts the same boxes are open, and the next dimension decides.
    """
    dim = len(prefix)
    if not boxes:
        return (*prefix, *((0, size) for size in shape[dim:])), ()
    if dim == len(shape):
        return None if len(boxes) == 1 else (prefix, tuple(rank for _, rank in boxes))
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[int]] = {}
    for i, (box, _) in enumerate(boxes):
        opens.setdefault(box[dim][0], []).append(i)
        closes.setdefault(box[dim][1], []).append(i)
    active: dict[int, None] = {}  # ordered
    cuts = sorted({0, shape[dim], *opens, *closes})
    for first, last in itertools.pairwise(cuts):
        for i in closes.get(first, ()):
            del active[i]
        active.update(dict.fromkeys(opens.get(first, ())))
        fault = _find_fault(shape, [boxes[i] for i in active], (*prefix, (first, last)))
        if fault is not None:
            return fault
    return None


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    return tuple((first, first + size) for first, size in zip(offsets, sizes, strict=True))


def box_text(box: Box) -> str:
    """As a slice is written in Python."""
    return "[" + ", ".join(f"{first}:{last}" for first, last in box) + "]"


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(r) for r in sorted(set(ranks)))
