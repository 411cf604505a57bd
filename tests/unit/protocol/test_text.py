"""Text from outside reaches no log, terminal or metric with control characters."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.worker_tree import _shown
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.errors import InvalidMessage, StateError
from atoll.protocol.layout import Manifest, Role, TensorSpec, TiedName
from atoll.protocol.text import CleanFormatter, JsonFormatter, clean, last_line
from tests.harness.envelopes import response
from tests.harness.fuzzing import fuzz

HEADER = m.Header(protocol_version=1, run_id="run")
FORGED = "left\nrun run: finished\r\x1b[2J\u202e\x9b31m"


@given(st.text())
@fuzz(300)
def test_what_does_not_print_is_shown_as_an_escape(text: str) -> None:
    shown = clean(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert clean(shown) == shown
    assert "\n" not in last_line(text)
    if text.isprintable():
        assert shown == text


def test_the_last_line_of_a_traceback_is_what_matters() -> None:
    text = 'Traceback (most recent call last):\r\n  File "train.py", line 3\r\nValueError: no\tdata\n\n'
    assert last_line(text) == "ValueError: no data"
    assert last_line("") == last_line(" \n") == ""


def test_no_message_brings_control_characters_in() -> None:
    for said in (
        m.Leave(reason=FORGED),
        m.Heartbeat(phase=FORGED, doing=FORGED),
        m.ExchangeFailed(
            sync=1, attempt=1, term=1, peer_site_id=2, direction=m.Direction.SENDING, phase=FORGED, text=FORGED
        ),
    ):
        _, heard = wire.unpack(wire.request(said, HEADER, 1, 0))
        for name in ("reason", "phase", "doing", "text"):
            assert getattr(heard, name, "") in ("", "left\nrun run: finished\\r\\x1b[2J\\u202e\\x9b31m")
    _, heard = wire.unpack(response(m.Evicted(reason="\x1b" * 1024), HEADER, 1, 0))
    assert heard.reason == ("\\x1b" * 1024)[:1024], "no longer than it may be said on"


def test_a_name_of_a_tensor_that_does_not_print_is_refused_not_changed() -> None:
    spec = TensorSpec(name="w\x1b", shape=(), dtype="F32", role=Role.TRAINABLE)
    with pytest.raises(InvalidMessage, match="do not print"):
        Manifest(tensors=(spec,))
    with pytest.raises(InvalidMessage, match="do not print"):
        Manifest(tensors=(), tied=(TiedName(alias="a\n", name="w"),))


def test_only_this_process_begins_a_line_of_its_log() -> None:
    record = logging.LogRecord("atoll", logging.INFO, "", 0, "%s leaves: %s", ("b", FORGED), None)
    text = CleanFormatter("%(levelname).1s %(message)s").format(record)
    assert text == "I b leaves: left\n  | run run: finished\\r\\x1b[2J\\u202e\\x9b31m"


def test_a_log_for_programs_has_an_object_a_line() -> None:
    record = logging.LogRecord("atoll", logging.WARNING, "", 0, "%s leaves: %s", ("b", FORGED), None)
    record.created = 1_800_000_000.25
    formatter = JsonFormatter(lambda: 7, run="run-1", site="b")
    line = formatter.format(record)
    assert line.isprintable()
    assert json.loads(line) == {
        "time": "2027-01-15T08:00:00.250+00:00",
        "level": "warning",
        "run": "run-1",
        "site": "b",
        "sync": 7,
        "logger": "atoll",
        "message": "b leaves: left\nrun run: finished\\r\\x1b[2J\\u202e\\x9b31m",
    }
    try:
        raise StateError(FORGED)
    except StateError:
        record.exc_info = sys.exc_info()
    line = formatter.format(record)
    assert line.isprintable()
    assert json.loads(line)["traceback"].startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [(b"\r 10 %\r 20 %\n", " 20 %"), (b"\x1b[2Jrun run: finished", "\\x1b[2Jrun run: finished"), (b"a\tb\r\n", "a\tb")],
)
def test_what_ranks_print_has_no_control_characters(printed: bytes, shown: str) -> None:
    assert _shown(printed) == shown
