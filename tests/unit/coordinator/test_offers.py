"""Offers: a model is named by its digest, and its manifest is asked of one site at a time, in bounded parts."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from atoll.coordinator.core.sites import manifests
from atoll.protocol import messages as m
from atoll.protocol import wire
from atoll.protocol.layout import Manifest, Role, TensorSpec
from atoll.protocol.messages import AdmittedAs, RefusedKind
from tests.harness.coordinator_story import Story, a_manifest, some_settings
from tests.harness.memory_store import MemoryStore


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MANIFEST_PART_BYTES", 16)


def parts_of(manifest: Manifest) -> list[m.ManifestPart]:
    parts = list(wire.manifest_parts(wire.encode(manifest)))
    assert len(parts) > 2
    return parts


def offering(story: Story, name: str, *, width: int = 6) -> None:
    """Says Hello and Offer, and does not answer by itself when it is asked for the manifest."""
    story.connect(name)
    story.sites[name].sends_manifest = False
    story.offer(name, width=width)


def a_story(**changes: object) -> Story:
    return Story(some_settings(**changes), store=MemoryStore())


def test_the_manifest_is_asked_for_once_and_whoever_offers_the_same_waits_for_it() -> None:
    story = a_story()
    offering(story, "a")
    offering(story, "b")
    assert [name for name, said in story.sent if isinstance(said, m.SendManifest)] == ["a"]
    *first, last = parts_of(a_manifest())
    for part in first:
        story.says("a", part)
        story.says("a", part)  # messages may come twice
    assert story.agreed_manifest() is None
    story.says("a", last)
    assert story.agreed_manifest() == a_manifest()
    assert [story.last(name, m.Admitted).site_id for name in ("a", "b")] == [1, 2], "in the order of their offers"
    story.join("c")
    assert [name for name, said in story.sent if isinstance(said, m.SendManifest)] == ["a"]
    assert story.last("c", m.Admitted).admitted_as is AdmittedAs.JOINER


def test_a_site_that_does_not_send_it_is_refused_and_the_next_is_asked() -> None:
    story = a_story()
    offering(story, "stranger", width=9)
    offering(story, "a")
    story.says("stranger", parts_of(a_manifest(9))[0])
    limit_s = story.manifest_part_limit_s()
    story.wait(limit_s - 0.1)
    assert story.num("a", m.SendManifest) == 0
    story.wait(0.2)
    assert story.last("stranger", m.Refused).kind is RefusedKind.INVALID
    assert story.num("a", m.SendManifest) == 1
    for part in parts_of(a_manifest()):
        story.says("a", part)
    assert story.last("a", m.Admitted).site_id == 1


def test_a_stream_that_ends_makes_room_and_its_offer_is_forgotten() -> None:
    story = a_story()
    for name in ("a", "b", "c"):
        offering(story, name)
    story.says("a", parts_of(a_manifest())[0])
    story.drop("b")
    story.drop("a")
    assert story.num("c", m.SendManifest) == 1
    offering(story, "a")
    for part in parts_of(a_manifest()):
        story.says("a", part)  # which nobody asked this stream for
    assert story.agreed_manifest() is None
    for part in parts_of(a_manifest()):
        story.says("c", part)
    assert story.last("c", m.Admitted).site_id == 1
    assert story.last("a", m.Admitted).site_id == 2
    assert story.waiting_offers() == 0


TOO_LARGE = m.ManifestPart(first_byte=0, total_bytes=m.MAX_MANIFEST_BYTES + 1, data=bytes(16))
NOT_FIRST = m.ManifestPart(first_byte=16, total_bytes=100, data=bytes(16))
SHORT = m.ManifestPart(first_byte=0, total_bytes=100, data=bytes(15))
NOTHING = m.ManifestPart(first_byte=0, total_bytes=0, data=b"")


@pytest.mark.parametrize("part", [TOO_LARGE, NOT_FIRST, SHORT, NOTHING])
def test_a_part_that_is_none_is_refused_before_anything_is_kept(part: m.ManifestPart) -> None:
    story = a_story()
    offering(story, "a")
    story.says("a", part)
    assert story.last("a", m.Refused).kind is RefusedKind.INVALID
    assert not story.manifest_is_coming()


def test_parts_that_contradict_each_other_are_refused() -> None:
    story = a_story()
    offering(story, "a")
    story.says("a", m.ManifestPart(first_byte=0, total_bytes=100, data=bytes(16)))
    story.says("a", m.ManifestPart(first_byte=16, total_bytes=101, data=bytes(16)))
    assert "100 bytes and then of 101" in story.last("a", m.Refused).text


def test_another_manifest_than_the_one_offered_is_refused_and_not_kept() -> None:
    story = a_story()
    offering(story, "a")
    for part in parts_of(a_manifest(7)):
        story.says("a", part)
    assert "another manifest than the one it offered" in story.last("a", m.Refused).text
    assert story.agreed_manifest() is None
    story.join("b")
    assert story.last("b", m.Admitted).site_id == 1


def test_bytes_that_are_no_manifest_and_one_without_parameters_are_refused() -> None:
    story = a_story()
    offering(story, "a")
    story.says("a", m.ManifestPart(first_byte=0, total_bytes=5, data=b"\xff" * 5))
    assert story.last("a", m.Refused).kind is RefusedKind.MANIFEST
    story.connect("b")
    frozen = TensorSpec(name="w", shape=(4,), dtype="F32", role=Role.FROZEN)
    story.sites["b"].manifest = Manifest.canonical([frozen])
    digest = story.sites["b"].manifest.digest
    story.says("b", m.Offer(manifest_digest=digest, data_fingerprint=bytes(32), max_retained_bytes=1))
    assert "no trainable parameters" in story.last("b", m.Refused).text


def test_a_model_of_more_chunks_than_the_run_takes_is_refused() -> None:
    story = Story(some_settings(max_chunks=4))
    story.join("a")
    assert "has 5 chunks of 4 elements, a run takes 4" in story.last("a", m.Refused).text
    assert story.agreed_manifest() is None


def test_what_differs_is_named_unless_the_other_manifest_is_much_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    story = a_story()
    story.start("a", "b")
    story.join("c", width=7)
    assert "'bias' is 7 F32 trainable there and 6 F32 trainable in the run" in story.last("c", m.Refused).text
    monkeypatch.setattr(manifests, "MAX_COMPARED_BYTES", 20)
    story.join("d", width=7)
    size = len(wire.encode(a_manifest(7)))
    assert f"its manifest has {size} bytes" in story.last("d", m.Refused).text
    many = Manifest.canonical([TensorSpec(name=f"t{i}", shape=(), dtype="F32", role=Role.TRAINABLE) for i in range(69)])
    monkeypatch.setattr(manifests, "MAX_COMPARED_BYTES", 1 << 20)
    story.connect("e")
    story.sites["e"].manifest = many
    story.says("e", m.Offer(manifest_digest=many.digest, data_fingerprint=bytes(32), max_retained_bytes=1))
    assert "it has 69 tensors" in story.last("e", m.Refused).text
    assert not story.manifest_is_coming()


def test_a_run_takes_so_many_sites_and_another_when_one_has_left() -> None:
    story = a_story(max_sites=2)
    story.start("a", "b")
    story.join("c")
    assert (story.last("c", m.Refused).kind, "run.max_sites = 2" in story.last("c", m.Refused).text) == (
        RefusedKind.FULL,
        True,
    )
    story.offer("a")  # who is in it stays
    assert story.num("a", m.Refused) == 0
    story.says("b", m.Leave(reason="enough"))
    story.join("c")
    assert story.standing_of("c") == "joining"


def test_a_thousand_that_say_hello_and_nothing_more_leave_the_status_small_and_the_run_open() -> None:
    story = a_story(max_sites=100)
    story.start("a", "b")
    size = len(json.dumps(asdict(story.view)))
    for i in range(1000):
        story.connect(f"stranger-{i}")
    view = story.view
    assert view.num_at_the_door == 100
    assert [site.name for site in view.sites if not site.site_id] == sorted(f"stranger-{i}" for i in range(16))
    assert len(json.dumps(asdict(view))) < 10 * size
    refused = story.last("stranger-999", m.Refused)
    assert (refused.kind, "run.max_sites" in refused.text) == (RefusedKind.FULL, True)
    story.drop("b")
    story.connect("b", state=(0, "s0"))  # who was in the run comes back all the same
    assert story.num("b", m.Refused) == 0
    story.drop("stranger-0")
    story.join("c")
    assert story.last("c", m.Admitted).site_id == 3
