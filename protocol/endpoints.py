"""Where a site has which chunks: at its address, and at the endpoints beside that. Pure.

A site of several hosts exchanges over the links of all of them: each has a range of chunks, and what concerns a chunk
is between the two hosts that have it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from atoll.protocol.addresses import is_plain, parse_address
from atoll.protocol.errors import ConfigError
from atoll.protocol.layout import Manifest, chunk_runs
from atoll.protocol.messages import Endpoint, Member


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


def first_chunks(manifest: Manifest, chunk_elements: int, num_hosts: int) -> tuple[int, ...]:
    """Of each host of a site the first of its chunks: whole tensors, as near to equal bytes as they allow.

    Hosts may be left without any: their first chunk is that of the next one. Chunks do not move between tensors, so
    that what ranks hold of a tensor goes to one host.
    """
    starts, ends = [0], [0]  # of each tensor, in the order of chunks: its first chunk, and the bytes up to its end
    previous = None
    for spec, count, elements in chunk_runs(manifest, chunk_elements):
        if spec is not previous:
            starts.append(starts[-1])
            ends.append(ends[-1])
            previous = spec
        starts[-1] += count
        ends[-1] += count * elements * spec.carried_itemsize
    total = ends[-1]
    # Host 0 has some: the address of the site is its own.
    places = range(min(1, len(ends) - 1), len(ends))
    later = [min(places, key=lambda t: abs(ends[t] * num_hosts - total * h)) for h in range(1, num_hosts)]
    return (0, *(starts[place] for place in later))


def owned_by(host: int, firsts: Sequence[int], num_chunks: int) -> range:
    """The chunks of that host, of those with these first ones."""
    return range(firsts[host], firsts[host + 1] if host + 1 < len(firsts) else num_chunks)
