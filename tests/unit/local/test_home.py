"""A node's own folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from atoll.node.daemon.home import Home
from atoll.node.daemon.journal import Journal
from atoll.node.daemon.site_log import site_log_handler
from atoll.node.dataplane.payload_log import PayloadLog
from atoll.node.dataplane.snapshot import Snapshots
from atoll.node.exchange.peers.frames import Encoded
from atoll.node.exchange.sync.spill import Spill
from atoll.protocol.errors import HostError
from atoll.protocol.plans import payload_hash
from atoll.protocol.settings import RunSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.data_plane import RUN, layout, seeded


def test_a_home_keeps_its_key_and_counts_starts(tmp_path: Path) -> None:
    first = Home(tmp_path / "home")
    with pytest.raises(HostError, match="in use by another node"):
        Home(tmp_path / "home")
    first.close()
    second = Home(tmp_path / "home")
    second.close()
    assert (second.key, second.incarnation) == (first.key, first.incarnation + 1)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_home_that_others_can_open_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    Home(tmp_path / "home").close()
    (tmp_path / "home").chmod(mode)
    with pytest.raises(HostError, match=f"is open to other users .mode {mode:o}.*chmod 700"):
        Home(tmp_path / "home")
    (tmp_path / "home").chmod(0o700)
    Home(tmp_path / "home").close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_a_home_of_another_user_or_below_another_users_folder_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    Home(theirs / "home").close()
    os.chown(theirs / "home", 12345, 12345)
    with pytest.raises(HostError, match="belongs to user 12345, and this node runs as user 0"):
        Home(theirs / "home")
    os.chown(theirs / "home", 0, 0)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(HostError, match="user 12345 can put another folder in its place"):
        Home(theirs / "home")


def test_a_home_below_a_folder_that_everybody_can_change_is_refused_unless_it_is_sticky(tmp_path: Path) -> None:
    Home(tmp_path / "shared" / "home").close()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(HostError, match="every user can put another folder in its place"):
        Home(tmp_path / "shared" / "home")
    (tmp_path / "shared").chmod(0o1777)
    Home(tmp_path / "shared" / "home").close()


def test_what_a_node_keeps_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        home = Home(tmp_path / "home")
        Journal(home.folder / "journal.jsonl").close()
        (home.folder / "node.log").touch(mode=0o644)  # an older version's
        site_log_handler(home.folder / "node.log").close()
        used = layout()
        outer = seeded(home.state_folder, used)
        Snapshots(home.snapshot_folder, used, ("momentum",), RUN, lambda: None).write(outer, 2, 0)
        log = PayloadLog(home.payload_folder, used, RunSettings(run_id=RUN, sync=SyncSettings(log_commits=4)))
        log.begin(1, 1, 1)
        log.close()
        spill = Spill(home.spill_folder)
        spill.keep(Encoded(0, b"x", payload_hash(b"x")))
        home.keep_branch(2)
        home.close()
    finally:
        os.umask(before)
    paths = [home.folder, *home.folder.rglob("*")]
    assert {path.parent.name for path in paths} >= {"state", "snapshots", "payloads", "contributions", "home"}
    open_ones = {str(path): oct(path.stat().st_mode & 0o777) for path in paths if path.stat().st_mode & 0o077}
    assert not open_ones


def test_a_copy_of_a_home_has_the_same_key_and_count_and_is_another_process(tmp_path: Path) -> None:
    Home(tmp_path / "home").close()
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    first, second = Home(tmp_path / "home"), Home(tmp_path / "copy")
    first.close()
    second.close()
    assert (second.key, second.incarnation) == (first.key, first.incarnation)
    assert second.process_id != first.process_id


def test_what_a_killed_node_left_outside_of_its_home_goes_at_its_next_start(tmp_path: Path) -> None:
    left_over, foreign = tmp_path / "atoll-x", tmp_path / "texts"
    for folder in (left_over, foreign):
        folder.mkdir()
        (folder / "node.sock").touch()
        killed = Home(tmp_path / "home")
        killed.note_socket_folder(folder)
        killed.close()
        Home(tmp_path / "home").close()
    assert not left_over.exists()
    assert foreign.exists()  # a note that does not name such a folder removes nothing


@pytest.mark.parametrize("text", ["-5", "9" * 25, "seven", ""])
def test_a_count_of_starts_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    Home(tmp_path / "home").close()
    (tmp_path / "home" / "incarnation").write_text(text)
    for _ in range(2):  # and the folder is not left locked
        with pytest.raises(HostError, match="is not a count"):
            Home(tmp_path / "home")


def test_a_note_that_is_no_path_is_passed_over(tmp_path: Path) -> None:
    Home(tmp_path / "home").close()
    (tmp_path / "home" / "socket_folder").write_bytes(b"atoll-\0")
    Home(tmp_path / "home").close()
