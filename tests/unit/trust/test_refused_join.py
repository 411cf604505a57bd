"""What a refused join leaves of a home: all that others made, and nothing that it made itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.cli.join import enrol
from atoll.node.daemon import home as homes
from atoll.protocol import disk as disks
from atoll.protocol.errors import HostError, InvalidMessage, RefusedError
from atoll.protocol.trust import enrolled, joining
from tests.unit.trust.test_enrolled import an_invite, joined


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, then: Callable[[], object] = list) -> None:
    """Each join from here on, once `then` has been called."""

    async def refused(*_of_join: object) -> None:
        then()
        raise error or RefusedError("the invite was used")

    monkeypatch.setattr(joining, "join", refused)


def in_folder(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_a_home_that_it_made_is_gone(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    refuse(monkeypatch)
    with pytest.raises(RefusedError, match="the invite was used"):
        enrol(an_invite(), home)
    assert not home.exists()


def test_a_home_that_somebody_enrolled_since_it_looked_stays(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """It looked before it had the lock, and another join went through in between."""
    refuse(monkeypatch)
    real = disks.make_folder

    def made_by_both(folder: Path) -> None:
        monkeypatch.setattr(homes, "make_folder", real)
        real(folder)
        joined(folder, an_invite("i2"))
        with homes.locked(folder):
            pass

    monkeypatch.setattr(homes, "make_folder", made_by_both)
    with pytest.raises(RefusedError, match="the invite was used"):
        enrol(an_invite(), home)
    kept = {f"{enrolled.FOLDER}/{name}" for name in (enrolled.IDENTITY, enrolled.ROOTS, enrolled.COORDINATOR)}
    assert in_folder(home) == {homes.LOCK, enrolled.FOLDER, *kept}
    assert enrolled.joined(home).invite_id == "i2"


def test_a_home_with_anything_else_in_it_stays(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    refuse(monkeypatch, then=lambda: (home / "notes").write_text("of a person"))
    with pytest.raises(RefusedError):
        enrol(an_invite(), home)
    assert in_folder(home) == {homes.LOCK, "notes"}


def test_a_folder_that_was_there_stays_without_the_key(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    home.mkdir()
    refuse(monkeypatch)
    with pytest.raises(RefusedError):
        enrol(an_invite(), home)
    assert in_folder(home) == {homes.LOCK}


@pytest.mark.parametrize("error", [RefusedError("the invite was used"), InvalidMessage("the answer is cut off")])
def test_a_key_that_may_be_asked_for_again_stays(
    monkeypatch: pytest.MonkeyPatch, home: Path, error: RefusedError
) -> None:
    """One that an earlier call made, and one whose answer broke on its way."""
    invite = an_invite()
    if not isinstance(error, InvalidMessage):
        refuse(monkeypatch, HostError("nobody answers"))
        with pytest.raises(HostError):
            enrol(invite, home)
    refuse(monkeypatch, error)
    with pytest.raises(type(error)):
        enrol(invite, home)
    assert in_folder(home) == {homes.LOCK, enrolled.FOLDER, f"{enrolled.FOLDER}/{invite.invite_id}.key"}


def test_what_cannot_be_removed_does_not_hide_the_refusal(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """On NFS a file that is open is renamed when it is removed, and its folder is not empty."""

    def not_empty(folder: Path) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr(Path, "rmdir", not_empty)
    refuse(monkeypatch)
    with pytest.raises(RefusedError, match="the invite was used"):
        enrol(an_invite(), home)


def test_a_lock_of_a_home_that_was_removed_holds_nothing(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """A refused join removes it between another one's opening of the lock and its taking."""
    real = fcntl.flock

    def removed_before(descriptor: int, operation: int) -> None:
        os.unlink(home / homes.LOCK)
        home.rmdir()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with pytest.raises(HostError, match="was removed meanwhile"):
        enrol(an_invite(), home)
    assert not home.exists()
