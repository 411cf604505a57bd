"""Error feedback of a site of several hosts: each has the errors of its own chunks, and they count where all are of one
commit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.host_events import HostErrors
from atoll.protocol import messages as m
from atoll.protocol.settings import settings_to_json
from tests.unit.node_core.test_errors import WITH_ERRORS, jobs, ready_again, ready_for_sync, reports
from tests.unit.node_core.test_site import HASH, SETTINGS, Driver, at_boundary, commit, plan, started

Held = tuple[int | None, ...]

OF_A_HOST = (
    "error feedback is dropped, and begins anew: what a host of this site holds of it is not of the same commit, or "
    "not whole"
)


def come_back(held: Held, last: tuple[int, ...], *hosts: Held, when: str = "before") -> Driver:
    """A later start of a site with that on the disk of host 0, what the coordinator says it contributed last, and what
    its other hosts have, which come before the coordinator or `after` it."""
    sync = replace(WITH_ERRORS.sync, fragments=len(last))
    drive = Driver(settings=replace(WITH_ERRORS, sync=sync), held_errors=held, num_hosts=1 + len(hosts))
    said: list[out.Output] = []
    if when == "before":
        for of in hosts:
            said += drive(HostErrors(of))
        assert not said, "nothing is compared before it is known which commits count"
    said += drive(e.SessionOpened())
    said += drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings), site_id=1, error_commits=last))
    if when == "after":
        for of in hosts:
            said += drive(HostErrors(of))
    drive.out = said
    return drive


WHEN = pytest.mark.parametrize("when", ["before", "after"])


@WHEN
@pytest.mark.parametrize(
    ("of_host", "left"),
    [
        ((4, 5), (4, 5)),
        ((4, 3), (4, 0)),  # it was lost, or off, when commit 5 came
        ((9, 5), (0, 5)),  # it has advanced by a commit that host 0 knows nothing of
        ((0, 5), (0, 5)),  # its disk is new, or it has dropped it
        ((None, 5), (0, 5)),  # a part of its chunks
        ((4, None), (4, 0)),
        ((0, 0), (0, 0)),
        ((), (0, 0)),  # it has no state at all
    ],
)
def test_errors_count_where_each_host_has_them_of_the_same_commit(
    of_host: Held, left: tuple[int, ...], when: str
) -> None:
    drive = come_back((4, 5), (4, 5), of_host, when=when)
    assert drive.errors() == left
    is_lost = left != (4, 5)
    assert reports(drive) == [OF_A_HOST] * is_lost
    assert drive.num_errors_dropped() == is_lost, "once, of whatever fragments"


@WHEN
@pytest.mark.parametrize("of_host", [(4, 5), (9, 5), (None, 5), (0, 5)])
def test_an_error_that_host_0_has_not_is_compared_with_none(of_host: Held, when: str) -> None:
    """The next contribution is made without it, on all hosts; that host 0 has lost it is said once."""
    drive = come_back((0, 5), (4, 5), of_host, when=when)
    assert drive.errors() == (0, 5)
    assert [OF_A_HOST in text for text in reports(drive)] == [False]
    assert drive.num_errors_dropped() == 1


@WHEN
def test_what_the_coordinator_says_comes_first(when: str) -> None:
    """All hosts have the same, and it is void: that is said once."""
    drive = come_back((4,), (5,), (4,), (4,), when=when)
    assert drive.errors() == (0,)
    assert len(reports(drive)) == 1
    assert OF_A_HOST not in reports(drive)


@WHEN
@pytest.mark.parametrize("hosts", list(itertools.permutations([(4, 5, 6), (4, None, 6), (3, 2, 6)])))
def test_of_several_hosts_each_is_compared(hosts: tuple[Held, ...], when: str) -> None:
    """In whatever order they come; a fragment is dropped once."""
    drive = come_back((4, 5, 6), (4, 5, 6), *hosts, when=when)
    assert drive.errors() == (0, 0, 6)
    second_says_more = hosts.index((4, None, 6)) < hosts.index((3, 2, 6))
    assert reports(drive) == [OF_A_HOST] * (1 + second_says_more)


@WHEN
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_host_that_lacks_them_is_enough(wrong: int, when: str) -> None:
    hosts: list[Held] = [(4,), (4,), (4,)]
    hosts[wrong] = ()
    drive = come_back((4,), (4,), *hosts, when=when)
    assert drive.errors() == (0,)
    assert reports(drive) == [OF_A_HOST]


def test_hosts_that_came_before_the_coordinator_are_compared_once() -> None:
    """On a new stream errors are further than they said then."""
    drive = come_back((4,), (4,), (4,))
    drive.had_errors(5)
    drive(e.SessionLost("it broke"))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(drive.core.settings), site_id=1, error_commits=(5,)))
    assert drive.errors() == (5,)
    drive(HostErrors((5,)))
    assert drive.errors() == (5,)
    assert not reports(drive)


def test_without_the_setting_nothing_is_compared() -> None:
    drive = started()
    assert not drive(HostErrors((4,)))
    assert not drive(HostErrors(()))
    assert not drive.errors()


def test_a_host_that_is_back_has_what_the_site_has_come_to_meanwhile() -> None:
    """Its stream broke, and its disk is as it was."""
    drive = ready_for_sync()
    drive(HostErrors((0,)))
    drive.receive(commit(1, 1))
    drive(e.ErrorsAdvanced())
    assert drive.errors() == (1,)
    drive(HostErrors((1,)))
    assert not reports(drive)
    assert drive.errors() == (1,)


@pytest.mark.parametrize("of_host", [(0,), (), (None,), (7,)])
def test_a_host_that_missed_the_last_advance_drops_it_on_all(of_host: Held) -> None:
    drive = ready_for_sync()
    drive.receive(commit(1, 1))
    drive(e.ErrorsAdvanced(share=0.25))
    drive(HostErrors(of_host))
    assert reports(drive) == [f"{OF_A_HOST}; 0.25 of the norm of what was to be sent last is lost"]
    assert drive.errors() == (0,)
    drive(HostErrors(of_host))
    assert not reports(drive), "there is nothing left to compare"


def test_after_a_drop_the_next_commit_advances_from_nothing() -> None:
    drive = started(settings=WITH_ERRORS)
    drive.had_errors(7)
    drive(HostErrors((6,)))
    at_boundary(drive)
    assert ready_again(drive) == [(0,)]
    drive.receive(plan(1))
    begun = drive.wants(out.BeginExchange)
    assert isinstance(begun, out.BeginExchange)
    assert begun.error_commits == (0,)
    drive.receive(commit(1, 1))
    assert jobs(drive) == [out.AdvanceErrors(1, 0, 0, (0,))]
    drive(e.ErrorsAdvanced())
    drive(e.CommitApplied(commit=1, state_hash=HASH))
    drive(HostErrors((1,)))
    assert not reports(drive)
    assert drive.errors() == (1,)


def test_without_the_setting_hosts_that_came_before_the_coordinator_change_nothing() -> None:
    drive = Driver(settings=SETTINGS, num_hosts=3)
    for _ in range(2):
        drive(HostErrors((4,)))
    drive(e.SessionOpened())
    drive.receive(m.Welcome(settings_json=settings_to_json(SETTINGS), site_id=1, error_commits=(4,)))
    assert not drive.errors()
    assert not reports(drive)
