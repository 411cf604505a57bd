"""Calls of a coordinator: how the run stands, and what an operator wants."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.coordinator.core.view.document import RunView
from atoll.protocol.errors import AtollError, ConfigError, HostError, InvalidMessage, PeerError
from atoll.protocol.strict import build, field_types
from atoll.protocol.text import clean, last_line

if TYPE_CHECKING:
    from atoll.protocol.trust.enrolled import Enrolled

ANSWER_LIMIT_S = 10.0
CONNECT_LIMIT_S = 10.0


def local_status(store_path: Path, *, data_ranges: bool = False) -> dict[str, Any]:
    """The document of /status.json, of the coordinator on this machine that has the store; `data_ranges` adds every
    range of samples. Raises HostError if there is none."""
    from atoll.coordinator.admin import ask

    return read_document(ask(store_path, "status", data_ranges=data_ranges), str(store_path))


def fetch_status(
    address: str,
    enrolled: Enrolled | None = None,
    limit_s: float = ANSWER_LIMIT_S,
    *,
    data_ranges: bool = False,
    proxy: str = "",
) -> dict[str, Any]:
    """The same from another machine, by whoever has joined the run; in plain text without. `proxy`: HOST:PORT of an
    HTTP proxy on the way.

    Raises ConfigError for what is no address, PeerError if nobody answers, RefusedError if it may not look.
    """
    from atoll.protocol.v1 import session_pb2

    with _opened(address, enrolled, proxy=proxy) as stub:
        response = _answer(address, stub.Status, session_pb2.StatusRequest(data_ranges=data_ranges), limit_s)
    return read_document(response.json, address)


@contextmanager
def _opened(address: str, enrolled: Enrolled | None, connect_limit_s: float = 0.0, proxy: str = "") -> Iterator[Any]:
    """The stub of a channel; with `connect_limit_s` only once that has come to its coordinator. Raises PeerError."""
    import grpc

    from atoll.protocol.addresses import parse_address
    from atoll.protocol.status import no_coordinator
    from atoll.protocol.transport import MAX_SESSION_MESSAGE_BYTES, channel_options, expects
    from atoll.protocol.trust.names import Kind
    from atoll.protocol.trust.security import MutualTls
    from atoll.protocol.v1 import session_pb2_grpc

    parse_address(address)
    options = channel_options(MAX_SESSION_MESSAGE_BYTES, proxy)
    if enrolled is None:
        opened = grpc.insecure_channel(address, options=options)
    else:
        handshake = MutualTls(enrolled.subject.run_id, enrolled.shown).towards(Kind.COORDINATOR)
        opened = grpc.secure_channel(address, handshake.credentials, options=[*options, expects(handshake)])
    with opened as channel:
        if connect_limit_s:
            try:
                grpc.channel_ready_future(channel).result(connect_limit_s)
            except grpc.FutureTimeoutError:
                raise PeerError(no_coordinator(address, f"no connection within {connect_limit_s:g} s")) from None
        yield session_pb2_grpc.CoordinatorServiceStub(channel)


def _answer(address: str, method: Callable[..., Any], request: object, limit_s: float) -> Any:
    """Raises PeerError if nobody answers, RefusedError if it may not be called, and what the coordinator says else."""
    import grpc

    from atoll.protocol.status import error_of, reason_of, unanswered

    try:
        return method(request, timeout=limit_s)
    except grpc.RpcError as error:
        where = f"the coordinator at {address}"
        raise unanswered(error, address) or error_of(error.code(), reason_of(error), where) from None


def operate(found: Enrolled, command: str, *, limit_s: float = ANSWER_LIMIT_S, **fields: object) -> str:
    """What an operator wants done (coordinator/commands.py), at the first address of its invite that can be reached: it
    is said once. Raises PeerError, RefusedError if that is no operator, HostError if the coordinator will not: why."""
    from atoll.coordinator.commands import line_of
    from atoll.protocol.v1 import session_pb2

    *others, last = found.addresses
    request = session_pb2.OperateRequest(line=line_of(command, **fields).decode())
    for address in (*others, last):
        with ExitStack() as stack:
            try:
                stub = stack.enter_context(_opened(address, found, CONNECT_LIMIT_S))
            except PeerError:
                if address == last:
                    raise
                continue
            answer = _answer(address, stub.Operate, request, limit_s)
            if answer.problem:
                raise HostError(f"the coordinator at {address} refused: {clean(answer.problem)}")
            return str(answer.found)
    raise AssertionError("an identity has an address")


def status_by(found: Enrolled, address: str = "", *, data_ranges: bool = False) -> dict[str, Any]:
    """The same, at that address, or at the first one of those of the invite that answers. Raises as `fetch_status`."""
    *others, last = [address] if address else found.addresses
    for other in others:
        try:
            return fetch_status(other, found, data_ranges=data_ranges)
        except PeerError:
            continue
    return fetch_status(last, found, data_ranges=data_ranges)


def status_of(home: Path, address: str = "", *, data_ranges: bool = False) -> dict[str, Any]:
    """The same, by whoever has joined with that home. Nothing of a viewer or an operator runs all the time, so its
    identity is renewed as it looks (`_renew_if_due`). Raises as `fetch_status`."""
    from atoll.protocol.trust import enrolled
    from atoll.protocol.trust.names import Kind

    found = enrolled.joined(home)
    document = status_by(found, address, data_ranges=data_ranges)
    if found.subject.kind in (Kind.VIEWER, Kind.OPERATOR):
        try:
            _renew_if_due(found, home / enrolled.FOLDER, document, address)
        except AtollError as error:  # who looks has seen the run
            _say_once(f"atoll: what is in {home} is not renewed yet: {error}")
    return document


def _renew_if_due(found: Enrolled, folder: Path, document: Mapping[str, Any], address: str) -> None:
    """When it is time, or another root signs; which coordinators share the store is learned then. `address`: of one
    that answers, if it is said. Raises AtollError."""
    import asyncio
    import time

    from atoll.protocol.disk import Disk
    from atoll.protocol.trust import certificates, enrolled
    from atoll.protocol.trust.joining import renew_identity
    from atoll.protocol.trust.renewing import due_s
    from atoll.protocol.trust.security import MutualTls

    signs = certificates.from_pem(str(document.get("root")).encode())[0]
    identity = certificates.from_pem(found.shown.certificate)[0]
    if time.time() >= due_s(found.shown) or not certificates.is_signed_by(identity, signs):
        tls = MutualTls(found.subject.run_id, found.shown)
        addresses = [address] if address else found.addresses
        enrolled.keep_shown(folder, asyncio.run(renew_identity(tls, addresses, found.subject)), Disk())
    coordinators = tuple(map(str, document.get("coordinators") or ()))
    if coordinators and coordinators != found.learned:
        enrolled.keep_learned(folder, coordinators, Disk())


@cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def read_document(text: str, address: str) -> dict[str, Any]:
    """Raises InvalidMessage."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"the coordinator at {address} sent a status that is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidMessage(f"the coordinator at {address} sent a status that is not a JSON object")
    return document


def parse_status(document: Mapping[str, Any]) -> RunView:
    """Raises InvalidMessage if something is missing or of another type; what is not known here is left alone."""
    # Errors have room for all of a traceback.
    shown = {key: _printable(document[key], key == "errors") for key in field_types(RunView) if key in document}
    try:
        return build(RunView, shown, "status", unknown=[])
    except ConfigError as error:
        raise InvalidMessage(f"{error}; is the coordinator of another version?") from None


def _printable(value: Any, is_long: bool) -> Any:
    """Names and reasons come from other machines: nothing in them may steer a terminal."""
    if isinstance(value, str):
        return clean(value) if is_long else last_line(value)
    if isinstance(value, list):
        return [_printable(item, is_long) for item in value]
    if isinstance(value, dict):
        return {key: _printable(item, is_long) for key, item in value.items()}
    return value
