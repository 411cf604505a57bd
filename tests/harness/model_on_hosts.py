"""A small model on the two hosts of a site, a rank on each.

Each rank has a half of `v` and of `w`; what they share, rank 0 owns; rank 1 alone has `own`. Host 0 exchanges `v`, and
host 1 all the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from atoll.node.core.ranks.pieces import SitePieces, site_pieces
from atoll.node.daemon.plane import DataPlane
from atoll.node.dataplane.slices import Wanted, views
from atoll.node.local_protocol import LocalJoin, Piece
from atoll.protocol import messages as m
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from tests.harness.data_plane import commit_record

SETTINGS = RunSettings(run_id="run", time_limits="wan")
SPECS = [
    TensorSpec(name="count", shape=(), dtype="I64", role=Role.BUFFER_LOWEST),
    TensorSpec(name="own", shape=(3,), dtype="F16", role=Role.FROZEN),
    TensorSpec(name="shared", shape=(5,), dtype="F32", role=Role.FROZEN),
    TensorSpec(name="v", shape=(4, 6), dtype="F32", role=Role.TRAINABLE),
    TensorSpec(name="w", shape=(4, 6), dtype="F32", role=Role.TRAINABLE),
]
MANIFEST = Manifest.canonical(SPECS)
LAYOUT = Layout(MANIFEST, SETTINGS.sync.chunk_elements)
V, W, COUNT = range(3)
"""Chunks that travel. The one of `v` is host 0's, the others are host 1's."""


def pieces_of(rank: int) -> tuple[Piece, ...]:
    shared = (
        Piece(name="count", offsets=(), sizes=(), dtype="I64"),
        Piece(name="shared", offsets=(0,), sizes=(5,), dtype="F32"),
        Piece(name="v", offsets=(2 * rank, 0), sizes=(2, 6), dtype="F32"),
        Piece(name="w", offsets=(2 * rank, 0), sizes=(2, 6), dtype="F32"),
    )
    return shared if rank == 0 else (*shared, Piece(name="own", offsets=(0,), sizes=(3,), dtype="F16"))


OWNED_BY_RANK_1 = pieces_of(1)[2:]
FOR_HOST_0 = tuple(piece for piece in OWNED_BY_RANK_1 if piece.name == "v")
"""What it needs of rank 1, but for the first state."""
FOR_HOST_1 = tuple(piece for piece in pieces_of(0) if piece.name in ("count", "w"))
"""What it needs of rank 0: of tensors that change."""


def offer_of(rank: int) -> LocalJoin:
    return LocalJoin(manifest=MANIFEST, pieces=pieces_of(rank), data_fingerprint=b"f", data_rank=rank)


def pieces_of_site() -> SitePieces:
    """Of both ranks."""
    found = site_pieces([offer_of(rank) for rank in range(2)], 1)
    assert isinstance(found, SitePieces)
    return found


def copied(source: memoryview, onto: bytes, pieces: Iterable[Piece], wanted: Wanted) -> bytes:
    """`onto`, with what the pieces hold of what is wanted, out of `source`."""
    target = bytearray(onto)
    listed = list(pieces)
    for into, out_of in zip(
        views(LAYOUT, memoryview(target), listed, wanted), views(LAYOUT, source, listed, wanted), strict=True
    ):
        into[...] = out_of
    return bytes(target)


def random_bytes(num_bytes: int, seed: int = 7) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def payloads_of(plane: DataPlane, number: int) -> tuple[m.Commit, dict[int, bytes]]:
    """A commit, which is of what this plane's SNAPSHOT holds, and its payloads."""
    data = plane.sync_data(number - 1, 0, ())
    return commit_record(number), {
        chunk: data.reduce(chunk, [(100, data.contribution(chunk))]) for chunk in data.chunks
    }


def logged(plane: DataPlane, commit: m.Commit, payloads: dict[int, bytes]) -> m.Commit:
    """In the log of this plane; with its digest."""
    writer = plane.log.begin(commit.sync, commit.term, commit.attempt, commit.fragment)
    for chunk, payload in payloads.items():
        writer.put(chunk, payload, payload_hash(payload))
    writer.seal()
    return replace(commit, payload_digest=writer.digest(commit))
