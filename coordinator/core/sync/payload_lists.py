"""Rule 15: contributors are done with different payloads. They list the hash of each chunk.

Every payload was checked against the hash that its reducer sent, so this takes a broken host or reducer, and is rare.
"""

from __future__ import annotations

from collections import Counter

from atoll.coordinator.core.log.hash_lists import first_difference
from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.blame import Pair
from atoll.coordinator.core.sync.decision import AskForLists, Wait
from atoll.protocol import messages as m
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.messages import MAX_LISTED_CHUNKS
from atoll.protocol.plans import top_of


def awaited(run: Run, attempt: Attempt, survivors: list[int]) -> AskForLists | Wait | None:
    """Sites whose lists are not here are asked, each stream once, or waited for; None: no longer."""
    if len(run.chunk_sizes) > MAX_LISTED_CHUNKS:
        return None
    lists = attempt.lists
    missing = [run.members.known(i) for i in survivors if lists is None or i not in lists.here]
    asked = lists.asked if lists is not None else {}
    streams = {s.site_id: s.stream for s in missing if s.stream is not None and asked.get(s.site_id) != s.stream}
    if streams or lists is None:
        return AskForLists(streams=streams, until=run.now + run.limits.stall_s)
    return Wait(lists.until) if missing and run.now < lists.until else None


def ask(run: Run, attempt: Attempt, asked: AskForLists) -> None:
    """The time for all of them runs from the first question on."""
    plan = attempt.plan
    for stream in asked.streams.values():
        run.send_on(stream, m.ListPayloads(sync=plan.sync, attempt=plan.attempt, term=plan.term))
    attempt.ask_for_lists(asked.streams, asked.until)


def received(run: Run, attempt: Attempt, site_id: int, message: m.PayloadList) -> None:
    """A list of another length is none."""
    if len(message.hashes) == DIGEST_BYTES * len(run.chunk_sizes):
        attempt.note_list(site_id, message.hashes)


def outliers(run: Run, attempt: Attempt, survivors: list[int]) -> tuple[tuple[Site, str, str], ...]:
    """Those who have another payload than its reducer, what is said of each, and why it is evicted; none if all are, or
    lists are missing."""
    listed = attempt.lists.here if attempt.lists is not None else {}
    if not all(i in listed for i in survivors):
        return ()
    wrong: dict[int, int] = {}  # site id -> the first chunk
    for tree in attempt.plan.trees:
        reducer = attempt.plan.contributors[top_of(tree)].site_id
        if reducer not in listed:
            continue
        right = _of(listed[reducer], tree)
        for site_id in survivors:
            place = first_difference(_of(listed[site_id], tree), right)
            if place is not None:
                wrong.setdefault(site_id, tree.first_chunk + place)
    if len(wrong) == len(survivors):
        return ()
    found = ((run.members.known(i), chunk) for i, chunk in sorted(wrong.items()))
    return tuple(
        (
            site,
            f"{site.label} has another payload of chunk {chunk} than the site that reduced it",
            f"its payload of chunk {chunk} is not the reducer's; it must fetch the commit",
        )
        for site, chunk in found
    )


def disagreements(run: Run, attempt: Attempt, survivors: list[int]) -> dict[Pair, bool]:
    """Who has another payload than whom, as failed exchanges (rule 16): a reducer may have given one payload to some
    and another one to the others, so that its word is one among several. Nothing where only two are left.

    Whoever shows nothing, or shows what all others have and says otherwise, fails with all of them."""
    if len(survivors) < 3:
        return {}
    shown = attempt.lists.here if attempt.lists is not None else {}
    listed = {i: shown[i] for i in survivors if i in shown}
    found: dict[Pair, bool] = {(i, j): True for j in survivors if j not in listed for i in listed}
    against: dict[int, set[int]] = {}  # of a reducer: who has another payload of one of its chunks
    for tree in attempt.plan.trees:
        reducer = attempt.plan.contributors[top_of(tree)].site_id
        right = _of(listed[reducer], tree) if reducer in listed else b""
        others = {i for i, hashes in listed.items() if right and _of(hashes, tree) != right}
        if others:
            against.setdefault(reducer, set()).update(others)
    for reducer_id, others in against.items():
        found.update(((i, reducer_id), True) for i in others)
        if len(others) == 1:  # one word against another
            found.update(((reducer_id, i), True) for i in others)
    if not found:
        digests = {i: attempt.done[i].payload_digest for i in survivors}
        most, num = Counter(digests.values()).most_common(1)[0]
        if 2 * num > len(survivors):
            found = {(i, j): True for j in survivors if digests[j] != most for i in survivors if digests[i] == most}
    return found


def _of(hashes: bytes, tree: m.Tree) -> bytes:
    return hashes[DIGEST_BYTES * tree.first_chunk : DIGEST_BYTES * (tree.first_chunk + tree.num_chunks)]
