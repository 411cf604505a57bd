"""What is known while a site catches up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.node.exchange.catchup.index import Index
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.history import History
from atoll.protocol.layout import Manifest, state_hash
from atoll.protocol.messages import MAX_LISTED_DONORS, Attestation, Commit, Donor, Sources

MANIFEST = Manifest(tensors=())
OLD, NEW = [b"a" * 32, b"b" * 32], [b"c" * 32, b"b" * 32]


def commit(number: int) -> Commit:
    return Commit(
        commit=number, sync=number, attempt=1, term=1, contributors=(), payload_digest=b"", run_step=0, run_tokens=0
    )


def known() -> Index:
    found = Index(MANIFEST, ("m",))
    attested = [(3, OLD), (5, NEW)]
    found.learn(
        Sources(
            attested=tuple(Attestation(commit=c, state_hash=state_hash(MANIFEST, ("m",), h)) for c, h in attested),
            commits=tuple(commit(n) for n in (5, 6)),
        )
    )
    return found


def test_only_an_attested_list_counts() -> None:
    found = known()
    assert found.add_list(3, OLD)
    assert not found.add_list(5, OLD)  # of another commit
    assert not found.add_list(4, OLD)  # not attested
    assert set(found.lists) == {3}


def test_a_chunk_is_checked_against_the_list_of_its_version() -> None:
    found = known()
    assert not found.is_valid(0, 0, 3, OLD[0])
    found.add_list(3, OLD)
    found.add_list(5, NEW)
    assert found.is_valid(0, 0, 3, OLD[0])
    assert not found.is_valid(0, 0, 5, OLD[0])
    assert found.is_valid(0, 0, 5, NEW[0])
    assert found.is_valid(1, None, 0, OLD[1])
    assert not found.is_valid(1, None, 3, OLD[1])  # a frozen chunk has version 0


def test_a_list_may_be_added_while_chunks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = known()
    found.add_list(3, OLD)
    touched = History.touched

    def slow(history: History, commit: int) -> tuple[int, ...] | None:
        found.add_list(5, NEW)  # as by another thread
        return touched(history, commit)

    monkeypatch.setattr(History, "touched", slow)
    assert not found.is_valid(0, None, 0, b"d" * 32)
    assert set(found.lists) == {3, 5}


def test_the_way_from_a_version_to_the_newest_commit() -> None:
    found = known()
    assert found.newest == 6
    assert [v for v in range(9) if found.can_replay(v)] == [4, 5, 6]
    found.unavailable.add(5)
    assert [v for v in range(9) if found.can_replay(v)] == [5, 6]
    found.learn(Sources(commits=(commit(7),)))
    assert [v for v in range(9) if found.can_replay(v)] == [5, 6, 7]
    assert Index(MANIFEST, ()).newest == -1


def of_three(touched: tuple[int, ...], newest: int) -> Index:
    """Commits after those `touched` are of fragments 0, 1, 2, 0, 1, 2 ... by number."""
    found = Index(MANIFEST, ("m",), 3)
    commits = tuple(replace(commit(n), fragment=n % 3) for n in range(max(touched) + 1, newest + 1))
    found.learn(Sources(commits=commits, touched=touched))
    return found


def test_of_several_fragments_a_chunk_is_wanted_at_the_version_at_the_commit() -> None:
    found = of_three((3, 4, 2), 6)  # 5 is of fragment 2, 6 of fragment 0
    found.attested[5] = state_hash(MANIFEST, ("m",), OLD)
    assert found.add_list(5, OLD)
    for fragment, wanted in ((0, 3), (1, 4), (2, 5)):
        assert [v for v in range(8) if found.is_valid(0, fragment, v, OLD[0])] == [wanted]
    assert not found.is_valid(0, 1, 4, NEW[0])


def test_of_several_fragments_a_chunk_is_led_on_by_the_commits_of_its_own() -> None:
    found = of_three((3, 4, 2), 6)
    assert [[v for v in range(8) if found.leads_on(f, v)] for f in range(3)] == [
        [3, 4, 5, 6],
        [4, 5, 6],
        [2, 3, 4, 5, 6],
    ]
    assert [n for n in range(8) if found.can_replay(n)] == [4, 5, 6]
    found.unavailable.add(5)
    assert found.leads_on(0, 3)
    assert not found.leads_on(2, 2)
    assert [n for n in range(8) if found.can_replay(n)] == [5, 6]
    with pytest.raises(InvalidMessage, match="sources of 2 fragments, this run has 3"):
        found.learn(Sources(touched=(7, 8)))


def test_a_donor_that_dialled_this_site_stays_though_the_coordinator_tells_of_others() -> None:
    offered = tuple(Donor(site_id=i, incarnation=1, address="", commit=3) for i in range(1, MAX_LISTED_DONORS + 3))
    here, found = offered[-2:], known()
    found.learn(Sources(donors=offered[:-2]), here)
    assert found.donors == offered
    found.learn(Sources(donors=offered[2:]), here)
    assert found.donors == offered[2:], "not twice"
    found.learn(Sources(donors=offered[:5]), here)
    assert found.donors == offered[:5], "those are all that there are"
