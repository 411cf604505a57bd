"""Curves for tools: only what is new, each series by itself, in the format that TensorBoard reads."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.tensorboard import TensorBoard, crc32c, record, scalar
from atoll.coordinator.tracking import Tracking
from atoll.protocol.errors import HostError


def records(data: bytes) -> Iterator[bytes]:
    """Checked as a reader does it."""
    while data:
        (length,) = struct.unpack_from("<Q", data)
        found = data[12 : 12 + length]
        assert record(found) == data[: 16 + length]
        yield found
        data = data[16 + length :]


def test_bytes_are_those_of_the_format() -> None:
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"
    assert crc32c(bytes(32)) == 0x8A9136AA, "RFC 3720, B.4"
    assert scalar("t", 300, 1.5, 2.25).hex() == "09000000000000f83f10ac022a0a0a080a01741500001040"


def a_document(*steps: int) -> dict[str, Any]:
    points = [(step, 10 * step, 1000.0 + step, 1.0 / step) for step in steps]
    sites = [{"site": "a", "name": "val_loss", "of_outer": outer, "points": points} for outer in (False, True)]
    return {"run": [(1, 10, None, 2.0)], "sites": sites}


def test_each_point_is_told_once(tmp_path: Path) -> None:
    document = a_document(1, 2)

    async def curves() -> dict[str, Any]:
        return document

    async def main() -> None:
        nonlocal document
        tracking = Tracking(TensorBoard(tmp_path, "events", lambda: 7.0), curves)
        await tracking.tell()
        document = a_document(1, 2, 4)
        await tracking.tell()
        await tracking.tell()

    asyncio.run(main())
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.0")) == [
        "run/events.0",
        "sites/a/events.0",
    ]
    begins, *of_site = records((tmp_path / "sites/a/events.0").read_bytes())
    assert begins.endswith(b"brain.Event:2")
    expected = [
        scalar(tag, step, 1000.0 + step, 1.0 / step)
        for steps in ((1, 2), (4,))
        for tag in ("val_loss", "val_loss of the outer parameters")
        for step in steps
    ]
    assert of_site == expected


def test_what_cannot_be_written_is_said_and_nothing_stands_behind_a_record_that_was_cut_off(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "here", "events", lambda: 7.0)
    (tmp_path / "here").write_text("a file")
    board.write("run", "loss", 1, 1.0, 2.0)
    with pytest.raises(HostError, match="here"):
        board.flush()
    (tmp_path / "here").unlink()
    board.write("run", "loss", 2, 1.0, 2.0)
    board.flush()
    begins, written = records((tmp_path / "here/run/events.1").read_bytes())
    assert (begins.endswith(b"brain.Event:2"), written) == (True, scalar("loss", 2, 1.0, 2.0))
