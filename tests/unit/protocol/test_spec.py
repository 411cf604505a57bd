"""What travels: all parties compute it alike from the settings, the base and the fragment that a plan names."""

from __future__ import annotations

import pytest

from atoll.protocol.codecs import max_encoded_bytes, unchanged
from atoll.protocol.codecs.table import CODECS
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Role
from atoll.protocol.settings import SyncSettings
from atoll.protocol.spec import Aggregation, Contribution, max_payload_bytes, payload_codec, spec_of

BUFFERS = (Role.BUFFER_MEAN, Role.BUFFER_LOWEST)


@pytest.mark.parametrize("codec", CODECS)
def test_what_travels_follows_the_role(codec: str) -> None:
    spec = spec_of(SyncSettings(codec=codec), 7, 0)
    ways = {role: spec.of(role) for role in (Role.TRAINABLE, *BUFFERS)}
    assert [(way.up, way.down) for way in ways.values()] == [(codec, codec), ("fp32", "fp32"), ("raw", "raw")]
    assert [role for role, way in ways.items() if way.contribution is Contribution.DELTA] == [Role.TRAINABLE]
    assert [role for role, way in ways.items() if way.aggregation is Aggregation.LOWEST] == [Role.BUFFER_LOWEST]
    for role, way in ways.items():
        assert spec.max_bytes(role, 700, 8) == max_encoded_bytes(way.up, 700, 8)
        assert max_payload_bytes(role, 700, 8) >= spec.max_bytes(role, 700, 8)


def test_each_direction_may_have_a_codec_of_its_own() -> None:
    for settings, expected in (
        (SyncSettings(codec="int4", up="sign1"), ("sign1", "int4")),
        (SyncSettings(codec="int4", down="bf16"), ("int4", "bf16")),
        (SyncSettings(up="int2", down="fp16"), ("int2", "fp16")),
    ):
        spec = spec_of(settings, 0, 0)
        way = spec.of(Role.TRAINABLE)
        assert (way.up, way.down) == expected
        assert spec.max_bytes(Role.TRAINABLE, 700, 4) == max(max_encoded_bytes(codec, 700) for codec in expected)


def test_only_a_buffer_may_be_said_to_be_unchanged() -> None:
    spec, data = spec_of(SyncSettings(codec="bf16"), 0, 0), unchanged(9, "F32")
    assert spec.of(Role.TRAINABLE).codec_in(data, "bf16") == "bf16"
    with pytest.raises(InvalidMessage, match="unchanged carries no pseudo-gradient"):
        payload_codec(Role.TRAINABLE, data)
    for role in BUFFERS:
        assert spec.of(role).codec_in(data, spec.of(role).up) == "unchanged"
        assert payload_codec(role, data) == "unchanged"
