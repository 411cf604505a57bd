"""What a relay and a site say to each other."""

from __future__ import annotations

import pytest

from atoll.node.relay import words as w
from atoll.protocol.errors import InvalidMessage

ALL: list[w.Word] = [
    w.Attach(1), w.Attach(w.MAX_START - 1), w.Call("berlin"), w.Call("a" * 64), w.Ping(), w.Pong(), w.Attached(),
    w.Ticket(bytes(range(32))), w.Refused("because of this"), w.Told("the quota: 3 GB"), w.Refused(""),
]  # fmt: skip


@pytest.mark.parametrize("word", ALL, ids=repr)
def test_a_word_is_read_as_it_was_written(word: w.Word) -> None:
    line = w.to_line(word)
    assert line.endswith(b"\n")
    assert len(line) <= w.MAX_LINE_BYTES
    assert w.from_line(line) == word


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"ping", b"ping x\n", b"hello\n", b"attach 0\n", b"attach -1\n", b"attach 1 2\n", b"attach x\n",
     b"attach 9223372036854775808\n", b"attach \xb2\n", b"attach " + b"1" * 400 + b"\n", b"call \n", b"call a/b\n",
     b"call " + b"a" * 65 + b"\n", b"ticket\n", b"ticket " + b"0" * 63 + b"\n", b"ticket " + b"A" * 64 + b"\n",
     b"ticket " + b"0 " * 32 + b"\n", b"told " + b"x" * 510 + b"\n", b"told \xff\n", b"Ping\n", b"attached 1\n"],
)  # fmt: skip
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidMessage):
        w.from_line(line)


def test_no_text_is_two_lines_too_long_or_steers_a_terminal() -> None:
    line = w.to_line(w.Told("a\nping\x1b[2J" + "ü" * 1000))
    assert line.count(b"\n") == 1
    assert len(line) == w.MAX_LINE_BYTES
    told = w.from_line(line)
    assert isinstance(told, w.Told)
    assert told.text.startswith("a ping")
    assert "\x1b" not in told.text
    said = w.from_line(b"refused \x1b[2J\n")
    assert isinstance(said, w.Refused)
    assert "\x1b" not in said.text
