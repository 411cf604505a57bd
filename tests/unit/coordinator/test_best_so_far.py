"""Which saved model is the best: decided once, by one site's word at a time, and said with each commit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.protocol import messages as m
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import RunSettings, needs_of, validate
from tests.harness.coordinator_story import Story, some_settings

SETTINGS = some_settings(min_sites=2, steps=1000, best_by="val_loss", save_every=2, keep_models=2)
SETTINGS = replace(SETTINGS, sync=replace(SETTINGS.sync, log_commits=16))


def said(step: int, value: float, name: str = "val_loss", *, of_outer: bool = True) -> m.Logged:
    return m.Logged(values=(m.LoggedValue(name=name, step=step, value=value, of_outer=of_outer),))


def a_story(num_commits: int, settings: RunSettings = SETTINGS) -> Story:
    """With commits, each of ten steps."""
    story = Story(settings)
    story.start("a", "b")
    commit_more(story, num_commits)
    return story


def commit_more(story: Story, num_commits: int = 1) -> m.Commit:
    for _ in range(num_commits):
        last = story.view.last_commit
        story.commit_one("a", "b", state=f"s{last}", following=f"s{last + 1}")
    found = story.last("a", m.Commit)
    assert isinstance(found, m.Commit)
    return found


def best(story: Story) -> tuple[int, int, float] | None:
    """As the next commit says it."""
    found = commit_more(story).best
    return None if found is None else (found.commit, found.run_step, found.value)


def test_a_model_that_is_saved_is_the_best_by_what_one_site_logs_of_the_outer_parameters() -> None:
    story = a_story(2)
    for no_word in (
        said(20, 1.0, of_outer=False),
        said(20, 1.0, "loss"),
        said(10, 1.0),  # the model of commit 1 is not saved
        said(17, 1.0),  # no commit is at that step
        said(90, 1.0),
        said(20, float("inf")),
    ):
        story.says("a", no_word)
    assert best(story) is None
    story.says("a", said(20, 2.5))
    story.says("b", said(20, 1.0))  # measured on other data
    assert best(story) == (2, 20, 2.5)
    story.says("a", said(40, 2.75))
    assert best(story) == (2, 20, 2.5)
    commit_more(story)
    story.says("a", said(60, 2.25))
    assert best(story) == (6, 60, 2.25)
    assert story.view.best is not None
    assert (story.view.best.commit, story.view.best.site) == (6, "a")


IN_VAIN = "no value of val_loss that came since commit 0 is of a saved model"


@pytest.mark.parametrize("of_outer", [True, False])
def test_values_that_are_never_of_a_saved_model_are_told_once_until_one_is(of_outer: bool) -> None:
    """As of a site that joined late, and evaluates by steps of its own; or of a script that logs its own values."""
    story = a_story(1)
    while story.view.last_commit < 6:
        assert story.view.best_in_vain == ""
        last = story.view.last_commit
        of_none = 10 * (last - 1 + last % 2)  # the model of such a commit is not saved
        story.says("a", said(of_none if of_outer else 10 * last, 2.0, of_outer=of_outer))
        commit_more(story)
    story.says("a", said(50, 2.0, of_outer=of_outer))
    assert story.view.best_in_vain.startswith(IN_VAIN)
    assert "a multiple of run.save_every = 2, before sites have saved 2 more" in story.view.best_in_vain
    commit_more(story)
    story.says("a", said(70, 2.0))
    assert sum(line.startswith(f"# {IN_VAIN}") for line in story.log) == 1
    commit_more(story)
    story.says("a", said(80, 2.0))
    assert story.view.best_in_vain == ""
    assert best(story) == (8, 80, 2.0)


def test_that_no_value_has_come_is_shown_when_sites_have_saved_a_few_models() -> None:
    """As where its name is misspelt."""
    story = a_story(5)
    story.says("a", said(40, 2.0, "val-loss"))
    assert story.view.best_in_vain == ""
    commit_more(story)
    assert story.view.best_in_vain.startswith("no value of val_loss (run.best_by) has come")
    story.says("a", said(60, 2.0))
    assert story.view.best_in_vain == ""
    assert not a_story(6, replace(SETTINGS, best_by="")).view.best_in_vain


def test_values_at_each_commit_and_own_ones_beside_them_are_not_in_vain() -> None:
    settings = replace(SETTINGS, save_every=3)
    story = a_story(1, settings)
    while story.view.last_commit < 40:
        if story.view.last_commit <= 20:
            story.says("a", said(10 * story.view.last_commit, 2.0))
        story.says("a", said(10 * story.view.last_commit, 3.0, of_outer=False))
        assert story.view.best_in_vain == ""
        commit_more(story)


def test_the_highest_may_be_the_best() -> None:
    story = a_story(2, replace(SETTINGS, best_is="highest"))
    story.says("a", said(20, 0.5))
    commit_more(story, 2)
    story.says("a", said(40, 0.25))
    assert best(story) == (2, 20, 0.5)
    commit_more(story)
    story.says("a", said(60, 0.75))
    assert best(story) == (6, 60, 0.75)


def test_another_site_is_the_judge_when_the_first_one_has_left() -> None:
    story = a_story(2)
    story.says("a", said(20, 2.5))
    assert best(story) == (2, 20, 2.5)
    story.leave("a")
    story.says("b", said(20, 2.25))
    assert story.view.best is not None
    assert (story.view.best.commit, story.view.best.site, story.view.best.value) == (2, "b", 2.25)


def test_a_model_that_sites_have_not_any_more_cannot_be_the_best() -> None:
    story = a_story(6)  # the models of commits 4 and 6 are there
    story.says("a", said(20, 1.0))
    assert best(story) is None
    story.says("a", said(40, 2.0))
    assert best(story) == (4, 40, 2.0)


def test_a_coordinator_that_starts_again_knows_it() -> None:
    story = a_story(2)
    story.says("a", said(20, 2.5))
    commit_more(story)
    story.restart()
    assert story.view.best is not None
    assert (story.view.best.commit, story.view.best.value) == (2, 2.5)


def test_a_run_that_goes_back_has_the_one_that_was_the_best_then() -> None:
    story = a_story(2)
    story.says("a", said(20, 2.5))
    commit_more(story, 2)
    story.says("a", said(40, 2.0))
    assert best(story) == (4, 40, 2.0)
    story.ask_to_go_back(3)
    story.rebuilt("a", "s3")
    assert story.view.best is not None
    assert (story.view.last_commit, story.view.best.commit, story.view.best.value) == (3, 2, 2.5)


def test_settings_that_do_not_go_together_are_refused() -> None:
    for wrong, words in (
        (replace(SETTINGS, save_every=0, keep_models=1), "without run.save_every"),
        (replace(SETTINGS, best_by="val loss"), "a name is 1 to 64 letters"),
        (replace(SETTINGS, best_is="least"), "write lowest or highest"),
    ):
        with pytest.raises(ConfigError, match=words):
            validate(wrong)
    assert "the best model" in needs_of(SETTINGS), "a node of an older version would keep none"
