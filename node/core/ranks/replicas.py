"""Whether what several ranks hold under one name is one tensor, or two that only look alike. Pure.

A stage that was cut out of a list of blocks calls its first block `layers.0`, as the first stage does; a rank that
keeps a slice of a matrix as a tensor of its own calls it what the other ranks call theirs. Taken for copies, the values
of one would overwrite the other at the first update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.node.local_protocol import LocalJoin, Piece
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Role, TensorSpec


def check_replicas(ranks: Sequence[LocalJoin], specs: Mapping[str, TensorSpec]) -> None:
    """Raises ConfigError, naming tensor and ranks, with what to say to `atoll.join`."""
    tied = {name for rank in ranks if rank.names_are_said for t in rank.manifest.tied for name in (t.alias, t.name)}
    if lacking_ties := sorted(tied - {name for rank in ranks for name in rank.tied_here}):
        raise ConfigError(
            f"tied= of atoll.join names {lacking_ties[0]!r}, which no rank has: say the names of the whole model, "
            "alike on all ranks"
        )
    trained = [{s.name for s in rank.manifest.tensors if s.role is Role.TRAINABLE} for rank in ranks]
    first: dict[str, int] = {}  # of each tensor, the first rank that holds it whole
    first_plain: dict[str, tuple[int, Piece]] = {}  # the same of those that do not say themselves what they are
    for number, rank in enumerate(ranks):
        for piece in rank.pieces:
            spec = specs[piece.name]
            if spec.role is not Role.TRAINABLE or piece.sizes != spec.shape or not spec.num_elements:
                continue
            other = first.setdefault(piece.name, number)
            if trained[other] != trained[number] and not (rank.names_are_said and ranks[other].names_are_said):
                lacking = min(trained[other] ^ trained[number])
                lacks = other if lacking in trained[number] else number
                raise ConfigError(
                    f"ranks {other} and {number} both hold {piece.name!r}, but not the same tensors (rank {lacks} has "
                    f"no {lacking!r}): if they are parts of one model, say what each is called in all of it, as "
                    'atoll.join(..., names={"layers.0": "layers.4"}) for a second stage; if every name is that of the '
                    "whole model, say names={}, and tied= alike, on all ranks"
                )
            if not piece.first_values:  # a DTensor says itself what it is
                continue
            same, known = first_plain.setdefault(piece.name, (number, piece))
            if known.first_values != piece.first_values:
                batch = (
                    f"see the same batch (data rank {rank.data_rank})"
                    if ranks[same].data_rank == rank.data_rank
                    else "see different batches"
                )
                raise ConfigError(
                    f"ranks {same} and {number} {batch} and both hold all of {piece.name!r} {list(spec.shape)}, with "
                    "different first values: if they are copies, begin them alike (the same seed, or a broadcast) "
                    "before atoll.join; if they are slices of one matrix, make it a DTensor, as torch's tensor "
                    "parallelism does; if they are two tensors, as two experts, give each a name of its own with "
                    'names={"expert": "experts.0"}'
                )
