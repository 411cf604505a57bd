"""Whether whoever calls is the site that it says to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node.exchange.peers import claims
from atoll.node.exchange.peers.claims import Claims
from atoll.protocol.errors import RefusedError
from atoll.protocol.messages import Donor, Member
from atoll.protocol.trust.names import Kind, Subject
from atoll.protocol.trust.security import Caller


def called_by(name: str) -> Any:
    return SimpleNamespace(caller=lambda context: Caller(Subject("run", Kind.SITE, name), bytes(32)))


def member(site_id: int, name: str) -> Member:
    return Member(site_id=site_id, incarnation=1, address="a:1", name=name)


def test_a_site_speaks_for_itself_alone() -> None:
    found = Claims(called_by("b"))
    donor = Donor(site_id=2, incarnation=1, address="b:1", commit=3, name="b")
    found.learn([member(1, "a"), donor])
    found.check(None, 2)
    with pytest.raises(RefusedError, match="site b of run run says to be site 1, which is a"):
        found.check(None, 1)
    found.check(None, 3)  # nobody has named it here yet


def test_in_plain_text_everybody_is_believed() -> None:
    found = Claims()
    found.learn([member(1, "a"), member(2, "")])
    found.check(None, 1)
    found.check(None, 2)


def test_the_newest_names_count_and_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MAX_REMEMBERED", 2)
    found = Claims(called_by("b"))
    found.learn([member(1, "a"), member(1, "b")])
    found.check(None, 1)
    found.learn([member(2, "x"), member(3, "y")])
    found.check(None, 1)
    for site_id in (2, 3):
        with pytest.raises(RefusedError):
            found.check(None, site_id)
    found.learn([member(2, "x"), member(4, "z")])
    with pytest.raises(RefusedError):
        found.check(None, 2)
    found.check(None, 3)
