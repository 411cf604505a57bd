"""Addresses that a node finds out by itself."""

from __future__ import annotations

import pytest

from atoll.node.daemon.discover import address_for_peers, local_address_towards, settings_in
from atoll.protocol.errors import HostError, InvalidMessage


@pytest.mark.parametrize(
    ("listen", "told"),
    [("0.0.0.0:0", "127.0.0.1:7"), ("[::]:0", "127.0.0.1:7"), ("10.1.2.3:0", "10.1.2.3:7"), ("[::1]:0", "[::1]:7")],
)
def test_peers_are_told_an_address_that_they_can_dial(listen: str, told: str) -> None:
    assert address_for_peers(listen, 7, "127.0.0.1:7700") == told


def test_the_address_of_a_node_is_the_one_its_coordinator_sees() -> None:
    assert local_address_towards("127.0.0.1:7700") == "127.0.0.1"
    with pytest.raises(HostError, match=r"no route to a\.\.b:1: 'a\.\.b' is no name of a machine"):
        local_address_towards("a..b:1")


NESTED = "[" * 100_000


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"settings": 7}', NESTED, f'{{"settings":{NESTED}'])
def test_what_is_no_status_of_a_coordinator_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage):
        settings_in(text, "a:1")
