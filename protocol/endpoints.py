"""Where a site has which chunks: at its address, and at the endpoints beside that. Pure.

A site of several hosts exchanges over the links of all of them, and a host by several processes, if it has that many:
each has a range of chunks, and what concerns a chunk is between the two processes that have it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from atoll.protocol.addresses import is_plain, parse_address
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import SYNC_ROLES, Manifest, chunk_runs
from atoll.protocol.messages import MAX_ENDPOINTS, Endpoint, Member

MAX_PLACES = MAX_ENDPOINTS + 1


def places_of(member: Member) -> tuple[Member, ...]:
    """As it is dialled at each of its places."""
    if not member.endpoints:
        return (member,)
    addresses = (member.address, *(endpoint.address for endpoint in member.endpoints))
    return tuple(replace(member, address=address, endpoints=()) for address in addresses)


def place_of(member: Member, chunk: int) -> Member:
    """As it is dialled for that chunk."""
    place = bisect_right([endpoint.first_chunk for endpoint in member.endpoints], chunk)
    return places_of(member)[place]


def problem_with(endpoints: Sequence[Endpoint], num_chunks: int) -> str:
    """Why a site cannot have these beside its address, in a run of so many chunks; empty if it can."""
    before = 0
    for endpoint in endpoints:
        if not before < endpoint.first_chunk < num_chunks:
            firsts = ", ".join(str(e.first_chunk) for e in endpoints)
            return f"its endpoints begin at chunks {firsts}: they must ascend, from 1 to {num_chunks - 1}"
        before = endpoint.first_chunk
        try:
            parse_address(endpoint.address)
        except ConfigError as error:
            return f"an endpoint: {error}"
        if not is_plain(endpoint.address):
            return f"an endpoint: {endpoint.address!r} has characters that no address has"
    return ""


@dataclass(frozen=True, slots=True)
class Places:
    """Which chunks of a model the hosts of a site have, and which of those each exchange process of a host."""

    firsts: tuple[int, ...]
    """The first chunk of each process, host by host."""
    num_processes: int
    """Of each host."""
    num_chunks: int

    @classmethod
    def of(cls, manifest: Manifest, chunk_elements: int, num_hosts: int, num_processes: int = 1) -> Places:
        """What travels in syncs is shared out: to hosts by whole tensors, as near to equal bytes as these allow, and
        within a host by chunks. Places may be left without any: their first chunk is that of the next place.

        A site has at most MAX_PLACES with chunks: hosts beyond that have none.
        Chunks do not move between tensors, so that what ranks hold of a tensor goes to one host.
        """
        cut = _Cut(manifest, chunk_elements)
        sharing = min(num_hosts, MAX_PLACES // num_processes)
        hosts = (*cut.of_tensors(sharing), *(cut.num_chunks for _ in range(num_hosts - sharing + 1)))
        firsts: list[int] = []
        for first, end in pairwise(hosts):
            firsts += cut.of_chunks(range(first, end), num_processes)
        return cls(tuple(firsts), num_processes, cut.num_chunks)

    def of_host(self, host: int) -> range:
        first = host * self.num_processes
        return range(self.firsts[first], self._end(first + self.num_processes - 1))

    def of_process(self, host: int, process: int) -> range:
        place = host * self.num_processes + process
        return range(self.firsts[place], self._end(place))

    def _end(self, place: int) -> int:
        return self.firsts[place + 1] if place + 1 < len(self.firsts) else self.num_chunks


class _Cut:
    """Of the bytes that travel."""

    def __init__(self, manifest: Manifest, chunk_elements: int) -> None:
        self._runs: list[tuple[int, int, int]] = []  # of equal chunks: the first, bytes before it, bytes of each
        self._tensors = [0]  # ends of tensors, in the order of chunks
        self._bytes = [0]  # up to each of these
        chunk = before = 0
        for spec, chunks in groupby(chunk_runs(manifest, chunk_elements), key=lambda run: run[0]):
            for _, count, elements in chunks:
                size = elements * spec.carried_itemsize if spec.role in SYNC_ROLES else 0
                self._runs.append((chunk, before, size))
                chunk, before = chunk + count, before + count * size
            self._tensors.append(chunk)
            self._bytes.append(before)
        self.num_chunks = chunk

    def of_tensors(self, num: int) -> list[int]:
        # The first has some: the address of the site is its own.
        places = range(min(1, len(self._bytes) - 1), len(self._bytes))
        total = self._bytes[-1]
        nearest = (min(places, key=lambda t: abs(self._bytes[t] * num - total * n)) for n in range(1, num))
        return [0, *(self._tensors[place] for place in nearest)]

    def of_chunks(self, chunks: range, num: int) -> list[int]:
        if not chunks:
            return [chunks.start] * num
        first, end = self._before(chunks.start), self._before(chunks.stop)
        later = (self._nearest(first + (end - first) * n // num) for n in range(1, num))
        least = min(chunks.start + 1, chunks.stop)
        return [chunks.start, *(min(max(chunk, least), chunks.stop) for chunk in later)]

    def _before(self, chunk: int) -> int:
        """Bytes."""
        if chunk == self.num_chunks:
            return self._bytes[-1]
        first, before, size = self._runs[bisect_right(self._runs, chunk, key=lambda run: run[0]) - 1]
        return before + (chunk - first) * size

    def _nearest(self, num_bytes: int) -> int:
        """The chunk that has about so many bytes before it."""
        first, before, size = self._runs[bisect_right(self._runs, num_bytes, key=lambda run: run[1]) - 1]
        return first + ((2 * (num_bytes - before) + size) // (2 * size) if size else 0)
