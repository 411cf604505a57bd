"""Hosts of a site that peers reach by themselves: the run is told of them, and each is given what it sends."""

from __future__ import annotations

import pytest

from atoll.node.core import events as e
from atoll.node.core import outputs as out
from atoll.node.core.events import AnswerKind, FailureKind
from atoll.node.core.exchange_events import ExchangeFinished
from atoll.node.core.host_events import HostsChanged, SlicesArrived, SnapshotShared
from atoll.node.core.ranks.pieces import site_pieces
from atoll.node.local_protocol import LOCAL_VERSION, Boundary, LocalHello, MergedReport, Piece, SealedReport
from atoll.protocol import messages as m
from atoll.protocol.errors import StateError
from atoll.protocol.plans import with_weights
from atoll.protocol.settings import settings_to_json
from tests.harness.ranks import offer
from tests.harness.site_questions import of_core
from tests.unit.node_core.test_hosts import LOST, Node
from tests.unit.node_core.test_site import HASH, MANIFEST, SETTINGS, commit, opened, plan, weights_of

ENDPOINTS = (m.Endpoint(address="b:1", first_chunk=2), m.Endpoint(address="c:1", first_chunk=5))
MOVED = (m.Endpoint(address="b:7", first_chunk=2), m.Endpoint(address="c:1", first_chunk=5))
WELCOME = e.Received(1, m.Welcome(settings_json=settings_to_json(SETTINGS)))
MEMBER = e.Received(1, m.Admitted(site_id=1, admitted_as=m.AdmittedAs.MEMBER, run_seed=7))


def sent(outputs: list[out.Output], kind: type[m.SiteMessage]) -> list[m.SiteMessage]:
    return [o.message for o in outputs if isinstance(o, out.Send) and isinstance(o.message, kind)]


def offered(outputs: list[out.Output]) -> list[tuple[m.Endpoint, ...]]:
    return [said.endpoints for said in sent(outputs, m.Offer) if isinstance(said, m.Offer)]


def joins(node: Node, endpoints: tuple[m.Endpoint, ...]) -> list[out.Output]:
    """New ranks; what follows once the node knows what they hold, and which hosts are there."""
    node.generation += 1
    node.all_say(LocalHello(world_size=node.num_ranks, pid=5, protocol_version=LOCAL_VERSION))
    said: list[out.Output] = []
    for rank in range(node.num_ranks):
        half = Piece(name="w", offsets=(4 * rank,), sizes=(4,), dtype="F32")
        joined = offer(MANIFEST, (half,), data_rank=rank)
        said += node(e.RankSaid(generation=node.generation, rank=rank, said=joined))
    (merges,) = said
    assert isinstance(merges, out.MergePieces)
    return node(
        e.PiecesMerged(
            generation=node.generation,
            pieces=site_pieces(merges.ranks),
            max_retained_bytes=1 << 20,
            endpoints=endpoints,
        )
    )


@pytest.mark.parametrize("endpoints", [(), ENDPOINTS[:1], ENDPOINTS])
def test_an_offer_says_where_the_other_hosts_are(endpoints: tuple[m.Endpoint, ...]) -> None:
    assert offered(joins(Node(2), endpoints)) == [endpoints]


def test_an_offer_says_so_on_a_new_stream_too() -> None:
    node = Node(2)
    joins(node, ENDPOINTS)
    node(MEMBER)
    for _ in range(2):
        node(e.SessionLost("it broke"))
        node(e.SessionOpened())
        assert offered(node(WELCOME)) == [ENDPOINTS]


def test_an_offer_waits_for_the_coordinator() -> None:
    node = Node(2)
    node(e.SessionLost("it broke"))
    assert offered(joins(node, ENDPOINTS)) == []
    node(e.SessionOpened())
    assert offered(node(WELCOME)) == [ENDPOINTS]


def test_a_host_that_comes_back_elsewhere_is_said_on_a_new_stream() -> None:
    """As new ranks have joined with it."""
    node = Node(2)
    joins(node, ENDPOINTS)
    node(MEMBER)
    node(HostsChanged((1,), LOST))
    node(HostsChanged(()))
    joins(node, MOVED)
    node(e.SessionLost("it broke"))
    node(e.SessionOpened())
    assert offered(node(WELCOME)) == [MOVED]


def test_the_run_is_told_when_a_host_comes_back_elsewhere() -> None:
    """Peers would dial where it was in every sync to come."""
    node = Node(2)
    joins(node, ENDPOINTS)
    node(MEMBER)
    node(HostsChanged((1,), LOST))
    node(HostsChanged(()))
    outputs = joins(node, MOVED)
    assert offered(outputs) == [MOVED]
    assert [o for o in outputs if isinstance(o, out.SendLayout)], "the workers go on meanwhile"


# --- what they send


def trains() -> Node:
    """A member of two hosts with a rank each, at commit 0, whose ranks are told to ask at step 10."""
    node = Node(2)
    joins(node, ENDPOINTS)
    node(MEMBER)
    node(e.Received(1, opened(1, 0)))
    goes_on(node, 0)
    return node


def goes_on(node: Node, version: int) -> None:
    """New ranks from that commit."""
    node(e.LayoutSent(node.generation))
    node.all_say(Boundary(step=0, seq=0))
    node(e.Published(e.Values(version)))
    node.all_say(MergedReport(version=version, step=0, wait_s=0.0))


def asks(node: Node, step: int = 10, seq: int = 0) -> None:
    """And are told to write the snapshot."""
    told = [o.answer for o in node.all_say(Boundary(step=step, seq=seq)) if isinstance(o, out.AnswerWorkers)]
    assert {answer.kind for answer in told} == {AnswerKind.SNAPSHOT}


def seals(node: Node, step: int = 10, seq: int = 0) -> list[out.Output]:
    """Requires that the ranks were told to write it."""
    said: list[out.Output] = []
    for rank in range(node.num_ranks):
        report = SealedReport(
            step=step, seq=seq, fragment=0, data_rank=rank, tokens=50, loss_sum=5.0, num_steps=10, train_s=1.0
        )
        said += node(e.RankSaid(generation=node.generation, rank=rank, said=report))
    return said


def arrived(node: Node, step: int = 10, seq: int = 0) -> list[out.Output]:
    return node(SlicesArrived(generation=node.generation, rank=1, step=step, seq=seq))


def shared(node: Node, step: int = 10, seq: int = 0, generation: int = 0) -> list[out.Output]:
    return node(SnapshotShared(generation=generation or node.generation, step=step, seq=seq))


def share(step: int = 10, seq: int = 0, generation: int = 1) -> out.ShareSnapshot:
    return out.ShareSnapshot(generation=generation, fragment=0, step=step, seq=seq)


def ready(outputs: list[out.Output]) -> list[int]:
    return [said.sync for said in sent(outputs, m.Ready) if isinstance(said, m.Ready)]


def planned(node: Node, attempt: int = 1) -> list[out.Output]:
    """For an exchange of sync 1, which is weighed as usual."""
    to_come = plan(1, attempt)
    tokens = weights_of(to_come, 100, 100)
    return node(e.Received(1, with_weights(to_come, (0, 0)))) + node(e.Received(1, tokens))


@pytest.mark.parametrize("first", ["reports", "slices", "shared"])
def test_a_site_is_ready_when_each_host_has_what_it_sends(first: str) -> None:
    node = trains()
    asks(node)
    if first == "slices":
        assert arrived(node) == []
    assert seals(node) == [share()]
    if first == "reports":
        assert arrived(node) == []
    assert shared(node, step=9) == []
    assert shared(node, generation=7) == []
    assert ready(shared(node) if first != "shared" else [*shared(node), *arrived(node)]) == [1]
    assert shared(node) == [], "once"
    assert [o for o in planned(node) if isinstance(o, out.BeginExchange)]


def test_a_contributor_whose_hosts_have_not_all_that_they_send_says_that_it_cannot() -> None:
    node = trains()
    asks(node)
    seals(node)
    arrived(node)
    outputs = planned(node)
    failed = [said.text for said in sent(outputs, m.ExchangeFailed) if isinstance(said, m.ExchangeFailed)]
    assert failed == ["planned as a contributor without a sealed snapshot"]
    assert ready(shared(node)) == [1]


@pytest.mark.parametrize("comes", ["while it is written", "while it is on its way", "while it is shared"])
def test_what_was_given_up_while_it_was_shared_does_not_make_another_ready(comes: str) -> None:
    node = trains()
    asks(node)
    assert seals(node) == [share()]
    assert arrived(node) == []
    node.all_say(Boundary(step=10, seq=1))
    missed = commit(1, 1, contributors=(2, 3))
    node(e.Received(1, missed))
    node(e.CommitApplied(commit=1, state_hash=HASH))
    node(e.Published(e.Difference(0, 1)))
    node.all_say(MergedReport(version=1, step=10, wait_s=0.0))
    node(e.Published(e.Values(1)))
    asks(node, seq=2)
    if comes == "while it is written":
        assert shared(node, seq=0) == []
    assert seals(node, seq=2) == [share(seq=2)]
    if comes == "while it is on its way":
        assert shared(node, seq=0) == []
    assert arrived(node, seq=2) == []
    if comes == "while it is shared":
        assert shared(node, seq=0) == []
    assert ready(shared(node, seq=2)) == [2]


@pytest.mark.parametrize("why", ["a host is lost", "the workers crash"])
def test_what_is_not_shared_goes_with_the_workers(why: str) -> None:
    node = trains()
    asks(node)
    assert seals(node) == [share()]
    assert arrived(node) == []
    if why == "a host is lost":
        node(HostsChanged((1,), LOST))
        assert shared(node) == [], "it is not waited for"
        node(HostsChanged(()))
    else:
        node(e.WorkersFailed(generation=1, kind=FailureKind.CRASHED, text="killed", num_steps=5))
    joins(node, ENDPOINTS)
    goes_on(node, 0)
    assert shared(node, generation=1) == []
    asks(node)
    assert shared(node) == [], "of these it is not written yet"
    assert seals(node) == [share(generation=2)]
    assert shared(node, generation=1) == []
    assert arrived(node) == []
    assert shared(node, generation=1) == []
    assert ready(shared(node)) == [1]


def test_what_is_being_written_goes_with_the_workers() -> None:
    node = trains()
    asks(node)
    node(HostsChanged((1,), LOST))
    node(HostsChanged(()))
    joins(node, ENDPOINTS)
    goes_on(node, 0)
    asks(node)
    assert seals(node) == [share(generation=2)]


def test_the_starting_state_is_made_when_its_snapshot_is_shared() -> None:
    """Which takes no time then: no other host has a use for it."""
    node = Node(2, held=None)
    joins(node, ENDPOINTS)
    node(e.Received(1, m.Admitted(site_id=1, admitted_as=m.AdmittedAs.SEEDER, run_seed=7)))
    node(e.LayoutSent(1))
    asks(node, 0)
    assert seals(node, 0) == [share(0)]
    assert shared(node, 0) == [], "host 0 makes it of the slices of all hosts"
    assert [o for o in arrived(node, 0) if isinstance(o, out.SeedState)]


def test_a_site_of_one_host_shares_nothing() -> None:
    node = Node(1)
    joins(node, ())
    node(MEMBER)
    node(e.Received(1, opened(1, 0)))
    goes_on(node, 0)
    asks(node)
    outputs = seals(node)
    assert ready(outputs) == [1]
    assert not [o for o in outputs if isinstance(o, out.ShareSnapshot)]
    assert arrived(node) == []
    assert shared(node) == []


# --- what a host that is lost was to send


@pytest.mark.parametrize("is_planned", ["before it is back", "when it is back"])
@pytest.mark.parametrize("comes", ["before the plan", "amid the exchange", "after it, and another attempt follows"])
def test_what_a_lost_host_was_to_send_is_not_contributed(comes: str, is_planned: str) -> None:
    """It has nothing of that any more, and would fail every attempt of every sync on this base. What others have of
    it already may be in a commit."""
    node = trains()
    asks(node)
    seals(node)
    arrived(node)
    assert ready(shared(node)) == [1]
    if comes != "before the plan":
        planned(node)
    if comes == "after it, and another attempt follows":
        node(ExchangeFinished(plan=plan(1), payload_digest=HASH))
    outputs = node(HostsChanged((1,), LOST))
    if comes == "amid the exchange":
        error = StateError("host 1 of this site is lost, with its part of sync 1")
        outputs += node(e.ExchangeBroken(plan(1), error))
    if is_planned == "when it is back":
        outputs += node(HostsChanged(()))
        outputs += joins(node, ENDPOINTS)
    outputs += planned(node, attempt=2)
    assert not [o for o in outputs if isinstance(o, out.BeginExchange)]
    following = m.Abandoned(sync=1, reason="too few", next=opened(2, 0))
    assert not ready(node(e.Received(1, following))), "it is not promised again"


@pytest.mark.parametrize("is_done", [False, True])
def test_what_was_exchanged_counts_though_a_host_is_missed_again_and_again(is_done: bool) -> None:
    """Contributions that all others have may be in a commit, whatever this site said of the exchange."""
    node = trains()
    asks(node)
    seals(node)
    arrived(node)
    shared(node)
    planned(node)
    if is_done:
        node(ExchangeFinished(plan=plan(1), payload_digest=HASH))
    node(HostsChanged((1,), LOST))
    node(HostsChanged((1,), LOST))
    outputs = node(e.Received(1, commit(1, 1)))
    assert [o for o in outputs if isinstance(o, out.ApplyCommit)]
    node(HostsChanged((1,), LOST))
    assert of_core(node.core).snapshot_committed_in(0) == 1, "what it was trained on is not drawn again"


def test_what_was_exchanged_before_a_host_was_lost_counts_when_a_commit_holds_it() -> None:
    node = trains()
    asks(node)
    seals(node)
    arrived(node)
    shared(node)
    planned(node)
    node(ExchangeFinished(plan=plan(1), payload_digest=HASH))
    node(HostsChanged((1,), LOST))
    outputs = node(e.Received(1, commit(1, 1)))
    assert [o for o in outputs if isinstance(o, out.ApplyCommit)]
    assert not [o for o in outputs if isinstance(o, out.DistrustState | out.Report)]
