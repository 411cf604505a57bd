"""Whatever comes to a relay's port, or from a relay to a site, is a word or the end of that connection alone."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.relay import greeting, outgoing, words
from atoll.node.relay.outgoing import Route
from atoll.node.relay.pairing import TICKET_LIMIT_S, Control, Pairing, SessionCertificate
from atoll.node.relay.quota import Quotas
from atoll.protocol.errors import InvalidMessage, RefusedError
from atoll.protocol.trust.names import Kind
from tests.harness.fuzzing import fuzz
from tests.harness.relaying import attached, called, echoed, echoing, relaying, site, until, until_attached
from tests.unit.trust.test_security import tls


class _Faults(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextmanager
def no_faults() -> Iterator[None]:
    """Nothing ends by a fault of ours."""
    faults, names = _Faults(), ("atoll.relay", "atoll.node")
    for name in names:
        logging.getLogger(name).addHandler(faults)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(faults)
    assert faults.found == []


NAMES = st.sampled_from(["a", "b", "c"])
GOOD = st.one_of(
    st.builds(words.Attach, st.integers(1, words.MAX_START - 1)),
    st.builds(words.Call, NAMES),
    st.builds(words.Ticket, st.binary(min_size=32, max_size=32)),
    st.builds(words.Told, st.text(max_size=600)),
    st.builds(words.Refused, st.text(max_size=600)),
    st.sampled_from([words.Ping(), words.Pong(), words.Attached()]),
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Of a word, some of them damaged; or bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=600))
    line = bytearray(words.to_line(draw(GOOD)))
    for _ in range(draw(st.integers(0, 2))):
        line[draw(st.integers(0, len(line) - 1))] = draw(st.integers(0, 255))
    return bytes(line)


@fuzz(300)
@given(lines())
def test_a_line_is_a_word_or_refused(line: bytes) -> None:
    try:
        word = words.from_line(line)
    except InvalidMessage:
        return
    again = words.from_line(words.to_line(word))
    assert again == word or isinstance(word, words.Told | words.Refused)  # texts are cleaned, and may be cut


def signed(number: int) -> SessionCertificate:
    """One of four, of two dates."""
    return SessionCertificate(bytes([number % 4]), number % 2, 100.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["attach", "detach", "call", "come", "guess", "end", "charge", "look"]), NAMES, NAMES,
              st.integers(0, 30)),
    max_size=60,
)  # fmt: skip


@fuzz(200)
@given(STEPS)
def test_pairs_are_two_tickets_each_used_once_and_bounded(steps: list[tuple[str, str, str, int]]) -> None:
    relay, numbers, now = Pairing(Quotas(1000), 5, 3), count(1), 0.0
    controls: dict[str, Control] = {}
    given_out: list[tuple[tuple[bytes, bytes], str, str, float]] = []
    used: set[bytes] = set()
    for verb, one, other, number in steps:
        now += number / 10
        match verb:
            case "attach":
                try:
                    controls[one], _ = relay.attach(one, shown := signed(number), number // 3)
                except RefusedError:
                    before = controls[one]
                    is_older = before.certificate.since_s > shown.since_s
                    assert is_older or (before.certificate == shown and before.start > number // 3)
                else:
                    assert controls[one].certificate == shown
            case "detach" if one in controls:
                relay.detach(one, controls.pop(one))
            case "call":
                tickets = next(numbers).to_bytes(32, "big"), next(numbers).to_bytes(32, "big")
                try:
                    assert relay.call(one, other, tickets, now) == controls[other]
                    given_out.append((tickets, one, other, now))
                except RefusedError:
                    pass
            case "come" if given_out:
                tickets, caller, callee, at = given_out[number % len(given_out)]
                ticket = tickets[number // 2 % 2]
                if (pair := relay.come(ticket, now)) is not None:
                    assert ticket not in used
                    assert (pair.caller, pair.called) == (caller, callee)
                    assert now < at + TICKET_LIMIT_S
                    assert pair.is_whole == (used >= (set(tickets) - {ticket}))
                    used.add(ticket)
            case "guess":
                assert relay.come(number.to_bytes(32, "little"), now) is None or number == 0
            case "end" if relay.pairs:
                relay.end(relay.pairs[number % len(relay.pairs)])
            case "charge":
                relay._quotas.charge(one, 100 * number, now)
            case "look":
                for pair in relay.late(now):
                    relay.end(pair)
        assert set(relay.attached) == set(controls)
        assert len(relay.pairs) <= 5
        assert all(len(relay.of_caller(name)) <= 3 for name in "abc")
        assert len(relay._by_ticket) <= 2 * len(relay.pairs), "no ticket outlives its pair"


@fuzz(30)
@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=300)), min_size=1, max_size=8), lines())
def test_bytes_to_a_relay_harm_nobody_else(said: list[tuple[bool, bytes]], line: bytes) -> None:
    """Without TLS, some as tickets; and as the first word of a site."""

    async def main() -> None:
        async with echoing() as port, relaying() as server:
            with attached("b", server.address, port):
                await until_attached(server, "b")
                loop, route = asyncio.get_running_loop(), Route(server.address)
                for is_ticket, data in said:
                    with await outgoing.connect(route) as connection:
                        await loop.sock_sendall(connection, words.TICKET_MARK * is_ticket + data)
                await until(lambda: server.num_strangers >= len(said))
                _, writer = await greeting.encrypted(await outgoing.connect(route), site("c"))
                writer.write(line)
                writer.transport.abort()
                with await called("a", server.address, "b") as connection:
                    assert await echoed(connection, b"x") == b"x"

    with no_faults():
        asyncio.run(main())


@fuzz(30)
@given(st.lists(lines(), max_size=6))
def test_what_a_relay_says_harms_no_site(said: list[bytes]) -> None:
    """It comes again, and is attached by a relay that says what relays say."""

    async def main() -> None:
        greeted = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal greeted
            greeted += 1
            await reader.readline()
            writer.write(b"".join(said) if greeted == 1 else words.to_line(words.Attached()))
            if greeted == 1:
                writer.close()

        context = greeting._context(ssl.PROTOCOL_TLS_SERVER, tls(Kind.RELAY))
        async with echoing() as port:
            server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
            with attached("b", f"127.0.0.1:{server.sockets[0].getsockname()[1]}", port) as at_b:
                await until(lambda: greeted > 1 and at_b.is_attached)
            server.close()

    with no_faults():
        asyncio.run(main())
