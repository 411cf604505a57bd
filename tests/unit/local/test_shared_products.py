"""Inner products that the parts of a site say of one attempt."""

from __future__ import annotations

from atoll.node.daemon.shared_products import SharedProducts
from atoll.node.exchange.sync.multiplication import Products

KEY = (5, 1, 2)
HUGE, OWN, SMALL = (2.0**60,), (1.0,), (-(2.0**60),)


def test_a_site_says_the_sum_in_the_order_of_its_parts_once_all_have_said_theirs() -> None:
    """In another order its own would not be lost in this one."""
    found: list[Products] = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        shared = SharedProducts()
        shared.expect(KEY, [2, 1])
        for part in order:
            assert len(found) == 0
            if part:
                shared.heard(KEY, part, SMALL if part == 2 else HUGE)
            else:
                shared.made(KEY, OWN, found.append)
        assert found == [(OWN[0] + HUGE[0] + SMALL[0],)]
        shared.heard(KEY, 1, HUGE)
        assert len(found) == 1, "what comes again is said once"
        found.clear()


def test_what_is_of_another_attempt_or_of_a_part_that_has_none_counts_for_nothing() -> None:
    found: list[Products] = []
    shared = SharedProducts()
    shared.made(KEY, OWN, found.append)
    assert found == [OWN], "no part takes part: it is the site's own at once"
    shared.expect(KEY, [1])
    shared.made(KEY, OWN, found.append)
    shared.heard((5, 1, 1), 1, HUGE)
    shared.heard(KEY, 3, HUGE)
    assert len(found) == 1
    shared.expect(KEY, [1])
    shared.heard(KEY, 1, SMALL)
    assert len(found) == 1, "begun again, the one that leads has to say its own anew"
    shared.made(KEY, OWN, found.append)
    assert found[1:] == [(OWN[0] + SMALL[0],)]
    shared.expect(KEY, [1])
    shared.forget(5)
    shared.heard(KEY, 1, SMALL)
    shared.made(KEY, OWN, found.append)
    assert found[2:] == [OWN]
