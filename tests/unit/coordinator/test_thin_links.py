"""What sites say of their links, and what follows for plans: a thin site reduces nothing, and shares do not flap."""

from __future__ import annotations

import random

from atoll.protocol import messages as m
from atoll.protocol.plans import top_of
from tests.harness.coordinator_story import Story, some_settings

NAMES = ("a", "b", "c", "d", "e")
THIN = "c"


def story_of(**settings: object) -> Story:
    story = Story(some_settings(min_sites=5, steps=1000, **settings))
    story.start(*NAMES)
    return story


def uses(story: Story, name: str, thin_rate: float, noise: random.Random | None = None) -> tuple[m.LinkUse, ...]:
    """A sync moves 100 bytes over each link, as the site saw it."""
    found = []
    for other in NAMES:
        rate = thin_rate if THIN in (name, other) else 1000.0
        rate *= noise.uniform(0.8, 1.25) if noise is not None else 1.0
        if other != name:
            found.append(m.LinkUse(site_id=story.id_of(other), received_bytes=100, seconds=100 / rate))
    return tuple(found)


def sync(story: Story, thin_rate: float, noise: random.Random | None = None, train_s: float = 1.0) -> m.Plan:
    """One commit of all sites."""
    commit = story.last_commit()
    story.wait(train_s)
    for name in NAMES:
        story.ready(name, train=1.0)
    plan = story.plan()
    for name in NAMES:
        story.done(name, f"s{commit}", links=uses(story, name, thin_rate, noise))
    for name in NAMES:
        story.applied(name, commit + 1, f"s{commit + 1}")
    return plan


def reducing(story: Story, plan: m.Plan) -> set[str]:
    ids = {plan.contributors[top_of(tree)].site_id for tree in plan.trees}
    return {name for name in NAMES if story.id_of(name) in ids}


def test_a_thin_site_reduces_nothing_from_the_second_commit_on_and_again_when_its_link_is_as_the_others() -> None:
    story = story_of()
    assert reducing(story, sync(story, 100.0, train_s=8.0)) == set(NAMES)
    sync(story, 100.0, train_s=8.0)
    for _ in range(3):
        plan = sync(story, 100.0, train_s=8.0)
        assert story.id_of(THIN) in {member.site_id for member in plan.contributors}, "not so thin that it would rest"
        assert reducing(story, plan) == set(NAMES) - {THIN}
    for _ in range(8):
        plan = sync(story, 1000.0, train_s=8.0)
    assert reducing(story, plan) == set(NAMES)


def test_measured_noise_changes_no_plan_and_plans_are_still_made_with_the_commit_before() -> None:
    story, noise = story_of(), random.Random(5)
    plans = [sync(story, 400.0, noise, train_s=2.0) for _ in range(20)]  # not so thin that the site would rest
    assert len({plan.trees for plan in plans[3:]}) == 1
    assert all(plan.ahead for plan in plans[1:])


def test_the_status_names_the_slowest_links_and_what_each_site_can_send_and_receive() -> None:
    story = story_of()
    for _ in range(3):
        sync(story, 1.0)
    slow = story.view.slow_links
    assert slow
    assert all(THIN in (link.sender, link.receiver) for link in slow)
    rates = {site.name: (site.up_bytes_per_s, site.down_bytes_per_s) for site in story.view.sites}
    assert all(0.99 < rate < 1.01 for rate in rates[THIN] if rate)
    assert rates["a"] == (1000.0, 1000.0)
    story.says(THIN, m.Leave(reason="moves"))
    assert not story.view.slow_links


def says_links(story: Story, name: str, *links: m.LinkUse) -> None:
    """As a receiver whose exchange ended when the sync was over."""
    done = m.Done(
        sync=99, attempt=1, term=1, payload_digest=bytes(32), last_commit=7, state_hash=bytes(32), links=links
    )
    story.says(name, done)


def test_a_receiver_says_of_its_links_and_counts_for_nothing_else() -> None:
    story = story_of()
    sync(story, 1.0)
    before = story.last_commit()
    slow = [m.LinkUse(site_id=story.id_of(name), received_bytes=100, seconds=100.0) for name in ("b", "d", "e")]
    says_links(story, "a", *slow)
    assert story.last_commit() == before
    assert story.is_live("a")
    (rate,) = (site.down_bytes_per_s for site in story.view.sites if site.name == "a")
    assert rate is not None
    assert 30 < rate < 33, "the middle between 1,000 and 1"


def test_what_is_said_of_sites_that_are_not_in_the_run_is_not_kept() -> None:
    story = story_of()
    sync(story, 1.0)
    gone = story.id_of("e")
    story.says("e", m.Leave(reason="moves"))
    says_links(story, "a", *(m.LinkUse(site_id=i, received_bytes=1, seconds=1.0) for i in (gone, 77)))
    assert story.links_known() == 4 * 3
