"""Which positions each rank has of a sequence that several share, and whose keys its queries see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.parallel.positions import Cut

cuts = st.builds(Cut, length=st.integers(1, 70), ring=st.integers(1, 5), ulysses=st.integers(1, 4))


def test_a_place_has_a_piece_from_each_end() -> None:
    cut = Cut(16, ring=2)
    assert [cut.positions_of(rank) for rank in (0, 1)] == [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))]


def test_neighbours_divide_the_pieces_of_a_place() -> None:
    cut = Cut(16, ring=2, ulysses=2)
    assert [cut.positions_of(rank) for rank in range(4)] == [
        [0, 1, 2, 3],
        [12, 13, 14, 15],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


@given(cuts)
def test_each_position_is_on_one_rank_and_filling_stands_last(cut: Cut) -> None:
    of_ranks = [cut.positions_of(rank) for rank in range(cut.num_ranks)]
    assert len({len(positions) for positions in of_ranks}) == 1
    everyone = sorted(position for positions in of_ranks for position in positions)
    assert everyone == list(range(len(everyone)))
    assert cut.length <= len(everyone) < cut.length + 2 * cut.num_ranks
    for positions in of_ranks:
        assert positions == sorted(positions)
        assert all(p < cut.length for p in positions[: cut.num_real(positions)])
    assert sum(map(cut.num_real, of_ranks)) == cut.length
    joined = [p for rank in range(cut.ulysses) for p in of_ranks[rank]]
    assert joined == cut.of_place(0), "ranks of a place have together what it has, in order"


@given(cuts, st.booleans())
def test_a_real_query_sees_each_real_key_that_it_may_and_no_other(cut: Cut, is_causal: bool) -> None:
    for place in range(cut.ring):
        seen: dict[int, list[int]] = {query: [] for query in cut.of_place(place)}
        for source in range(cut.ring):
            if (part := cut.seen(place, source, is_causal)) is None:
                continue
            queries, keys = cut.of_place(place)[part.queries], cut.of_place(source)[part.keys]
            assert queries
            assert keys
            for number, query in enumerate(queries):
                seen[query] += keys[: number + 1] if part.is_diagonal else keys
        for query, keys_of_query in seen.items():
            assert keys_of_query, "no query is without a key, of which there is no mean"
            if query < cut.length:
                assert sorted(keys_of_query) == list(range(query + 1 if is_causal else cut.length))


@pytest.mark.parametrize("ring", [2, 4])
def test_places_have_as_much_to_compute(ring: int) -> None:
    cut = Cut(64, ring=ring)
    for turn in range(1, ring):
        areas = set()
        for place in range(ring):
            part = cut.seen(place, (place - turn) % ring, is_causal=True)
            assert part is not None
            own = cut.of_place(place)
            areas.add(len(own[part.queries]) * len(own[part.keys]))
        assert len(areas) == 1
