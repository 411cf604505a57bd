"""A node's own folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atoll.node.daemon.home import Home
from atoll.protocol.errors import HostError


def test_a_home_keeps_its_key_and_counts_starts(tmp_path: Path) -> None:
    first = Home(tmp_path / "home")
    with pytest.raises(HostError, match="in use by another node"):
        Home(tmp_path / "home")
    first.close()
    second = Home(tmp_path / "home")
    second.close()
    assert (second.key, second.incarnation) == (first.key, first.incarnation + 1)


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
