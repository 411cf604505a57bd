"""The run's root on the coordinator's disk."""

from __future__ import annotations

import asyncio
import shutil
import stat
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from atoll.coordinator.authority import Authority, folder_of
from atoll.coordinator.core import events as e
from atoll.coordinator.core.events import InviteAsked
from atoll.coordinator.rotation import Rotation
from atoll.coordinator.stage import Stage
from atoll.protocol.dates import date_of
from atoll.protocol.errors import ConfigError, HostError, InvalidMessage, StaleError
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates, renewing, tokens
from atoll.protocol.trust.invites import from_text
from atoll.protocol.trust.names import Kind, Subject

NOW_S = 1_764_000_000.0
NOW = date_of(NOW_S)
MACHINE = replace(Machine(), wall_time=lambda: NOW_S)


def opened(folder: Path) -> Authority:
    return Authority.opened(folder, "run", MACHINE)


def test_a_root_is_made_once_for_this_user_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run.db")
    first = opened(folder)
    assert folder.name == "run.db.trust"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "root.key").stat().st_mode) == 0o600
    again = opened(folder)
    assert again.roots == first.roots
    assert certificates.key_to_bytes(again.root.key) == certificates.key_to_bytes(first.root.key)
    assert opened(tmp_path / "another").roots != first.roots


def test_a_start_that_broke_off_while_the_root_was_made_makes_another(tmp_path: Path) -> None:
    first = opened(tmp_path / "trust")
    (tmp_path / "trust" / "root.pem").unlink()
    assert opened(tmp_path / "trust").roots != first.roots


def test_a_root_that_others_can_read_or_that_is_damaged_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "trust"
    opened(folder)
    key = (folder / "root.key").read_bytes()
    (folder / "root.key").chmod(0o644)
    with pytest.raises(HostError, match="can be read by other users"):
        opened(folder)
    (folder / "root.key").chmod(0o600)
    (folder / "root.key").write_bytes(certificates.key_to_pem(certificates.new_key()))
    with pytest.raises(ConfigError, match=r"root.key is not the key of root.pem"):
        opened(folder)
    (folder / "root.key").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="not a key"):
        opened(folder)
    (folder / "root.key").unlink()
    with pytest.raises(HostError, match=r"root.pem is there without root.key"):
        opened(folder)
    (folder / "root.key").write_bytes(key)
    (folder / "root.key").chmod(0o600)
    assert opened(folder)


def test_files_that_systemd_gives_the_service_may_look_as_if_a_group_could_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoadCredential= from systemd 254 on: the files are root's, an access list has the service's user."""
    folder = tmp_path / "trust"
    first = opened(folder)
    (folder / "root.key").chmod(0o440)
    folder.chmod(0o550)
    with pytest.raises(HostError, match="can be read by other users"):
        opened(folder)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(HostError, match="can be read by other users"):
        opened(folder)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))
    assert opened(folder).roots == first.roots


@pytest.mark.parametrize(("kind", "life"), [(Kind.SITE, 1), (Kind.SITE_IDENTITY, 365), (Kind.VIEWER, 365)])
def test_what_it_signs_is_of_whom_it_says_for_as_long_as_that_kind_lives(tmp_path: Path, kind: Kind, life: int) -> None:
    key = certificates.new_key()
    found = certificates.from_der(opened(tmp_path / "trust").certify(key.public_key(), kind, "a"))
    assert certificates.subject_of(found) == Subject("run", kind, "a")
    assert certificates.digest_of(found) == certificates.key_digest(key.public_key())
    assert found.not_valid_after_utc.timestamp() == NOW_S + timedelta(days=life).total_seconds()


def test_an_invite_holds_as_long_as_was_asked(tmp_path: Path) -> None:
    asked = InviteAsked(role="site", name="berlin", life_s=7200.0, invite_id="0123")
    invite = from_text(opened(tmp_path / "trust").invite(asked, ("10.0.0.1:7700",)))
    assert (invite.run_id, invite.role, invite.name) == ("run", "site", "berlin")
    assert (invite.invite_id, invite.expires_s) == ("0123", NOW_S + 7200.0)


def test_what_is_shown_is_due_at_two_thirds_of_its_life(tmp_path: Path) -> None:
    assert renewing.due_s(opened(tmp_path / "trust").shown()) == NOW_S + 16 * 3600


# --- a root of one's own


def given(folder: Path, key: Any = None, **changed: Any) -> None:
    """An authority that a company's own has signed, as the files of a root."""
    key = key or certificates.new_key()
    values: dict[str, Any] = {
        "ca": True,
        "path_length": 0,
        "may_sign": True,
        "since": NOW - timedelta(days=30),
        "until": NOW + timedelta(days=300),
        "shown": key,
    } | changed
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=values["may_sign"], crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    above = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "A Company")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "A Company's Training")]))
        .issuer_name(above)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(values["since"])
        .not_valid_after(values["until"])
        .add_extension(x509.BasicConstraints(ca=values["ca"], path_length=values["path_length"]), critical=True)
        .add_extension(usage, critical=True)
        .sign(certificates.new_key(), hashes.SHA256())
    )
    folder.mkdir(mode=0o700)
    pem = values["shown"].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "root.key").write_bytes(pem)
    (folder / "root.key").chmod(0o600)
    (folder / "root.pem").write_bytes(certificates.to_pem(certificate))


def test_a_companys_own_authority_is_the_root_of_a_run(tmp_path: Path) -> None:
    given(tmp_path / "trust")
    authority = opened(tmp_path / "trust")
    invite = from_text(authority.invite(InviteAsked(role="site", name="a", invite_id="01"), ("10.0.0.1:7700",)))
    assert certificates.to_der(invite.root) == authority.roots[0]
    key = certificates.new_key()
    site = certificates.from_der(authority.certify(key.public_key(), Kind.SITE, "a"))
    assert certificates.is_signed_by(site, authority.root.certificate)
    salt = certificates.salt_of(authority.root.certificate)
    assert salt == certificates.salt_of(opened(tmp_path / "trust").root.certificate)
    names = site.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert Subject("run", Kind.SITE, "a").dns_name(salt) in names.get_values_for_type(x509.DNSName)
    year = certificates.from_der(authority.certify(key.public_key(), Kind.SITE_IDENTITY, "a"))
    assert year.not_valid_after_utc == NOW + timedelta(days=300), "not longer than the authority itself"
    with pytest.raises(ConfigError, match="atoll makes no other in its place"):
        authority.after("make")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ca": False, "path_length": None}, "is no authority: it may sign no certificates"),
        ({"may_sign": False}, "is no authority: it may sign no certificates"),
        ({"path_length": None}, "may sign other authorities: have one made with path length 0"),
        ({"path_length": 1}, "may sign other authorities"),
        ({"until": NOW - timedelta(days=1)}, "the root has expired at"),
        ({"since": NOW + timedelta(days=1)}, "the root holds from"),
        ({"shown": certificates.new_key()}, r"root.key is not the key of root.pem"),
        ({"key": ec.generate_private_key(ec.SECP384R1())}, "not of the curve P-256"),
        ({"key": rsa.generate_private_key(65537, 2048)}, "not of the curve P-256"),
    ],
)
def test_what_cannot_be_the_root_of_a_run_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], text: str
) -> None:
    given(tmp_path / "trust", **changed)
    with pytest.raises(ConfigError, match=text):
        opened(tmp_path / "trust")


# --- another root in its place


def test_another_root_takes_its_place_in_three_steps_that_outlive_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "trust"
    authority = opened(folder)
    first, secret = authority.root.certificate, authority.secret
    token = authority.token(InviteAsked(role="viewer", name="v", invite_id="01", is_token=True))

    def signed(by: Authority) -> list[bool]:
        """Whether the first root has signed what sites get, what the coordinator shows, and a new token."""
        site = certificates.from_der(by.certify(certificates.new_key().public_key(), Kind.SITE, "a"))
        own = certificates.from_pem(by.shown().certificate)[0]
        text = by.token(InviteAsked(role="viewer", name="v", invite_id="01", is_token=True))
        try:
            tokens.from_text(text, [first])
        except InvalidMessage:
            of_token = False
        else:
            of_token = True
        return [certificates.is_signed_by(site, first), certificates.is_signed_by(own, first), of_token]

    assert (authority.has_next, authority.has_old) == (False, False)
    steps = (
        ("make", 2, (True, False), [True, True, True], True),
        ("sign", 2, (False, True), [False, True, False], True),
        ("retire", 1, (False, False), [False, False, False], False),
    )
    for step, num_roots, phase, by_first, is_token in steps:
        assert authority.follow(authority.after(step))
        for found in (authority, opened(folder)):
            assert len(found.roots) == len(certificates.from_pem(found.shown().roots)) == num_roots
            assert (found.has_next, found.has_old) == phase
            assert signed(found) == by_first
            assert found.roots[0] == certificates.to_der(found.root.certificate), "the first one signs"
            assert (found.token_of(token) is not None) == is_token
            assert found.secret == secret, "what sites have kept for the coordinator stays of use"
            invite = from_text(found.invite(InviteAsked(role="site", name="a", invite_id="02"), ("10.0.0.1:7700",)))
            shown = certificates.from_pem(found.shown().certificate)[0]
            assert certificates.is_signed_by(shown, invite.root), "whoever is invited knows the coordinator by it"
    assert certificates.salt_of(authority.root.certificate) == certificates.salt_of(first)
    authority.follow(authority.after("make"))
    assert len(opened(folder).roots) == 2
    assert authority.root.certificate.subject != certificates.from_der(authority.roots[1]).subject


class Steps:
    """Of a rotation: who is here, and what has been heard of whom."""

    def __init__(self, folder: Path, leading: Any = None) -> None:
        self.now_s = NOW_S
        self.authority = Authority.opened(folder, "run", replace(Machine(), wall_time=lambda: self.now_s))
        self.asked: list[e.Asked] = []
        self.here = ["a"]
        self.behind: set[Subject] = set()
        watchers: Any = SimpleNamespace(changed=lambda: None, behind=self._behind)
        self.rotation = Rotation(self.authority, watchers, self._ask, lambda: self.here, leading)

    def _behind(self, expected: set[Subject]) -> list[str]:
        return sorted(map(str, expected & self.behind))

    async def _ask(self, asked: e.Asked) -> e.Answer:
        self.asked.append(asked)
        return e.Answer(0, "", "site c")

    def step(self, step: str, *, at_once: bool = False) -> tuple[str, str]:
        answer = asyncio.run(self.rotation.ask(e.RotateAsked(step=step, at_once=at_once)))
        return answer.problem, answer.found


def test_a_step_that_would_cut_somebody_off_is_refused(tmp_path: Path) -> None:
    run = Steps(tmp_path / "trust")
    assert "there is no next root" in run.step("sign")[0]
    assert "no old root is trusted" in run.step("retire", at_once=True)[0]
    assert "'turn' is no step" in run.step("turn")[0]
    assert run.asked == [], "what is refused is decided by nobody"
    told: list[int] = []
    run.authority.told.append(lambda: told.append(len(run.authority.roots)))
    assert run.step("make") == ("", "")
    assert "a rotation has begun" in run.step("make")[0]
    run.behind = {Subject("run", Kind.SITE_IDENTITY, "a")}
    assert "these do not trust the next root yet: site a of run run" in run.step("sign")[0]
    run.behind = set()
    assert run.step("sign") == ("", "")
    run.now_s += 86_399
    assert "in use until 2025-11-25 16:00:00 UTC" in run.step("retire")[0]
    run.now_s += 1
    assert run.step("retire") == ("", "site c")
    assert told == [2, 2, 1]
    assert [asked.step for asked in run.asked if isinstance(asked, e.RotateAsked)] == ["make", "sign", "retire"]


def test_where_the_root_was_stolen_nobody_is_waited_for(tmp_path: Path) -> None:
    run = Steps(tmp_path / "trust")
    run.step("make")
    run.behind = {Subject("run", Kind.SITE_IDENTITY, "a")}
    assert run.step("sign", at_once=True) == ("", "")
    assert run.step("retire", at_once=True) == ("", "site c")


def test_whoever_stands_by_is_brought_the_next_root_before_all_trust_it(tmp_path: Path) -> None:
    """A person copies the key; the stage comes by the store, step by step, and is followed there."""
    here, there = tmp_path / "here", tmp_path / "there"
    first = opened(here)
    shutil.copytree(here, there)
    standby = opened(there)
    stages: list[Stage] = []
    is_over = False

    class Leads:
        """As `Leading`: `standby` says what it has."""

        def lacking(self, root: str) -> tuple[str, ...]:
            return () if root in standby.held() else ("b:1",)

        async def keep_stage(self, stage: Stage) -> None:
            if is_over:
                raise StaleError("the lease is over")
            stages.append(stage)

    run = Steps(here, Leads())
    for _ in range(2):
        problem = run.step("make")[0]
        assert "these stand by and have not the next root" in problem
        assert f"b:1; copy root-2.pem and root-2.key of {here} into the folder" in problem
    assert run.authority.stage == standby.stage == first.stage
    assert sorted(path.name for path in here.glob("*.key")) == ["root-2.key", "root.key"], "one was made"
    for name in ("root-2.key", "root-2.pem"):
        assert "b:1" in run.step("make")[0]
        shutil.copy(here / name, there / name)
    is_over = True
    assert run.step("make")[0] == "the lease is over"
    assert run.authority.stage == first.stage, "what others would not hear is not in force"
    is_over = False

    for step in ("make", "sign", "retire"):
        assert run.step(step, at_once=True)[0] == ""
        assert standby.follow(stages[-1])
        assert not standby.follow(stages[-1])
        for found in (standby, opened(there)):
            assert found.stage == run.authority.stage == stages[-1]
            assert found.roots == run.authority.roots
    assert len(stages) == 3


def test_where_the_root_was_stolen_whoever_stands_by_is_not_waited_for_and_does_not_lead(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    opened(here)
    shutil.copytree(here, there)
    standby = opened(there)

    async def keep_stage(stage: Stage) -> None:
        pass

    run = Steps(here, SimpleNamespace(lacking=lambda root: ("b:1",), keep_stage=keep_stage))
    assert "have not the next root" in run.step("make")[0]
    assert run.step("make", at_once=True)[0] == ""
    assert "have not the next root" in run.step("sign")[0]
    assert run.step("sign", at_once=True)[0] == ""
    before = standby.stage
    with pytest.raises(ConfigError, match="the run's root is another one"):
        standby.follow(run.authority.stage)
    assert standby.stage == opened(there).stage == before
