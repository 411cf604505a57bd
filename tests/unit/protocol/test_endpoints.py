"""Endpoints: which place of a site has a chunk, what is refused, and how a model is cut for the hosts of a site."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.protocol.endpoints import MAX_PLACES, Places, place_of, places_of, problem_with
from atoll.protocol.layout import SYNC_ROLES, Chunk, Layout, Manifest, Role, TensorSpec, chunk_runs
from atoll.protocol.messages import Endpoint, Member

ALONE = Member(site_id=3, incarnation=2, address="a:1", tokens=7)
OF_THREE = Member(
    site_id=3,
    incarnation=2,
    address="a:1",
    tokens=7,
    endpoints=(Endpoint(address="b:1", first_chunk=4), Endpoint(address="c:1", first_chunk=9)),
)


def test_a_site_is_dialled_as_the_same_start_at_each_of_its_places() -> None:
    assert places_of(ALONE) == (ALONE,)
    found = places_of(OF_THREE)
    assert [place.address for place in found] == ["a:1", "b:1", "c:1"]
    assert {(place.site_id, place.incarnation, place.tokens, place.endpoints) for place in found} == {(3, 2, 7, ())}


def test_a_chunk_is_at_the_last_place_that_begins_at_or_before_it() -> None:
    found = [place_of(OF_THREE, chunk).address for chunk in (0, 3, 4, 8, 9, 1 << 20)]
    assert found == ["a:1", "a:1", "b:1", "b:1", "c:1", "c:1"]
    assert all(place_of(OF_THREE, chunk) in places_of(OF_THREE) for chunk in range(12))
    assert place_of(ALONE, 5) == ALONE


def endpoints(*firsts: int, address: str = "b:1") -> tuple[Endpoint, ...]:
    return tuple(Endpoint(address=address, first_chunk=first) for first in firsts)


@pytest.mark.parametrize("firsts", [(), (1,), (9,), (1, 2, 9)])
def test_endpoints_ascend_within_the_chunks_of_the_run(firsts: tuple[int, ...]) -> None:
    assert problem_with(endpoints(*firsts), num_chunks=10) == ""


@pytest.mark.parametrize("firsts", [(0,), (10,), (3, 3), (4, 3), (1, 2, 10)])
def test_chunks_that_no_endpoint_can_begin_at_are_refused_with_all_of_them(firsts: tuple[int, ...]) -> None:
    problem = problem_with(endpoints(*firsts), num_chunks=10)
    assert problem == f"its endpoints begin at chunks {', '.join(map(str, firsts))}: they must ascend, from 1 to 9"


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("b", "'b' is not an address; write HOST:PORT"),
        ("b:99999", "'b:99999' is not an address: a port is a number from 0 to 65535"),
        ("::1:7700", "in brackets"),
        ("<b>:1", "'<b>:1' has characters that no address has"),
        ("b\n:1", r"'b\n:1' has characters that no address has"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_an_endpoint_that_cannot_be_dialled_is_refused(address: str, text: str, place: int) -> None:
    offered = list(endpoints(1, 2))
    offered[place] = Endpoint(address=address, first_chunk=offered[place].first_chunk)
    problem = problem_with(offered, num_chunks=10)
    assert problem.startswith("an endpoint: ")
    assert text in problem


def test_a_model_of_one_chunk_has_no_place_for_an_endpoint() -> None:
    assert problem_with(endpoints(1), num_chunks=1)
    assert not problem_with((), num_chunks=1)


# --- the cut of a model


def spec(name: str, num_elements: int, role: Role = Role.TRAINABLE, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(name=name, shape=(num_elements,), dtype=dtype, role=role)


def of_sizes(*sizes: int) -> Manifest:
    return Manifest.canonical([spec(f"t{i:02}", size) for i, size in enumerate(sizes)])


def cut(manifest: Manifest, num_hosts: int, chunk_elements: int = 4) -> list[range]:
    places = Places.of(manifest, chunk_elements, num_hosts)
    assert places.num_chunks == len(Layout(manifest, chunk_elements).chunks)
    assert all(places.of_process(host, 0) == places.of_host(host) for host in range(num_hosts))
    return [places.of_host(host) for host in range(num_hosts)]


def test_equal_tensors_are_shared_equally() -> None:
    assert cut(of_sizes(8, 8, 8, 8), 1) == [range(8)]
    assert cut(of_sizes(8, 8, 8, 8), 2) == [range(4), range(4, 8)]
    assert cut(of_sizes(8, 8, 8, 8), 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]


def test_the_cut_is_by_bytes_not_by_chunks_or_tensors() -> None:
    assert cut(of_sizes(1, 1, 1, 3, 6), 2) == [range(4), range(4, 6)]
    small = Manifest.canonical([spec("a", 16), *(spec(f"count{i}", 2, Role.BUFFER_LOWEST, "I64") for i in range(4))])
    assert cut(small, 2) == [range(4), range(4, 8)], "64 bytes of four chunks, and 16 of each of four"


def test_hosts_of_more_than_there_are_tensors_are_left_without_chunks() -> None:
    found = cut(of_sizes(8, 8), 5)
    assert [part for part in found if part] == [range(2), range(2, 4)]
    assert len(found) == 5


def test_a_giant_tensor_stays_whole() -> None:
    assert cut(of_sizes(1, 4000, 1), 2) == [range(1), range(1, 1002)]
    found = cut(of_sizes(4000), 3)
    assert [part for part in found if part] == [range(1000)]


def test_a_frozen_tensor_is_some_hosts_too_and_leaves_none_without_what_travels() -> None:
    """It travels when a state is fetched, and not in syncs: adapters of a large frozen model are shared out."""
    manifest = Manifest.canonical([spec("w", 8), spec("v", 8), spec("f", 3200, Role.FROZEN, "F16")])
    assert cut(manifest, 2) == [range(2), range(2, 804)]


def test_a_model_without_bytes_is_of_the_hosts_all_the_same() -> None:
    assert [chunk for part in cut(of_sizes(0, 0), 2) for chunk in part] == [0, 1]


ROLES = [(Role.TRAINABLE, "F32"), (Role.BUFFER_MEAN, "F16"), (Role.BUFFER_LOWEST, "I64"), (Role.FROZEN, "BF16")]
tensors = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(ROLES)), min_size=1, max_size=12)


@given(tensors, st.integers(1, 9), st.integers(1, 9))
@example([(40, ROLES[0])] + [(1, ROLES[0])] * 3, 4, 7)
def test_the_parts_of_hosts_are_whole_tensors_of_nearly_equal_bytes_and_all_chunks(
    sizes: list[tuple[int, tuple[Role, str]]], num_hosts: int, chunk_elements: int
) -> None:
    manifest = Manifest.canonical([spec(f"t{i:02}", size, *kind) for i, (size, kind) in enumerate(sizes)])
    layout = Layout(manifest, chunk_elements)
    parts = cut(manifest, num_hosts, chunk_elements)
    assert [chunk for part in parts for chunk in part] == list(range(len(layout.chunks)))
    host_of = {chunk: host for host, part in enumerate(parts) for chunk in part}
    of_tensor = {(chunk.tensor, host_of[chunk.index]) for chunk in layout.chunks}
    assert len(of_tensor) == len({tensor for tensor, _ in of_tensor})
    num_bytes = [sum(travelling_bytes(layout.chunks[chunk]) for chunk in part) for part in parts]
    largest = max(chunk_bytes(manifest, chunk_elements).values(), default=0)
    of_first = sum(travelling_bytes(chunk) for chunk in layout.chunks if chunk.tensor == layout.chunks[0].tensor)
    for host, end in enumerate(accumulate(num_bytes), 1):  # each cut is as near as half a tensor to where it should be
        is_near = abs(end - sum(num_bytes) * host / num_hosts) <= largest / 2
        assert is_near or host == num_hosts or end == of_first, "host 0 has one at least"
    firsts = Places.of(manifest, chunk_elements, num_hosts).firsts
    assert firsts[0] == 0
    assert all(first <= following for first, following in pairwise(firsts))


@given(tensors, st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))
@example([(40, ROLES[0])], 1, 4, 3)
@example([(0, ROLES[0]), (1, ROLES[1])], 3, 5, 1)
def test_the_parts_of_processes_are_chunks_of_their_host_of_nearly_equal_bytes(
    sizes: list[tuple[int, tuple[Role, str]]], num_hosts: int, num_processes: int, chunk_elements: int
) -> None:
    manifest = Manifest.canonical([spec(f"t{i:02}", size, *kind) for i, (size, kind) in enumerate(sizes)])
    chunks, alone = Layout(manifest, chunk_elements).chunks, Places.of(manifest, chunk_elements, num_hosts)
    places = Places.of(manifest, chunk_elements, num_hosts, num_processes)
    largest = max(map(travelling_bytes, chunks))
    for host in range(num_hosts):
        own, parts = places.of_host(host), [places.of_process(host, process) for process in range(num_processes)]
        assert own == alone.of_host(host), "processes change nothing between hosts"
        assert [chunk for part in parts for chunk in part] == list(own)
        assert not own or parts[0], "the address of the host is that of its first process"
        of_parts = [sum(travelling_bytes(chunks[chunk]) for chunk in part) for part in parts]
        for process, end in enumerate(accumulate(of_parts), 1):
            is_near = abs(end - sum(of_parts) * process / num_processes) <= largest / 2 + 1
            of_first = travelling_bytes(chunks[own[0]]) if own else 0
            assert is_near or process == num_processes or end == of_first


@pytest.mark.parametrize(("num_hosts", "num_processes", "most"), [(100, 1, 64), (64, 1, 64), (40, 3, 21), (5, 16, 4)])
def test_a_site_has_no_more_places_with_chunks_than_an_offer_can_name(
    num_hosts: int, num_processes: int, most: int
) -> None:
    places = Places.of(of_sizes(*[96] * 128), 4, num_hosts, num_processes)
    sharing = [host for host in range(num_hosts) if places.of_host(host)]
    assert sharing == list(range(most))
    assert sum(bool(places.of_process(h, p)) for h in range(num_hosts) for p in range(num_processes)) <= MAX_PLACES
    assert [chunk for host in range(num_hosts) for chunk in places.of_host(host)] == list(range(places.num_chunks))


def test_a_giant_tensor_is_shared_out_among_the_processes_of_its_host() -> None:
    places = Places.of(of_sizes(4000), 4, 2, 4)
    assert [places.of_process(0, process) for process in range(4)] == [
        range(250),
        range(250, 500),
        range(500, 750),
        range(750, 1000),
    ]
    assert not any(places.of_process(1, process) for process in range(4))


def travelling_bytes(chunk: Chunk) -> int:
    return chunk.num_bytes if chunk.role in SYNC_ROLES else 0


def chunk_bytes(manifest: Manifest, chunk_elements: int) -> dict[str, int]:
    """Of all chunks of each tensor that travels in syncs."""
    found: dict[str, int] = {}
    for tensor, count, elements in chunk_runs(manifest, chunk_elements):
        if tensor.role not in SYNC_ROLES:
            continue
        found[tensor.name] = found.get(tensor.name, 0) + count * elements * tensor.carried_itemsize
    return found
