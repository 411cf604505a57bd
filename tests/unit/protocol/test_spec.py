"""What travels: all parties compute it alike from the settings, the base and the fragment that a plan names."""

from __future__ import annotations

import pytest

from atoll.protocol.codecs import max_encoded_bytes, unchanged
from atoll.protocol.codecs.table import DENSE
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Role
from atoll.protocol.spec import (
    Aggregation,
    Contribution,
    codecs_of,
    max_payload_bytes,
    payload_codec,
    spec_of,
    specs_of,
)
from atoll.protocol.sync_settings import SyncSettings

BUFFERS = (Role.BUFFER_MEAN, Role.BUFFER_LOWEST)


@pytest.mark.parametrize("codec", DENSE)
def test_what_travels_follows_the_role(codec: str) -> None:
    spec = spec_of(SyncSettings(codec=codec), 7, 0)
    ways = {role: spec.of(role) for role in (Role.TRAINABLE, *BUFFERS)}
    assert [(way.up, way.down) for way in ways.values()] == [(codec, codec), ("fp32", "fp32"), ("raw", "raw")]
    assert [role for role, way in ways.items() if way.contribution is Contribution.DELTA] == [Role.TRAINABLE]
    assert [role for role, way in ways.items() if way.aggregation is Aggregation.LOWEST] == [Role.BUFFER_LOWEST]
    for role, way in ways.items():
        assert spec.max_bytes(role, 700, 8) == max_encoded_bytes(way.up, 700, 8)
        assert max_payload_bytes(role, 700, 8, 1) >= spec.max_bytes(role, 700, 8)


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


@pytest.mark.parametrize(
    ("mean_over", "aggregation"), [("senders", Aggregation.BUNDLE), ("all", Aggregation.BUNDLE_OVER_ALL)]
)
def test_what_carries_some_of_the_values_is_bundled(mean_over: str, aggregation: Aggregation) -> None:
    for settings in (SyncSettings(codec="topk2", mean_over=mean_over), SyncSettings(up="topk2", mean_over=mean_over)):
        spec = spec_of(settings, 0, 0)
        way = spec.of(Role.TRAINABLE)
        assert (way.up, way.down, way.aggregation) == ("topk2", "bundle", aggregation)
        encoded = max_encoded_bytes("topk2", 5000)
        assert encoded == 16 + (2 * 8) + 79 + (16 + 4)
        assert spec.max_bytes(Role.TRAINABLE, 5000, 4) == encoded
        for number in (1, 3, 1024):
            assert spec.payload_bytes(Role.TRAINABLE, 5000, 4, number) == 16 + number * (4 + encoded)
            assert max_payload_bytes(Role.TRAINABLE, 5000, 4, number) >= 16 + 8 + number * (4 + encoded)
        assert spec.payload_bytes(Role.BUFFER_MEAN, 5000, 4, 1024) == max_encoded_bytes("fp32", 5000)


def test_momenta_follow_gradients() -> None:
    settings = SyncSettings(
        strategy="momentum", every=1, warmup_commits=3, warmup_codec="fp16", codec="int4", up="sign1",
        error_feedback_down=0.5,
    )  # fmt: skip
    found = [spec_of(settings, base, 0).of(Role.TRAINABLE) for base in (0, 2, 3, 1000)]
    gradients, momenta = ("fp16", "fp16", Contribution.GRADIENT), ("sign1", "int4", Contribution.MOMENTUM)
    assert [(way.up, way.down, way.contribution) for way in found] == [gradients, gradients, momenta, momenta]
    assert [way.error_beta_down for way in found] == [0, 0, 0.5, 0.5]
    assert {spec.trainable.up for spec in specs_of(settings)} == {"fp16", "sign1"}
    assert specs_of(SyncSettings()) == (spec_of(SyncSettings(), 0, 0),)


def test_gradients_come_between_momenta_and_momenta_of_local_steps_follow() -> None:
    settings = SyncSettings(
        strategy="momentum", every=1, warmup_commits=6, gradient_doubling=1, local_doubling=2, codec="sign1",
        error_feedback_down=0.5,
    )  # fmt: skip
    found = [spec_of(settings, base, 0).of(Role.TRAINABLE) for base in range(10)]
    kinds = {Contribution.GRADIENT: "g", Contribution.MOMENTUM: "m", Contribution.LOCAL_MOMENTUM: "l"}
    assert "".join(kinds[way.contribution] for way in found) == "ggmgmmmmll"
    assert [way.up == "bf16" == way.down for way in found] == [c == "g" for c in "ggmgmmmmll"]
    assert [way.error_beta_down == 0 for way in found] == [c == "g" for c in "ggmgmmmmll"]
    assert {spec.trainable.contribution for spec in specs_of(settings)} == set(kinds)


def test_all_codecs_of_a_run_are_said_by_direction() -> None:
    momenta = SyncSettings(strategy="momentum", every=1, warmup_commits=3, codec="int4", up="sign1")
    assert codecs_of(momenta) == ("bf16+sign1", "bf16+int4"), "in the order of its syncs"
    assert codecs_of(SyncSettings(strategy="momentum", every=1, warmup_commits=3, codec="bf16")) == ("bf16", "bf16")
    assert codecs_of(SyncSettings(codec="topk2")) == ("topk2", "bundle")


def test_only_a_buffer_may_be_said_to_be_unchanged() -> None:
    spec, data = spec_of(SyncSettings(codec="bf16"), 0, 0), unchanged(9, "F32")
    assert spec.of(Role.TRAINABLE).codec_in(data, "bf16") == "bf16"
    with pytest.raises(InvalidMessage, match="unchanged carries no average of pseudo-gradients"):
        payload_codec(Role.TRAINABLE, data)
    for role in BUFFERS:
        assert spec.of(role).codec_in(data, spec.of(role).up) == "unchanged"
        assert payload_codec(role, data) == "unchanged"
