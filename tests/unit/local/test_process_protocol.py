"""Dataclasses of the words between a node and its exchange processes and the messages of processes.proto are the same,
and bounds are checked."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from atoll.node import host_protocol as hosts
from atoll.node import process_protocol as processes
from atoll.node.dataplane.payload_file import AttemptKey
from atoll.node.local_protocol import LENGTH_BYTES, MAX_FRAME_BYTES
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.v1 import hosts_pb2, processes_pb2, session_pb2

SAID, TOLD = get_args(processes.ProcessSaid), get_args(processes.ProcessTold)
CLASSES = list(dict.fromkeys((*SAID, *TOLD, processes.AttemptInLog, processes.LastCommit)))
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
MANIFEST = Manifest.canonical([TensorSpec(name="w", shape=(3,), dtype="F32", role=Role.TRAINABLE)])
BEGUN = hosts.BeginAtHost(plan=PLAN, tokens=5, weights=(5, 6), spread_s=0.5, in_flight=(1, 2), site_id=3)
ATTEMPT = processes.AttemptInLog(sync=1, term=3, attempt=2, fragment=4, of_fragment=5)
START = processes.ProcessStart(
    number=1,
    home=b"/home/of/the/node",
    settings_json="{}",
    listen_on="10.0.0.1:0",
    num_threads=4,
    nice=10,
    is_debug=True,
    beat_s=0.5,
    num_processes=3,
)
STORED = processes.PayloadsStored(sync=1, term=3, attempt=2, entries=b"\0\1")
BEGIN = processes.BeginInProcess(
    begun=BEGUN,
    region_start=100,
    region_end=1 << 60,
    held=b"\2\3",
    last=(processes.LastCommit(fragment=1, commit=COMMIT),),
    left_errors=(ATTEMPT,),
    in_force=(replace(ATTEMPT, attempt=1), ATTEMPT),
)


def frame_of(whole: bytes) -> bytes:
    """What comes after its length, which is right."""
    assert int.from_bytes(whole[:LENGTH_BYTES], "little") == len(whole) - LENGTH_BYTES
    return whole[LENGTH_BYTES:]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_fields_are_those_of_the_proto_message(cls: type) -> None:
    files = (processes_pb2, hosts_pb2, session_pb2)
    proto: Any = next(getattr(file, cls.__name__) for file in files if hasattr(file, cls.__name__))
    assert [f.name for f in dataclasses.fields(cls)] == [f.name for f in proto.DESCRIPTOR.fields]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_strings_and_bytes_have_a_stated_bound(cls: type) -> None:
    hints = get_type_hints(cls)
    unbounded = [f.name for f in dataclasses.fields(cls) if hints[f.name] in {str, bytes} and "max" not in f.metadata]
    assert not unbounded


@pytest.mark.parametrize(
    ("envelope", "classes"), [(processes_pb2.ProcessRequest, SAID), (processes_pb2.ProcessResponse, TOLD)]
)
def test_every_body_has_a_class(envelope: Any, classes: tuple[type, ...]) -> None:
    bodies = envelope.DESCRIPTOR.oneofs_by_name["body"].fields
    assert sorted(cls.__name__ for cls in classes) == sorted(f.message_type.name for f in bodies)


SAID_WORDS: list[processes.ProcessSaid] = [
    processes.ProcessReady(port=65535),
    hosts.HostBeat(),
    hosts.HostBeat(sent_bytes=1 << 60, received_bytes=2, moved_bytes=3),
    STORED,
    m.Done(sync=1, attempt=2, term=3, payload_digest=bytes(32), last_commit=0, state_hash=bytes(32), tokens=(5,)),
    m.ExchangeFailed(
        sync=1, attempt=2, term=3, peer_site_id=4, direction=m.Direction.SENDING, phase="payloads", text="silent"
    ),
    m.Products(sync=1, attempt=2, term=3, products=(1.0, -0.5, 2.0)),
    processes.ProcessFailed(text="no memory", exit_code=7),
    processes.ProcessLog(level=20, text="sync 1: exchanged 2 of the 3 chunks"),
]
TOLD_WORDS: list[processes.ProcessTold] = [
    START,
    processes.ProcessIdentity(site_id=3, incarnation=1 << 60),
    m.Banned(names=("a", "b")),
    m.Influences(sync=1, attempt=2, term=3, influences=(1, 1 << 20)),
    processes.ProcessShown(roots=b"roots", certificate=b"certificate", key=b"key"),
    processes.ProcessLayout(
        manifest=MANIFEST,
        chunk_elements=400,
        dtypes=("BF16",),
        first_chunk=1,
        end_chunk=1 << 40,
        max_retained_bytes=1 << 50,
        reduce_buffer_bytes=1 << 33,
    ),
    BEGIN,
    processes.BeginInProcess(begun=BEGUN, region_start=0, region_end=0),
    m.Weights(sync=1, attempt=2, term=3, tokens=(5, 6)),
    hosts.HurryAtHost(sync=1),
    hosts.CancelAtHost(sync=1, attempt=2),
    processes.DropInProcess(sync=1),
    processes.DropInProcess(sync=1, in_force=(ATTEMPT,)),
    processes.AbandonAll(),
]


def test_words_come_back_equal() -> None:
    for said in SAID_WORDS:
        assert processes.heard_of_process(frame_of(processes.said(said))) == said
    for told in TOLD_WORDS:
        assert processes.heard_of_node(frame_of(processes.told(told))) == told


def test_a_word_of_each_kind_comes_back() -> None:
    """The test above has one of each."""
    assert {type(word) for word in SAID_WORDS} == set(SAID)
    assert {type(word) for word in TOLD_WORDS} == set(TOLD)


def test_an_attempt_is_named_as_its_file_is() -> None:
    key = AttemptKey(1, 3, 2, 4)
    named = processes.AttemptInLog.of(key, 5)
    assert named == ATTEMPT
    assert named.key.file_name == key.file_name == "attempt-1-3-2-4.payloads"


@pytest.mark.parametrize("hear", [processes.heard_of_process, processes.heard_of_node])
def test_what_has_no_body_or_is_no_message_is_refused(hear: Any) -> None:
    for unknown in (b"", b"\x9a\x06\x00"):  # the second one has a body of number 99
        with pytest.raises(InvalidMessage, match="a message of unknown kind between a node and its exchange process"):
            hear(unknown)
    for garbage in (b"abc", b"\xff" * 8, bytearray(b"\x0a\x05\x08")):
        with pytest.raises(InvalidMessage, match="what comes between a node and its exchange process is no message"):
            hear(garbage)


def test_what_a_process_says_has_bounds() -> None:
    for long in (
        replace(STORED, entries=bytes(processes.MAX_ENTRIES_BYTES + 1)),
        processes.ProcessFailed(text="x" * 4097, exit_code=1),
        processes.ProcessLog(level=20, text="x" * ((1 << 16) + 1)),
    ):
        with pytest.raises(InvalidMessage, match=type(long).__name__):
            processes.heard_of_process(frame_of(processes.said(long)))


def test_what_the_node_says_has_bounds() -> None:
    many = (ATTEMPT,) * (m.MAX_FRAGMENTS + 1)
    for long in (
        replace(START, home=b"/" * 4097),
        replace(START, settings_json=" " * ((1 << 20) + 1)),
        replace(START, listen_on="a" * 257),
        replace(BEGIN, held=bytes(processes.MAX_ENTRIES_BYTES + 1)),
        replace(BEGIN, last=BEGIN.last * (m.MAX_FRAGMENTS + 1)),
        replace(BEGIN, left_errors=many),
        replace(BEGIN, in_force=many),
        processes.DropInProcess(sync=1, in_force=many),
    ):
        with pytest.raises(InvalidMessage, match=type(long).__name__):
            processes.heard_of_node(frame_of(processes.told(long)))
    many_weights = replace(BEGIN, begun=replace(BEGUN, weights=(1,) * (m.MAX_MEMBERS + 1)))
    with pytest.raises(InvalidMessage, match="BeginAtHost"):
        processes.heard_of_node(frame_of(processes.told(many_weights)))


def test_the_most_that_is_said_of_payloads_fits_into_a_frame_and_more_than_a_frame_is_not_sent() -> None:
    most = replace(STORED, entries=bytes(processes.MAX_ENTRIES_BYTES))
    assert processes.heard_of_process(frame_of(processes.said(most))) == most
    with pytest.raises(InvalidMessage, match=r"a message of .* bytes for an exchange process, at most"):
        processes.said(replace(STORED, entries=bytes(MAX_FRAME_BYTES)))
