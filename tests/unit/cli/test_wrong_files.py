"""Files and identities that are not what a command needs: the error names the one that is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.protocol.errors import ConfigError, StateError
from atoll.protocol.trust import certificates
from tests.harness.sockets import free_address
from tests.unit.trust.test_enrolled import DAY, NOW_S, ROOT, an_invite, joined


def test_evidence_is_held_against_no_file_that_is_no_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence, root = tmp_path / "commit-7-chunk-3.pb", tmp_path / "root.pem"
    evidence.write_bytes(b"?")
    root.write_text("no root")
    assert main(["evidence", str(evidence), "--root", str(root)]) == ConfigError.exit_code
    assert f"--root {root} is no root of a run" in capsys.readouterr().err
    root.write_bytes(certificates.to_pem(ROOT.certificate))
    assert main(["evidence", str(evidence), "--root", str(root)]) == StateError.exit_code
    assert f"{evidence} shows nothing against a reducer" in capsys.readouterr().err


def test_an_operator_whose_identity_has_expired_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not that nobody answers."""
    joined(tmp_path, replace(an_invite(), role="operator", addresses=(free_address(),)))
    monkeypatch.setattr("time.time", lambda: NOW_S + (366 * DAY).total_seconds())
    assert main(["stop", "--home", str(tmp_path)]) == ConfigError.exit_code
    assert "has expired at" in capsys.readouterr().err
