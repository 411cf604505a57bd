"""Rule 22: sites that hold different states of one commit. Whose is right is computed; heads do not count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator.core import events as e
from atoll.coordinator.core.log import evidence
from atoll.protocol import messages as m
from atoll.protocol.errors import InvalidMessage
from atoll.protocol.layout import Layout, Manifest, Role, TensorSpec
from atoll.protocol.messages import AdmittedAs, Evidence
from atoll.protocol.outer_settings import OuterSettings
from atoll.protocol.settings import RunSettings
from tests.harness.coordinator_story import FakeSite, Story, a_manifest, some_settings
from tests.harness.data_plane import step_of
from tests.harness.tiny_model import DAMAGED_CHUNK


def before_it(
    names: str,
    *,
    receiver: str = "",
    silent: str = "",
    manifest: Manifest | None = None,
    settings: RunSettings | None = None,
) -> Story:
    """`names` have committed sync 1 and not said yet what they hold; `receiver` is at commit 0. `silent` show nothing
    before they are told to (`show`)."""
    story = Story(settings or some_settings(min_sites=len(names)), real=True, manifest=manifest)
    story.start(*names, *receiver)
    for name in names:
        story.ready(name)
    for name in receiver:
        story.ready(name, tokens=0)
    for name in names:
        story.done(name, "s0")
    for name in silent:
        story.sites[name].shows = None
    return story


def differing(
    *, first: str = "b", wrong: str = "wrong", silent: str = "", hides: str = "", settings: RunSettings | None = None
) -> Story:
    """Two sites at commit 1; b's state is another. `first` reports first, and so is attested."""
    story = before_it("ab", silent=silent, settings=settings)
    for name in hides:
        story.sites[name].shows = False
    for name in sorted("ab", key=lambda n: n != first):
        story.applied(name, 1, "s1" if name == "a" else wrong)
    return story


def show(story: Story, name: str) -> None:
    """A site that was silent answers the last question."""
    site = story.sites[name]
    site.shows = True
    message = story.shown(site, story.last(name, m.Show))
    site.shows = None
    story.says(name, message)


def evicted(story: Story) -> str:
    return "".join(name for name in sorted(story.sites) if story.num(name, m.Evicted))


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("wrong", ["wrong", "made-up"])
def test_of_two_the_wrong_one_is_found_out_and_repairs_itself(first: str, wrong: str) -> None:
    story = differing(first=first, wrong=wrong)
    assert evicted(story) == "b"
    assert story.attested(1) == story.state("s1", 1)
    assert story.view.state == "training"
    story.connect("b", state=(1, wrong), again=True)
    story.offer("b")
    admitted = story.last("b", m.Admitted)
    assert (admitted.admitted_as, admitted.state_hash) == (AdmittedAs.JOINER, story.state("s1", 1))
    story.applied("b", 1, "s1")
    story.ready("a")
    story.done("a", "s1")
    view = story.view
    assert view.last_commit == 2
    assert {s.name: s.num_wrong_states for s in view.sites} == {"a": 0, "b": 1}


@pytest.mark.parametrize("codec", ["fp32", "topk2"])
def test_it_is_computed_with_the_weights_and_the_rates_of_the_commit(codec: str) -> None:
    settings = some_settings(min_sites=2)
    outer = OuterSettings(learning_rate=0.7, momentum=0.9, warmup=1.0, momentum_decay=0.5)
    settings = replace(settings, outer=outer, sync=replace(settings.sync, codec=codec))
    story = differing(settings=settings)
    assert evicted(story) == "b"
    assert story.attested(1) == story.state("s1", 1)
    other = replace(settings, outer=replace(outer, warmup=0.0))
    assert story.state("s1", 1) != differing(settings=other).state("s1", 1), "the rates count"


def test_a_step_of_the_nodes_is_computed_with_the_rates_of_the_parameter_group() -> None:
    settings = some_settings(min_sites=2, outer=OuterSettings(optimizer="adamw", momentum=0.9))
    settings = replace(settings, sync=replace(settings.sync, strategy="gradient", every=1))
    groups = [replace(spec, group=number) for number, spec in enumerate(a_manifest().tensors)]
    for manifest in (a_manifest(), Manifest.canonical(groups)):
        story = before_it("ab", settings=settings, manifest=manifest)
        story.applied("a", 1, "s1")
        story.applied("b", 1, "wrong")
        assert evicted(story) == "b"
        assert story.attested(1) == story.state("s1", 1)


def test_what_cannot_be_computed_for_any_reason_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispute that nothing answers would last for ever."""

    def broken(**given: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(evidence, "recomputed", broken)
    asked = e.Recompute(
        role=Role.TRAINABLE, dtype="F32", num_elements=1, outer=step_of(OuterSettings()), record=b"", payload=b""
    )
    assert evidence.recompute(asked).problem == "ZeroDivisionError()"


def test_the_chunk_is_named() -> None:
    story = differing()
    text = story.last("b", m.Evicted).reason
    assert f"chunk {DAMAGED_CHUNK} of commit 1, in 'weight'," in text
    assert "it must fetch the state again" in text


@pytest.mark.parametrize(("chunk", "num_shown"), [(0, 0), (1, 4), (2, 4), (3, 1)])
def test_a_chunk_without_elements_and_a_frozen_one_need_no_sum(chunk: int, num_shown: int) -> None:
    """`num_shown`: what is asked for beside the hashes of both."""
    shapes = {"empty": (0,), "frozen": (3,), "mean": (2,), "w": (4,)}
    roles = {"frozen": Role.FROZEN, "mean": Role.BUFFER_MEAN}
    specs = [
        TensorSpec(name=name, shape=shape, dtype="F32", role=roles.get(name, Role.TRAINABLE))
        for name, shape in shapes.items()
    ]
    layout = Layout(Manifest.canonical(specs), 4)
    order = ["empty", "w", "mean", "frozen"]
    assert [layout.name_of(chunk.index) for chunk in layout.chunks] == order
    story = before_it("ab", manifest=layout.manifest)
    assert story.model is not None
    story.model.damaged = chunk
    story.applied("b", 1, "wrong")
    story.applied("a", 1, "s1")
    assert evicted(story) == "b"
    assert f"chunk {chunk} of commit 1, in {order[chunk]!r}," in story.last("b", m.Evicted).reason
    assert sum(isinstance(message, m.Show) for _, message in story.sent) == 2 + num_shown


def test_what_cannot_be_computed_at_the_coordinator_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(**_: object) -> bytes:
        raise InvalidMessage("encoded chunk: zstd: a broken frame")

    monkeypatch.setattr(evidence, "recomputed", unreadable)
    story = differing()
    assert not evicted(story)
    assert "cannot be computed here (encoded chunk: zstd: a broken frame)" in story.view.state
    assert "ban those that you do not trust" in story.view.state


@pytest.mark.parametrize("wrong", ["wrong", "made-up"])
@pytest.mark.parametrize("order", ["abcde", "edcba", "cabde"])
def test_a_majority_of_liars_evicts_nobody(order: str, wrong: str) -> None:
    story = before_it("abcde")
    for name in order:
        story.applied(name, 1, wrong if name in "cde" else "s1")
    assert evicted(story) == "cde"
    assert story.attested(1) == story.state("s1", 1)
    assert story.view.state == "training"


def test_one_of_three_is_found_out_as_soon_as_somebody_contradicts_it() -> None:
    story = before_it("abc")
    story.applied("b", 1, "wrong")
    story.applied("a", 1, "s1")
    assert evicted(story) == "b"
    story.applied("c", 1, "s1")
    assert evicted(story) == "b"
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("order", ["ac", "ca"])
@pytest.mark.parametrize(("contributor", "receiver", "found_out"), [("wrong", "s1", "a"), ("s1", "wrong", "c")])
def test_a_liar_that_contributed_alone_or_received_alone_is_found_out(
    order: str, contributor: str, receiver: str, found_out: str
) -> None:
    story = before_it("a", receiver="c")
    for name in order:
        story.applied(name, 1, contributor if name == "a" else receiver)
    assert evicted(story) == found_out
    assert story.attested(1) == story.state("s1", 1)


def test_of_three_different_states_two_are_wrong() -> None:
    story = before_it("abcd")
    for name, state in (("d", "wrong"), ("c", "also wrong"), ("a", "s1"), ("b", "s1")):
        story.applied(name, 1, state)
    assert evicted(story) == "cd"
    assert story.attested(1) == story.state("s1", 1)


def test_where_nobody_has_what_comes_out_nobody_is_evicted() -> None:
    story = before_it("ab")
    story.applied("a", 1, "wrong")
    story.applied("b", 1, "also wrong")
    assert not evicted(story)
    assert "paused: sites hold different states of commit 1" in story.view.state
    assert f"none of them has chunk {DAMAGED_CHUNK} of commit 1, in 'weight', as it comes out here" in story.view.state


def test_who_fetched_the_state_is_no_party() -> None:
    story = differing(hides="ab")
    story.join("c")
    story.applied("c", 1, "wrong")
    assert not evicted(story)
    assert story.view.state.count("(site ") == 2


def test_who_did_not_compute_the_state_waits_until_all_who_did_are_heard() -> None:
    story = before_it("ab")
    story.applied("a", 1, "wrong")
    story.join("c")
    story.applied("c", 1, "s1")
    assert not evicted(story), "the first report may be wrong"
    story.applied("b", 1, "s1")
    assert evicted(story) == "a"


# --- while it is found out


def test_nothing_is_planned_or_committed_meanwhile() -> None:
    story = differing(silent="ab")
    assert "their states are being checked" in story.view.state
    assert [story.last(name, m.Disputed) for name in "ab"] == [m.Disputed(commit=1)] * 2
    for name in "ab":
        story.ready(name)
    assert story.attempt()
    assert story.weighed_plan() is None


def test_one_question_is_open_at_a_time_and_everything_comes_in_parts() -> None:
    story = before_it("ab")
    for name in "ab":
        story.sites[name].part_bytes = 7
    story.applied("b", 1, "wrong")
    story.applied("a", 1, "s1")
    assert evicted(story) == "b"
    asked = [message for _, message in story.sent if isinstance(message, m.Show)]
    assert len(asked) > 40
    assert {show.evidence for show in asked} == set(Evidence) - {Evidence.UNSPECIFIED}
    assert len(set(asked[5:])) > len(asked) / 2
    firsts = [show.first_byte for show in asked if show.evidence is Evidence.RECORD]
    assert firsts == list(range(0, firsts[-1] + 1, 7))


def test_whoever_has_the_evidence_may_show_it() -> None:
    """The parties cannot, or show something else; c, which came later, can."""
    story = before_it("ab", silent="ab")
    story.applied("a", 1, "s1")
    story.applied("b", 1, "wrong")
    show(story, "a")
    show(story, "b")
    for name in "ab":
        asked = story.last(name, m.Show)
        assert (asked.evidence, asked.commit) == (Evidence.CHUNK_HASHES, 0)
        shown = replace(story.shown(story.sites[name], asked), data=bytes(5 * 32), total_bytes=5 * 32)
        story.says(name, shown)
        story.sites[name].shows = False
    assert "nobody here can show the hashes of the chunks after commit 0" in story.view.state
    assert "ban those that you do not trust (atoll ban NAME)" in story.view.state
    assert [story.last(name, m.Disputed) for name in "ab"] == [m.Disputed(commit=1, is_over=True)] * 2
    story.join("c")
    story.applied("c", 0, "s0")
    assert evicted(story) == "b"


def test_a_site_that_stays_silent_is_evicted_and_the_next_is_asked() -> None:
    story = before_it("abc", silent="b")
    story.applied("b", 1, "s1")
    story.applied("a", 1, "s1")
    story.applied("c", 1, "wrong")
    assert not evicted(story)
    story.wait(story.idle_limit_s() + 0.1)
    assert "has not answered" in story.last("b", m.Evicted).reason
    assert evicted(story) == "bc"


def test_a_site_that_shows_a_byte_now_and_then_does_not_hold_up_the_run() -> None:
    story = before_it("abc", silent="b")
    story.applied("b", 1, "s1")
    story.applied("a", 1, "s1")
    story.applied("c", 1, "wrong")
    begun, limit_s = story.now, story.idle_limit_s()
    story.sites["b"].part_bytes = 1
    while "b" not in evicted(story):
        assert story.now - begun < limit_s + 1.0
        show(story, "b")
        story.wait(limit_s / 8)
    assert "has not answered" in story.last("b", m.Evicted).reason
    assert evicted(story) == "bc"


def test_a_site_that_lost_its_stream_is_asked_again_on_the_next_one() -> None:
    story = differing(silent="b")
    story.drop("b")
    assert not evicted(story), "b may come back, and show what its hash is made of"
    story.sites["b"].shows = True
    story.connect("b", state=(1, "wrong"))
    assert evicted(story) == "b"
    assert f"chunk {DAMAGED_CHUNK}" in story.last("b", m.Evicted).reason, "it was heard"


@pytest.mark.parametrize("total_bytes", [1, 5 * 32 - 1, 5 * 32 + 1, 1 << 60])
def test_what_has_not_the_size_that_is_due_is_not_kept(total_bytes: int) -> None:
    story = differing(silent="b")
    asked = story.last("b", m.Show)
    story.says(
        "b",
        m.Shown(
            commit=1,
            evidence=asked.evidence,
            chunk=0,
            first_byte=0,
            total_bytes=total_bytes,
            data=bytes(min(total_bytes, 5 * 32)),
        ),
    )
    assert story.evidence_bytes() <= 5 * 32
    if total_bytes != 5 * 32 - 1:
        assert evicted(story) == "b"


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    story = differing(silent="ab")
    asked = story.last("b" if story.num("b", m.Show) else "a", m.Show)
    other = "a" if story.num("b", m.Show) else "b"
    right = story.shown(FakeSite(other, held=(1, "s1")), asked)
    for message in (right, replace(right, commit=2), replace(right, first_byte=3), replace(right, chunk=1)):
        story.says(other, message)
    assert story.num_shown() == 0
    unasked = e.Recompute(
        role=Role.TRAINABLE,
        dtype="float32",
        num_elements=1,
        outer=step_of(story.settings.outer),
        record=b"",
        payload=b"",
    )
    story.happens(e.Recomputed(of=unasked, chunk_hash=bytes(32)))
    assert not evicted(story)


def test_after_a_restart_of_the_coordinator_the_claims_come_again() -> None:
    story = differing(silent="ab")
    story.restart()
    for name in "ab":
        story.sites[name].shows = True
        story.connect(name, state=(1, "s1" if name == "a" else "wrong"), term=1)
    assert evicted(story) == "b"
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_one_word_after_a_restart_is_not_held_against_what_was_kept_before_the_others_are_heard(wrong: str) -> None:
    """a reported, and its word was kept; b comes back first and says something else."""
    story = before_it("ab")
    states = {name: "wrong" if name == wrong else "s1" for name in "ab"}
    story.applied("a", 1, states["a"])
    story.restart()
    story.connect("b", state=(1, states["b"]), term=1)
    assert not evicted(story)
    story.connect("a", state=(1, states["a"]), term=1)
    assert evicted(story) == wrong
    assert story.attested(1) == story.state("s1", 1)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("states", ["s1", "wrong"])
@pytest.mark.parametrize("is_settled", [False, True])
def test_what_is_disputed_is_not_attested_to_those_who_come_anew(order: str, states: str, is_settled: bool) -> None:
    """The wrong hash was reported first; then the coordinator and all sites are started again. `states`: what b says
    then. Nobody is told to give up its state for the word of a start that is over."""
    story = differing(silent="" if is_settled else "ab")
    assert evicted(story) == ("b" if is_settled else "")
    story.restart()
    num_evicted = story.num("b", m.Evicted)
    for name in order:
        story.sites[name].shows = True
        story.connect(name, incarnation=2, state=(1, "s1" if name == "a" else states), term=1)
        story.offer(name)
    admitted = {name: story.last(name, m.Admitted) for name in "ab"}
    assert admitted["a"].admitted_as is AdmittedAs.MEMBER
    assert not admitted["a"].state_hash
    assert story.attested(1) == story.state("s1", 1)
    if not is_settled:
        assert story.num("b", m.Evicted) - num_evicted == (states == "wrong")
        assert not story.num("a", m.Evicted)
    else:
        assert admitted["b"].admitted_as is (AdmittedAs.JOINER if states == "wrong" else AdmittedAs.MEMBER)


def test_what_is_attested_is_kept_again_when_a_side_is_gone() -> None:
    story = differing(silent="ab", first="a")
    assert story.store.read_commits(1, 1)[1] == (e.AttestationRecord(1, b""),)
    story.leave("b")
    assert not story.disputed()
    assert story.store.read_commits(1, 1)[1] == (e.AttestationRecord(1, story.state("s1", 1)),)


def test_without_evidence_the_run_is_paused_and_names_both_until_one_is_gone() -> None:
    story = differing(hides="ab")
    assert "a (site 1)" in story.view.state
    assert "b (site 2)" in story.view.state
    assert "not every side shows what its hash is made of: ban those" in story.view.state
    for name in "ab":
        story.ready(name)
    story.wait(2 * story.limits.sync_wait_s)
    assert story.view.last_commit == 1
    story.leave("b")
    assert story.attested(1) == story.state("s1", 1)
    assert not story.disputed()
    story.done("a", "s1")
    assert story.view.last_commit == 2
