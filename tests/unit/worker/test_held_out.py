"""The built-in trainer evaluates the outer parameters: one site, at commits of its setting, and at the run's end."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.node.core.events import Answer, MergeMode
from atoll.node.worker import trainer
from atoll.node.worker.data import load, source_for_run
from atoll.node.worker.model import Transformer
from atoll.node.worker.recipe import next_byte_loss
from tests.harness.fake_node import SNAPSHOT, STOP, TOLD_TO_LEAVE, FakeNode, apply
from tests.unit.worker.test_worker_trainer import SETTINGS, start

EVERY_SECOND = dataclasses.replace(SETTINGS, trainer=dataclasses.replace(SETTINGS.trainer, evaluate_every=2))
TEXT = b"the quick brown fox jumps over the lazy dog. " * 100


def trained(node: FakeNode, path: Path, monkeypatch: pytest.MonkeyPatch, *, site_index: int = 0) -> list[bytes]:
    """Three steps with a commit after each, as of a site that is alone. What PUBLISH held at each commit."""
    (path / "text").write_bytes(TEXT)
    start(node, monkeypatch, (str(path / "text"),), settings=EVERY_SECOND)
    published = []

    def commit(number: int, next_step: int) -> Answer:
        node.publish[:] = node.snapshot
        published.append(bytes(node.publish))
        return apply(
            MergeMode.REPLACE,
            next_step,
            version=number,
            run_step=number,
            fresh=number == 0,
            site_index=site_index,
            num_sites=2,
        )

    for number in range(3):
        node.script += [(number, SNAPSHOT), (number, partial(commit, number, number + 1))]
    node.script += [(3, SNAPSHOT), (3, partial(commit, 3, 3)), (3, STOP)]
    trainer.main()
    return published


def loss_of(node: FakeNode, published: bytes, path: Path) -> float:
    """Of the model of these values, on sixteen windows evenly over the held-out text."""
    model = Transformer(SETTINGS.model, SETTINGS.seed)
    for name, parameter in model.named_parameters():
        values = np.array(node.values(memoryview(published), name))
        parameter.data.copy_(torch.from_numpy(values).view_as(parameter))
    text = load(source_for_run("mine", [str(path / "text")])).held_out
    offsets = np.linspace(0, len(text) - 17, 16, dtype=np.int64)
    windows = torch.from_numpy(np.stack([text.window(int(at), 17) for at in offsets]))
    with torch.no_grad():
        return next_byte_loss(model, windows).item()


def test_its_loss_is_of_the_outer_parameters_on_the_same_windows_at_each_second_commit_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode()
    published = trained(node, tmp_path, monkeypatch)
    values = [value for said in node.said("logged") for value in said["values"]]
    assert [(v.name, v.step, v.of_outer) for v in values] == [("held_out_loss", 2, True), ("held_out_loss", 3, True)]
    expected = [loss_of(node, published[n], tmp_path) for n in (2, 3)]
    assert [v.value for v in values] == pytest.approx(expected, rel=1e-5)
    assert [said["what"] for said in node.said("busy")] == ["evaluation", "", "evaluation", ""]
    assert node.said("goodbye") == [{"run_over": True}]


def test_a_commit_that_was_taken_together_with_the_next_one_is_evaluated_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    node = FakeNode()
    start(node, monkeypatch, (str(tmp_path / "text"),), settings=EVERY_SECOND)
    for at, version in enumerate((1, 3, 3, 5)):
        answer = apply(
            MergeMode.REPLACE,
            at + 1,
            version=version,
            run_step=version,
            fresh=at == 0,
            site_index=0,
            num_sites=2,
        )
        node.script.append((at, answer))
    node.script.append((4, STOP))
    trainer.main()
    assert [v.step for said in node.said("logged") for v in said["values"]] == [3, 5]


def test_a_site_that_was_told_to_leave_evaluates_nothing_on_its_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor at a commit of the schedule: all wait for who leaves, and the next site evaluates from now on."""
    for version in (3, 4):
        (tmp_path / "text").write_bytes(TEXT)
        node = FakeNode()
        start(node, monkeypatch, (str(tmp_path / "text"),), settings=EVERY_SECOND)
        first = apply(MergeMode.REPLACE, 1, version=2, run_step=2, fresh=True, site_index=0, num_sites=2)
        last = apply(MergeMode.REPLACE, 1, version=version, run_step=version, site_index=0, num_sites=2)
        node.script = [(0, first), (1, SNAPSHOT), (1, last), (1, TOLD_TO_LEAVE)]
        trainer.main()
        assert node.said("logged") == []
        assert node.said("goodbye") == [{"run_over": True}]


def test_another_site_than_the_first_evaluates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    trained(node, tmp_path, monkeypatch, site_index=1)
    assert node.said("logged") == []


def test_training_goes_on_as_if_nothing_had_been_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = []
    for index in (0, 1):
        node = FakeNode()
        trained(node, tmp_path, monkeypatch, site_index=index)
        last.append(bytes(node.snapshot))
    assert last[0] == last[1]


def test_too_little_text_to_evaluate_on_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(TEXT[:320])
    node = FakeNode()
    start(node, monkeypatch, (str(tmp_path / "text"),), settings=EVERY_SECOND)
    node.script = [(0, apply(MergeMode.REPLACE, 1, fresh=True)), (1, apply(MergeMode.REPLACE, 2, version=2)), (2, STOP)]
    trainer.main()
    said = "nothing is evaluated while this site is the run's first: 16 held-out bytes or tokens are fewer than a"
    assert said in capsys.readouterr().err
    assert node.said("logged") == []
