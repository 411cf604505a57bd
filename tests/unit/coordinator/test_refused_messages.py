"""Messages that are refused change nothing but their own stream. Each of these was found by tests/fuzz."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.protocol import messages as m
from atoll.protocol.messages import RefusedKind
from tests.harness.coordinator_story import Story, some_settings


def test_a_second_name_on_one_stream_is_refused() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.sites["c"] = story.sites["a"]  # says Hello as c where a speaks
    story.connect("c", again=True)
    assert story.last("a", m.Refused).kind is RefusedKind.INVALID
    assert not story.is_known("c")
    story.connect("a", state=(0, "s0"))  # the name is still its own
    assert story.standing_of("a") == "member"


def test_a_start_with_a_state_ahead_of_the_log_does_not_end_the_one_that_is_in_the_run() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.ready("a")
    old = story.sites.pop("a")
    story.connect("a", incarnation=2, state=(7, "s7"))
    assert story.last("a", m.Refused).kind is RefusedKind.STATE
    assert (story.incarnation_of("a"), story.stream_of("a"), story.is_live("a")) == (1, old.stream, True)
    assert story.is_ready("a")


def test_a_copy_of_a_home_does_not_take_the_stream_of_the_start_that_is_in_the_run() -> None:
    """With the same key and the same start count. Reducers would take chunks of both for one contribution."""
    story = Story(some_settings())
    story.join("a", process="first")
    story.applied("a", 0, "s0")
    story.join("b")
    story.applied("b", 0, "s0")
    story.ready("a")
    first = story.sites.pop("a")
    story.connect("a", process="copy", state=(0, "s0"))
    refused = story.last("a", m.Refused)
    assert (refused.kind, "copy of the other's" in refused.text) == (RefusedKind.STALE, True)
    assert (story.stream_of("a"), story.is_live("a")) == (first.stream, True)
    story.sites["a"] = first
    story.connect("a", process="first", state=(0, "s0"))  # a new stream of the same process
    assert story.stream_of("a") == first.stream
    assert story.is_ready("a")
    story.connect("a", process="copy", incarnation=2, state=(0, "s0"))  # the next start of either is one of its own
    assert story.incarnation_of("a") == 2
    story.restart()
    story.connect("a", process="copy", state=(0, "s0"))
    assert story.is_connected("a")
    story.sites.pop("a")
    story.connect("a", process="first", incarnation=2, state=(0, "s0"))
    assert story.last("a", m.Refused).kind is RefusedKind.STALE


@pytest.mark.parametrize("name", ["", "a b", "a\nrun run: finished", "\x1b[2J", "-a", "b\u00fcro", 'a"}', "a" * 65])
def test_a_name_has_one_alphabet(name: str) -> None:
    story = Story(some_settings())
    story.connect(name)
    refused = story.last(name, m.Refused)
    assert (refused.kind, "is no name of a site" in refused.text) == (RefusedKind.INVALID, True)
    assert refused.text.isprintable()
    assert not story.known_sites()


@pytest.mark.parametrize(
    "address", ["", "a", "a b:1", "a\n:1", "\x1b[2J:1", "a:1/", "b\u00fcro:1", "a:99999", "a@", "a@r", "@r:1"]
)
def test_an_address_has_one_alphabet(address: str) -> None:
    story = Story(some_settings())
    story.open_stream("a")
    hello = m.Hello(name="a", key=bytes(32), address=address)
    story.says("a", hello)
    assert story.last("a", m.Refused).kind is RefusedKind.INVALID
    assert not story.known_sites()
    story.open_stream("a")
    story.says("a", replace(hello, address="[fe80::1%eth0]:7701"))
    assert story.last("a", m.Welcome).site_id == 0


def test_a_site_is_behind_a_relay_by_its_own_name_and_its_certificate_alone() -> None:
    for address, text in (
        ("b@relay:7800", "'b@relay:7800' is of site 'b': a relay leads to a at a@relay:7800"),
        ("a@relay:7800", "a at a@relay:7800: a run in plain text has no relays"),
    ):
        story = Story(some_settings())
        story.open_stream("a")
        story.says("a", m.Hello(name="a", key=bytes(32), address=address))
        refused = story.last("a", m.Refused)
        assert refused.kind is RefusedKind.INVALID
        assert text in refused.text
        assert not story.known_sites()
