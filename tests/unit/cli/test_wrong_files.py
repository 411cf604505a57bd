"""Files and identities that are not what a command needs: the error names the one that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from atoll.cli import client
from atoll.cli.main import main
from atoll.protocol.errors import ConfigError, PeerError, StateError
from atoll.protocol.trust import certificates, invites, joining
from tests.harness.sockets import free_address
from tests.unit.trust.test_enrolled import ADDRESSES, DAY, NOW_S, ROOT, an_invite, joined


def test_evidence_is_held_against_no_file_that_is_no_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence, root = tmp_path / "commit-7-chunk-3.pb", tmp_path / "root.pem"
    evidence.write_bytes(b"?")
    root.write_text("no root")
    assert main(["evidence", str(evidence), "--root", str(root)]) == ConfigError.exit_code
    assert f"--root {root} is no root of a run" in capsys.readouterr().err
    root.write_bytes(certificates.to_pem(ROOT.certificate))
    assert main(["evidence", str(evidence), "--root", str(root)]) == StateError.exit_code
    assert f"{evidence} shows nothing against a reducer" in capsys.readouterr().err


def test_an_invite_that_is_not_there_is_a_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", str(tmp_path / "none"), "--home", str(tmp_path / "home")]) == ConfigError.exit_code
    assert f"{tmp_path / 'none'}: No such file or directory; name the file that" in capsys.readouterr().err


def test_a_long_file_that_is_no_invite_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_toml, home = tmp_path / "run.toml", tmp_path / "home"
    for text, says in (
        ("# " + 20_000 * "x", "that is no invite: one begins with atoll-invite-"),
        (invites.PREFIX + 20_000 * "x", "that is no invite: one has at most 8192 characters"),
    ):
        run_toml.write_text(text)
        assert main(["join", str(run_toml), "--home", str(home)]) == ConfigError.exit_code
        assert says in capsys.readouterr().err


def test_an_operator_whose_identity_has_expired_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not that nobody answers."""
    joined(tmp_path, replace(an_invite(), role="operator", addresses=(free_address(),)))
    monkeypatch.setattr("time.time", lambda: NOW_S + (366 * DAY).total_seconds())
    assert main(["stop", "--home", str(tmp_path)]) == ConfigError.exit_code
    assert "has expired at" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "10.1.1.1:7700"])
def test_who_looks_sees_the_run_though_the_identity_cannot_be_renewed(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is due for a third of a year, and is renewed where the run was seen: the addresses of the invite may be of
    another network."""
    joined(tmp_path, replace(an_invite(), role="viewer"))
    document, asked = {"root": certificates.to_pem(ROOT.certificate).decode()}, []

    async def renews(tls: object, addresses: Sequence[str], subject: object) -> NoReturn:
        asked.append(list(addresses))
        raise PeerError("the coordinator does not answer")

    monkeypatch.setattr("time.time", lambda: NOW_S + (300 * DAY).total_seconds())
    monkeypatch.setattr(client, "status_by", lambda *_, **__: document)
    monkeypatch.setattr(joining, "renew_identity", renews)
    for _ in range(2):
        assert client.status_of(tmp_path, address) is document
    assert asked == 2 * [[address] if address else list(ADDRESSES)]
    assert capsys.readouterr().err == (
        f"atoll: what is in {tmp_path} is not renewed yet: the coordinator does not answer\n"
    ), "once"
