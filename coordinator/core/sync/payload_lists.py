"""Rule 15: contributors are done with different payloads. They list their hashes.

Every payload was checked against the hash that its reducer sent, so this takes a broken host or reducer, and is rare.
"""

from __future__ import annotations

from collections import Counter

from atoll.coordinator.core.run import Run
from atoll.coordinator.core.sites.membership import Site
from atoll.coordinator.core.sync.attempts import Attempt
from atoll.coordinator.core.sync.blame import Pair
from atoll.coordinator.core.sync.decision import AskForLists, Wait
from atoll.protocol import messages as m
from atoll.protocol.digest import DIGEST_BYTES
from atoll.protocol.messages import MAX_LISTED_CHUNKS
from atoll.protocol.payload_lists import num_listed, places
from atoll.protocol.plans import top_of


def awaited(run: Run, attempt: Attempt, survivors: list[int]) -> AskForLists | Wait | None:
    """Sites whose lists are not here are asked, each stream once, or waited for; None: no longer."""
    if num_listed(attempt.plan.trees) > MAX_LISTED_CHUNKS:
        return None  # it is another attempt without a word of who is wrong
    lists = attempt.lists
    missing = [run.members.known(i) for i in survivors if lists is None or i not in lists.here]
    asked = lists.asked if lists is not None else {}
    streams = {s.site_id: s.stream for s in missing if s.stream is not None and asked.get(s.site_id) != s.stream}
    if streams or lists is None:
        return AskForLists(streams=streams, until=run.now + run.limits.stall_s)
    names = ", ".join(site.label for site in missing)
    return Wait(f"{names} list what they have", lists.until) if missing and run.now < lists.until else None


def ask(run: Run, attempt: Attempt, asked: AskForLists) -> None:
    """The time for all of them runs from the first question on."""
    plan = attempt.plan
    for stream in asked.streams.values():
        run.send_on(stream, m.ListPayloads(sync=plan.sync, attempt=plan.attempt, term=plan.term))
    attempt.ask_for_lists(asked.streams, asked.until)


def received(run: Run, site: Site, message: m.PayloadList) -> None:
    """The answer to ListPayloads, if it is of the attempt under way. A list of another length is none."""
    attempt = run.attempt_of(site, message)
    if attempt is not None and len(message.hashes) == DIGEST_BYTES * num_listed(attempt.plan.trees):
        attempt.note_list(site.site_id, message.hashes)


def outliers(run: Run, attempt: Attempt, survivors: list[int]) -> tuple[tuple[Site, str, str], ...]:
    """Those who have another payload than its reducer, what is said of each, and why it is evicted; none if all are, or
    lists are missing."""
    wrong = sorted(set[int]().union(*_against(attempt, survivors).values()))
    if len(_listed(attempt, survivors)) < len(survivors) or len(wrong) == len(survivors):
        return ()
    text = "has another payload of a chunk than the site that reduced it"
    why = "its payload of a chunk is not the reducer's; it must fetch the commit"
    return tuple((site, f"{site.label} {text}", why) for site in map(run.members.known, wrong))


def disagreements(attempt: Attempt, survivors: list[int]) -> dict[Pair, bool]:
    """Who has another payload than whom, as failed exchanges (rule 16): a reducer may have given one payload to some
    and another one to the others, so that its word is one among several. Nothing where only two are left.

    Whoever shows nothing, or shows what all others have and says otherwise, fails with all of them."""
    if len(survivors) < 3:
        return {}
    listed = _listed(attempt, survivors)
    found: dict[Pair, bool] = {(i, j): True for j in survivors if j not in listed for i in listed}
    for reducer_id, others in _against(attempt, survivors).items():
        found.update(((i, reducer_id), True) for i in others)
        if len(others) == 1:  # one word against another
            found.update(((reducer_id, i), True) for i in others)
    if not found:
        digests = {i: attempt.done[i].payload_digest for i in survivors}
        most, num = Counter(digests.values()).most_common(1)[0]
        if 2 * num > len(survivors):
            found = {(i, j): True for j in survivors if digests[j] != most for i in survivors if digests[i] == most}
    return found


def _listed(attempt: Attempt, survivors: list[int]) -> dict[int, bytes]:
    shown = attempt.lists.here if attempt.lists is not None else {}
    return {i: shown[i] for i in survivors if i in shown}


def _against(attempt: Attempt, survivors: list[int]) -> dict[int, set[int]]:
    """Of each reducer that shows its payloads: who shows another one of a chunk that it reduced."""
    listed = _listed(attempt, survivors)
    found: dict[int, set[int]] = {}
    trees = attempt.plan.trees
    for tree, chunks in zip(trees, places(trees), strict=True):
        reducer = attempt.plan.contributors[top_of(tree)].site_id
        if reducer in listed:
            others = {i for i, hashes in listed.items() if hashes[chunks] != listed[reducer][chunks]}
            found[reducer] = found.get(reducer, set()) | others
    return found
