"""docs/parallelism.md has a row for each technique, and each row has what it promises: in few words what it is, its
option, what of torch is behind it, and a test that has a layout with that option."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from atoll.node.parallel.settings import DIMENSIONS, SCHEDULES, ParallelSettings, parse
from tests.process.test_layouts import COMPILED, LAYOUTS

ROOT = Path(__file__).resolve().parents[3]
TECHNIQUES = {
    "data parallel, DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP2", "HSDP", "tensor parallel", "sequence parallel",
    "context parallel, Ulysses", "context parallel, ring", "both", "pipeline", "its schedules", "expert parallel",
    "activation checkpointing", "accumulation", "mixed precision", "CPU offload", "compilation",
}  # fmt: skip
THREE_LINES = 3 * 120
SIZES = str.maketrans("NM", "44")
"""What stands for any number on the page."""
SOURCES = "\n".join(path.read_text() for part in ("parallel", "worker") for path in (ROOT / "node" / part).glob("*.py"))
SCHEDULE_CLASSES = {f"Schedule{name}" for name in SCHEDULES.values()}
"""Which the code names without their prefix."""
GROUPS = [cast(tuple[int, list[str]], group.values) for group in LAYOUTS]
TEXTS = [*(text for _, texts in GROUPS for text in texts), *(text for _, text in COMPILED)]
TESTED = [parse(text.rpartition(" ")[2]) for text in TEXTS]
RESOLVED = [parse(text.rpartition(" ")[2]).resolved(num_ranks) for num_ranks, texts in GROUPS for text in texts]


class Row(NamedTuple):
    technique: str
    what: str
    option: str
    torch: str
    shown_by: str


def rows() -> dict[str, Row]:
    """What says "the same" is shown by what shows the row before it."""
    found: dict[str, Row] = {}
    table = (ROOT / "docs" / "parallelism.md").read_text().partition("| technique |")[2]
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        row = Row(*(cell.strip() for cell in line.strip("|").split("|")))
        if row.shown_by.startswith("the same"):
            row = row._replace(shown_by=list(found.values())[-1].shown_by)
        found[row.technique] = row
    return found


ROWS = rows()


def test_it_has_a_row_for_each_technique_and_says_each_setting() -> None:
    assert set(ROWS) == TECHNIQUES
    said = " ".join(row.option for row in ROWS.values())
    assert not [f.name for f in fields(ParallelSettings) if f"{f.name}=" not in said]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_has_all_four(row: Row) -> None:
    assert all(row)
    assert len(row.what) <= THREE_LINES
    names = re.findall(r"`(?:\w+\.)?(\w+)", row.torch)
    assert names or row.torch == "both"
    unused = [name for name in names if name not in SOURCES and name not in SCHEDULE_CLASSES]
    assert not unused, "that it is in torch, mypy shows of what the code uses"
    files = [list((ROOT / "tests").rglob(name)) for name in re.findall(r"`(?:tests/)?([\w/]+\.py)`", row.shown_by)]
    assert files
    assert all(len(found) == 1 for found in files)
    text = "\n".join(path.read_text() for (path,) in files)
    assert not [name for name in re.findall(r"`(test_\w+)`", row.shown_by) if f"def {name}(" not in text]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_its_option_is_one_that_is_shown(row: Row) -> None:
    """In a layout that trains beside one process: with the same values where the page has values."""
    if row.technique == "its schedules":
        assert all(re.search(rf"\b{name}\b", row.option) for name in SCHEDULES)
        assert {settings.pp_schedule for settings in TESTED} == set(SCHEDULES)
        return
    lines = re.findall(r"`(\w+=[^`]+)`", row.option)
    assert lines
    for line in lines:
        parse(line.translate(SIZES))
        said = dict(part.split("=") for part in line.split(","))
        assert any(has(settings, said) for settings in TESTED), line


SHARING = [
    *({name} for name in DIMENSIONS),
    *({"ep", name} for name in ("dp_shard", "cp")),  # whose ranks share experts
    *map(set, combinations(DIMENSIONS, 2)),
    *({"ep", "dp_shard", name} for name in ("dp_replicate", "cp", "tp", "pp")),
    {"dp_shard", "tp", "pp"},
]
"""Each dimension alone, each pair, and three."""


@pytest.mark.parametrize("dimensions", SHARING, ids=lambda names: "-".join(sorted(names)))
def test_each_dimension_and_each_pair_trains_beside_one_process(dimensions: set[str]) -> None:
    assert dimensions in [{name for name in (*DIMENSIONS, "ep") if getattr(one, name) > 1} for one in RESOLVED]


def has(settings: ParallelSettings, said: dict[str, str]) -> bool:
    found = {name: str(getattr(settings, name)) for name in said}
    if settings.is_replicated_alone and found.get("zero") == "3":
        found["zero"] = "0"  # it shares nothing either
    return all(found[name] == value or (value in "NM" and int(found[name]) > 1) for name, value in said.items())
