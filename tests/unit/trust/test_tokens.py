"""Viewers' tokens: what the run's root has signed, and nothing else."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.authority import Authority
from atoll.coordinator.core import events as e
from atoll.coordinator.enrolment import Enrolment
from atoll.node.daemon.security import page_access
from atoll.protocol.dates import date_of
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.http import Request
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates, tokens
from atoll.protocol.trust.names import Kind, Subject, parse_uri
from atoll.protocol.trust.security import PLAIN, MutualTls
from atoll.protocol.trust.server_tls import ServerTls
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.fuzzing import fuzz

NOW_S = 1.764e9
ROOT = certificates.Root.made(bytes(16), timedelta(days=1), date_of(NOW_S))
OTHER = certificates.Root.made(bytes(16), timedelta(days=1), date_of(NOW_S))
TOKEN = tokens.Token("run", "anna", "0123", 1_764_000_100)
TEXT = tokens.to_text(TOKEN, ROOT.key)


def test_a_token_is_what_the_root_has_signed() -> None:
    assert tokens.from_text(TEXT, [ROOT.certificate]) == TOKEN
    assert tokens.from_text(TEXT, [OTHER.certificate, ROOT.certificate]) == TOKEN, "two roots are in force"
    with pytest.raises(InvalidMessage, match="has not given out"):
        tokens.from_text(TEXT, [OTHER.certificate])
    assert len(TEXT) < 200


@fuzz(200)
@given(st.integers(0, len(TEXT) - 1), st.sampled_from("ABab01-_.= \x00é"))
def test_a_token_that_is_changed_anywhere_is_none(place: int, character: str) -> None:
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    try:
        found = tokens.from_text(changed, [ROOT.certificate])
    except InvalidMessage:
        return
    assert found == TOKEN, "the last character has bits that say nothing"


@pytest.mark.parametrize("text", ["", ".", "x", "a.b.c", "é.é", "x" * 1025, TEXT + "!", TEXT.split(".")[0]])
def test_what_is_no_token_is_said(text: str) -> None:
    with pytest.raises(InvalidMessage):
        tokens.from_text(text, [ROOT.certificate])


def test_what_the_root_signs_for_something_else_is_no_token() -> None:
    said = tokens._bytes(TEXT.split(".")[0])
    for data in (said, b"atoll/another/v1\0" + said):
        text = f"{tokens._text(said)}.{tokens._text(certificates.signature(ROOT.key, data))}"
        with pytest.raises(InvalidMessage):
            tokens.from_text(text, [ROOT.certificate])


class Run:
    """A coordinator's core and its authority, whose clock goes when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.story = Story(some_settings(min_sites=2))
        machine = replace(Machine(), wall_time=lambda: self.story.wall_s)
        self.authority = Authority.opened(folder, "run", machine)
        self._request = 0

        async def ask(asked: e.Asked) -> e.Answer:
            self._request += 1
            outputs = self.story.happens(replace(asked, request=self._request))
            return next(o for o in outputs if isinstance(o, e.Answer))

        self.enrolment = Enrolment(self.authority, PLAIN, self.story.core, ask)

    def token(
        self, name: str = "anna", *, role: str = "viewer", life_s: float = 3600.0, is_of_nodes: bool = False
    ) -> e.Answer:
        asked = e.InviteAsked(role=role, name=name, life_s=life_s, is_token=True, is_of_nodes=is_of_nodes)
        return asyncio.run(self.enrolment.invite(asked, "127.0.0.1:1"))


def test_a_viewer_looks_until_the_token_expires(tmp_path: Path) -> None:
    run = Run(tmp_path / "trust")
    text = run.token().found
    assert run.enrolment.may_look(text)
    assert not run.enrolment.may_look(text + "x")
    run.story.restart()
    again = Enrolment(run.authority, PLAIN, run.story.core, run.enrolment._ask)
    assert again.may_look(text)
    run.story.wall_from_s += 3601
    assert not again.may_look(text)


def test_a_token_that_is_taken_back_is_good_for_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "trust")
    text, other = run.token().found, run.token("otto").found
    run.story.happens(e.TakeBackAsked(role="viewer", name="anna", request=50))
    assert not run.enrolment.may_look(text)
    assert run.enrolment.may_look(other)


def test_what_a_node_is_shown_is_no_token_for_the_coordinator(tmp_path: Path) -> None:
    run = Run(tmp_path / "trust")
    machine = replace(Machine(), wall_time=lambda: run.story.wall_s)
    tls = MutualTls("run", run.authority.shown())
    known: set[str] = set()
    at_node = page_access("0.0.0.0:0", "run", tls, machine, known.__contains__)
    run_token, node_token = run.token().found, run.token(is_of_nodes=True).found

    def seen(token: str) -> bool:
        known.update(run.story.known_tokens())
        return at_node.refusal(Request("GET", "/metrics", {"authorization": f"Bearer {token}"})) is None

    assert (seen(node_token), run.enrolment.may_look(node_token)) == (True, False)
    assert (seen(run_token), run.enrolment.may_look(run_token)) == (False, True)
    run.story.wall_from_s += 3601
    assert not seen(node_token)
    run.story.wall_from_s -= 3601
    known.clear()
    run.story.happens(e.TakeBackAsked(role="viewer", name="anna", request=50))
    assert not seen(node_token)
    run.story.wall_from_s += 3601
    another = MutualTls("run", Authority.opened(tmp_path / "another", "run", machine).shown())
    run.story.wall_from_s -= 3601
    assert page_access("0.0.0.0:0", "run", another, machine, known.__contains__).refusal(
        Request("GET", "/metrics", {"authorization": f"Bearer {node_token}"})
    ), "another run's root has not signed it"


def test_an_invite_is_no_token_and_a_token_no_invite(tmp_path: Path) -> None:
    run = Run(tmp_path / "trust")
    run.story.happens(e.InviteAsked(role="viewer", name="anna", invite_id="0123", request=50))
    assert not run.enrolment.may_look(run.authority.token(e.InviteAsked(role="viewer", name="anna", invite_id="0123")))
    token = run.authority.token_of(run.token().found)
    assert token is not None
    asked = e.JoinAsked(invite_id=token.token_id, key_digest=bytes(32), request=51)
    (answer,) = [o for o in run.story.happens(asked) if isinstance(o, e.Answer)]
    assert "knows no invite" in answer.problem


def test_tokens_are_for_viewers_and_a_year(tmp_path: Path) -> None:
    run = Run(tmp_path / "trust")
    for role in ("site", "operator"):
        assert "a token is for viewers" in run.token(role=role).problem
    assert "at most 366 days" in run.token(life_s=367 * 86_400.0).problem
    assert run.token(life_s=366 * 86_400.0).problem == ""


def test_pages_show_names_and_numbers_of_their_machine_and_are_no_caller(tmp_path: Path) -> None:
    run = Run(tmp_path / "trust")
    shown = run.authority.shown_on_pages(["run.example", "10.0.0.5", "fe80::1"])
    (found,) = certificates.from_pem(shown.certificate)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    page = Subject("run", Kind.PAGE)
    salt = certificates.salt_of(run.authority.root.certificate)
    assert names.get_values_for_type(x509.DNSName) == [page.dns_name(salt), "run.example"]
    assert [str(number) for number in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "fe80::1"]
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [usage._name for usage in usages] == ["serverAuth"]
    assert certificates.subject_of(found) == page == parse_uri(page.uri)
    with pytest.raises(InvalidMessage):
        parse_uri(page.uri + "/x")
    site = run.authority.certify(certificates.new_key().public_key(), Kind.SITE, "a")
    found_site = certificates.from_der(site).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    of_site = found_site.get_values_for_type(x509.DNSName)
    assert Subject("run", Kind.METRICS).dns_name(salt) in of_site, "sites serve their metrics"
    assert page.dns_name(salt) not in of_site, "and never stand in for the coordinator's page"


def test_no_older_tls_is_spoken_and_no_key_is_on_a_disk(tmp_path: Path) -> None:
    run = Run(tmp_path / "trust")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    tls = ServerTls(run.authority.shown_on_pages(["localhost"]))
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
