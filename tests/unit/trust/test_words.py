"""Words of sites that they have signed: whoever has the root knows whose they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll.protocol.errors import InvalidMessage
from atoll.protocol.messages import Member, Plan, Signature, Tree
from atoll.protocol.spec import spec_of
from atoll.protocol.sync_settings import SyncSettings
from atoll.protocol.trust import words
from atoll.protocol.trust.names import Kind
from tests.harness.site_keys import SiteKeys

KEYS = SiteKeys("run")
A = Member(site_id=1, incarnation=2, address="a:1", name="a")
WORD = words.of_contributions("run", 5, (1, 2), b"r" * 32)
PLAN = Plan(
    sync=5, attempt=2, term=3, fragment=0, base_commit=4, num_steps=1, contributors=(replace(A, tokens=7),),
    receivers=(), trees=(Tree(first_chunk=0, num_chunks=2, parents=(), top=0),), deadline_s=1, stall_limit_s=1,
    slowest_bytes_per_s=1,
)  # fmt: skip
WAY = spec_of(SyncSettings(audits=1), 4, 0).trainable


def test_a_word_is_of_who_signed_it_and_of_nothing_else() -> None:
    signature = KEYS.words("a").signed(WORD)
    reader = KEYS.words("b")
    reader.check(A, WORD, signature)
    for name, word in (("a", WORD + b"!"), ("b", WORD)):
        with pytest.raises(InvalidMessage):
            reader.check(replace(A, name=name, site_id=9), word, signature)
    with pytest.raises(InvalidMessage, match="that is not signed"):
        reader.check(A, WORD, None)
    digest = KEYS.certified("a").key_digest
    assert words.is_by(digest, WORD, signature)
    assert not words.is_by(KEYS.certified("b").key_digest, WORD, signature)
    assert not words.is_by(digest, b"other", signature)
    assert not words.is_by(digest, WORD, Signature(value=signature.value, certificate=b"none"))
    assert not words.is_by(digest, WORD, Signature(value=b"none", certificate=signature.certificate))


def test_a_certificate_of_another_root_another_kind_or_another_run_is_none() -> None:
    for other, problem in (
        (SiteKeys("run").words("a"), "no root of the run has signed"),
        (SiteKeys("other").words("a"), "with the certificate of"),
        (words.Words("run", SiteKeys("run").tls("a", Kind.SITE)), "with the certificate of"),
    ):
        with pytest.raises(InvalidMessage, match=problem):
            KEYS.words("b").check(A, WORD, other.signed(WORD))


def test_a_start_of_a_site_signs_with_one_key_whatever_certificates_are_made() -> None:
    keys = SiteKeys("run")
    reader = keys.words("b")
    reader.check(A, WORD, keys.words("a").signed(WORD))
    keys.tls("a", anew=True)
    forged = keys.words("a").signed(WORD)
    with pytest.raises(InvalidMessage, match="another key"):
        reader.check(A, WORD, forged)
    reader.check(replace(A, incarnation=3), WORD, forged)


@pytest.mark.parametrize(
    "changes",
    [
        {"sync": 6}, {"attempt": 3}, {"term": 4}, {"fragment": 1}, {"base_commit": 5},
        {"contributors": (replace(A, tokens=8),)}, {"contributors": (replace(A, influence=8),)},
        {"contributors": (A, A)},
    ],
)  # fmt: skip
def test_what_is_signed_of_payloads_says_of_which_attempt_and_with_which_weights(changes: dict[str, Any]) -> None:
    word = words.of_payloads("run", PLAN, WAY, (1, 2), b"r" * 32)
    assert words.of_payloads("run", replace(PLAN, **changes), WAY, (1, 2), b"r" * 32) != word


def test_what_is_signed_says_of_which_run_start_root_and_way() -> None:
    found = [
        words.of_payloads(run_id, PLAN, way, start, root)
        for run_id in ("run", "other")
        for way in (WAY, replace(WAY, down="bf16"), replace(WAY, robust="trim", trim=2), replace(WAY, clip=9.0))
        for start in ((1, 2), (1, 3), (2, 2))
        for root in (b"r" * 32, b"s" * 32)
    ]
    found += [
        words.of_contributions(run_id, sync, start, root)
        for run_id in ("run", "other")
        for sync in (5, 6)
        for start in ((1, 2), (1, 3), (2, 2))
        for root in (b"r" * 32, b"s" * 32)
    ]
    assert len(set(found)) == len(found)
