"""Sources that do not fit one message come in parts, each within the limit of a session, and are whole again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import PROTOCOL_VERSION, sources_parts, transport, wire
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.sources_parts import Parts, most_bytes, split
from atoll.protocol.v1 import session_pb2
from tests.harness.fuzzing import fuzz, instances

HEADER = m.Header(protocol_version=PROTOCOL_VERSION, run_id="r" * 64, term=1 << 40)
HASH = bytes(range(32))
DONORS = tuple(m.Donor(site_id=i, incarnation=1, address=f"10.0.0.{i}:7701", commit=9) for i in range(1, 4))
ATTESTED = tuple(m.Attestation(commit=i, state_hash=HASH) for i in range(9))


def members(num: int) -> tuple[m.Member, ...]:
    return tuple(
        m.Member(site_id=i + 1, incarnation=3, address=f"node-{i}.somewhere.example.org:7701", tokens=10**6 + i)
        for i in range(num)
    )


def commits(num: int, contributors: tuple[m.Member, ...], done: tuple[m.LineRanges, ...] = ()) -> tuple[m.Commit, ...]:
    return tuple(
        m.Commit(
            commit=n,
            sync=n,
            attempt=1,
            term=1,
            contributors=contributors,
            payload_digest=HASH,
            run_step=10 * n,
            run_tokens=1000 * n,
            done=done,
        )
        for n in range(1, num + 1)
    )


def put_together(parts: Iterable[m.Sources]) -> list[m.Sources]:
    """The answers that come out."""
    receiving = Parts()
    return [whole for part in parts if (whole := receiving.add(part)) is not None]


def test_a_thousand_contributors_and_a_log_of_1100_commits_can_be_heard() -> None:
    """In one message they are 49 MB: nobody could have joined any more."""
    sources = m.Sources(attested=ATTESTED, donors=DONORS, commits=commits(1100, members(1000)))
    whole_bytes = 0
    parts: list[m.Sources] = []
    for part in split(sources):
        data = wire.response_around(wire.response_body(part), HEADER, 1 << 40, 1 << 40)
        assert len(data) <= sources_parts.MAX_PART_BYTES
        whole_bytes += len(data)
        if len(parts) < 3:  # reading them takes long
            assert wire.unpack(wire.parse(session_pb2.SessionResponse, data)) == (HEADER, part)
        parts.append(part)
    assert whole_bytes > transport.MAX_SESSION_MESSAGE_BYTES
    assert put_together(parts) == [sources]
    assert [bool(part.donors) for part in parts] == [True] + [False] * (len(parts) - 1)


def test_what_is_small_is_one_part() -> None:
    for sources in (m.Sources(), m.Sources(donors=DONORS, attested=ATTESTED, commits=commits(9, members(3)))):
        assert list(split(sources)) == [sources]


@fuzz(100)
@given(instances(m.Commit))
def test_no_commit_takes_more_than_it_is_counted_at(commit: m.Commit) -> None:
    assert len(wire.encode(commit)) <= most_bytes(commit)


def test_the_largest_numbers_and_addresses_are_counted_for() -> None:
    largest = (1 << 64) - 1
    member = m.Member(site_id=(1 << 32) - 1, incarnation=largest, address="\U0001f600" * 256, tokens=largest)
    ranges = (m.DataRange(first=largest, num_samples=largest),) * 100
    (commit,) = commits(1, (member,) * 50, (m.LineRanges(line=(1 << 32) - 1, ranges=ranges),) * 20)
    assert len(wire.encode(commit)) <= most_bytes(commit)


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 6000))
def test_any_answers_come_out_as_they_went_in(lengths: list[int], max_part_bytes: int) -> None:
    answers = [m.Sources(donors=DONORS[:n], commits=commits(n, members(2))) for n in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources_parts, "MAX_PART_BYTES", max_part_bytes)
        parts = [part for answer in answers for part in split(answer)]
    assert put_together(parts) == answers
    assert sum(not part.more for part in parts) == len(answers)


def test_an_answer_without_end_is_refused() -> None:
    receiving = Parts()
    endless = m.Sources(commits=commits(1000, ()), more=True)
    for _ in range(4):
        assert receiving.add(endless) is None
    with pytest.raises(InvalidMessage, match="5000 commits"):
        receiving.add(endless)


def test_an_answer_of_too_many_contributors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_parts, "MAX_ITEMS", 100)
    with pytest.raises(InvalidMessage, match="110 contributors and ranges, at most"):
        Parts().add(m.Sources(commits=commits(10, members(10), (m.LineRanges(line=0, ranges=()),)), more=True))
