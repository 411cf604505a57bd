"""Dataclasses of the words between hosts and the messages of hosts.proto are the same, and bounds are checked."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from atoll.node import host_protocol as hosts
from atoll.node.local_protocol import MAX_FRAME_BYTES
from atoll.protocol import wire
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.v1 import hosts_pb2

SAID, TOLD = get_args(hosts.HostSaid), get_args(hosts.HostTold)
CLASSES = list(dict.fromkeys((*SAID, *TOLD, hosts.SlicesPut, hosts.SlicesOpen)))
HELLO = hosts.HostHello(protocol_version=1, site_name="a", host=1, num_hosts=2, num_ranks=4, machine="b")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_fields_are_those_of_the_proto_message(cls: type) -> None:
    proto = getattr(hosts_pb2, cls.__name__)
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
        hosts.SlicesTaken(number=1 << 60),
    ):
        assert hosts.heard_of_host(hosts.said(said)) == said
    for told in (
        hosts.HostWelcome(run_id="run", settings_json="{}", session=2),
        hosts.HostBeat(),
        hosts.RankFrame(connection=3, data=b""),
        hosts.RankClosed(connection=4, text="why"),
        hosts.StartRanks(generation=2, store_address="10.0.0.1:4567", group_name="g"),
        hosts.StopRanks(generation=2),
        hosts.SlicesPublished(generation=2, number=5),
        hosts.SiteEnded(exit_code=6, text="over"),
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
    opened = hosts.SlicesOpen(fragment=1, with_frozen=False, num_moments=2)
    assert wire.from_proto(hosts.SlicesOpen, wire.to_proto(opened)) == opened
