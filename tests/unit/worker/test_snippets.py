"""What pages tell people to write into a script, played as it stands there."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import atoll
from atoll.node.core.events import MergeMode
from atoll.node.worker.site import Site
from atoll.protocol.settings import RunSettings
from tests.harness.fake_node import SNAPSHOT, STOP, FakeNode, apply, in_memory

ROOT = Path(__file__).resolve().parents[3]
OF_NANO_GPT = """\
def get_lr(it):
    return 1 - it / lr_decay_iters

def estimate_loss():
    return {"val": iter_num}

"""
OF_ITS_LOOP = """\
            reported.append(losses)
        learning_rates.append(get_lr(iter_num))
        for micro_step in range(gradient_accumulation_steps):
            X = torch.ones(2, 2)
            loss = model(X).mean() / gradient_accumulation_steps
            losses_of_steps.append(loss.item() * gradient_accumulation_steps)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def block(page: str, kind: str, has: str) -> str:
    """The one of these blocks of a page that has those words."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (one,) = [text for text in found if has in text]
    return str(one)


def played(text: str, folder: Path, names: dict[str, Any]) -> dict[str, Any]:
    """As a script's own. What it has in the end."""
    (folder / "script.py").write_text(text)
    return runpy.run_path(str(folder / "script.py"), names)


def a_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    return net, torch.optim.SGD(net.parameters(), lr=0.125)


def evaluated(monkeypatch: pytest.MonkeyPatch, folder: Path, commits: list[tuple[int, int]]) -> list[tuple[int, float]]:
    """At which steps of the run, and what, where a site takes these commits, each with its place among the sites."""
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=100, min_sites=2, max_sites=8))
    for at, (commit, place) in enumerate(commits):
        place_among = {"site_index": place, "num_sites": 2}
        answer = apply(MergeMode.REPLACE, at + 1, version=commit, run_step=commit, fresh=at == 0, **place_among)
        node.script.append((at, answer))
    node.script.append((len(commits), STOP))
    model, optimizer = a_model()

    def batches(site: Site) -> Iterator[None]:
        while site.running:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            yield

    with atoll.join(model, optimizer) as site:
        names = {"site": site, "loader": batches(site), "model": model, "tokens": 1, "loss": 0.5}
        names["evaluate"] = lambda model: 3.0
        played(block("docs/scripts.md", "python", "site.evaluates"), folder, names)
    values = [value for said in node.said("logged") for value in said["values"]]
    assert all(value.of_outer and value.name == "val_loss" for value in values)
    return [(value.step, value.value) for value in values]


def test_an_evaluation_each_ten_commits_misses_none_that_came_together_with_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in fragments and with overlap. A site that becomes the first one does none again."""
    commits = [8, 9, 11, 12, 20, 21, 33]
    assert evaluated(monkeypatch, tmp_path, [(commit, 0) for commit in commits]) == [(11, 3.0), (20, 3.0), (33, 3.0)]
    assert evaluated(monkeypatch, tmp_path, [(commit, int(commit < 21)) for commit in commits]) == [(33, 3.0)]


def nano_gpt(folder: Path, **changed: Any) -> dict[str, Any]:
    """The loop of README, with what nanoGPT has itself where README leaves it out."""
    lines = block("README.md", "diff", "lr_decay_iters").splitlines(keepends=True)
    kept = [line[1:] for line in lines if not line.startswith("-")]
    (place,) = [number for number, line in enumerate(kept) if line.strip().startswith("...")]
    model, optimizer = a_model()
    names: dict[str, Any] = {
        "atoll": atoll, "model": model, "optimizer": optimizer, "iter_num": 0, "max_iters": 5, "eval_interval": 2,
        "lr_decay_iters": 10, "gradient_accumulation_steps": 3, "master_process": True, "ddp": True,
        "reported": [], "learning_rates": [], "losses_of_steps": [], **changed,
    }  # fmt: skip
    return played("".join([OF_NANO_GPT, *kept[:place], OF_ITS_LOOP, *kept[place + 1 :]]), folder, names)


def a_torch(node: FakeNode | None) -> tuple[Any, list[str]]:
    """With a barrier that notes what the node was told last, and no other seed than the test's."""
    barriers: list[str] = []

    def barrier() -> None:
        barriers.append("" if node is None else node.said("busy")[-1]["what"])

    seeds: list[int] = []
    stand_in = SimpleNamespace(
        ones=torch.ones, manual_seed=seeds.append, seeds=seeds, distributed=SimpleNamespace(barrier=barrier)
    )
    return stand_in, barriers


def test_nano_gpts_loop_follows_the_run_and_announces_its_evaluation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It joins at step 4 of 20, of which an operator makes 40 at step 6."""
    node = in_memory(monkeypatch, RunSettings(run_id="r", steps=20, min_sites=2, max_sites=8, data="local"))
    node.script = [
        (0, apply(MergeMode.REPLACE, 2, run_step=4, fresh=True)), (2, SNAPSHOT),
        (2, apply(MergeMode.REPLACE, 4, run_step=6, version=1, run_length=40)), (4, SNAPSHOT), (4, STOP),
    ]  # fmt: skip
    stand_in, barriers = a_torch(node)
    names = nano_gpt(tmp_path, torch=stand_in)
    assert names["learning_rates"] == [1 - 4 / 20, 1 - 5 / 20, 1 - 6 / 40, 1 - 7 / 40]
    assert names["reported"] == [{"val": 4}, {"val": 6}]
    assert barriers == ["evaluation"] * 2, "the ranks that wait are within it"
    assert [said["what"] for said in node.said("busy")] == ["evaluation", ""] * 2
    assert stand_in.seeds == [1337 + names["site"].seed]
    assert stand_in.seeds != [1337]
    assert [sealed["tokens"] for sealed in node.said("sealed")] == [2 * 3 * 4] * 2
    last_of_steps = names["losses_of_steps"][2::3]
    losses = [sealed["loss_sum"] for sealed in node.said("sealed")]
    assert losses == pytest.approx([sum(last_of_steps[:2]), sum(last_of_steps[2:])])
    assert node.said("goodbye") == [{"run_over": True}]


def test_nano_gpts_loop_ends_without_a_node_as_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """After `max_iters`, which is one of its steps."""
    stand_in, barriers = a_torch(None)
    names = nano_gpt(tmp_path, torch=stand_in, ddp=False, master_process=False)
    assert names["learning_rates"] == [1 - step / 10 for step in range(6)]
    assert (names["reported"], barriers, stand_in.seeds) == ([], [], [1337])
    assert "it trains alone" in capsys.readouterr().err
