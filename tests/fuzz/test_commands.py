"""What an operator's line may hold: a command, or an error that says what is wrong; the run is never harmed."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator import commands
from atoll.coordinator.core import events as e
from atoll.coordinator.core.audit import break_in
from atoll.protocol.errors import ConfigError
from atoll.protocol.v1 import session_pb2
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.fuzzing import fuzz

VALUES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["a", "b", "site", "viewer"]),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.text(max_size=8), max_size=3),
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "str": st.one_of(st.text(max_size=40), st.sampled_from(["a", "b", "site", "viewer"])),
    "int": st.integers(),
    "int | None": st.one_of(st.integers(), st.none()),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(st.text(max_size=8), max_size=3),
}


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A command with its fields, of which some have another value, or bytes."""
    if draw(st.integers(0, 9)) == 7:
        return draw(st.binary(max_size=64))
    command = draw(st.sampled_from(list(commands.COMMANDS)))
    said: dict[str, Any] = {"command": command}
    for field in dataclasses.fields(commands.COMMANDS[command]):
        if field.name not in commands.NOT_ASKED_FOR or draw(st.integers(0, 39)) == 7:
            said[field.name] = draw(VALUES if draw(st.integers(0, 9)) == 7 else GOOD[str(field.type)])
    return json.dumps(said).encode()


@fuzz(100)
@given(st.lists(lines(), max_size=6))
def test_a_line_is_a_command_or_refused(said: list[bytes]) -> None:
    story = Story(some_settings(min_sites=2))
    story.start("a", "b")
    for number, line in enumerate(said, 1):
        try:
            asked = commands.read(line, "operator o")
        except ConfigError as error:
            session_pb2.OperateResponse(problem=str(error)).SerializeToString()
            continue
        if not isinstance(asked, e.Asked):
            continue
        assert asked.by == "operator o"
        for output in story.happens(dataclasses.replace(asked, request=number)):
            if isinstance(output, e.Answer):
                session_pb2.OperateResponse(problem=output.problem, found=output.found).SerializeToString()
    story.restart()
    assert break_in(story.audit_log()) == ""
