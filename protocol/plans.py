"""What a plan means: its digest, who reduces which chunk, and the digest of a sync's payloads. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from atoll.protocol.digest import Digest
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.messages import AuditChunk, Commit, Member, Plan, Tree


def plan_digest(plan: Plan) -> bytes:
    """Over everything in the plan that two sites must agree on before they exchange chunks. Raises InvalidMessage.

    Weights are said apart, and by each site itself.
    """
    digest = Digest("atoll/plan/v1").uint(plan.sync).uint(plan.attempt).uint(plan.term).uint(plan.fragment)
    digest.uint(plan.base_commit).uint(plan.num_steps)
    for members in (plan.contributors, plan.receivers):
        digest.uint(len(members))
        digest.uints(value for member in members for value in (member.site_id, member.incarnation))
    digest.uint(len(plan.trees))
    for tree in plan.trees:
        digest.uint(tree.first_chunk).uint(tree.num_chunks).uint(len(tree.parents))
        for parent in tree.parents:
            if parent < -1:
                raise InvalidMessage(f"plan of sync {plan.sync}: a tree with parent {parent}")
            digest.uint(parent + 1)
        digest.uint(tree.top)
    if any(
        member.endpoints for member in plan.contributors
    ):  # plans of sites of one host have the digests that they had
        for member in plan.contributors:
            digest.uint(len(member.endpoints)).uints(endpoint.first_chunk for endpoint in member.endpoints)
    return digest.finish()


def with_weights(plan: Plan, tokens: Sequence[int], influences: Sequence[int] = ()) -> Plan:
    """The plan with these weights of its contributors, one for each, and influences, if they have any: what
    `payload_digest` is over. None is said so."""
    return replace(plan, contributors=weighed(plan.contributors, tokens, influences))


def weighed(members: Sequence[Member], tokens: Sequence[int], influences: Sequence[int] = ()) -> tuple[Member, ...]:
    """The members with these weights and influences, one for each."""
    of_each = zip(members, tokens, influences or [0] * len(members), strict=True)
    return tuple(c if (c.tokens, c.influence) == (t, i) else replace(c, tokens=t, influence=i) for c, t, i in of_each)


def influences(plan: Plan | Commit | AuditChunk) -> tuple[int, ...]:
    """Of the contributors; empty where they have none."""
    found = tuple(member.influence for member in plan.contributors)
    return found if any(found) else ()


def weights(plan: Plan | Commit) -> tuple[int, ...]:
    return tuple(member.tokens for member in plan.contributors)


def top_of(tree: Tree) -> int:
    """The place of its reducer among the contributors; -1 if it has none."""
    if not tree.parents:
        return tree.top
    return tree.parents.index(-1) if -1 in tree.parents else -1


def reducing(plan: Plan) -> set[int]:
    """Ids of the sites that reduce something."""
    return {plan.contributors[top_of(tree)].site_id for tree in plan.trees}


MOST_HEARD = 32


def heard(plan: Plan) -> dict[int, int]:
    """By site id, with its number of chunks: the reducers that say what they averaged. Those with the most chunks, of
    equal ones by a draw: a thousand that speak of a thousand sites each would be too many words."""
    found: Counter[int] = Counter()
    for tree in plan.trees:
        if 0 <= (top := top_of(tree)) < len(plan.contributors):
            found[plan.contributors[top].site_id] += tree.num_chunks
    if len(found) <= MOST_HEARD:
        return found

    def rank(site_id: int) -> tuple[int, bytes]:
        return -found[site_id], Digest("atoll/heard/v1").uint(plan.sync).uint(plan.attempt).uint(site_id).finish()

    return {site_id: found[site_id] for site_id in sorted(found, key=rank)[:MOST_HEARD]}


def payload_hash(data: bytes | bytearray | memoryview) -> bytes:
    """The hash of an encoded chunk, as it travels."""
    return Digest("atoll/payload/v1").data(data).finish()


def encoded_digest(num_bytes: int) -> Digest:
    """`payload_hash` before the bytes: it goes on with `more`."""
    return Digest("atoll/payload/v1").uint(num_bytes)


def payload_digest(run_id: str, plan: Plan | Commit, payload_hashes: list[bytes]) -> bytes:
    """Over contributors, weights and the hash of each chunk's payload in chunk order (empty chunks left out)."""
    return payloads_digest(run_id, plan, len(payload_hashes)).digests(b"".join(payload_hashes)).finish()


def payloads_digest(run_id: str, plan: Plan | Commit, num_payloads: int) -> Digest:
    """`payload_digest` before the hashes of payloads: it goes on with `digests`."""
    digest = Digest("atoll/payloads/v1").text(run_id).uint(plan.sync).uint(plan.term).uint(plan.attempt)
    digest.uint(len(plan.contributors))
    digest.uints(value for c in plan.contributors for value in (c.site_id, c.incarnation, c.tokens))
    digest.uints(influences(plan))  # those of a run that has none have the digests that they had
    return digest.uint(num_payloads)


def reducers(plan: Plan, num_chunks: int) -> list[Member]:
    """The reducer of each chunk 0..num_chunks-1.

    Raises InvalidMessage unless the trees cover every chunk exactly once, in order, each a star over the contributors.
    """
    ids = [m.site_id for m in plan.contributors]
    if not ids or ids != sorted(set(ids)):
        raise InvalidMessage(f"plan of sync {plan.sync}: contributors {ids} are not distinct and ascending")
    result: list[Member] = []
    for tree in plan.trees:
        if tree.first_chunk != len(result) or len(result) + tree.num_chunks > num_chunks:
            raise InvalidMessage(f"plan of sync {plan.sync}: trees do not cover chunks 0 to {num_chunks - 1} in order")
        top = top_of(tree)
        if not 0 <= top < len(ids) or (tree.parents and len(tree.parents) != len(ids)) or tree.parents.count(-1) > 1:
            raise InvalidMessage(f"plan of sync {plan.sync}: a tree needs one parent for each contributor and one top")
        if any(parent not in (top, -1) for parent in tree.parents):
            raise InvalidMessage(f"plan of sync {plan.sync}: this version runs stars only, not deeper trees")
        result.extend([plan.contributors[top]] * tree.num_chunks)
    if len(result) != num_chunks:
        raise InvalidMessage(f"plan of sync {plan.sync}: {len(result)} of {num_chunks} chunks have a reducer")
    return result
