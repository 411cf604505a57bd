"""What the coordinator sends to many sites is encoded once."""

from __future__ import annotations

import pytest

from atoll.coordinator.service import BODIES_KEPT, _Bodies
from atoll.protocol import messages as m
from atoll.protocol import wire


def test_a_message_for_all_is_encoded_once_between_those_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[m.CoordinatorMessage] = []
    encode = wire.response_body

    def counted(message: m.CoordinatorMessage) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(wire, "response_body", counted)
    bodies = _Bodies()
    for_all = m.Finished(commit=3, reason="the end", run_step=30, run_tokens=300)
    for site in range(3 * BODIES_KEPT):
        for_one = m.Evicted(reason=f"site {site}")
        assert bodies.of(for_one) == encode(for_one)
        assert bodies.of(for_all) == encode(for_all)
    assert sum(message is for_all for message in encoded) == 1
    assert len(encoded) == 3 * BODIES_KEPT + 1
    assert len(bodies._known) == BODIES_KEPT
