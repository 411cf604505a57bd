"""Of how long a link was in use only what this site really waited for it counts."""

from __future__ import annotations

from atoll.node.exchange.peers.link_use import LinkUses
from atoll.protocol.messages import MAX_LINKS, LinkUse


def test_what_was_waited_for_is_added_up() -> None:
    uses = LinkUses()
    uses.note(7, 1000, 10.0, 10.5)
    uses.note(7, 500, 12.0, 12.25)
    assert uses.longest() == (LinkUse(site_id=7, received_bytes=1500, seconds=0.75),)


def test_the_first_wait_counts_from_when_it_began() -> None:
    uses = LinkUses()
    uses.note(7, 1000, 100.0, 104.0)
    assert uses.longest()[0].seconds == 4.0


def test_streams_that_bring_something_at_the_same_time_share_the_link() -> None:
    uses = LinkUses()
    uses.note(7, 1000, 10.0, 11.0)
    uses.note(7, 1000, 10.0, 11.5)
    uses.note(7, 1000, 10.5, 11.25)
    assert uses.longest() == (LinkUse(site_id=7, received_bytes=3000, seconds=1.5),)


def test_a_message_names_those_that_took_longest() -> None:
    uses = LinkUses()
    for site_id in range(100):
        uses.note(site_id, 1, 0.0, float(site_id))
    found = uses.longest()
    assert [use.site_id for use in found] == list(range(99, 99 - MAX_LINKS, -1))
