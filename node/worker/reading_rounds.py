"""Which rank reads what of a checkpoint for whom, and when, where files lie on several hosts. Pure: ranks that know the
same come to the same rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Asked = tuple[int, str]
"""The rank that wrote a file, and a tensor in it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a tensor: what one rank reads, and those take for which it does (that may be itself)."""

    reader: int
    takers: tuple[int, ...]
    of: Asked
    first_byte: int
    num_bytes: int
    is_last: bool


def rounds_of(
    asked: Sequence[Sequence[Asked]], sizes: Mapping[Asked, int], holders: Mapping[int, range], piece_bytes: int
) -> list[list[Piece]]:
    """Each rank has to do with one piece a round at the most, and takes a tensor to its end before it begins the next:
    no rank holds more than one that it has not put in its place.

    `asked`: by rank, what it needs. `sizes`: in bytes. `holders`: by the rank that wrote a file, the ranks of the host
    that has the file. A rank of that host reads what it needs itself. One of them reads for all that are elsewhere.
    """
    takers: dict[Asked, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(asked):
        for item in of_rank:
            takers[item].append(rank)
    found: list[list[Piece]] = []
    free_at: dict[int, int] = defaultdict(int)
    for item in sorted(takers):
        here = holders[item[0]]
        afar = tuple(rank for rank in takers[item] if rank not in here)
        pairs: list[tuple[int, tuple[int, ...]]] = [(rank, (rank,)) for rank in takers[item] if rank in here]
        if afar:
            pairs.append((here[item[0] % len(here)], afar))
        for reader, of_reader in pairs:
            at = max(free_at[rank] for rank in (reader, *of_reader))
            firsts = range(0, max(1, sizes[item]), piece_bytes)
            for first in firsts:
                while len(found) <= at:
                    found.append([])
                num_bytes = min(piece_bytes, sizes[item] - first)
                found[at].append(Piece(reader, of_reader, item, first, num_bytes, first == firsts[-1]))
                at += 1
            free_at.update(dict.fromkeys((reader, *of_reader), at))
    return found
