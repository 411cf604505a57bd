"""The last released protocol, against which `make lint` compares: it is that release's, and what breaks it is found."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from atoll.node.host_protocol import HOSTS_VERSION
from atoll.protocol import PROTOCOL_VERSION
from atoll.protocol.v1 import hosts_pb2
from tests.harness import released


def compared(folder: Path) -> subprocess.CompletedProcess[str]:
    """As `make lint` does it, with the messages that are in that folder."""
    command = [str(released.BUF), "breaking", str(folder), "--against", str(released.IMAGE)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def messages(tmp_path: Path) -> Path:
    """A copy of them, to be changed."""
    shutil.copy(released.ROOT / "buf.yaml", tmp_path)
    shutil.copytree(released.ROOT / "protocol" / "v1", tmp_path / "src" / "atoll" / "protocol" / "v1")
    return tmp_path


def test_what_is_kept_is_the_protocol_of_the_commit_that_it_names(tmp_path: Path) -> None:
    release = released.last_release()
    code = released.code_of(release.commit, tmp_path)
    assert released.image_of(code) == released.IMAGE.read_bytes(), "renew both with `make released`"
    (found,) = released.VERSION.findall((tmp_path / "protocol" / "__init__.py").read_text())
    assert int(found) == release.protocol_version <= PROTOCOL_VERSION
    assert released.hosts_version_of(tmp_path) == release.hosts_version


def fields_of(file: FileDescriptorProto) -> dict[str, list[tuple[object, ...]]]:
    return {
        message.name: [(f.name, f.number, f.type, f.label, f.type_name) for f in message.field]
        for message in file.message_type
    }


def test_hosts_of_two_releases_that_say_other_things_to_each_other_have_other_versions() -> None:
    """They refuse each other by that; sites of a run, which may be of two releases, have PROTOCOL_VERSION."""
    (before,) = (
        file
        for file in FileDescriptorSet.FromString(released.IMAGE.read_bytes()).file
        if file.name.endswith("v1/hosts.proto")
    )
    now = FileDescriptorProto()
    hosts_pb2.DESCRIPTOR.CopyToProto(now)
    version = released.last_release().hosts_version
    if fields_of(now) == fields_of(before):
        assert version == HOSTS_VERSION
    else:
        assert version < HOSTS_VERSION, "raise HOSTS_VERSION in node/host_protocol.py"


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("common.proto", "uint32 protocol_version = 1;", "uint32 protocol_version = 99;", "deleted"),
        ("session.proto", "bytes signing_request = 1;", "uint64 signing_request = 1;", "changed"),
    ],
    ids=["another number", "another type"],
)
def test_a_field_of_another_number_or_type_is_found(
    messages: Path, file: str, old: str, new: str, problem: str
) -> None:
    path = messages / "src" / "atoll" / "protocol" / "v1" / file
    text = path.read_text()
    assert old in text
    assert compared(messages).returncode == 0
    path.write_text(text.replace(old, new, 1))
    found = compared(messages)
    assert found.returncode != 0
    assert file in found.stdout
    assert problem in found.stdout


def test_the_page_of_the_wire_format_is_of_this_version() -> None:
    assert f"\nVersion {PROTOCOL_VERSION}. " in (released.ROOT / "docs" / "protocol.md").read_text()


def test_a_field_and_a_message_more_break_nothing(messages: Path) -> None:
    path = messages / "src" / "atoll" / "protocol" / "v1" / "common.proto"
    text = path.read_text()
    assert "uint32 protocol_version = 1;" in text
    more = text.replace("uint32 protocol_version = 1;", "uint32 protocol_version = 1;\n  uint32 more = 99;", 1)
    path.write_text(f"{more}\nmessage More {{\n  bool more = 1;\n}}\n")
    assert compared(messages).returncode == 0
