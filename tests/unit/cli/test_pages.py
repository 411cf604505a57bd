"""Commands of atoll that pages show are there, with their options."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from atoll.cli.main import make_parser, split_command
from tests.harness.pages import typed_on

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("page", "num_at_least"), [("two-clouds.md", 20), ("volunteers.md", 4), ("operations.md", 2)])
def test_commands_of_a_page_are_understood(page: str, num_at_least: int) -> None:
    commands = [command for _, command in typed_on(DOCS / page) if command.startswith("atoll ")]
    assert len(commands) >= num_at_least
    for command in commands:
        own, _ = split_command(shlex.split(command)[1:])
        make_parser().parse_args(own)


def test_each_command_of_the_two_clouds_says_on_whose_machine_it_is_typed() -> None:
    assert all(machine for machine, _ in typed_on(DOCS / "two-clouds.md"))
