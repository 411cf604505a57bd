"""What an operator sets while the run goes on."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.protocol import messages as m
from atoll.protocol.changed import CHANGEABLE, run_length, settings_with, with_change
from atoll.protocol.errors import ConfigError, InvalidMessage
from atoll.protocol.outer import outer_at
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings, read_settings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_story import Story, some_settings
from tests.harness.data_plane import commit_record

SETTINGS = RunSettings(run_id="r", steps=300, outer=OuterSettings(learning_rate=0.7, momentum=0.9, warmup=0.5))
SLOWER = with_change(SETTINGS, "", "outer.learning_rate", "0.4")


def training(*names: str) -> Story:
    story = Story(some_settings(min_sites=2))
    story.start(*names)
    return story


def ask(story: Story, name: str, value: str) -> e.Answer:
    (answer,) = [o for o in story.happens(e.SetAsked(name=name, value=value, request=900)) if isinstance(o, e.Answer)]
    return answer


def committed(story: Story) -> m.Commit:
    """The next one."""
    number = story.view.last_commit
    story.commit_one("a", "b", state=f"s{number}", following=f"s{number + 1}")
    found: m.Commit = story.last("a", m.Commit)
    return found


def test_the_outer_step_follows_the_record_of_its_commit() -> None:
    record = replace(commit_record(1), run_step=300)
    assert outer_at(SETTINGS, record).learning_rate == 0.7
    changed = replace(record, changed_json=SLOWER)
    assert (outer_at(SETTINGS, changed).learning_rate, outer_at(SETTINGS, changed).momentum) == (0.4, 0.9)
    both = with_change(SETTINGS, SLOWER, "run.steps", "1200")
    assert json.loads(both) == {"outer.learning_rate": 0.4, "run.steps": 1200}
    longer = replace(record, changed_json=both)
    assert outer_at(SETTINGS, longer).learning_rate == 0.2, "a quarter of the run is half of the warm-up"
    assert (run_length(SETTINGS, SLOWER), run_length(SETTINGS, both)) == (0, 1200)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("sync.every", "10", "stays as it is"),
        ("run.run_id", '"other"', "stays as it is"),
        ("outer.optimizer", '"sgd"', "stays as it is"),
        (
            "outer.learnin_rate",
            "0.4",
            '"outer.learnin_rate" is no setting of the run; did you mean "outer.learning_rate"?',
        ),
        ("sync.evry", "10", '"sync.evry" is no setting of the run; did you mean "sync.every"?'),
        ("momentum", "1", '"momentum" is no setting of the run; did you mean "outer.momentum"?'),
        ("outer.learning_rate", "fast", "a number is expected"),
        ("outer.learning_rate", "true", "outer.learning_rate must be a number"),
        ("outer.learning_rate", "NaN", "outer.learning_rate must be a finite number"),
        ("outer.learning_rate", "0", "outer.learning_rate = 0.0: must be more than 0"),
        ("outer.momentum", "1", "outer.momentum = 1.0: must be"),
        ("run.tokens", "5000", "not in tokens"),
        ("run.steps", "0.5", "run.steps must be an integer"),
        ("run.steps", "0", "set one of them"),
        ("outer.learning_rate", "[" * 10_000, "a number is expected"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: str, word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        with_change(SETTINGS, "", name, value)


def test_where_the_nodes_do_the_steps_the_rates_are_the_scripts() -> None:
    outer = OuterSettings(optimizer="adamw")
    settings = RunSettings(run_id="r", steps=300, outer=outer, sync=SyncSettings(strategy="gradient", every=1))
    for name in CHANGEABLE:
        if name.startswith("outer."):
            with pytest.raises(ConfigError, match="change them there"):
                with_change(settings, "", name, "0.5")
    assert settings_with(settings, with_change(settings, "", "run.steps", "600")).steps == 600


@pytest.mark.parametrize("text", ["[]", "{", '{"sync.every": 5}', '{"run.steps": "x"}', '{"outer.momentum": 2}', "1"])
def test_a_record_that_changes_what_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage):
        outer_at(SETTINGS, replace(commit_record(1), changed_json=text))


@pytest.mark.parametrize("restarted", [False, True])
def test_it_holds_from_the_next_commit_on_and_after_a_restart(restarted: bool) -> None:
    story = training("a", "b")
    assert committed(story).changed_json == ""
    answer = ask(story, "outer.momentum", "0.25")
    assert (answer.problem, answer.found) == ("", "outer.momentum = 0.25 (0.0 as the run began)")
    if restarted:
        story.restart()
        for name in "ab":
            story.connect(name, state=(1, "s1"))
            story.offer(name)
    assert json.loads(committed(story).changed_json) == {"outer.momentum": 0.25}
    assert story.view.changed == answer.found
    assert ask(story, "outer.momentum", "2").problem.startswith("outer.momentum = 2.0: must be")
    assert json.loads(committed(story).changed_json) == {"outer.momentum": 0.25}, "what was refused changes nothing"


def test_a_site_that_comes_hears_of_it_and_one_of_an_older_version_stops_it() -> None:
    story = training("a", "b")
    ask(story, "outer.momentum", "0.25")
    story.connect("c")
    welcome = story.last("c", m.Welcome)
    assert json.loads(welcome.changed_json) == {"outer.momentum": 0.25}
    read_settings(welcome.settings_json)
    assert "settings that change" in json.loads(welcome.settings_json)["needs"], "an older version does not come in"
    story = Story(some_settings(min_sites=2), takes_changes=False)
    story.start("a", "b")
    assert "a (site 1)" in ask(story, "outer.momentum", "0.25").problem
    assert committed(story).changed_json == ""


def test_an_older_node_at_the_door_and_a_site_that_is_not_back_yet_stop_it_too() -> None:
    story = training("a", "b")
    story.takes_changes = False
    story.connect("c")
    assert "an older version" in ask(story, "outer.momentum", "0.25").problem
    story = training("a", "b")
    story.restart()
    assert "a (site 1), b (site 2) has not come back" in ask(story, "outer.momentum", "0.25").problem


def test_what_is_set_back_is_changed_no_more() -> None:
    story = training("a", "b")
    ask(story, "outer.momentum", "0.25")
    assert ask(story, "outer.momentum", "0").found == "all is as the run began"
    assert committed(story).changed_json == ""


def test_a_run_that_is_made_shorter_or_longer_ends_there() -> None:
    story = training("a", "b")
    every, steps = story.settings.sync.every, story.settings.steps
    committed(story)
    assert "the run is at step" in ask(story, "run.steps", str(every)).problem
    assert ask(story, "run.steps", str(3 * every)).problem == ""
    assert steps > 3 * every == story.view.steps
    assert not committed(story).final
    assert committed(story).final
    assert "is over" in ask(story, "run.steps", str(steps)).problem


@pytest.mark.parametrize("restarted", [False, True])
def test_a_rollback_goes_back_to_what_held_then(restarted: bool) -> None:
    story = training("a", "b")
    committed(story)
    ask(story, "outer.momentum", "0.25")
    committed(story)
    ask(story, "outer.momentum", "0.5")
    request = story.ask_to_go_back(1)
    story.rebuilt("a", "s1")
    assert (story.answers[request], story.view.last_commit, story.view.changed) == ("", 1, "")
    if restarted:
        story.restart()
    for name in "ab":
        story.connect(name, incarnation=story.sites[name].incarnation, state=(1, "s1"), branch=1, again=not restarted)
        story.offer(name)
    assert story.view.changed == ""
    assert committed(story).changed_json == ""
