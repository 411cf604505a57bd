"""The run's root on the coordinator's disk."""

from __future__ import annotations

import stat
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from atoll.coordinator.authority import Authority, folder_of
from atoll.coordinator.core.events import InviteAsked
from atoll.protocol.errors import ConfigError, HostError
from atoll.protocol.machine import Machine
from atoll.protocol.trust import certificates, renewing
from atoll.protocol.trust.invites import from_text
from atoll.protocol.trust.names import Kind, Subject

NOW_S = 1_764_000_000.0
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
