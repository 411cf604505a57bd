"""`atoll status --data`: every sample is accounted for."""

from __future__ import annotations

import json
from dataclasses import asdict

from atoll.cli.client import parse_status
from atoll.cli.status import data_lines, text_lines
from atoll.protocol import messages as m
from tests.harness.coordinator_story import Story, ranges_of, some_settings


def lines_of(story: Story) -> list[str]:
    return data_lines(parse_status(json.loads(json.dumps(asdict(story.view)))))


def test_the_account_in_words() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    assert lines_of(story) == ["data: no site has asked for samples yet"]
    story.wants("a", 25, of=10)
    story.wants("b", 10, of=10)
    story.ready("a", data=ranges_of("0-11"))
    story.ready("b")
    story.done("a", "s0")
    story.done("b", "s0")
    assert lines_of(story) == [
        "data: 10 samples a pass, 1 passes done, 4 begun: 12 done once + 23 in flight + 5 open = 40",
        "  pass 1: 2 done once, 8 in flight (a 8), 0 open",
        "  pass 2: 0 done once, 10 in flight (a 5, b 5), 0 open",
        "  pass 3: 0 done once, 5 in flight (b 5), 5 open",
    ]


def test_local_lines_are_named() -> None:
    story = Story(some_settings(data="local"))
    story.start("a", "b")
    story.wants("b", 3, of=10)
    assert lines_of(story)[0].startswith("data of b: 10 samples a pass, 0 passes done, 1 begun: 0 done once + 3 in")


def test_of_a_traceback_the_line_that_matters_is_in_the_table_and_all_of_it_below() -> None:
    story = Story(some_settings())
    story.start("a", "b")
    story.says("b", m.Leave(reason="Traceback:\n  File x\nValueError: no data", fatal=True))
    status = parse_status(json.loads(json.dumps(asdict(story.view))))
    lines = text_lines(status).splitlines()
    assert any("gone: ValueError: no data" in line for line in lines if line.startswith("b "))
    assert lines[-3:] == [
        "a site left for good: b (site 2): Traceback:",
        "  |   File x",
        "  | ValueError: no data",
    ]


def test_a_weight_that_was_cut_is_a_line_below_the_table() -> None:
    story = Story(some_settings(min_sites=4))
    story.start("a", "b", "c", "d")
    for name, tokens in (("a", 100), ("b", 100), ("c", 1 << 44), ("d", 1 << 44)):
        story.ready(name, tokens=tokens)
    for name in "abcd":
        story.done(name, "s0")
    status = parse_status(json.loads(json.dumps(asdict(story.view))))
    words = f"c (site 3) says {1 << 44} tokens, which count as 1600 (sync.max_weight_ratio)"
    assert text_lines(status).splitlines()[-1] == f"a weight was cut in commit 1: {words}; and 1 more"


def test_losses_that_no_number_holds_together_do_not_hide_the_status() -> None:
    """Each of them is finite, as everything that comes through the door; their sum is not."""
    story = Story(some_settings())
    story.start("a", "b")
    story.ready("a", loss=1.0e308)
    story.ready("b", loss=1.7e308)
    for name in "ab":
        story.done(name, "s0")
    status = parse_status(json.loads(json.dumps(asdict(story.view), allow_nan=False)))
    (commit,) = status.commits
    assert (commit.mean_loss, commit.median_loss, status.losses) == (None, None, ())
