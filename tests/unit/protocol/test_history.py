"""Which commits touched which fragment, against lists of all commits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.history import History
from tests.harness.data_plane import commit_record


def touched_at(fragments: list[int], num_fragments: int, commit: int) -> tuple[int, ...]:
    """Commit n is of fragment `fragments[n - 1]`, of all if that is their number; commit 0 is of all."""
    found = [0] * num_fragments
    for number in range(1, commit + 1):
        for fragment in range(num_fragments):
            if fragments[number - 1] in (fragment, num_fragments):
                found[fragment] = number
    return tuple(found)


@st.composite
def logs(draw: st.DrawFn) -> tuple[int, list[int]]:
    num_fragments = draw(st.sampled_from([1, 2, 3, 8]))
    return num_fragments, draw(st.lists(st.integers(0, num_fragments if num_fragments > 1 else 0), max_size=40))


@given(logs(), st.data())
def test_it_is_what_a_list_of_all_commits_says(log: tuple[int, list[int]], data: st.DataObject) -> None:
    num_fragments, fragments = log
    last = len(fragments)
    first = data.draw(st.integers(0, last), label="the log begins after")
    history = History(touched_at(fragments, num_fragments, first), fragments[first:])
    for commit in range(first, last + 1):
        expected = touched_at(fragments, num_fragments, commit)
        assert history.touched(commit) == expected
        assert history.commit_of(expected) == commit
        for fragment in range(num_fragments):
            own = [n for n in range(last + 1) if n == 0 or fragments[n - 1] in (fragment, num_fragments)]
            assert history.touch(fragment, commit) == expected[fragment]
            later = [n for n in own if n > commit]
            assert history.following(fragment, commit) == (later[0] if later else last + 1)
            for after in range(first, commit + 1):
                assert list(history.between(fragment, after, commit)) == [n for n in own if after < n <= commit]
            if commit > first:
                assert history.before(fragment, commit) == [n for n in own if n < commit][-1]


@given(logs(), st.data())
def test_what_the_log_does_not_reach_is_right_or_not_known(log: tuple[int, list[int]], data: st.DataObject) -> None:
    num_fragments, fragments = log
    first = data.draw(st.integers(0, len(fragments)))
    base = touched_at(fragments, num_fragments, first)
    history = History(base, fragments[first:])
    for commit in range(first):
        expected = touched_at(fragments, num_fragments, commit)
        assert history.touched(commit) in (None, expected)
        assert history.commit_of(expected) in (None, commit)
        for fragment in range(num_fragments):
            if commit < base[fragment] and num_fragments > 1:
                with pytest.raises(StateError, match=f"fragment {fragment} last at commit {commit} is not known"):
                    history.touch(fragment, commit)
            else:
                assert history.touch(fragment, commit) == expected[fragment]
    if num_fragments > 1:
        assert history.touched(len(fragments) + 1) is None


def test_with_one_fragment_no_log_is_needed() -> None:
    history = History()
    assert (history.touch(0, 7), history.before(0, 7), history.following(0, 7)) == (7, 6, 8)
    assert history.between(0, 7, 10) == range(8, 11)
    assert history.touched(7) == (7,)
    assert history.commit_of([7]) == 7
    with pytest.raises(StateError):
        history.before(0, 0)


def test_another_mixture_is_no_commit() -> None:
    history = History((0, 0, 0), [2, 1, 0, 0])
    assert [history.commit_of(t) for t in ((4, 2, 1), (3, 2, 1), (0, 2, 1))] == [4, 3, 2]
    assert history.commit_of((3, 2, 0)) is None, "commit 1 is lacking"
    assert history.commit_of((4, 2, 5)) is None, "commit 5 is not known"


def test_a_log_with_a_gap_tells_of_what_is_before_it() -> None:
    records = {n: commit_record(n, fragment=n % 2) for n in (4, 5, 7)}
    history = History.of_log((2, 3), records)
    assert history.last == 5
    assert history.touched(5) == (4, 5)
    with pytest.raises(InvalidMessage, match="fragment 3: this run has 2"):
        History.of_log((2, 3), {4: commit_record(4, fragment=1), 5: commit_record(5, fragment=3)})
