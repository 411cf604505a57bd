"""Commands of atoll that pages show are there, with their options."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from atoll.cli.main import VERBS, Verb, make_parser, split_command
from tests.harness.pages import named_on, typed_on

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


ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]


def options_of(verb: Verb) -> set[str]:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return {"--debug", *parser._option_string_actions}


OPTIONS = {name: options_of(verb) for name, verb in VERBS.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_and_option_that_a_page_names_is_there(page: Path) -> None:
    """In lines that are typed, and in sentences, where words in capitals stand for others."""
    for command in named_on(page):
        own, _ = split_command(shlex.split(command)[1:])
        verb = next((word for word in own if not word.startswith("-")), "")
        if verb == "VERB:":  # of any
            continue
        assert verb in OPTIONS, f"{page.name}: {command}"
        options = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert options <= OPTIONS[verb], f"{page.name}: {command}"


def test_pages_name_most_commands() -> None:
    """So that what is looked at above is not empty."""
    named = {shlex.split(command)[1] for page in PAGES for command in named_on(page) if " " in command}
    assert len(named & set(OPTIONS)) >= len(OPTIONS) - 2
