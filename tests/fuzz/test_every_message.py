"""Every message of the .proto files comes to a test of this folder as something that nobody should send."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor

from atoll.protocol.v1 import common_pb2, hosts_pb2, local_pb2, peer_pb2, processes_pb2, session_pb2

FILES = (common_pb2, hosts_pb2, local_pb2, peer_pb2, processes_pb2, session_pb2)
FUZZED = {
    "SessionRequest": "test_wire.py::test_any_content_is_a_message_or_refused",
    "SessionResponse": "test_wire.py::test_any_content_is_a_message_or_refused",
    "JoinRequest": "test_trust.py::test_any_request_for_a_certificate_is_signed_for_whom_it_is_or_refused",
    "JoinResponse": "test_trust.py::test_any_answer_is_the_certificate_that_was_asked_for_or_refused",
    "RenewRequest": "test_trust.py::test_any_request_for_a_certificate_is_signed_for_whom_it_is_or_refused",
    "RenewResponse": "test_trust.py::test_any_answer_is_the_certificate_that_was_asked_for_or_refused",
    "WatchResponse": "test_trust.py::test_whatever_a_coordinator_says_of_roots_and_bans_is_heeded_or_refused",
    "StatusResponse": "test_wire.py::test_any_status_of_a_coordinator_is_shown_or_refused",
    "ExchangeRequest": "test_peers.py::test_what_a_stream_brings_is_held_whole_or_refused",
    "ExchangeResponse": "test_reducers.py::test_an_exchange_with_any_reducer_ends_with_its_payloads_or_names_it",
    "FetchStateRequest": "test_peers.py::test_a_donor_answers_in_bounded_frames_or_refuses",
    "FetchStateResponse": "test_peers.py::test_a_donors_answer_is_what_was_asked_for_or_an_error",
    "FetchPayloadsRequest": "test_peers.py::test_a_donor_answers_in_bounded_frames_or_refuses",
    "FetchPayloadsResponse": "test_peers.py::test_a_donors_answer_is_what_was_asked_for_or_an_error",
    "DonateRequest": "test_peers.py::test_what_a_donor_that_dialled_sends_is_what_was_asked_for_or_an_error",
    "DonateResponse": "test_peers.py::test_a_donor_that_dialled_answers_any_request_and_says_how_it_ended",
    "ProbeRequest": "test_peers.py::test_whoever_probes_hears_who_is_here_or_is_refused",
    "ProbeResponse": "test_peers.py::test_only_the_site_itself_answers_a_probe",
    "MeasureRequest": "test_measuring.py::test_any_request_is_answered_within_its_bounds_or_refused",
    "MeasureResponse": "test_measuring.py::test_any_answer_is_a_speed_or_an_error",
    "DialMeRequest": "test_measuring.py::test_whoever_wants_to_be_dialled_is_dialled_by_its_own_name_or_refused",
    "AttachRequest": "test_hosts.py::test_any_words_of_a_host_are_followed_or_end_it",
    "AttachResponse": "test_followers.py::test_any_words_of_a_leader_are_followed_or_the_host_ends_its_stream",
    "PutSlicesRequest": "test_hosts.py::test_slices_that_are_put_are_whole_or_the_host_is_given_up",
    "TakeSlicesRequest": "test_hosts.py::test_whoever_takes_slices_gets_those_of_its_tensors_or_is_refused",
    "TakeFromHostRequest": "test_followers.py::test_whoever_asks_a_host_for_slices_gets_its_own_or_is_refused",
    "TakeFromHostResponse": "test_followers.py::test_slices_that_another_host_gives_are_whole_or_refused",
    "TakeSlicesResponse": "test_followers.py::test_slices_that_are_taken_are_whole_or_the_leader_is_given_up",
    "PutPayloadsRequest": "test_hosts.py::test_payloads_that_are_put_are_those_of_the_host_or_refused",
    "TakePayloadsRequest": "test_hosts.py::test_payloads_that_are_put_are_those_of_the_host_or_refused",
    "TakePayloadsResponse": "test_hosts.py::test_payloads_that_are_taken_are_those_of_other_hosts_or_refused",
    "LocalRequest": "test_local.py::test_any_reports_of_ranks_are_followed_or_refused",
    "LocalResponse": "test_local.py::test_any_frame_to_a_worker_is_understood_or_refused",
    "ProcessRequest": "test_exchange_processes.py::test_any_words_of_a_process_are_followed_or_end_it",
    "ProcessResponse": "test_exchange_processes.py::test_any_words_of_a_node_are_followed_or_end_the_process",
    "FalsePayload": "test_evidence.py::test_any_file_shows_what_its_reducer_signed_or_nothing",
}
"""What arrives as bytes, and who sends any of it. With it come the messages that are fields of it."""
GRPC_READS = {
    "StatusRequest",
    "WatchRequest",
    "PutSlicesResponse",
    "PutPayloadsResponse",
    "OperateRequest",
    "OperateResponse",
    "DialMeResponse",
}
"""At most one bool or digest, of which all values are right, or texts that are shown, or read elsewhere
(tests/fuzz/test_commands.py); what is no such message grpc itself refuses."""


def roots() -> Iterator[str]:
    """What a method of a service takes and gives, what goes over sockets of this host, and what lies in files."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield method.input_type.name
                yield method.output_type.name
    yield from ("LocalRequest", "LocalResponse", "ProcessRequest", "ProcessResponse", "FalsePayload")


def within(message: Descriptor, found: set[str]) -> set[str]:
    if message.name not in found:
        found.add(message.name)
        for field in message.fields:
            if field.message_type is not None:
                within(field.message_type, found)
    return found


def every_message() -> dict[str, Descriptor]:
    return {name: message for file in FILES for name, message in file.DESCRIPTOR.message_types_by_name.items()}


def test_what_arrives_as_bytes_is_sent_by_a_test_here() -> None:
    assert set(FUZZED) == set(roots()) - GRPC_READS
    for name, where in FUZZED.items():
        file, _, test = where.partition("::")
        text = Path(__file__).with_name(file).read_text()
        assert f"def {test}(" in text, where
        assert re.search(rf"_pb2\.{name}\b", text), f"{file} sends no {name}"


def test_every_message_is_part_of_what_arrives() -> None:
    messages = every_message()
    reached: set[str] = set()
    for name in FUZZED:
        within(messages[name], reached)
    assert set(messages) - reached - GRPC_READS == set()
