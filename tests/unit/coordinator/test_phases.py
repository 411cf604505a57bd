"""0/1 Adam at the coordinator: how long a window is, and which commit a site's error feedback is of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core.sync import weighing
from atoll.protocol import log_length
from atoll.protocol import messages as m
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.sync_settings import SyncSettings
from tests.harness.coordinator_story import Story, some_settings

RATES = (0.01, 0.1)


def a_run(*, steps: int, log_commits: int = 8) -> Story:
    settings = some_settings(quorum=1, min_sites=2, steps=steps, outer=OuterSettings(optimizer="adamw", momentum=0.9))
    sync = replace(
        settings.sync, strategy="momentum", every=1, warmup_commits=4, gradient_doubling=1, local_doubling=2,
        most_local_steps=4, codec="sign1", error_feedback=1.0, log_commits=log_commits,
    )  # fmt: skip
    story = Story(replace(settings, sync=sync))
    story.start("a", "b")
    return story


def commit(story: Story, number: int) -> m.Commit:
    for name in "ab":
        story.ready(name, rates=RATES, errors=(0,))
    for name in "ab":
        story.done(name, f"s{number - 1}")
    for name in "ab":
        story.applied(name, number, f"s{number}")
    found: m.Commit = story.last("a", m.Commit)
    assert found.commit == number
    return found


def test_windows_grow_with_the_number_of_the_commit_and_the_last_one_is_what_is_left() -> None:
    story = a_run(steps=22)
    windows = [story.last("a", m.Open).num_steps]
    shown = [story.view.sync_every]
    found = commit(story, 1)
    number = 1
    while found.next is not None:
        windows.append(found.next.num_steps)
        shown.append(story.view.sync_every)
        number += 1
        found = commit(story, number)
    assert windows == shown == [1] * 6 + [2, 2, 4, 4, 4]
    assert (found.run_step, found.final) == (22, True)
    short = a_run(steps=9)
    steps = [commit(short, number).run_step for number in range(1, 9)]
    assert steps == [1, 2, 3, 4, 5, 6, 8, 9]


def test_after_a_restart_the_window_is_as_long_again() -> None:
    story = a_run(steps=100)
    for number in range(1, 9):
        commit(story, number)
    following = story.last("a", m.Commit).next
    assert following is not None
    assert following.num_steps == 4
    story.restart()
    for name in "ab":
        story.connect(name, state=(8, "s8"))
        story.offer(name)
    assert story.last("a", m.Open).num_steps == 4


def test_a_loss_counts_after_a_restart_though_a_rate_is_another_in_its_last_digits() -> None:
    """One script on two machines; what is kept of a plan has the usual rates."""
    story = a_run(steps=100)
    others = tuple(rate * (1 + 1e-9) for rate in RATES)
    for name, rates, loss in (("a", RATES, 2.0), ("b", others, 4.0)):
        story.ready(name, rates=rates, errors=(0,), loss=loss)
    story.restart()
    for name, rates, loss in (("a", RATES, 2.0), ("b", others, 4.0)):
        story.connect(name, state=(0, "s0"))
        story.offer(name)
        story.ready(name, rates=rates, errors=(0,), loss=loss)
    for name in "ab":
        story.done(name, "s0")
    assert story.view.losses[-1][-1] == 3.0


def test_a_start_of_a_site_hears_of_the_last_commit_that_left_it_an_error() -> None:
    """Commits 1, 2 and 4 are of gradients."""
    story = a_run(steps=100)
    for number, last in ((1, 0), (2, 0), (3, 3), (4, 3), (5, 5)):
        commit(story, number)
        story.connect("a", incarnation=1 + number, state=(number, f"s{number}"))
        assert story.last("a", m.Welcome).error_commits == (last,)
        story.offer("a")
        story.applied("a", number, f"s{number}")


def test_the_rates_of_a_window_may_be_as_many_times_as_large_as_it_has_steps() -> None:
    settings = SyncSettings(strategy="momentum", every=1, warmup_commits=1, local_doubling=1, most_local_steps=4)
    ready = m.Ready(sync=1, tokens=1, num_steps=4, mean_loss=0.0, train_s=0.0, ranges=(), rates=(400.0, 0.1))
    assert not weighing.beyond_bounds(ready, settings)
    assert "from 0 to 100 are" in weighing.beyond_bounds(ready, SyncSettings(strategy="gradient", every=1))
    more = replace(ready, rates=(400.1, 0.1))
    assert "from 0 to 400 are possible" in weighing.beyond_bounds(more, settings)


def test_the_log_has_as_many_commits_as_those_of_the_sites_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"STATES": 2, "LEAST_COMMITS": 2, "SMALL_COMMITS": 0, "TABLE_BYTES": 0}.items():
        monkeypatch.setattr(log_length, name, value)
    story = a_run(steps=100, log_commits=0)
    assert any("; payload logs have at most " in text for _, text in story.reports)
    nums: list[int] = []
    for number in range(1, 13):
        commit(story, number)
        logged = story.logged()
        assert logged == list(range(number - len(logged) + 1, number + 1))
        nums.append(len(logged))
        if number in (4, 6, 12):
            story.restart()
            assert story.logged() == logged, "the store has more"
            for name in "ab":
                story.connect(name, state=(number, f"s{number}"))
                story.offer(name)
    assert nums == [1, 2, 3, 4, 4, 5, 5, 5, 5, 5, 5, 5], "gradients are larger, and in commits 1, 2 and 4"
