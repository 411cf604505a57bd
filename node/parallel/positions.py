"""Which positions of a sequence each rank has that shares it with others, and whose keys its queries see. Pure."""

from __future__ import annotations

from dataclasses import dataclass

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Seen:
    """Of a ring's two places: which queries of the one see which keys of the other. Slices of what a place has."""

    queries: slice
    keys: slice
    is_diagonal: bool = False
    """Each query sees the keys up to its own; else each sees all of them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence of `length`, cut into two pieces for each place of a ring: place r has piece r from the start and r
    from the end.

    So each place has as much to compute where queries see only the keys before them (Llama 3, 2407.21783, section
    3.3.2). The `ulysses` ranks of one place divide its pieces equally. The last pieces are filled up behind `length`.
    """

    length: int
    ring: int = 1
    ulysses: int = 1

    @property
    def num_ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def piece_size(self) -> int:
        return self.ulysses * -(-self.length // (2 * self.num_ranks))

    def of_place(self, place: int) -> list[int]:
        """Positions in ascending order, those of filling among them."""
        return [position for piece in self._pieces(place) for position in piece]

    def positions_of(self, rank: int) -> list[int]:
        """Positions in ascending order, as many on each rank. Filling stands last, and has positions from `length` on.

        Ranks of one place of the ring are neighbours.
        """
        place, number = divmod(rank, self.ulysses)
        size = 2 * self.piece_size // self.ulysses
        return self.of_place(place)[number * size : (number + 1) * size]

    def num_real(self, positions: list[int]) -> int:
        """How many, from the first on, are no filling."""
        return sum(position < self.length for position in positions)

    def seen(self, place: int, source: int, is_causal: bool) -> Seen | None:
        """By the queries of `place` of the keys of `source`; None if that is nothing.

        A real query never sees filling: it lies behind all real ones, and is left out where queries see what is behind.
        """
        if not is_causal:
            num_real = sum(len(piece[: max(0, self.length - piece.start)]) for piece in self._pieces(source))
            return Seen(ALL, slice(num_real)) if num_real else None
        if source == place:
            return Seen(ALL, ALL, is_diagonal=True)
        if source < place:
            return Seen(ALL, slice(self.piece_size))
        return Seen(slice(self.piece_size, None), ALL)

    def _pieces(self, place: int) -> tuple[range, range]:
        size = self.piece_size
        first, last = place, 2 * self.ring - 1 - place
        return range(first * size, (first + 1) * size), range(last * size, (last + 1) * size)
