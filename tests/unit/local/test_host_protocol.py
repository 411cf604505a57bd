"""Dataclasses of the words between hosts and the messages of hosts.proto are the same, and bounds are checked."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.local_protocol import MAX_FRAME_BYTES, Piece
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.endpoints import MAX_PLACES
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.hash_tree import MAX_COVER
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.v1 import hosts_pb2, session_pb2

SAID, TOLD = get_args(hosts.HostSaid), get_args(hosts.HostTold)
CLASSES = list(dict.fromkeys((*SAID, *TOLD, hosts.SlicesPut, hosts.TakeFromHostRequest, hosts.PayloadsOf)))
MEMBER = m.Member(site_id=3, incarnation=1, address="10.0.0.1:5", tokens=5)
PLAN = m.Plan(
    sync=1,
    attempt=2,
    term=3,
    base_commit=0,
    contributors=(MEMBER,),
    trees=(m.Tree(first_chunk=0, num_chunks=2, parents=(-1,)),),
    stall_limit_s=5.0,
    num_steps=10,
    deadline_s=60.0,
    slowest_bytes_per_s=1000,
)
COMMIT = m.Commit(
    commit=1,
    sync=1,
    attempt=2,
    term=3,
    contributors=(MEMBER,),
    payload_digest=bytes(32),
    run_step=10,
    run_tokens=5,
)
SOURCES = m.Sources(
    attested=(m.Attestation(commit=1, state_hash=bytes(32)),),
    donors=(m.Donor(site_id=3, incarnation=1, address="10.0.0.1:5", commit=1),),
    commits=(COMMIT,),
    touched=(),
)
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(3,), dtype="F32", role=Role.TRAINABLE)])
READY = hosts.HostReady(
    address="10.0.0.2:5", has_state=False, commit=0, state_hash=b"", branch=0, site_address="10.1.0.2:5"
)
DONE = m.Done(sync=1, attempt=2, term=3, payload_digest=bytes(32), last_commit=0, state_hash=bytes(32), tokens=(5,))
FAILED = m.ExchangeFailed(
    sync=1, attempt=2, term=3, peer_site_id=4, direction=m.Direction.SENDING, phase="payloads", text="silent"
)
HELLO = hosts.HostHello(protocol_version=1, site_name="a", host=1, num_hosts=2, num_ranks=4, machine="b")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_fields_are_those_of_the_proto_message(cls: type) -> None:
    proto = getattr(hosts_pb2, cls.__name__, None) or getattr(session_pb2, cls.__name__)
    assert [f.name for f in dataclasses.fields(cls)] == [f.name for f in proto.DESCRIPTOR.fields]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_strings_and_bytes_have_a_stated_bound(cls: type) -> None:
    hints = get_type_hints(cls)
    unbounded = [f.name for f in dataclasses.fields(cls) if hints[f.name] in (str, bytes) and "max" not in f.metadata]
    assert not unbounded


@pytest.mark.parametrize(("envelope", "classes"), [(hosts_pb2.AttachRequest, SAID), (hosts_pb2.AttachResponse, TOLD)])
def test_every_body_has_a_class(envelope: Any, classes: tuple[type, ...]) -> None:
    bodies = envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    assert sorted(cls.__name__ for cls in classes) == sorted(f.message_type.name for f in bodies)


def test_words_come_back_equal() -> None:
    for said in (
        HELLO,
        hosts.HostBeat(),
        hosts.RankFrame(connection=3, data=b"\0\1"),
        hosts.RankClosed(connection=4),
        hosts.RanksExited(generation=1, code=-9, text="killed"),
        hosts.HostFailed(generation=1, text="no memory", exit_code=7),
        hosts.HostReady(
            address="10.0.0.2:5",
            has_state=True,
            commit=1 << 60,
            state_hash=bytes(32),
            branch=3,
            error_commits=(0, -1, 1 << 60),
            site_address="10.1.0.2:5",
        ),
        hosts.StateHeld(has_state=False, commit=0, state_hash=b"", lacks="payloads", number=2),
        hosts.SourcesWanted(),
        hosts.StatePublished(number=1 << 60),
        hosts.SnapshotTaken(generation=1, fragment=2, step=3, seq=4),
        hosts.HostErrorsAdvanced(commit=1, fragment=2, problem="no disk", share=0.25),
        hosts.HostKept(number=1, cover=(b"a" * 32, b"b" * 32), problem="gone"),
        DONE,
        FAILED,
    ):
        assert hosts.heard_of_host(hosts.said(said)) == said
    for told in (
        hosts.HostWelcome(run_id="run", settings_json="{}", session=2, incarnation=3),
        hosts.HostBeat(),
        hosts.RankFrame(connection=3, data=b""),
        hosts.RankClosed(connection=4, text="why"),
        hosts.StartRanks(generation=2, store_address="10.0.0.1:4567", group_name="g"),
        hosts.StopRanks(generation=2),
        hosts.SiteLaidOut(
            generation=2,
            site_id=3,
            manifest=MANIFEST,
            chunk_elements=400,
            dtypes=("F32", "BF16"),
            pieces=(Piece(name="w", offsets=(1,), sizes=(2,), dtype="F32"),),
            num_pieces=(1, 0, 0),
            host_addresses=("", "10.1.0.2:5", "10.1.0.3:5"),
            key=bytes(16),
        ),
        hosts.HoldState(site_id=3, sources=SOURCES, number=1 << 60),
        hosts.ApplyAtHost(commit=COMMIT),
        hosts.PublishAtHost(number=4, version=3, fragment=2, is_difference=True, base=1),
        hosts.TakeSnapshot(generation=1, fragment=2, step=3, seq=4),
        hosts.AdvanceAtHost(commit=4, fragment=2, base_commit=3, error_commits=(1, 0)),
        hosts.KeepAtHost(number=1, sync=2, fragment=3, base_commit=4, error_commits=(5, 6)),
        hosts.KeptBySite(number=1, fragment=2, knots=(b"a" * 32,)),
        hosts.RollBackHost(last_commit=-1, branch=2, number=3),
        hosts.BeginAtHost(
            plan=PLAN,
            tokens=5,
            weights=(5, 6),
            spread_s=0.5,
            in_flight=(1, 2),
            error_commits=(3,),
            site_id=3,
        ),
        m.Weights(sync=1, attempt=2, term=3, tokens=(5, 6)),
        hosts.HurryAtHost(sync=1),
        hosts.CancelAtHost(sync=1, attempt=2),
        hosts.DropAtHost(sync=1),
        hosts.SiteEnded(exit_code=6, text="over", scripts_go_on=True),
    ):
        assert hosts.heard_of_leader(hosts.told(told)) == told


def test_what_has_no_body_or_is_too_long_is_refused() -> None:
    for hear, nothing in (
        (hosts.heard_of_host, hosts_pb2.AttachRequest()),
        (hosts.heard_of_leader, hosts_pb2.AttachResponse()),
    ):
        with pytest.raises(InvalidMessage, match="a message of unknown kind between the hosts"):
            hear(nothing)  # type: ignore[arg-type]
    for long in (
        replace(HELLO, site_name="a" * 65),
        replace(HELLO, machine="b" * 257),
        hosts.HostFailed(generation=1, text="x" * 4097, exit_code=1),
        hosts.RankFrame(connection=1, data=bytes(MAX_FRAME_BYTES + 1)),
        replace(READY, address="a" * 257),
        replace(READY, site_address="a" * 257),
        replace(READY, state_hash=bytes(33)),
        replace(READY, error_commits=(0,) * (m.MAX_FRAGMENTS + 1)),
        hosts.StateHeld(has_state=True, commit=0, state_hash=bytes(33)),
        hosts.HostErrorsAdvanced(commit=1, fragment=0, problem="x" * 4097, share=0.0),
        hosts.HostKept(number=1, cover=(b"a" * 32,) * (MAX_COVER + 1)),
        hosts.HostKept(number=1, problem="x" * 4097),
    ):
        with pytest.raises(InvalidMessage, match=type(long).__name__):
            hosts.heard_of_host(hosts.said(long))


def test_the_largest_frame_of_a_rank_fits_into_a_message() -> None:
    frame = hosts.RankFrame(connection=(1 << 64) - 1, data=bytes(MAX_FRAME_BYTES))
    assert hosts.said(frame).ByteSize() <= hosts.MAX_MESSAGE_BYTES
    assert hosts.told(frame).ByteSize() <= hosts.MAX_MESSAGE_BYTES


def test_slices_say_where_they_belong() -> None:
    put = hosts.SlicesPut(session=1, generation=2, rank=3, step=4, seq=5, fragment=6, with_frozen=True)
    assert wire.from_proto(hosts.SlicesPut, wire.to_proto(put)) == put
    taken = hosts.TakeFromHostRequest(host=1, key=bytes(16), fragment=3, step=4, seq=5)
    assert wire.from_proto(hosts.TakeFromHostRequest, wire.to_proto(taken)) == taken
    of = hosts.PayloadsOf(session=1, sync=2, term=3, attempt=4)
    assert wire.from_proto(hosts.PayloadsOf, wire.to_proto(of)) == of


def test_what_the_leader_says_has_bounds() -> None:
    for long in (
        hosts.HostWelcome(run_id="r" * 129, settings_json="", session=1, incarnation=1),
        hosts.AdvanceAtHost(commit=1, fragment=0, base_commit=0, error_commits=(0,) * (m.MAX_FRAGMENTS + 1)),
        hosts.BeginAtHost(
            plan=PLAN, tokens=5, weights=(1,) * (m.MAX_MEMBERS + 1), spread_s=0.0, in_flight=(), site_id=1
        ),
        hosts.KeepAtHost(number=1, sync=1, fragment=0, base_commit=0, error_commits=(0,) * (m.MAX_FRAGMENTS + 1)),
        hosts.KeptBySite(number=1, fragment=0, knots=(b"",) * (MAX_PLACES * MAX_COVER + 1)),
        hosts.SiteEnded(exit_code=0, text="x" * 4097),
    ):
        with pytest.raises(InvalidMessage, match=type(long).__name__):
            hosts.heard_of_leader(hosts.told(long))
